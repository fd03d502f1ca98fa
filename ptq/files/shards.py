"""Write files that are either whole or absent, and fill the shards of a Hugging Face checkpoint.

Every file is written under a temporary name beside its place and renamed. A crash leaves at most a `*.tmp`, which
nobody reads. Bytes depend only on the tensors, so writing again is harmless. Files that are meant to stay are forced
to disk before they are renamed; work files are not, so after a power cut a run is better begun again (`--restart`)
than continued.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ptq.errors import RunError
from ptq.files.checkpoint import INDEX, SINGLE, read_tensor
from ptq.files.header import DTYPE_NAMES, TensorInfo, encode_header

OWNER = ".ptq-run"
"""In a folder of shards that are not all filled yet: the fingerprint of the run that fills them."""
FORMAT = {"format": "pt"}  # transformers refuses files that do not say so


def _write_error(path: Path, nbytes: int, error: OSError) -> RunError:
    try:
        free = f"{shutil.disk_usage(path.parent).free} are free"
    except OSError:
        free = "the free space is unknown"
    remedy = "free some space or fix the folder"
    if error.errno == errno.EFBIG:
        remedy = "raise the limit on the size of a file (`ulimit -f`, or that of the file system)"
    return RunError(
        f"{path}: writing {nbytes} bytes failed ({error.strerror or error}; {free}); {remedy} and run the same command "
        "again"
    )


@contextmanager
def atomic_file(path: str | Path, nbytes: int, durable: bool = True) -> Iterator[BinaryIO]:
    """A binary file that takes its place at `path` only when the block ends without an error.

    `nbytes` is the size to come, for the error message. Raises RunError for every OSError (a full disk, no
    permission), naming the bytes needed and free; then, as for any other exception, nothing is left behind and a
    file that stood at `path` still stands.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            if durable:  # before the rename: otherwise a power cut may leave a whole name on empty bytes
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise _write_error(path, nbytes, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: str | Path) -> None:
    """Delete the `*.tmp` of a run that was killed. Only for the one process that starts a run: it would also delete
    what another process is writing just now."""
    for path in Path(folder).glob("*.tmp"):
        path.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes, durable: bool = True) -> None:
    """Write `data` atomically. Raises RunError."""
    with atomic_file(path, len(data), durable) as file:
        file.write(data)


def write_json(path: str | Path, value: Any, durable: bool = True) -> None:
    """Write JSON atomically, as transformers does: sorted keys, two spaces, ASCII, a newline at the end."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode(), durable)


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, durable: bool = True
) -> None:
    """Write one safetensors file atomically, with bytes that depend on nothing but the arguments.

    Equal to `safetensors.torch.save_file` (for at most one metadata key, whose order the library leaves to chance).
    Takes no memory beyond the contiguous copy of one tensor where it is not contiguous already. Raises RunError.
    """
    path = Path(path)
    for name, tensor in tensors.items():
        assert tensor.dtype in DTYPE_NAMES, f"{name}: {tensor.dtype} has no name in safetensors"
    header, order = encode_header(
        [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()], metadata or {}
    )
    nbytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    with atomic_file(path, nbytes, durable) as file:
        file.write(header)
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy().data)


Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""


@dataclass(frozen=True)
class Placement:
    """Where every tensor of a checkpoint lies, known before the first of them is."""

    headers: dict[str, bytes]
    """The first bytes of every shard, by file name."""
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def size(self, shard: str) -> int:
        """Bytes of one shard's file."""
        return len(self.headers[shard]) + sum(info.nbytes for info in self.tensors.values() if info.shard == shard)


def layout(tensors: Specs, max_shard_bytes: int) -> Placement:
    """Distribute tensors over shards of at most `max_shard_bytes` of tensor bytes.

    With the order of the model's `state_dict` the files are those of `save_pretrained` with the same shard size: shards
    are filled greedily, and a tensor larger than the limit gets one of its own, numbered before the shard in progress.
    """
    shards = _fill([(name, dtype.itemsize * prod(shape)) for name, (dtype, shape) in tensors.items()], max_shard_bytes)
    count = len(shards)
    headers, places = {}, {}
    for number, names in enumerate(shards, 1):
        shard = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        headers[shard], order = encode_header([(name, *tensors[name]) for name in names], FORMAT)
        at = len(headers[shard])
        for name in order:
            dtype, shape = tensors[name]
            places[name] = TensorInfo(shape, dtype, shard, at, dtype.itemsize * prod(shape))
            at += places[name].nbytes
    return Placement(headers, places)


def _fill(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, size in sizes:
        if size > limit:
            shards.append([name])
            continue
        if used + size > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    return shards + [current] if current or not shards else shards


class Shards:
    """The shards of a checkpoint in the making: whole files from the start, filled tensor by tensor in any order.

    They are not kept twice, neither on disk nor in time; who fills them has to know what is filled already.
    """

    def __init__(self, layout: Placement, folder: Path, owner: str = "") -> None:
        self.layout, self.folder, self.owner = layout, folder, owner

    def begun(self) -> bool:
        """Whether the folder holds exactly these shards, as `begin` makes them for this owner, or without one."""
        owner = self.folder / OWNER
        if owner.is_file() and owner.read_bytes() != self.owner.encode():
            return False
        return all(self._begun(shard) for shard in self.layout.headers)

    def _begun(self, shard: str) -> bool:
        path, header = self.folder / shard, self.layout.headers[shard]
        if not path.is_file() or path.stat().st_size != self.layout.size(shard):
            return False
        with path.open("rb") as file:
            return file.read(len(header)) == header

    def begin(self) -> None:
        """Make the folder, with shards that have headers but no tensors yet; what else was in it is removed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.owner:
            write_bytes(self.folder / OWNER, self.owner.encode())
        for shard, header in self.layout.headers.items():
            with atomic_file(self.folder / shard, size := self.layout.size(shard), durable=False) as file:
                file.write(header)
                file.truncate(size)

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their places. Raises RunError (a full disk)."""
        for name, tensor in tensors.items():
            info = self.layout.tensors[name]
            assert tensor.dtype == info.dtype and tuple(tensor.shape) == info.shape, (name, tensor.dtype, tensor.shape)
            if not info.nbytes:
                continue
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            try:
                with (self.folder / info.shard).open("r+b", buffering=0) as file:
                    file.seek(info.offset)
                    while data:  # one call writes at most 2 GiB on Linux
                        data = data[file.write(data) :]
            except OSError as error:
                raise _write_error(self.folder / info.shard, info.nbytes, error) from error

    def read(self, name: str) -> Tensor:
        """A tensor that was placed."""
        info = self.layout.tensors[name]
        return read_tensor(self.folder / info.shard, info)

    def finish(self) -> None:
        """Force everything to disk, and write the index of several shards last, so that a folder with an index is
        complete."""
        for shard in self.layout.headers:
            sync_file(self.folder / shard)
        if SINGLE not in self.layout.headers:
            weight_map = {name: info.shard for name, info in self.layout.tensors.items()}
            write_json(self.folder / INDEX, {"metadata": {"total_size": self.layout.nbytes}, "weight_map": weight_map})
        _sync_folder(self.folder)


def sync_file(path: Path) -> None:
    """Force what was written to a file to disk. Raises RunError."""
    try:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise _write_error(path, path.stat().st_size, error) from error
