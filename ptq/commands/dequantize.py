"""`quantize dequantize`: the weights of a packed checkpoint as plain numbers, for any runtime, and for training."""

from pathlib import Path

import torch

from ptq.commands import checkpoint_copy
from ptq.commands.checkpoint_copy import Rewritten, Tensors, without
from ptq.commands.verify import check_integrity
from ptq.errors import InputError
from ptq.files import dtypes
from ptq.files.checkpoint import Checkpoint
from ptq.files.shards import Specs
from ptq.files.source import path_of
from ptq.hf import dequantized, residual
from ptq.hf.meta_model import check_whole, packed_modules, transformers_config
from ptq.hf.packed_config import PtqConfig
from ptq.kv.key_centers import KEY_CENTER
from ptq.layers.linear import QuantLinear, plain_weight
from ptq.layers.packed_weight import GUARD, INPUT_SIGNS, OUTPUT_SIGNS, PackedWeight
from ptq.models.families import family_of
from ptq.models.family import Family
from ptq.pipeline.writer import check_out


def dequantize(checkpoint: Path, out: Path) -> tuple[int, tuple[str, ...]]:
    """Write `checkpoint`, made by `quantize`, to the folder `out` as a plain checkpoint in the dtype of its config: of
    every packed weight the numbers that it stands for, with all rotations in them, rounded to that dtype.

    Returns the number of packed weights, and what the plain model does not do: to round inputs, or keys and values.
    Raises InputError for a checkpoint that is not packed, or damaged, for families whose plain weights transformers
    reads in another form, and for a folder that exists. RunError for a full disk.
    """
    out = path_of(out).absolute()
    source = Checkpoint.open(checkpoint)
    packed = PtqConfig.of_checkpoint(source)
    if packed is None:
        raise InputError(f"{checkpoint}: is not quantised: its weights are plain numbers already")
    check_out(out)
    config, family, dtype = transformers_config(source), family_of(source.config), dtypes.stored_as(source)
    dequantized.check(config)
    check_whole(source, family)
    check_integrity(checkpoint)
    modules = packed_modules(config, packed)
    turned = packed.residual()
    changes = [
        _plain(name, module, dtype) for name, module in modules.items() if turned is None or name != family.embedding
    ]
    if turned is not None:
        changes.append(_untied(source, family, modules.get(family.embedding), turned, dtype))
    centers = tuple(name for name in source.tensors if name.endswith(f".{KEY_CENTER}"))
    if centers:
        changes.append(Rewritten((), {}, lambda tensors: {}, None, dropped=centers))
    described = dtypes.plain(source.config, dtype)
    if turned is not None:
        described["tie_word_embeddings"] = False
    checkpoint_copy.write(source, out, changes, checkpoint_copy.plain_files(source, described))
    return len(modules), packed.rounded()


def _plain(name: str, module: PackedWeight, dtype: torch.dtype) -> Rewritten:
    shape, prefix = (module.out_features, module.in_features), f"{name}."
    signs = (INPUT_SIGNS, OUTPUT_SIGNS) if isinstance(module, QuantLinear) and module.online.signs else ()
    stored = tuple(
        prefix + leaf for leaf in (*(f"weight_{part}" for part in module.file_format.buffers(*shape)), *signs)
    )

    def make(tensors: Tensors) -> Tensors:
        return {f"{name}.weight": plain_weight(module, without(prefix, tensors)).to(dtype)}

    return Rewritten(stored, {f"{name}.weight": (dtype, shape)}, make, None, dropped=(prefix + GUARD,))


def _untied(
    source: Checkpoint, family: Family, embedding: PackedWeight | None, construction: str, dtype: torch.dtype
) -> Rewritten:
    """Both ends of a model whose head is tied to its embedding, without what turns there (`residual.untied`)."""
    name, norm, head = f"{family.embedding}.weight", f"{family.final_norm}.weight", f"{family.head}.weight"
    signs, has_gain = residual.tensors(family), norm in source.tensors
    packed = None if embedding is None else _plain(family.embedding, embedding, dtype)
    first = (name,) if packed is None else packed.stored
    info = source.tensors[f"{family.embedding}.{residual.SIGNS}"]

    def make(tensors: Tensors) -> Tensors:
        plain = tensors if packed is None else packed.make({key: tensors[key] for key in first})
        rows, gain = plain[name].float(), tensors.get(norm)
        start, end, unit = residual.untied(rows, gain, tensors[signs[0]], construction, family.norm_offset)
        return {name: start.to(dtype), head: end.to(dtype)} | ({} if unit is None else {norm: unit})

    rows = embedding.out_features if embedding is not None else source.tensors[name].shape[0]
    specs: Specs = dict.fromkeys((name, head), (dtype, (rows, *info.shape)))
    if has_gain:
        specs[norm] = source.tensors[norm].dtype, tuple(source.tensors[norm].shape)
    stored = (*first, *signs, *((norm,) if has_gain else ()))
    return Rewritten(stored, specs, make, None, dropped=() if packed is None else packed.dropped)
