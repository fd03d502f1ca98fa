"""`quantize export`: a packed checkpoint in the format of compressed-tensors, for other runtimes (vLLM, SGLang)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ptq.commands import checkpoint_copy
from ptq.commands.checkpoint_copy import Rewritten, Tensors, prefixed, without
from ptq.commands.verify import check_integrity
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.files.dtypes import stored_as
from ptq.files.shards import Specs
from ptq.files.source import path_of
from ptq.hf.meta_model import packed_modules, plain_linears, transformers_config
from ptq.hf.packed_config import PtqConfig
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.packed_weight import GUARD, NOT_OF_THE_FORMAT, PackedWeight
from ptq.models.families import family_or_default
from ptq.ops.activations import parse
from ptq.pipeline.writer import check_out
from ptq.weights.compressed_tensors import Exportable, Scheme
from ptq.weights.prepacked import PrepackedFormat

INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
"""`QuantizationArgs` of inputs in 8 bits: as `ptq.ops.activations` with clip 1. vLLM has the same scale, largest / 127;
the library compressed-tensors has largest / 127.5."""
TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Linears that runtimes put into one, so that all of them must be stored in one way."""


def export(checkpoint: Path, out: Path) -> int:
    """Write `checkpoint`, made by `quantize`, to the folder `out` as compressed-tensors stores it: the same codes and
    scales, none of them rounded again.

    What was written is read again, and must give the bytes of the source. Returns the number of linears. Raises
    InputError, saying which option to quantise with, for what other runtimes do not have: rotations that run online,
    a packed KV cache or embedding, inputs in few bits, formats of this package; and for models with experts, a damaged
    checkpoint and a folder that exists. RunError for a full disk.
    """
    out = path_of(out).absolute()
    source = Checkpoint.open(checkpoint)
    packed = PtqConfig.of_checkpoint(source)
    if packed is None or not packed.linears:
        raise InputError(f"{checkpoint}: no weight of it is quantised; run `quantize quarot --offline` or `fp6` first")
    refuse_beside(checkpoint, packed)
    check_out(out)
    check_integrity(checkpoint)
    config = transformers_config(source)
    plain = plain_linears(config, packed)
    if family_or_default(config).transposed:
        raise InputError(
            f"{checkpoint}: {config.model_type} is not exported, as other runtimes hold its weights as [k, n]"
        )
    if plain is None:
        raise InputError(f"{checkpoint}: models with experts are not exported yet")
    modules, entries = packed_modules(config, packed), packed.entries()
    _refuse_torn(checkpoint, modules, plain)
    schemes = [_scheme(checkpoint, name, module, entries[name]) for name, module in modules.items()]
    if any(scheme != schemes[0] for scheme in schemes):
        raise InputError(
            f"{checkpoint}: its weights are stored in several ways, which is not exported: quantise all in one width, "
            "without --bits-for, --element-for and --element auto"
        )
    half = stored_as(source) == torch.float16
    linears = [_rewritten(name, module, schemes[0], half) for name, module in modules.items()]
    described = source.config | {"quantization_config": quantization_config(schemes[0], plain)}
    checkpoint_copy.write(source, out, linears, checkpoint_copy.plain_files(source, described))
    return len(linears)


def refuse_beside(checkpoint: Path, packed: PtqConfig) -> None:
    """What a runtime would have to do beside multiplying with the weights."""
    if packed.kv_cache is not None:
        raise InputError(f"{checkpoint}: other runtimes do not have its KV cache of few bits; quantise without it")
    own = {*NOT_OF_THE_FORMAT} - {"format", "version", "activation"}
    if packed.residual_rotation is not None or any(own & entry.keys() for entry in packed.schemes.values()):
        raise InputError(
            f"{checkpoint}: has rotations that run with the model, which other runtimes do not have; quantise with "
            "`quarot --offline`, or `fp6` without --rotate (QuIP# cannot be exported)"
        )


def _refuse_torn(checkpoint: Path, modules: Mapping[str, PackedWeight], plain: list[str]) -> None:
    """Linears that a runtime puts into one, of which only some are packed."""
    for name in plain:
        parent, _, leaf = name.rpartition(".")
        others = {f"{parent}.{other}" for group in TOGETHER if leaf in group for other in group - {leaf}}
        if torn := sorted(others & modules.keys()):
            raise InputError(
                f"{checkpoint}: {torn[0]} is quantised and {name} is not, which other runtimes put into one linear; "
                "quantise with --skip for all or none of q_proj, k_proj and v_proj, and of gate_proj and up_proj"
            )


def _scheme(checkpoint: Path, name: str, module: PackedWeight, entry: Mapping[str, Any]) -> Scheme:
    if isinstance(module, PackedEmbedding) or "." not in name:  # a head is a linear of the model itself
        raise InputError(f"{checkpoint}: embedding and head are packed; quantise without --embedding-bits")
    if isinstance(module.file_format, PrepackedFormat):
        raise InputError(f"{checkpoint}: is prepacked; pass the checkpoint that it was made from")
    if "activation" in entry and ((activation := parse(entry["activation"])).bits, activation.clip) != (8, 1):
        raise InputError(
            f"{checkpoint}: inputs must be in 16 bits, or in 8 with clip 1; quantise with --activation-bits 8 "
            "--activation-clip 1"
        )
    if not isinstance(module.format, Exportable):
        raise InputError(f"{checkpoint}: {name}: compressed-tensors cannot hold the format {module.format.name}")
    try:
        return module.format.compressed_scheme("activation" in entry)
    except InputError as error:
        raise InputError(f"{checkpoint}: {name}: {error}") from error


def _rewritten(name: str, module: PackedWeight, scheme: Scheme, half: bool) -> Rewritten:
    """`half`: other runtimes bring the scales to float16, the dtype of the model."""
    format, shape = module.format, (module.out_features, module.in_features)
    assert isinstance(format, Exportable)
    buffers = module.format.buffers(*shape)

    stored, own = f"{name}.weight_", f"{name}."

    def compress(tensors: Tensors) -> Tensors:
        made = format.compress(without(stored, tensors), *shape, scheme)
        scale = made["weight_scale"]
        if half and scale.is_floating_point() and not torch.equal(scale.half().float(), scale.float()):
            raise InputError(
                f"{name}: scales do not fit into float16, the dtype of the model, so other runtimes would change them; "
                "quantise the model in bfloat16 (`dtype` in its config.json)"
            )
        return prefixed(own, made)

    def decompress(tensors: Tensors) -> Tensors:
        return prefixed(stored, format.decompress(without(own, tensors), *shape, scheme))

    empty = {part: torch.empty(size, dtype=dtype, device="meta") for part, (size, dtype) in buffers.items()}
    made = format.compress(empty, *shape, scheme)
    specs: Specs = {own + end: (tensor.dtype, tuple(tensor.shape)) for end, tensor in made.items()}
    return Rewritten(tuple(stored + part for part in buffers), specs, compress, decompress, dropped=(own + GUARD,))


def quantization_config(scheme: Scheme, plain: list[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors, for a model whose linears are all packed so but those in
    `plain`."""
    group = {
        "targets": ["Linear"],
        "format": scheme.format,
        "weights": scheme.weights,
        "input_activations": INPUTS if scheme.quantized_input else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": plain,
    }
