"""`ptq::integer_experts`: the chosen experts of a block on few tokens as one op (`ptq.ops.expert_ops`), for integer
weights in tiles (`quarot.tiled_ops`). `zero` is empty, or as long as `tiles`."""

from typing import Any

import torch
from torch import Tensor

from ptq.ops.expert_ops import declare_experts
from quarot import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)


def _floats(x: Tensor, tiles: Tensor, scale: Tensor, zero: Tensor | None, *numbers: Any) -> Tensor:
    return torch.ops.ptq.integer_linear_tiled(x, tiles, scale, zero, None, *numbers)


def _integers(q: Tensor, q_scale: Tensor, tiles: Tensor, scale: Tensor, zero: Tensor | None, *numbers: Any) -> Tensor:
    return torch.ops.ptq.integer_linear_quantized(q, q_scale, tiles, scale, zero, None, *numbers)


experts = declare_experts(
    "integer_experts", "Tensor[] tiles, Tensor[] scale, Tensor[] zero", "int bits, int group_size", _floats, _integers
)
"""The op step by step."""
