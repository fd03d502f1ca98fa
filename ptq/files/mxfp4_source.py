"""Models that were published in MXFP4, read as if their weights were stored in 16 bits.

A weight X [experts, n, k] is two tensors of bytes: `X_blocks` [experts, n, k / 32, 16] with 32 e2m1 codes in a row, two
in a byte, the first one in its low bits; and `X_scales` [experts, n, k / 32], exponents of two plus 127 (e8m0). That is
what transformers takes them for (`integrations/mxfp4.py`), and the OCP Microscaling Formats. Codes of two significant
bits times a power of two are exact in bfloat16.

The tensors are still those of all experts of a block; `ptq.hf.fused` takes them apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ptq.errors import InputError
from ptq.files.checkpoint import QUANTISATION, Checkpoint, refuse_quantized
from ptq.files.dtypes import dtype_name, plain, read_as
from ptq.files.header import Scale, TensorInfo

METHOD = "mxfp4"
CODES, SCALES = "_blocks", "_scales"
"""What the names of its two tensors add to that of a weight."""
GROUP, BYTES = 32, 16
"""Weights that share a scale, and the bytes of their codes."""


def stated(config: Mapping[str, Any]) -> bool:
    """Whether a config says that weights are in MXFP4."""
    entry = config.get(QUANTISATION[0])
    return isinstance(entry, Mapping) and entry.get("quant_method") == METHOD


def dequantized(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with its MXFP4 weights as weights of the config's dtype, without their scales and without a
    quantization_config, and a sentence for the user. No weight is read.

    Raises InputError where codes and scales do not fit.
    """
    refuse_quantized({key: value for key, value in checkpoint.config.items() if key != QUANTISATION[0]})
    dtype, tensors = read_as(checkpoint.config), checkpoint.tensors
    found = {name: info for name, info in tensors.items() if not name.endswith((CODES, SCALES))}
    codes = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
    for name in codes:
        if name in found:
            raise InputError(f"tensor {name!r} is there twice: as it is, and in MXFP4 as {name + CODES!r}")
        scale = _scale(name, tensors)
        shape = (*scale.info.shape[:-1], GROUP * scale.info.shape[-1])
        found[name] = replace(scale.codes, shape=shape, dtype=dtype, nbytes=prod(shape) * dtype.itemsize, scale=scale)
    if not codes:
        raise InputError(
            f"config.json: quantization_config says that weights are MXFP4, but no tensor's name ends in {CODES!r}: "
            "remove it if the weights are plain, or fetch the model again"
        )
    for name in tensors:
        if name.endswith(SCALES) and name.removesuffix(SCALES) not in found:
            raise InputError(f"tensor {name!r} is a scale, but beside it is no {name.removesuffix(SCALES) + CODES!r}")
    note = f"published in MXFP4: {len(codes)} weights are read as {dtype_name(dtype)}, each times its scale"
    return replace(checkpoint, config=plain(checkpoint.config, dtype), tensors=found), (note,)


def refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Raise InputError for weights in MXFP4 in a model whose config does not say that they are."""
    for name in checkpoint.tensors:
        scale = name.removesuffix(CODES) + SCALES
        if name.endswith(CODES) and scale in checkpoint.tensors:
            raise InputError(
                f"tensor {name!r} has scales {scale!r}, as in MXFP4, but config.json has no quantization_config that "
                "says so; fetch config.json again"
            )


def _scale(name: str, tensors: Mapping[str, TensorInfo]) -> Scale:
    """Codes and scales of a weight. Raises InputError where these are not what they must be."""
    if name + SCALES not in tensors:
        raise InputError(f"tensor {name + CODES!r} needs its scales {name + SCALES!r}, which the files do not hold")
    codes, scales = tensors[name + CODES], tensors[name + SCALES]
    for suffix, info in ((CODES, codes), (SCALES, scales)):
        if info.dtype != torch.uint8:
            raise InputError(f"tensor {name + suffix!r} is {dtype_name(info.dtype)}: MXFP4 is stored as uint8")
    if len(codes.shape) != 4 or codes.shape[-1] != BYTES or 0 in codes.shape:
        raise InputError(
            f"tensor {name + CODES!r} has shape {list(codes.shape)}, but codes of MXFP4 are [experts, rows, groups, "
            f"{BYTES}]: the checkpoint is damaged, or no MXFP4; fetch it again"
        )
    if scales.shape != codes.shape[:-1]:
        raise InputError(
            f"tensor {name + SCALES!r} has shape {list(scales.shape)}, but codes of shape {list(codes.shape)} need one "
            f"scale for every {BYTES} bytes, {list(codes.shape[:-1])}: the checkpoint is damaged; fetch it again"
        )
    rows = replace(codes, shape=(*codes.shape[:-2], codes.shape[-2] * BYTES))
    return Scale(name + SCALES, replace(scales, dtype=torch.float8_e8m0fnu), (1, GROUP), rows)
