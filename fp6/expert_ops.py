"""`ptq::minifloat_experts` and `ptq::minifloat_all_experts`: experts of a block (`ptq.ops.expert_ops`), with weights of
small floats in tiles (`fp6.tiled_ops`)."""

import torch

from fp6 import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)
from ptq.ops.expert_ops import declare_experts

experts, all_experts = declare_experts(
    "minifloat",
    "Tensor[] tiles, Tensor[] scale",
    "int exponent, int mantissa, int group_size",
    torch.ops.ptq.minifloat_linear_tiled,
    torch.ops.ptq.minifloat_linear_quantized,
)
"""The ops step by step."""
