"""Read a Hugging Face checkpoint (a folder of safetensors) tensor by tensor.

`Checkpoint.open` checks everything that can be checked without reading weights; after it, reading can only fail when
the disk does. Nothing is mapped into memory and no more than the tensor asked for is read.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ptq.errors import InputError, RunError
from ptq.files.header import TO_SAFETENSORS, TensorInfo, read_header
from ptq.files.hub import NOT_GGUF
from ptq.files.scaled_codes import check_scale, dequantize
from ptq.files.strict_json import read_json_object, tagged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNFINISHED = "work.json"
"""The record inside a work folder: another name than in a checkpoint, so that neither is taken for the other."""
MAX_CONFIG_BYTES = 16_000_000
MAX_INDEX_BYTES = 100_000_000
LARGEST = 1e15
"""No weight is trained to more; sums of its squares would leave float32."""
QUANTISATION = ("quantization_config", "compression_config")
"""Keys of config.json under which it says how the weights are quantised."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PLAIN_NAME = re.compile(r"[^/\\\0]{1,255}")
SAMPLES, SAMPLE_BYTES = 64, 4096


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """`config.json` of a checkpoint and its raw bytes. Raises InputError (missing, not JSON, no `model_type`)."""
    path = folder / "config.json"
    if not path.is_file():
        if (folder / UNFINISHED).is_file():
            raise InputError(f"{folder}: unfinished work; repeat the command that began it, and use its result")
        raise InputError(f"{path}: missing; {_instead(folder)}")
    config, raw = read_json_object(path, MAX_CONFIG_BYTES, tagged)
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{path}: expected a `model_type` string, found {config.get('model_type')!r}")
    return config, raw


def _instead(folder: Path) -> str:
    """What to do about a folder without config.json, by what it holds."""
    if (folder / "adapter_config.json").is_file():
        return "an adapter (LoRA) is no model: merge it into its base with peft's `merge_and_unload`, and pass that"
    if any(folder.glob("*.gguf")):
        return NOT_GGUF
    return "expected a Hugging Face folder with config.json and safetensors"


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raise InputError if `config` is of a checkpoint that is quantised already: its weights are not the originals."""
    for key in QUANTISATION:
        found = config.get(key)
        if found is not None:
            method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else "unknown"
            raise InputError(
                f"config.json: the model is quantised already ({key}: {str(method)[:80]!r}); "
                "quantising twice only loses quality, so pass the original model (one that was published in FP8 or "
                "MXFP4 can be read: quant_method fp8, mxfp4, or compressed-tensors with 8-bit floats)"
            )


def _no_safetensors(folder: Path) -> InputError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        way = "fetch the missing index" if shards[1:] else f"if that is all, name it {SINGLE}, else fetch {INDEX} too"
        return InputError(f"{folder}: found {shards[0]} but neither {SINGLE} nor {INDEX}; {way}")
    if pickles:
        return InputError(f"{folder / pickles[0]}: a pickle can run code, so it is never opened; {TO_SAFETENSORS}")
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return InputError(f"{folder / ggufs[0]}: {NOT_GGUF}")
    return InputError(f"{folder}: holds neither {SINGLE} nor {INDEX}; MODEL must be a folder of safetensors")


def _read_index(path: Path) -> tuple[dict[str, str], bytes]:
    """The map of tensor name to shard file name, every file name plain and present, and the raw bytes."""
    index, raw = read_json_object(path, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: expected a `weight_map` from tensor names to files; fetch the file again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != Path(shard).name or not PLAIN_NAME.fullmatch(shard):
            raise InputError(f"{path}: tensor {name[:200]!r}: {str(shard)[:80]!r} is not a plain file name")
        if not shard.endswith(".safetensors"):
            raise InputError(f"{path}: {shard[:80]!r} is not a safetensors file; {TO_SAFETENSORS}")
    for shard in sorted(set(weight_map.values())):
        if not (path.parent / shard).is_file():
            raise InputError(f"{path.parent / shard}: this shard is missing although {INDEX} names it; fetch it again")
    return weight_map, raw


def _check_index(weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, TensorInfo]], path: Path) -> None:
    """The index and the shards must tell the same story, tensor by tensor."""
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise InputError(f"{path}: tensor {name!r} should be in {shard}, which does not hold it; fetch both again")
    for shard, tensors in shards.items():
        for name in tensors:
            if weight_map.get(name) != shard:
                raise InputError(f"{path}: tensor {name!r} of {shard} is not listed for it; fetch both again")


@dataclass(frozen=True)
class Checkpoint:
    """A checked Hugging Face folder. `tensors` is in order of shard, then of position in the shard; `shards` maps a
    file name to (where its data section starts, its size in bytes)."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: dict[str, tuple[int, int]]
    config_bytes: bytes = field(repr=False)
    index_bytes: bytes = field(repr=False)  # empty for a single file

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Check config, index and every header, without reading weights.

        Raises InputError, naming the file and the tensor, for whatever is missing, contradictory, truncated or hostile.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: not a folder; pass a folder with config.json and safetensors")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise InputError(f"{folder}: permission denied; make the folder readable")
        config, config_bytes = read_config(folder)
        single, index = folder / SINGLE, folder / INDEX
        if single.is_file() and index.is_file():
            raise InputError(f"{folder}: holds both {SINGLE} and {INDEX}; remove the one that is stale")
        if not single.is_file() and not index.is_file():
            raise _no_safetensors(folder)
        weight_map, index_bytes = _read_index(index) if index.is_file() else ({}, b"")
        tables: dict[str, dict[str, TensorInfo]] = {}
        shards: dict[str, tuple[int, int]] = {}
        for shard in sorted(set(weight_map.values())) or [SINGLE]:
            tables[shard], start = read_header(folder / shard)
            shards[shard] = (start, start + sum(info.nbytes for info in tables[shard].values()))
        if weight_map:
            _check_index(weight_map, tables, index)
        tensors = {name: info for table in tables.values() for name, info in table.items()}
        return cls(folder, config, tensors, shards, config_bytes, index_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> Shaped[Tensor, "..."]:
        """Read one tensor into fresh memory; of a weight in FP8 or MXFP4, its codes times their scales.

        Fresh and not a view of a mapped file: torch aligns its own memory to 64 bytes, and the last bit of a matrix
        product may depend on alignment. Raises InputError for an unknown name and for scales that cannot be, RunError
        if the disk fails.
        """
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.folder}: holds no tensor {name!r}; is it the model that was planned?")
        if info.pieces:
            return torch.cat([read_tensor(self.folder / piece.shard, piece) for piece in info.pieces])
        if info.scale is None:
            return read_tensor(self.folder / info.shard, info)
        factors = read_tensor(self.folder / info.scale.info.shard, info.scale.info).float()
        check_scale(info.scale.name, factors)
        codes = read_tensor(self.folder / info.scale.codes.shard, info.scale.codes).flatten(0, -2)
        return dequantize(codes, factors, info.scale.block, info.dtype).view(info.shape)

    def read_checked(self, name: str) -> Shaped[Tensor, "..."]:
        """`read`; raises InputError for NaN, Inf and what no model is trained to, too."""
        tensor = self.read(name)
        check_numbers(self.folder / self.tensors[name].shard, name, tensor)
        return tensor

    def identity(self) -> str:
        """SHA-256 that tells one checkpoint from another without reading all of it.

        Covers config.json, the index and, per shard, its name, size, header and 64 evenly spaced samples of 4 KiB of
        the weights. Any retraining or conversion changes it; an edit of a few bytes between the samples does not.
        """
        digest = hashlib.sha256()

        def add(part: bytes) -> None:  # length first, so that no two lists of parts run together alike
            digest.update(len(part).to_bytes(8, "little") + part)

        add(self.config_bytes)
        add(self.index_bytes)
        for shard, (start, size) in self.shards.items():
            add(f"{shard} {size}".encode())
            try:
                with (self.folder / shard).open("rb", buffering=0) as file:
                    add(file.read(start))
                    last = max(start, size - SAMPLE_BYTES)
                    for position in sorted({start + (last - start) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                        file.seek(position)
                        add(file.read(SAMPLE_BYTES))
            except OSError as error:
                raise RunError(f"{self.folder / shard}: reading failed ({error.strerror}); check the disk") from error
        return digest.hexdigest()


def read_tensor(path: Path, info: TensorInfo) -> Shaped[Tensor, "..."]:
    """Read the tensor that `info` describes from `path`. Raises RunError if the file shrank or the disk fails."""
    count = math.prod(info.shape)
    if info.stride is not None and count:  # what lies between its elements is read along
        count = 1 + sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    data = torch.empty(count * info.dtype.itemsize, dtype=torch.uint8)
    if count:
        read_range(path, info.offset, data.numpy().data)
    found = data.view(info.dtype)
    return found.view(info.shape) if info.stride is None else found.as_strided(info.shape, info.stride).contiguous()


def read_range(path: Path, offset: int, into: memoryview) -> None:
    """Fill `into` from byte `offset` of `path`. Raises RunError."""
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while done < len(into):  # one call returns at most 2 GiB on Linux
                count = file.readinto(into[done:])
                if not count:
                    raise RunError(f"{path}: ended at byte {offset + done} while it was read; it has been changed")
                done += count
    except OSError as error:
        raise RunError(f"{path}: reading failed at byte {offset + done} ({error.strerror}); check the disk") from error


def check_numbers(path: Path, name: str, tensor: Shaped[Tensor, "..."]) -> None:
    """Raise InputError if a tensor of floating-point numbers, from this file, holds NaN, Inf or what no model is
    trained to (`LARGEST`): how many, and where the first one is."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    values = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # aminmax knows no 8-bit floats
    low, high = torch.aminmax(values)  # one pass, no temporaries; NaN wins both
    if -LARGEST <= low and high <= LARGEST:
        return
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    found, wrong = f"{nans} NaN and {infs} Inf of {tensor.numel()} values", ~values.isfinite()
    if not nans + infs:
        wrong = values.abs() > LARGEST
        found = f"{int(wrong.sum())} of {tensor.numel()} values beyond {LARGEST:.0e}, up to {max(-low, high):.0e}"
    at = ", ".join(str(int(i)) for i in torch.unravel_index(wrong.flatten().to(torch.uint8).argmax(), values.shape))
    raise InputError(
        f"{path}: tensor {name!r} holds {found}, the first at [{at}]; the checkpoint is damaged or was trained badly: "
        "fetch it again or pass another"
    )
