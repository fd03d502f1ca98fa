"""`quantize export`: a packed checkpoint in the format of compressed-tensors, for other runtimes (vLLM, SGLang)."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptq.commands import rewritten
from ptq.commands.rewritten import Rewritten
from ptq.commands.verify import check_integrity
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.files.shards import Shards, write_bytes
from ptq.hf import experts, fused
from ptq.hf.described import packed_modules, plain_linears, transformers_config
from ptq.hf.plugin import PtqConfig
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.packed_weight import GUARD, PackedWeight
from ptq.ops.activations import parse
from ptq.pipeline.writer import COPIED, check_out
from ptq.weights.compressed_tensors import Exportable, Scheme
from ptq.weights.formats import Parts

INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
"""`QuantizationArgs` of inputs in 8 bits: as `ptq.ops.activations` quantises them, with clip 1."""


def export(checkpoint: Path, out: Path) -> int:
    """Write `checkpoint`, made by `quantize`, to the folder `out` as compressed-tensors stores it: the same codes and
    scales, none of them rounded again.

    What was written is read again, and must give the bytes of the source. Returns the number of linears. Raises
    InputError, saying which option to quantise with, for what other runtimes do not have: rotations that run online,
    a packed KV cache or embedding, inputs in other than 8 bits, formats of this package; and for a damaged checkpoint
    and a folder that exists. RunError for a full disk.
    """
    out = out.expanduser().absolute()
    source = Checkpoint.open(checkpoint)
    packed = PtqConfig.parse(source.config)
    if packed is None or not packed.linears:
        raise InputError(f"{checkpoint}: no weight of it is quantised; run `quantize quarot --offline` or `fp6` first")
    _refuse_online(checkpoint, packed)
    check_out(out)
    check_integrity(checkpoint)
    config = transformers_config(source)
    modules, entries = packed_modules(config, packed), packed.entries()
    schemes = {name: _scheme(checkpoint, name, module, entries[name]) for name, module in modules.items()}
    linears = [_rewritten(name, module, schemes[name]) for name, module in modules.items()]
    quantised = {name for name, entry in entries.items() if "activation" in entry}
    described = describe(schemes, quantised, plain_linears(config, packed))
    rewritten.write(source, out, linears, partial(_complete, source, described))
    return len(linears)


def _refuse_online(checkpoint: Path, packed: PtqConfig) -> None:
    """What a runtime would have to do beside multiplying with the weights."""
    entries = packed.entries()
    if packed.residual_rotation is not None or any("hadamard" in entry for entry in entries.values()):
        raise InputError(
            f"{checkpoint}: has rotations that run with the model, which other runtimes do not have; quantise with "
            "`quarot --offline`, or `fp6` (QuIP# cannot be exported)"
        )
    if packed.kv_cache is not None:
        raise InputError(f"{checkpoint}: other runtimes do not have its KV cache of few bits; quantise without it")
    if experts.names_in(entries) or any(fused.module_name(name) != name for name in entries):
        raise InputError(f"{checkpoint}: models with experts are not exported yet")


def _scheme(checkpoint: Path, name: str, module: PackedWeight, entry: Mapping[str, Any]) -> Scheme:
    if isinstance(module, PackedEmbedding) or name == "lm_head":
        raise InputError(f"{checkpoint}: embedding and head are packed; quantise without --embedding-bits")
    if "activation" in entry and ((activation := parse(entry["activation"])).bits, activation.clip) != (8, 1):
        raise InputError(
            f"{checkpoint}: inputs must be in 8 bits with clip 1, or 16; quantise with --activation-bits 8"
        )
    if not isinstance(module.format, Exportable):
        raise InputError(f"{checkpoint}: {name}: compressed-tensors cannot hold the format {module.format.name}")
    try:
        return module.format.compressed_scheme("activation" in entry)
    except InputError as error:
        raise InputError(f"{checkpoint}: {name}: {error}") from error


def _rewritten(name: str, module: PackedWeight, scheme: Scheme) -> Rewritten:
    format, shape = module.format, (module.out_features, module.in_features)
    assert isinstance(format, Exportable)
    buffers = module.format.buffers(*shape)
    made = format.compress(
        {part: torch.zeros(size, dtype=dtype) for part, (size, dtype) in buffers.items()}, *shape, scheme
    )

    def compress(parts: Parts) -> Parts:
        return format.compress(parts, *shape, scheme)

    def decompress(tensors: Parts) -> Parts:
        return format.decompress(tensors, *shape, scheme)

    specs = {end: (tensor.dtype, tuple(tensor.shape)) for end, tensor in made.items()}
    return Rewritten(name, tuple(buffers), specs, compress, decompress, dropped=(GUARD,))


def describe(schemes: Mapping[str, Scheme], quantised: set[str], plain: list[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors. `quantised`: linears whose inputs are; `plain`: those that are
    not packed."""
    groups: list[tuple[Scheme, bool, list[str]]] = []
    for name, scheme in schemes.items():
        known = next((names for each, inputs, names in groups if (each, inputs) == (scheme, name in quantised)), None)
        groups.append((scheme, name in quantised, [name])) if known is None else known.append(name)
    alone = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0][0].format if len({scheme.format for scheme, _, _ in groups}) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if alone else names,
                "format": scheme.format,
                "weights": scheme.weights,
                "input_activations": INPUTS if inputs else None,
                "output_activations": None,
            }
            for i, (scheme, inputs, names) in enumerate(groups)
        },
        "ignore": plain,
    }


def _complete(source: Checkpoint, described: dict[str, Any], shards: Shards) -> None:
    config = source.config | {"quantization_config": described}
    write_bytes(shards.folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    rewritten.copy_files(source.folder, shards.folder, COPIED)
