"""`quantize prepack`: a packed checkpoint with its weights in the layout that the kernels of a target read (tiles on a
CPU, fragments on a GPU), so that loading need not make it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.commands.verify import check_integrity
from ptq.errors import InputError, RunError
from ptq.files.checkpoint import Checkpoint
from ptq.files.lock import exclusive
from ptq.files.shards import Shards, Specs, layout, write_bytes, write_json
from ptq.hf.described import packed_modules, transformers_config
from ptq.hf.plugin import OPTIONAL, PtqConfig
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.packed_weight import NOT_OF_THE_FORMAT, PackedWeight
from ptq.pipeline.work import RECORD, read_record
from ptq.pipeline.writer import COPIED, LOG, MAX_SHARD_BYTES, check_out, file_hashes, partial_folder, put_in_place
from ptq.weights.prepacked import PrepackedFormat, target_of

KEPT = (*COPIED, LOG, "report.html", "report.json")


def prepack(checkpoint: Path, out: Path, target: str) -> int:
    """Write `checkpoint`, made by `quantize`, to the folder `out`, with every weight in the layout of `target` whose
    format has one.

    What was written is read again, and must give the bytes of the source. Returns the number of linears in the layout.
    Raises InputError for an unknown target, a damaged or a plain checkpoint, one that is prepacked, a folder that
    exists; RunError for a full disk.
    """
    target_of(target)
    out = out.expanduser().absolute()
    source = Checkpoint.open(checkpoint)
    packed = PtqConfig.parse(source.config)
    if packed is None:
        raise InputError(f"{checkpoint}: is not quantised; run `quantize quarot`, `quip-sharp` or `fp6` first")
    if any(entry.get("format") == PrepackedFormat.name for entry in packed.schemes.values()):
        raise InputError(f"{checkpoint}: is prepacked already; pass the checkpoint that it was made from")
    check_out(out)
    check_integrity(checkpoint)
    modules = packed_modules(transformers_config(source), packed)
    linears = [linear for name, module in modules.items() if (linear := _tiled(name, module, packed, target))]
    if not linears:
        formats = ", ".join(sorted({str(entry.get("format")) for entry in packed.schemes.values()}))
        raise InputError(
            f"{checkpoint}: no weight of it has a layout for {target} (its formats: {formats}); such weights are read "
            "as they are stored, so load it as it is"
        )
    gone = {tensor for linear in linears for tensor in linear.stored}
    kept = {name: info for name, info in source.tensors.items() if name not in gone}
    specs: Specs = {name: (info.dtype, tuple(info.shape)) for name, info in kept.items()}
    for linear in linears:
        specs |= linear.specs()
    shards = Shards(layout(specs, MAX_SHARD_BYTES), partial_folder(out))
    with exclusive(out):
        check_out(out)  # another run may have ended meanwhile
        shards.begin()
        for linear in linears:
            shards.place(_tiles(source, linear))
        for name in kept:
            shards.place({name: source.read(name)})
        shards.finish()
        _prove(source, linears, list(kept), shards)
        _complete(source, packed.entries() | {linear.name: linear.entry for linear in linears}, shards, target)
        put_in_place(shards.folder, out)
    return len(linears)


@dataclass(frozen=True)
class _Linear:
    """A linear whose weight has tiles."""

    name: str
    shape: tuple[int, int]
    format: PrepackedFormat
    entry: dict[str, Any]
    """Its new entry of config.json."""

    @property
    def stored(self) -> dict[str, str]:
        """The part that every tensor of the plain checkpoint is."""
        return {f"{self.name}.weight_{part}": part for part in self.format.inner.buffers(*self.shape)}

    def specs(self) -> Specs:
        """The tensors of the result."""
        buffers = self.format.buffers(*self.shape).items()
        return {f"{self.name}.weight_{part}": (dtype, shape) for part, (shape, dtype) in buffers}


def _tiled(name: str, module: PackedWeight, packed: PtqConfig, target: str) -> _Linear | None:
    """A linear of a plain checkpoint; None where its format makes no tiles for its shape, and for an embedding, whose
    rows are looked up in the stored bytes."""
    if isinstance(module, PackedEmbedding):
        return None
    entry, shape = packed.entries()[name], (module.out_features, module.in_features)
    rest = {key: value for key, value in entry.items() if key in NOT_OF_THE_FORMAT}
    of = {key: value for key, value in entry.items() if key in ("format", "version") or key not in rest}
    try:
        format = PrepackedFormat(target, target_of(target).version, of)
    except InputError:  # the checkpoint is sound, so this format has no layout for the target
        return None
    if format.buffers(*shape) == format.inner.buffers(*shape):
        return None
    return _Linear(name, shape, format, {**rest, "format": format.name, "version": format.version, **format.options()})


def _tiles(source: Checkpoint, linear: _Linear) -> dict[str, Tensor]:
    """The tensors of a linear in the layout of the target."""
    tiles = linear.format.lay_out({part: source.read(tensor) for tensor, part in linear.stored.items()})
    return {f"{linear.name}.weight_{part}": tensor for part, tensor in tiles.items()}


def _prove(source: Checkpoint, linears: list[_Linear], kept: list[str], shards: Shards) -> None:
    """Read again what was written. Raises RunError where it does not give the bytes of the source again."""
    for linear in linears:
        names = {part: f"{linear.name}.weight_{part}" for part in linear.format.buffers(*linear.shape)}
        again = linear.format.inner.unprepack({part: shards.read(name) for part, name in names.items()})
        for tensor, part in linear.stored.items():
            _check_equal(tensor, source.read(tensor), again[part])
    for name in kept:
        _check_equal(name, source.read(name), shards.read(name))


def _check_equal(name: str, stored: Tensor, again: Tensor) -> None:
    if not torch.equal(stored, again):
        raise RunError(f"{name}: what was written does not give its bytes again, so there is no result; run again")


def _complete(source: Checkpoint, entries: dict[str, dict[str, Any]], shards: Shards, target: str) -> None:
    """Config, record (where there is one: `save_pretrained` writes none) and whatever else a checkpoint has."""
    given = source.config["quantization_config"]
    listed = PtqConfig.listing(entries, **{key: given.get(key) for key in OPTIONAL})
    config = source.config | {"quantization_config": listed.to_dict()}
    write_bytes(shards.folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    for pattern in KEPT:
        for path in sorted(source.folder.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, shards.folder / path.name)
    if not (source.folder / RECORD).is_file():
        return
    record = read_record(source.folder / RECORD)
    prepacked = {"target": target, "layout": target_of(target).version}
    write_json(shards.folder / RECORD, {**record, "prepacked": prepacked, "files": file_hashes(shards.folder)})
