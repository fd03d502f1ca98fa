"""Ops of mixers that keep a state in the place of keys and values, on the CPU.

- `ptq::conv_step`: one token of a causal convolution of each channel, x [b, c, 1] behind the last tokens `state` [b, c,
  room]; width <= room + 1. The sum, and silu of it where that is asked for, are rounded to x's dtype.
- `ptq::causal_conv`: the same convolution over all tokens of x [b, c, t], with nothing in front of them. In memory the
  channels of a token lie together in what it returns, as in what a linear gives.
- `ptq::mamba2_scan` (arXiv 2405.21060): S = exp(dt A) S + dt x Bᵀ; y = S C + D x, token after token in float32, where
  dt is softplus(dt + dt_bias) between `low` and `high`. x [b, t, heads, d] and dt [b, t, heads]; B and C [b, t, groups,
  n] serve heads / groups heads each; A [heads] and the state S [b, heads, d, n] are float32, and y is, too.
- `ptq::gated_delta_rule` (arXiv 2412.06464): S' = e^g S; S = S' + k (beta (v - S'ᵀ k))ᵀ; y = Sᵀ q / sqrt(dk), token
  after token in float32. q and k [b, t, shared, dk] serve heads / shared heads of v [b, t, heads, dv] each; with `norm`
  they are x / sqrt(sum of x² + 1e-6). g and beta [b, t, heads] and the state S [b, heads, dk, dv] are float32.
- `ptq::gated_rms_norm`: y = gain * x / sqrt(mean of x² + eps) * silu(gate), rounded before the gain, behind it and at
  last; or, with the gate `before`, the same of x * silu(gate) without a gate behind it. Each of the `groups` of a row
  has a mean of its own. gate and gain have one dtype: x's, or x is float32.
- `ptq::delta_net_step`: what a gated delta net does to one token of each row, x [b, 1, k], between its products and the
  last of them. The product `qkv` [b, 1, 2 shared dk + heads dv] goes through the convolution and silu; g = -exp(a_log)
  softplus(a x + dt_bias) and beta = sigmoid(b x), for weights a and b [heads, k], as Qwen 3.5 has them; then come the
  gated delta rule with `norm`, and the gated RMSNorm of each head, whose gate is the product z [b, 1, heads dv].
- `ptq::mamba2_step`: what a state space does to one token of each row between its two products. Of the first one [b, 1,
  width + channels + heads], the parts are the gate of the norm, what the convolution and silu turn into x, B and C, and
  dt. Then come `ptq::mamba2_scan` with A = -exp(a_log) and no limits, and the gated RMSNorm with the gate before it. In
  float32 in between.

States are moved on in place.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.ops.matmul import few_tokens_linear
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


@reference_of(
    "causal_conv",
    "(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    lambda x, *rest: x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2),
)
def causal_conv(
    x: Float[Tensor, "b c t"], weight: Float[Tensor, "c width"], bias: Float[Tensor, " c"] | None, silu: bool
) -> Float[Tensor, "b c t"]:
    """`ptq::causal_conv` in plain torch."""
    seen, t = torch.nn.functional.pad(x.float(), (weight.shape[1] - 1, 0)), x.shape[2]
    y = torch.stack([seen[..., i : i + t] * w[:, None] for i, w in enumerate(weight.float().unbind(1))]).sum(0)
    y = (y if bias is None else y + bias.float()[:, None]).to(x.dtype)
    return (torch.nn.functional.silu(y) if silu else y).transpose(1, 2).contiguous().transpose(1, 2)


@reference_of(
    "mamba2_scan",
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor(a!) state, float low, "
    "float high) -> Tensor",
    lambda x, *rest: x.new_empty(x.shape, dtype=torch.float32),
)
def mamba2_scan(
    x: Float[Tensor, "b t heads d"],
    dt: Float[Tensor, "b t heads"],
    A: Float32[Tensor, " heads"],  # noqa: N803
    B: Float[Tensor, "b t groups n"],  # noqa: N803
    C: Float[Tensor, "b t groups n"],  # noqa: N803
    D: Float[Tensor, " heads"] | None,  # noqa: N803
    dt_bias: Float[Tensor, " heads"] | None,
    state: Float32[Tensor, "b heads d n"],
    low: float,
    high: float,
) -> Float32[Tensor, "b t heads d"]:
    """`ptq::mamba2_scan` in plain torch."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = torch.nn.functional.softplus(step).clamp(low, high)
    each = [part.float().repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C)]
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[1]):
        state *= (step[:, t] * A).exp()[..., None, None]
        state += (x[:, t].float() * step[:, t, :, None])[..., None] * each[0][:, t, :, None]
        y[:, t] = (state * each[1][:, t, :, None]).sum(-1)
    return y if D is None else y + x.float() * D.float()[:, None]


@reference_of(
    "gated_rms_norm",
    "(Tensor x, Tensor gate, Tensor gain, float eps, int groups=1, bool before=False) -> Tensor",
    like_first,
)
def gated_rms_norm(
    x: Float[Tensor, "*t k"],
    gate: Float[Tensor, "*t k"],
    gain: Float[Tensor, " k"],
    eps: float,
    groups: int = 1,
    before: bool = False,
) -> Float[Tensor, "*t k"]:
    """`ptq::gated_rms_norm` in plain torch."""
    by = torch.nn.functional.silu(gate.float())
    y = (x.float() * by if before else x.float()).unflatten(-1, (groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)
    return (gain * y).to(x.dtype) if before else (gain * y * by).to(x.dtype)


@reference_of(
    "delta_net_step",
    "(Tensor x, Tensor qkv, Tensor z, Tensor(a!) conv_state, Tensor(b!) state, Tensor conv, Tensor? conv_bias, "
    "Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor gain, float eps) -> Tensor",
    lambda x, qkv, z, *rest: z.new_empty(z.shape),
)
def delta_net_step(
    x: Float[Tensor, "batch 1 k"],
    qkv: Float[Tensor, "batch 1 channels"],
    z: Float[Tensor, "batch 1 width"],
    conv_state: Float[Tensor, "batch channels room"],
    state: Float32[Tensor, "batch heads dk dv"],
    conv: Float[Tensor, "channels 1 kernel"],
    conv_bias: Float[Tensor, " channels"] | None,
    a: Float[Tensor, "heads k"],
    b: Float[Tensor, "heads k"],
    a_log: Float[Tensor, " heads"],
    dt_bias: Float[Tensor, " heads"],
    gain: Float[Tensor, " dv"],
    eps: float,
) -> Float[Tensor, "batch 1 width"]:
    """`ptq::delta_net_step` by the ops that do one step."""
    heads, dk, dv = state.shape[1:]
    mixed = torch.ops.ptq.conv_step(qkv.transpose(1, 2), conv_state, conv.squeeze(1), conv_bias, True).transpose(1, 2)
    width = (qkv.shape[2] - heads * dv) // 2
    sizes = zip(mixed.split((width, width, heads * dv), 2), (dk, dk, dv), strict=True)
    q, k, v = (part.unflatten(2, (-1, d)) for part, d in sizes)
    decay = torch.nn.functional.softplus(few_tokens_linear(x, a).float() + dt_bias.float())
    g, beta = -a_log.float().exp() * decay, few_tokens_linear(x, b).sigmoid().float()
    y = torch.ops.ptq.gated_delta_rule(q, k, v, g, beta, state, True)
    return torch.ops.ptq.gated_rms_norm(y, z.view(y.shape), gain, eps).view(z.shape)


@reference_of(
    "mamba2_step",
    "(Tensor product, Tensor(a!) conv_state, Tensor(b!) state, Tensor conv, Tensor? conv_bias, Tensor a_log, Tensor D, "
    "Tensor dt_bias, Tensor gain, float eps, int norm_groups) -> Tensor",
    lambda product, conv_state, state, conv, conv_bias, a_log, D, dt_bias, gain, *rest: product.new_empty(  # noqa: N803
        product.shape[0], 1, gain.shape[0]
    ),
)
def mamba2_step(
    product: Float[Tensor, "batch 1 rows"],
    conv_state: Float[Tensor, "batch channels room"],
    state: Float32[Tensor, "batch heads d n"],
    conv: Float[Tensor, "channels 1 kernel"],
    conv_bias: Float[Tensor, " channels"] | None,
    a_log: Float[Tensor, " heads"],
    D: Float[Tensor, " heads"],  # noqa: N803
    dt_bias: Float[Tensor, " heads"],
    gain: Float[Tensor, " width"],
    eps: float,
    norm_groups: int,
) -> Float[Tensor, "batch 1 width"]:
    """`ptq::mamba2_step` by the ops that do one step."""
    heads, d, n = state.shape[1:]
    width, channels = heads * d, conv.shape[0]
    gate, mixed, dt = product.split((width, channels, heads), 2)
    seen = torch.ops.ptq.conv_step(mixed.transpose(1, 2), conv_state, conv.squeeze(1), conv_bias, True).transpose(1, 2)
    both = (channels - width) // 2
    parts = [
        part.unflatten(2, (-1, size)) for part, size in zip(seen.split((width, both, both), 2), (d, n, n), strict=True)
    ]
    x, B, C = parts  # noqa: N806
    A = -a_log.float().exp()  # noqa: N806
    y = torch.ops.ptq.mamba2_scan(x, dt, A, B, C, D, dt_bias, state, 0.0, float("inf")).flatten(2)
    return torch.ops.ptq.gated_rms_norm(y, gate, gain, eps, norm_groups, True).to(product.dtype)
