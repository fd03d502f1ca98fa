"""GGUF, the files of llama.cpp: one that is there is read, and written again with other tensors.

What a GGUF says beside its tensors (sizes, tokenizer, chat template) is taken over byte by byte, but for the type that
it says most of its tensors have.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from ptq.errors import InputError, refused
from ptq.files.shards import atomic_file

MAGIC, VERSION, BEGIN = 0x46554747, 3, 24
"""The first two words; where the keys begin, behind two counts."""
MOST_ALIGNED = 1 << 16
"""Bytes that tensors may be aligned to; 32 is usual."""
FILE_TYPE = "general.file_type"
FILE_TYPES = {"Q2_K": 10, "Q3_K": 12, "Q4_0": 2, "Q5_0": 8, "Q6_K": 18, "Q8_0": 7, "MXFP4": 38}
"""What llama.cpp calls a file by the type of most of its tensors."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF that is to be written."""

    name: str
    type: str
    shape: tuple[int, ...]
    """As torch has it."""


class GgufFile:
    """A GGUF with all its tensors, read as they are needed."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for what is none, for one in several files, and where the package gguf is missing."""
        self.path, self._gguf = path, _package()
        if not path.is_file():
            raise InputError(f"{path}: there is no such file; pass the GGUF of the original model")
        with refused(f"{path}: is no GGUF that the package gguf can read"):
            self._reader = self._gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (self._value("split.count") or 1) > 1:
            raise InputError(f"{path}: is one of several files; put them together with `llama-gguf-split --merge`")
        if not self._tensors or self._reader.byte_order != "I" or self._reader.alignment > MOST_ALIGNED:
            raise InputError(f"{path}: has no tensors, or was written for another kind of machine")

    @property
    def architecture(self) -> str:
        return str(self._value("general.architecture"))

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in their order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def type(self, name: str) -> str:
        return self._tensors[name].tensor_type.name

    def raw(self, name: str) -> Tensor:
        """The bytes of a tensor."""
        return torch.from_numpy(self._tensors[name].data.copy()).flatten().view(torch.uint8)

    def numbers(self, name: str) -> Float32[Tensor, "..."]:
        """What the bytes of a tensor stand for."""
        if self.type(name) == "BF16":
            return self.raw(name).view(torch.bfloat16).float().view(self.shape(name))
        tensor = self._tensors[name]
        with refused(f"{self.path}: tensor {name}: the package gguf does not read the type {self.type(name)}"):
            return torch.tensor(self._gguf.dequantize(tensor.data, tensor.tensor_type)).view(self.shape(name))

    def name_of(self, name: str, blocks: int) -> str | None:
        """What a GGUF of this architecture calls a tensor of transformers; None where it has none."""
        architectures = {value: key for key, value in self._gguf.MODEL_ARCH_NAMES.items()}
        if self.architecture not in architectures:
            return None
        names = self._gguf.get_tensor_name_map(architectures[self.architecture], blocks)
        return names.get_name(name, try_suffixes=(".weight", ".bias"))

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def head(self, entries: Sequence[Entry], file_type: str) -> bytes:
        """All of a file in front of its tensors: with the keys of this one, and these tensors."""
        end = min(tensor.field.offset for tensor in self._tensors.values())
        keys = bytearray(self._reader.data[BEGIN:end].tobytes())
        if (field := self._reader.get_field(FILE_TYPE)) is not None:
            struct.pack_into("<I", keys, field.offset - BEGIN + 8 + len(FILE_TYPE) + 4, FILE_TYPES[file_type])
        count = int(self._reader.fields["GGUF.kv_count"].parts[0][0])
        head = bytearray(struct.pack("<IIQQ", MAGIC, VERSION, len(entries), count)) + keys
        offset = 0
        for entry in entries:
            name, sizes = entry.name.encode(), entry.shape[::-1]
            kind = self._gguf.GGMLQuantizationType[entry.type]
            head += (
                struct.pack("<Q", len(name))
                + name
                + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
            )
            offset += self._aligned(self.nbytes(entry))
        return bytes(head + bytes(-len(head) % self._reader.alignment))

    def nbytes(self, entry: Entry) -> int:
        """The size of a tensor, without what is put behind it."""
        block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[entry.type]]
        return torch.Size(entry.shape).numel() // block * size

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._reader.alignment) * self._reader.alignment

    def write(self, out: Path, entries: Sequence[Entry], file_type: str, data: Iterator[Tensor]) -> None:
        """Write a GGUF with the keys of this one; `data`: the bytes of the tensors, one after the other. Raises
        RunError for a full disk; then nothing is left."""
        head = self.head(entries, file_type)
        total = len(head) + sum(self._aligned(self.nbytes(entry)) for entry in entries)
        with atomic_file(out, total) as file:
            file.write(head)
            for entry, tensor in zip(entries, data, strict=True):
                nbytes = self.nbytes(entry)
                assert tensor.dtype == torch.uint8 and tensor.numel() == nbytes, (entry, tensor.shape)
                file.write(tensor.contiguous().numpy().data)
                file.write(bytes(self._aligned(nbytes) - nbytes))


def _package() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise InputError("GGUF files are read by a package of their own: pip install gguf") from error
    return gguf
