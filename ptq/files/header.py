"""The safetensors header: eight bytes of length, JSON, then the tensors' bytes without holes.

The specification is the "Format" section of the safetensors README. Validation is total, because a header comes from
strangers: nothing is allocated, and no tensor read, before every length, name, shape and offset has been checked.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ptq.errors import InputError
from ptq.files.strict_json import parse_json_object

# In the order in which the safetensors library sorts tensors inside a file (widest alignment first; verified against
# the library in the tests). The 4- and 6-bit dtypes of the format are left out: torch cannot hold them plainly.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_RANK = 32
PICKLE_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
TO_SAFETENSORS = (
    'convert it with `python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "M.from_pretrained('OLD', dtype='auto').save_pretrained('NEW'); T.from_pretrained('OLD').save_pretrained('NEW')\"` "
    "and pass NEW"
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes at `offset` (from the start of the file) of the file `shard`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: str
    offset: int
    nbytes: int
    scale: "Scale | None" = None
    """The scales of a weight that the file holds as codes of 8 or 4 bits; `dtype` and `nbytes` are then of what is read
    (see `ptq.files.published`). None: the file holds the tensor itself."""
    stride: tuple[int, ...] | None = None
    """Elements from one to the next along each axis, of a tensor that is part of a larger one in the file; `offset` is
    that of its first element. None: its elements follow one another."""
    pieces: "tuple[TensorInfo, ...]" = ()
    """Tensors of the files that are this one, one behind the other along the first axis; `shard` and `offset` are then
    those of the first. Empty: it is one tensor."""

    @property
    def stored_bytes(self) -> int:
        """Bytes in the files, scales included."""
        return self.nbytes if self.scale is None else self.scale.codes.nbytes + self.scale.info.nbytes

    def part(self, first: int, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> "TensorInfo":
        """Some of its elements, from number `first` on, as a tensor of their own."""
        assert self.scale is None and self.stride is None, self
        size = self.dtype.itemsize
        return replace(self, shape=shape, stride=stride, offset=self.offset + first * size, nbytes=prod(shape) * size)


@dataclass(frozen=True)
class Scale:
    """The factors of a weight: `info` has one for every block of r x c weights, row after row; blocks at the edges may
    be smaller."""

    name: str
    info: TensorInfo
    block: tuple[int, int]
    codes: TensorInfo
    """What is multiplied: float8_e4m3fn, or uint8 where a byte holds two codes (`ptq.files.mxfp4_source`)."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # bool is an int, and would pass isinstance


def _entry(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    """Check one tensor's entry by itself; `start` is where the data section begins."""
    where = f"{path}: tensor {name[:200]!r}"
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InputError(f"{where}: the name is not valid Unicode; the file is damaged or hostile")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where}: expected dtype, shape and data_offsets in the header; fetch the file again")
    label, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(label, str) or label not in DTYPES:
        raise InputError(f"{where}: dtype {label!r} is not supported; expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise InputError(f"{where}: shape {str(shape)[:80]} is not a list of sizes; the file is damaged")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise InputError(f"{where}: data_offsets {str(offsets)[:80]} are not two positions; the file is damaged")
    begin, end = offsets
    need = prod(shape) * DTYPES[label].itemsize
    if end - begin != need:
        raise InputError(f"{where}: {label} {shape} takes {need} bytes, but its offsets span {end - begin}")
    return TensorInfo(tuple(shape), DTYPES[label], path.name, start + begin, need)


def _check_layout(tensors: Mapping[str, TensorInfo], path: Path, start: int, size: int) -> None:
    """The tensors must fill the data section exactly: no hole, no overlap, no missing or surplus tail."""
    at = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != at:
            what = "overlaps the tensor before it" if info.offset < at else "leaves a hole before it"
            where = f"byte {info.offset}, expected {at}"
            raise InputError(f"{path}: tensor {name[:200]!r} {what} ({where}); the file is damaged, fetch it again")
        at += info.nbytes
    if at > size:
        raise InputError(f"{path}: truncated: {size} bytes on disk, but the header describes {at}; fetch it again")
    if at < size:
        raise InputError(f"{path}: {size - at} bytes after the last tensor belong to none; fetch the file again")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], int]:
    """Read and check the header of one safetensors file.

    Returns the tensors (in the header's order) and where the data section starts.
    Raises InputError that names the file, the tensor and what is wrong.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if head.startswith(PICKLE_MAGICS) and length > size:
                raise InputError(f"{path}: a pickle under a safetensors name, which is never opened; {TO_SAFETENSORS}")
            if len(head) < 8 or length > size - 8:
                raise InputError(f"{path}: truncated, or not safetensors: the header does not fit into {size} bytes")
            if length > MAX_HEADER_BYTES:
                raise InputError(f"{path}: a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
            raw = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from error
    if not raw.startswith(b"{"):
        raise InputError(f"{path}: not a safetensors file: its header does not start with a brace")
    table = parse_json_object(raw, path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path}: __metadata__ must map strings to strings; fetch the file again")
    start = 8 + length
    tensors = {name: _entry(name, entry, path, start) for name, entry in table.items()}
    _check_layout(tensors, path, start, size)
    return tensors, start


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The header that `safetensors.torch.save` writes, and the names in the order in which their bytes follow.

    Dtypes go from the widest alignment down, then by name. Metadata keys are sorted here; the library leaves their
    order to chance when there is more than one, so only files with at most one key can be equal to its own.
    """
    order = sorted(tensors, key=lambda item: (DTYPE_RANK[item[1]], item[0].encode()))
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name, dtype, shape in order:
        end = at + prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the data section starts at a multiple of eight
    return len(text).to_bytes(8, "little") + text, [name for name, _, _ in order]
