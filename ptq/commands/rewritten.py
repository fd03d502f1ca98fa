"""A checkpoint with the tensors of some linears in another form: written, read again and put in its place."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ptq.errors import RunError
from ptq.files.checkpoint import Checkpoint
from ptq.files.lock import exclusive
from ptq.files.shards import Shards, Specs, layout
from ptq.pipeline.writer import MAX_SHARD_BYTES, check_out, partial_folder, put_in_place
from ptq.weights.formats import Parts


@dataclass(frozen=True)
class Rewritten:
    """A linear whose tensors are others in the result."""

    name: str
    stored: tuple[str, ...]
    """Parts of its format: the tensors `<name>.weight_<part>` of the source."""
    specs: Specs
    """Its tensors in the result, by the end of their names behind `<name>.`; so are those of the functions."""
    make: Callable[[Parts], Parts]
    """From the stored parts."""
    unmake: Callable[[Parts], Parts]
    """The stored parts again."""
    dropped: tuple[str, ...] = ()
    """Ends of names of tensors of the source that the result does without."""

    def source_name(self, part: str) -> str:
        return f"{self.name}.weight_{part}"


def write(source: Checkpoint, out: Path, linears: Sequence[Rewritten], complete: Callable[[Shards], None]) -> None:
    """Write `source` to the folder `out` with those linears in their new form; `complete` adds config.json and whatever
    else belongs to it.

    What was written is read again, and must give the bytes of the source. Raises InputError for a folder that exists;
    RunError for a full disk.
    """
    gone = {linear.source_name(part) for linear in linears for part in linear.stored}
    gone |= {f"{linear.name}.{end}" for linear in linears for end in linear.dropped}
    kept = [name for name in source.tensors if name not in gone]
    specs: Specs = {name: (source.tensors[name].dtype, tuple(source.tensors[name].shape)) for name in kept}
    for linear in linears:
        specs |= {f"{linear.name}.{end}": spec for end, spec in linear.specs.items()}
    shards = Shards(layout(specs, MAX_SHARD_BYTES), partial_folder(out))
    with exclusive(out):
        check_out(out)  # another run may have ended meanwhile
        try:
            shards.begin()
            for linear in linears:
                made = linear.make({part: source.read(linear.source_name(part)) for part in linear.stored})
                shards.place({f"{linear.name}.{end}": tensor for end, tensor in made.items()})
            for name in kept:
                shards.place({name: source.read(name)})
            shards.finish()
            _prove(source, linears, kept, shards)
            complete(shards)
        except BaseException:  # nobody would go on with it
            shutil.rmtree(shards.folder, ignore_errors=True)
            raise
        put_in_place(shards.folder, out)


def _prove(source: Checkpoint, linears: Sequence[Rewritten], kept: Sequence[str], shards: Shards) -> None:
    """Read again what was written. Raises RunError where it does not give the bytes of the source again."""
    for linear in linears:
        again = linear.unmake({end: shards.read(f"{linear.name}.{end}") for end in linear.specs})
        for part in linear.stored:
            _check_equal(linear.source_name(part), source.read(linear.source_name(part)), again[part])
    for name in kept:
        _check_equal(name, source.read(name), shards.read(name))


def _check_equal(name: str, stored: Tensor, again: Tensor) -> None:
    if not torch.equal(stored, again):
        raise RunError(f"{name}: what was written does not give its bytes again, so there is no result; run again")
