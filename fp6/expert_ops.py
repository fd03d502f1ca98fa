"""`ptq::minifloat_experts`: the chosen experts of a block on few tokens as one op (`ptq.ops.expert_ops`), for weights
of small floats in tiles (`fp6.tiled_ops`)."""

import torch

from fp6 import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)
from ptq.ops.expert_ops import declare_experts

experts = declare_experts(
    "minifloat_experts",
    "Tensor[] tiles, Tensor[] scale",
    "int exponent, int mantissa, int group_size",
    torch.ops.ptq.minifloat_linear_tiled,
    torch.ops.ptq.minifloat_linear_quantized,
)
"""The op step by step."""
