"""`quantize prepack`: a packed checkpoint with its weights in the layout that the kernels of a target read (tiles on a
CPU, fragments on a GPU), so that loading need not make it."""

from functools import partial
from pathlib import Path
from typing import Any

from ptq.commands import checkpoint_copy
from ptq.commands.checkpoint_copy import Rewritten, Tensors, prefixed, without
from ptq.commands.verify import check_integrity
from ptq.errors import InputError
from ptq.files import companions
from ptq.files.checkpoint import Checkpoint
from ptq.files.hub import CARD
from ptq.files.shards import Shards, Specs, write_bytes, write_json
from ptq.files.source import path_of
from ptq.hf.meta_model import packed_modules, transformers_config
from ptq.hf.packed_config import OPTIONAL, PtqConfig
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.packed_weight import NOT_OF_THE_FORMAT, PackedWeight
from ptq.pipeline.work import RECORD, read_record
from ptq.pipeline.writer import LOG, check_out, file_hashes
from ptq.reporting.report_schema import JSON, PAGE
from ptq.weights.prepacked import PrepackedFormat, target_of

KEPT = (*companions.COPIED, LOG, PAGE, JSON, CARD)


def prepack(checkpoint: Path, out: Path, target: str) -> int:
    """Write `checkpoint`, made by `quantize`, to the folder `out`, with every weight in the layout of `target` whose
    format has one.

    What was written is read again, and must give the bytes of the source. Returns the number of linears in the layout.
    Raises InputError for an unknown target, a damaged or a plain checkpoint, one that is prepacked, a folder that
    exists; RunError for a full disk.
    """
    target_of(target)
    out = path_of(out).absolute()
    source = Checkpoint.open(checkpoint)
    packed = PtqConfig.of_checkpoint(source)
    if packed is None:
        raise InputError(f"{checkpoint}: is not quantised; run `quantize quarot`, `quip-sharp` or `fp6` first")
    if any(entry.get("format") == PrepackedFormat.name for entry in packed.schemes.values()):
        raise InputError(f"{checkpoint}: is prepacked already; pass the checkpoint that it was made from")
    check_out(out)
    check_integrity(checkpoint)
    modules = packed_modules(transformers_config(source), packed)
    entries = packed.entries()
    tiled = {name: found for name, module in modules.items() if (found := _tiled(name, module, entries[name], target))}
    if not tiled:
        formats = ", ".join(sorted({str(entry.get("format")) for entry in packed.schemes.values()}))
        raise InputError(
            f"{checkpoint}: no weight of it has a layout for {target} (its formats: {formats}); such weights are read "
            "as they are stored, so load it as it is"
        )
    entries |= {name: entry for name, (entry, _) in tiled.items()}
    linears = [linear for _, linear in tiled.values()]
    checkpoint_copy.write(source, out, linears, partial(_complete, source, entries, target))
    return len(linears)


def _tiled(
    name: str, module: PackedWeight, entry: dict[str, Any], target: str
) -> tuple[dict[str, Any], Rewritten] | None:
    """A linear of a plain checkpoint with this entry of config.json, and its new one; None where its format makes no
    tiles for its shape, and for an embedding, whose rows are looked up in the stored bytes."""
    if isinstance(module, PackedEmbedding):
        return None
    shape = (module.out_features, module.in_features)
    rest = {key: value for key, value in entry.items() if key in NOT_OF_THE_FORMAT}
    of = {key: value for key, value in entry.items() if key in ("format", "version") or key not in rest}
    try:
        format = PrepackedFormat(target, target_of(target).version, of)
    except InputError:  # the checkpoint is sound, so this format has no layout for the target
        return None
    buffers, stored = format.buffers(*shape), format.inner.buffers(*shape)
    if buffers == stored:
        return None

    prefix = f"{name}.weight_"

    def lay_out(tensors: Tensors) -> Tensors:
        return prefixed(prefix, format.lay_out(without(prefix, tensors)))

    def take_back(tensors: Tensors) -> Tensors:
        return prefixed(prefix, format.inner.unprepack(without(prefix, tensors)))

    specs: Specs = prefixed(prefix, {part: (dtype, size) for part, (size, dtype) in buffers.items()})
    made = {**rest, "format": format.name, "version": format.version, **format.options()}
    return made, Rewritten(tuple(prefix + part for part in stored), specs, lay_out, take_back)


def _complete(source: Checkpoint, entries: dict[str, dict[str, Any]], target: str, shards: Shards) -> None:
    """Config, record (where there is one: `save_pretrained` writes none) and whatever else a checkpoint has."""
    given = source.config["quantization_config"]
    listed = PtqConfig.listing(entries, **{key: given.get(key) for key in OPTIONAL})
    config = source.config | {"quantization_config": listed.to_dict()}
    write_json(shards.folder / "config.json", config)
    companions.copy(source.folder, shards.folder, KEPT)
    if (card := shards.folder / CARD).is_file():
        since = (
            f"\nSince then, `quantize prepack --target {target}` has put the weights into the order of its kernels.\n"
        )
        write_bytes(card, card.read_bytes() + since.encode())
    if not (source.folder / RECORD).is_file():
        return
    record = read_record(source.folder / RECORD)
    prepacked = {"target": target, "layout": target_of(target).version}
    write_json(shards.folder / RECORD, {**record, "prepacked": prepacked, "files": file_hashes(shards.folder)})
