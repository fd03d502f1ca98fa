"""Models that were published in FP8, read as if their weights were stored in 16 bits.

Some models are only published so: their weights are float8_e4m3fn, with scales beside them. For them this is the
original, and what is lost by rounding it once more is all that there is to lose. Two forms are known, as
`quantization_config` (or `compression_config`) of config.json names them: `quant_method: fp8`, with a scale
`X.weight_scale_inv` (which is multiplied, in spite of its name) for every block of `weight_block_size`, or one for the
whole weight; and `compressed-tensors` with 8-bit floats, with a scale `X.weight_scale` for every row, block or weight.
The meaning of both is that of transformers (`Fp8Dequantize`, `CompressedTensorsDequantize`).

A weight is the float32 product of code and scale, cast once to the config's dtype, which is bfloat16 in every published
model: the weights that transformers computes for `dequantize=True`. That cast moves a weight by up to 2^-9 of itself,
the rounding to FP8 before it by up to 2^-4; so nothing would be gained by showing the float32 product to the rewriter,
and the same model as a plain checkpoint in bfloat16 gives the same bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ptq.errors import InputError
from ptq.files.checkpoint import QUANTISATION, Checkpoint, refuse_quantized
from ptq.files.dtypes import dtype_name, levels, plain, read_as
from ptq.files.header import Scale, TensorInfo

FP8 = torch.float8_e4m3fn
SCALES = ("_scale_inv", "_scale")
"""What the name of a weight's scales adds to that of the weight."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
INPUT_SCALES = ("input_scale", "activation_scale", "output_scale")
"""Scales beside a weight that say how activations were rounded when the model ran: of no use here."""
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Ends of names of scales of an FP8 KV cache, beside the linears of an attention: of no use either."""
BLOCK = (128, 128)
"""What `quant_method: fp8` means where it does not say `weight_block_size`, as in transformers."""
FORMATS = ("float-quantized", "naive-quantized")
"""Of compressed-tensors: one FP8 number for each weight, under its own name."""

Block = tuple[int, int]


def dequantized(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with its FP8 weights as weights of the config's dtype, without their scales and without a
    quantization_config, and a sentence for the user; a plain checkpoint as it is. No weight is read.

    Raises InputError where the model is quantised in another way, and where weights and scales do not fit.
    """
    blocks = stated(checkpoint.config)
    if blocks is None:
        refuse_quantized(checkpoint.config)
        _refuse_unexplained(checkpoint.tensors)
        return checkpoint, ()
    dtype = read_as(checkpoint.config)
    scales = {name: _scale(name, checkpoint.tensors, blocks) for name, _ in _fp8(checkpoint.tensors)}
    if not scales:
        raise InputError(
            "config.json: quantization_config says that weights are FP8, but no tensor is float8_e4m3fn: remove it if "
            "the weights are plain, or fetch the model again"
        )
    taken = {scale.name for scale in scales.values()}
    of_inputs = {f"{name.rpartition('.')[0]}.{leaf}" for name in scales for leaf in INPUT_SCALES}
    owners = {name.removesuffix(".weight").rpartition(".")[0] for name in scales}
    tensors, left = {}, 0
    for name, info in checkpoint.tensors.items():
        if name in scales:
            info = replace(info, dtype=dtype, nbytes=prod(info.shape) * dtype.itemsize, scale=scales[name])
        elif name in taken:
            continue
        elif name in of_inputs or (name.endswith(CACHE_SCALES) and name.rpartition(".")[0] in owners):
            left += 1
            continue
        elif name.endswith(tuple(f".weight{suffix}" for suffix in SCALES)):
            raise InputError(f"tensor {name!r} is a scale, but beside it is no weight that is float8_e4m3fn")
        tensors[name] = info
    note = f"published in FP8: {len(scales)} weights are read as {dtype_name(dtype)}, each times its scale"
    if left:
        note += f"; {left} scales of activations or of a KV cache are left out"
    return replace(checkpoint, config=plain(checkpoint.config, dtype), tensors=tensors), (note,)


def stated(config: Mapping[str, Any]) -> tuple[Block, ...] | None:
    """The size of the blocks that share a scale, none or one, if a config says that its weights are FP8; None if it
    says nothing, or something else. Raises InputError where what it says of FP8 makes no sense."""
    found = [level[key] for level in levels(config) for key in QUANTISATION if level.get(key) is not None]
    blocks: set[Block] = set()
    for entry in found:
        some = _blocks(entry)
        if some is None:
            return None
        blocks |= some
    if len(blocks) > 1:
        raise InputError(f"config.json: FP8 scales of several block sizes, {sorted(blocks)}; expected one")
    return tuple(blocks) if found else None


def _blocks(entry: Any) -> set[Block] | None:
    """The block sizes of one quantization_config; None where it is not of FP8 weights."""
    method = entry.get("quant_method") if isinstance(entry, Mapping) else None
    if method == "fp8":
        size = entry.get("weight_block_size", BLOCK)
        return set() if size is None else {_block(size, "weight_block_size")}
    groups = entry.get("config_groups") if method == "compressed-tensors" else None
    if not isinstance(groups, Mapping) or not groups:
        return None
    blocks = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            return None
        if (group.get("format") or entry.get("format")) not in FORMATS:
            return None
        if weights.get("strategy") == "block":
            blocks.add(_block(weights.get("block_structure"), "block_structure"))
    return blocks


def _block(size: Any, key: str) -> Block:
    if isinstance(size, list | tuple) and len(size) == 2 and all(type(x) is int and x > 0 for x in size):
        return size[0], size[1]
    raise InputError(f"config.json: {key} of FP8 weights is {str(size)[:80]}, expected two positive whole numbers")


def _fp8(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    return ((name, info) for name, info in tensors.items() if info.dtype == FP8)


def _scale(name: str, tensors: Mapping[str, TensorInfo], blocks: tuple[Block, ...]) -> Scale:
    """The scales of an FP8 weight. Raises InputError where there are none, or of a shape that says nothing."""
    shape = tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"tensor {name!r} is float8_e4m3fn of shape {list(shape)}: only matrices can be read in FP8; of experts, "
            "pass files with one matrix for each"
        )
    found = [name + suffix for suffix in SCALES if name + suffix in tensors]
    if len(found) != 1:
        wanted = " or ".join(repr(name + suffix) for suffix in SCALES)
        raise InputError(f"tensor {name!r} is float8_e4m3fn, so its scales {wanted} are needed; found {len(found)}")
    info = tensors[found[0]]
    if info.dtype not in SCALE_DTYPES:
        wanted = ", ".join(map(dtype_name, SCALE_DTYPES))
        raise InputError(
            f"tensor {found[0]!r} is {dtype_name(info.dtype)}: scales of FP8 weights must be one of {wanted}"
        )
    return Scale(found[0], info, _fitting(found[0], info.shape, shape, blocks), tensors[name])


def _fitting(name: str, found: tuple[int, ...], shape: tuple[int, ...], blocks: tuple[Block, ...]) -> Block:
    """How many rows and columns of a weight of this `shape` share a scale, from the shape of the scales `found`."""
    n, k = shape
    known: dict[tuple[int, ...], Block] = {
        (-(-n // r), -(-k // c)): (min(r, n), min(c, k))
        for r, c in blocks  # which may be larger than the weight
    }
    known |= {(): (n, k), (1,): (n, k), (1, 1): (n, k), (n,): (1, k), (n, 1): (1, k)}
    if found not in known:
        *others, last = (list(size) for size in known)
        raise InputError(
            f"tensor {name!r} has shape {list(found)}, but scales of a weight of shape {list(shape)} must have "
            f"{', '.join(map(str, others))} or {last}"
        )
    return known[found]


def _refuse_unexplained(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise InputError for an FP8 weight with scales in a model whose config does not say what they mean."""
    for name, _ in _fp8(tensors):
        scale = next((name + suffix for suffix in SCALES if name + suffix in tensors), None)
        if scale is not None:
            raise InputError(
                f"tensor {name!r} is float8_e4m3fn with scales {scale!r}, but config.json has no quantization_config "
                "that says how to read them; fetch config.json again"
            )
