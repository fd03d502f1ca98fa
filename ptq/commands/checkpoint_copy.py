"""A checkpoint with the tensors of some linears in another form: written, read again and put in its place."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ptq.errors import RunError
from ptq.files import companions
from ptq.files.checkpoint import Checkpoint
from ptq.files.lock import exclusive
from ptq.files.shards import Shards, Specs, layout, write_json
from ptq.pipeline.work import check_owner
from ptq.pipeline.writer import MAX_SHARD_BYTES, check_out, partial_folder, put_in_place

Tensors = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Rewritten:
    """Tensors of a checkpoint, mostly those of one linear, that are others in the result; all by their full names."""

    stored: tuple[str, ...]
    """Tensors of the source that these are made from."""
    specs: Specs
    """Tensors of the result."""
    make: Callable[[Tensors], Tensors]
    """From the stored tensors."""
    unmake: Callable[[Tensors], Tensors] | None
    """The stored tensors again; None where numbers were rounded, and there is no way back."""
    dropped: tuple[str, ...] = ()
    """Other tensors of the source that the result does without."""


def write(source: Checkpoint, out: Path, changes: Sequence[Rewritten], complete: Callable[[Shards], None]) -> None:
    """Write `source` to the folder `out` with those tensors in their new form; `complete` adds config.json and whatever
    else belongs to it.

    What was written is read again, and must give the bytes of the source, where there is a way back. Raises InputError
    for a folder that exists; RunError for a full disk.
    """
    gone = {name for change in changes for name in (*change.stored, *change.dropped)}
    kept = [name for name in source.tensors if name not in gone]
    specs: Specs = {name: (source.tensors[name].dtype, tuple(source.tensors[name].shape)) for name in kept}
    for change in changes:
        specs |= change.specs
    shards = Shards(layout(specs, MAX_SHARD_BYTES), partial_folder(out))
    with exclusive(out):
        check_out(out)  # another run may have ended meanwhile
        check_owner(shards.folder, None)
        try:
            shards.begin()
            for change in changes:
                shards.place(change.make({name: source.read(name) for name in change.stored}))
            for name in kept:
                shards.place({name: source.read(name)})
            shards.finish()
            _prove(source, changes, kept, shards)
            complete(shards)
        except BaseException:  # nobody would go on with it
            shutil.rmtree(shards.folder, ignore_errors=True)
            raise
        put_in_place(shards.folder, out)


def plain_files(source: Checkpoint, config: dict[str, Any]) -> Callable[[Shards], None]:
    """A `complete` of `write`: this config.json, and the files that stand beside the weights of the source."""

    def complete(shards: Shards) -> None:
        write_json(shards.folder / "config.json", config)
        companions.copy(source.folder, shards.folder)

    return complete


def _prove(source: Checkpoint, changes: Sequence[Rewritten], kept: Sequence[str], shards: Shards) -> None:
    """Read again what was written. Raises RunError where it does not give the bytes of the source again."""
    for change in changes:
        if change.unmake is not None:
            again = change.unmake({name: shards.read(name) for name in change.specs})
            for name in change.stored:
                _check_equal(name, source.read(name), again[name])
    for name in kept:
        _check_equal(name, source.read(name), shards.read(name))


def _check_equal(name: str, stored: Tensor, again: Tensor) -> None:
    if not torch.equal(stored, again):
        raise RunError(f"{name}: what was written does not give its bytes again, so there is no result; run again")


def prefixed(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    """The same things under names with a prefix."""
    return {prefix + name: value for name, value in found.items()}


def without(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    """Inverse of `prefixed`."""
    return {name.removeprefix(prefix): value for name, value in found.items()}
