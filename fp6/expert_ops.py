"""`ptq::minifloat_experts`: the chosen experts of a block on few tokens as one op (`ptq.ops.expert_ops`), for weights
of small floats in tiles (`fp6.tiled_ops`)."""

from typing import Any

import torch
from torch import Tensor

from fp6 import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)
from ptq.ops.expert_ops import declare_experts


def _floats(x: Tensor, tiles: Tensor, scale: Tensor, *numbers: Any) -> Tensor:
    return torch.ops.ptq.minifloat_linear_tiled(x, tiles, scale, None, *numbers)


def _integers(q: Tensor, q_scale: Tensor, tiles: Tensor, scale: Tensor, *numbers: Any) -> Tensor:
    return torch.ops.ptq.minifloat_linear_quantized(q, q_scale, tiles, scale, None, *numbers)


experts = declare_experts(
    "minifloat_experts",
    "Tensor[] tiles, Tensor[] scale",
    "int exponent, int mantissa, int group_size",
    _floats,
    _integers,
)
"""The op step by step."""
