"""The small steps between the products of a decoded token: RMSNorm and rotary embedding, each as one op.

Each does the arithmetic of the modules of transformers, which make eight to fourteen ops of it:

- `ptq::rms_norm`: x / sqrt(mean(x²) + eps) in float32, times offset + gain. `round_first` rounds to the dtype of x
  before the gain (Llama and most others), else after it, once (OLMo 2; Gemma with offset 1). The sum of squares may
  be added in another order than torch's: its last bit differs.
- `ptq::rotary`: q and k [b, h, t, d] with cos and sin [b or 1, t, d], x cos + (-x₂, x₁) sin for the halves x₁, x₂ of d
  (RoFormer, arXiv 2104.09864, in the layout of GPT-NeoX). Every product and sum is rounded to the dtype: equal to the
  bit.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.op_declarations import declare_all

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor gain, float eps, float offset, bool round_first) -> Tensor",
    "rotary": "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
}


def rms_norm(
    x: Float[Tensor, "*t k"], gain: Float[Tensor, " k"], eps: float, offset: float, round_first: bool
) -> Float[Tensor, "*t k"]:
    """`ptq::rms_norm` in plain torch."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        y = y.to(x.dtype).float()
    return (y * (gain.float() + offset)).to(x.dtype)


def rotary(
    q: Float[Tensor, "b q_heads t d"],
    k: Float[Tensor, "b h t d"],
    cos: Float[Tensor, "_ t d"],
    sin: Float[Tensor, "_ t d"],
) -> tuple[Float[Tensor, "b q_heads t d"], Float[Tensor, "b h t d"]]:
    """`ptq::rotary` in plain torch."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        turned.append((x * cos + torch.cat((-second, first), -1) * sin).contiguous())
    return turned[0], turned[1]


REFERENCES = {"rms_norm": rms_norm, "rotary": rotary}
FAKES = {
    "rms_norm": lambda x, gain, eps, offset, round_first: x.new_empty(x.shape),
    "rotary": lambda q, k, cos, sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
}

declare_all(SCHEMAS, REFERENCES, FAKES)
