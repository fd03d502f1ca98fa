"""Write files that are either whole or absent, and assemble block files into Hugging Face shards.

Every file is written under a temporary name beside its place and renamed. A crash leaves at most a `*.tmp`, which
nobody reads. Bytes depend only on the tensors, so writing again is harmless. Files that are meant to stay are forced
to disk before they are renamed; work files are not, so after a power cut a run is
better begun again (`--restart`) than continued.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ptq.checkpoint import INDEX, SINGLE, read_range
from ptq.errors import InputError, RunError
from ptq.header import DTYPE_NAMES, TensorInfo, encode_header, read_header

MAX_SHARD_BYTES = 5_000_000_000
COPY_BYTES = 8 << 20
FORMAT = {"format": "pt"}  # transformers refuses files that do not say so


def _write_error(path: Path, nbytes: int, error: OSError) -> RunError:
    try:
        free = f"{shutil.disk_usage(path.parent).free} are free"
    except OSError:
        free = "the free space is unknown"
    return RunError(
        f"{path}: writing {nbytes} bytes failed ({error.strerror or error}; {free}); "
        "free some space or fix the folder and run the same command again"
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


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` atomically. Raises RunError."""
    with atomic_file(path, len(data)) as file:
        file.write(data)


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically, as transformers does: sorted keys, two spaces, ASCII, a newline at the end."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


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


@dataclass(frozen=True)
class ShardPlan:
    """Which tensor goes into which file: `files` maps each shard's name to its tensors' names."""

    files: dict[str, tuple[str, ...]]
    sources: dict[str, tuple[Path, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for _, info in self.sources.values())


def plan_shards(
    block_files: Sequence[str | Path], order: Sequence[str] | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ShardPlan:
    """Distribute the tensors of `block_files` over shards of at most `max_shard_bytes` of tensor bytes.

    `order` is the order in which shards are filled (default: the files' order, and the order inside them). With the
    order of the model's `state_dict` the result equals that of `save_pretrained` with the same shard size: shards are
    filled greedily, and a tensor larger than the limit gets one of its own, numbered before the shard in progress.
    Raises InputError for a damaged block file, a tensor that two files hold, or an `order` that is not exactly theirs.
    """
    sources: dict[str, tuple[Path, TensorInfo]] = {}
    for path in map(Path, block_files):
        for name, info in read_header(path)[0].items():
            if name in sources:
                raise InputError(f"{path}: tensor {name!r} is in {sources[name][0]} too; remove the stale file")
            sources[name] = (path, info)
    names = list(sources if order is None else order)
    if len(names) != len(sources) or set(names) != set(sources):
        odd = sorted(set(names) ^ set(sources)) or ["a name given twice"]
        raise InputError(f"merge: the block files and the expected tensors differ, for instance in {odd[0]!r}")
    shards = _fill([(name, sources[name][1].nbytes) for name in names], max_shard_bytes)
    if len(shards) == 1:
        return ShardPlan({SINGLE: tuple(shards[0])}, sources)
    count = len(shards)
    files = {f"model-{i:05d}-of-{count:05d}.safetensors": tuple(shard) for i, shard in enumerate(shards, 1)}
    return ShardPlan(files, sources)


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


def merge(plan: ShardPlan, folder: str | Path, index_metadata: Mapping[str, Any] | None = None) -> None:
    """Write the shards of `plan` into `folder`, and the index last, so that a folder with an index is complete.

    Bytes are copied range by range through one small buffer: memory does not depend on the model. `index_metadata`
    joins `total_size` in the index (transformers also writes `total_parameters`). A single file has no index.
    Raises RunError (disk full, a block file changed while it was read).
    """
    folder = Path(folder)
    for shard, names in plan.files.items():
        _write_shard(folder / shard, {name: plan.sources[name] for name in names})
    if SINGLE not in plan.files:
        weight_map = {name: shard for shard, names in plan.files.items() for name in names}
        metadata = {**(index_metadata or {}), "total_size": plan.nbytes}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_shard(path: Path, sources: Mapping[str, tuple[Path, TensorInfo]]) -> None:
    header, order = encode_header([(name, info.dtype, info.shape) for name, (_, info) in sources.items()], FORMAT)
    nbytes = len(header) + sum(info.nbytes for _, info in sources.values())
    buffer = memoryview(bytearray(COPY_BYTES))
    with atomic_file(path, nbytes) as file:
        file.write(header)
        for source, info in (sources[name] for name in order):
            for at in range(0, info.nbytes, COPY_BYTES):
                part = buffer[: min(COPY_BYTES, info.nbytes - at)]
                read_range(source, info.offset + at, part)
                file.write(part)
