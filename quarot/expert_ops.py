"""`ptq::integer_experts`: the chosen experts of a block on few tokens as one op (`ptq.ops.expert_ops`), for integer
weights in tiles (`quarot.tiled_ops`). `zero` is empty, or as long as `tiles`."""

import torch

from ptq.ops.expert_ops import declare_experts
from quarot import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

experts = declare_experts(
    "integer_experts",
    "Tensor[] tiles, Tensor[] scale, Tensor[] zero",
    "int bits, int group_size",
    torch.ops.ptq.integer_linear_tiled,
    torch.ops.ptq.integer_linear_quantized,
)
"""The op step by step."""
