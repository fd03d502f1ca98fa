"""`ptq::integer_experts` and `ptq::integer_all_experts`: experts of a block (`ptq.ops.expert_ops`), with integer
weights in tiles (`quarot.tiled_ops`). `zero` is empty, or as long as `tiles`."""

import torch

from ptq.ops.expert_ops import declare_experts
from quarot import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

experts, all_experts = declare_experts(
    "integer",
    "Tensor[] tiles, Tensor[] scale, Tensor[] zero",
    "int bits, int group_size",
    torch.ops.ptq.integer_linear_tiled,
    torch.ops.ptq.integer_linear_quantized,
)
"""The ops step by step."""
