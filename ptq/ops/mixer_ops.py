"""Ops of mixers that keep a state in the place of keys and values, on the CPU.

- `ptq::conv_step`: one token of a causal convolution of each channel, x [b, c, 1] behind the last tokens `state` [b, c,
  room]; width <= room + 1. The sum, and silu of it where that is asked for, are rounded to x's dtype.
- `ptq::gated_delta_rule` (arXiv 2412.06464): S' = e^g S; S = S' + k (beta (v - S'ᵀ k))ᵀ; y = Sᵀ q / sqrt(dk), token
  after token in float32. q and k [b, t, shared, dk] serve heads / shared heads of v [b, t, heads, dv] each; with `norm`
  they are x / sqrt(sum of x² + 1e-6). g and beta [b, t, heads] and the state S [b, heads, dk, dv] are float32.
- `ptq::gated_rms_norm`: y = gain * x / sqrt(mean of x² + eps) * silu(gate), rounded before the gain, behind it and at
  last.

States are moved on in place.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.ops.op_declarations import like_first, reference_of


@reference_of("conv_step", "(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool silu) -> Tensor", like_first)
def conv_step(
    x: Float[Tensor, "b c 1"],
    state: Float[Tensor, "b c room"],
    weight: Float[Tensor, "c width"],
    bias: Float[Tensor, " c"] | None,
    silu: bool,
) -> Float[Tensor, "b c 1"]:
    """`ptq::conv_step` in plain torch."""
    seen = torch.cat((state, x), -1)
    state.copy_(seen[..., 1:])
    y = (seen[..., seen.shape[-1] - weight.shape[1] :].float() * weight.float()).sum(-1, keepdim=True)
    y = (y if bias is None else y + bias.float()[:, None]).to(x.dtype)
    return torch.nn.functional.silu(y) if silu else y


@reference_of(
    "gated_delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, bool norm) -> Tensor",
    lambda q, k, v, *rest: q.new_empty(v.shape),
)
def gated_delta_rule(
    q: Float[Tensor, "b t shared dk"],
    k: Float[Tensor, "b t shared dk"],
    v: Float[Tensor, "b t heads dv"],
    g: Float32[Tensor, "b t heads"],
    beta: Float32[Tensor, "b t heads"],
    state: Float32[Tensor, "b heads dk dv"],
    norm: bool,
) -> Float[Tensor, "b t heads dv"]:
    """`ptq::gated_delta_rule` in plain torch."""
    query, key = (x.float() for x in (q, k))
    if norm:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(v.shape[2] // x.shape[2], 2)[..., None] for x in (query, key))
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for t in range(v.shape[1]):
        state *= g[:, t].exp()[..., None, None]
        delta = (v[:, t].float() - (state * key[:, t]).sum(-2)) * beta[:, t, :, None]
        state += key[:, t] * delta[:, :, None]
        y[:, t] = (state * query[:, t] / q.shape[-1] ** 0.5).sum(-2)
    return y.to(q.dtype)


@reference_of("gated_rms_norm", "(Tensor x, Tensor gate, Tensor gain, float eps) -> Tensor", like_first)
def gated_rms_norm(
    x: Float[Tensor, "*t k"], gate: Float[Tensor, "*t k"], gain: Float[Tensor, " k"], eps: float
) -> Float[Tensor, "*t k"]:
    """`ptq::gated_rms_norm` in plain torch."""
    y = x.float()
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (gain * y * torch.nn.functional.silu(gate.float())).to(x.dtype)
