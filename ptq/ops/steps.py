"""The small steps between the products of decoded tokens: RMSNorm, rotary embedding, attention over plain keys and
values, and the gate of the MLP.

Each does the arithmetic of the modules of transformers, which make two to fourteen ops of it:

- `ptq::rms_norm`: x / sqrt(mean(x²) + eps) in float32, times offset + gain. `round_first` rounds to the dtype of x
  before the gain (Llama and most others), else after it, once (OLMo 2; Gemma with offset 1). The sum of squares may
  be added in another order than torch's: its last bit differs.
- `ptq::rotary`: q and k [b, h, t, d] with cos and sin [b or 1, t, r], x cos + (-x₂, x₁) sin for the halves x₁, x₂ of
  the first r channels (RoFormer, arXiv 2104.09864, in the layout of GPT-NeoX); the others stay as they are (on a GPU: r
  is d). Every product and sum is rounded to the dtype: equal to the bit.
- `ptq::rotary_pairs`: the same for neighbours, x cos + (-x₂, x₁) sin for x₁ and x₂ at places 2i and 2i + 1 (RoFormer's
  own layout). Where cos and sin are float32, so are products and the sum, which is rounded once. On the CPU.
- `ptq::decode_attention`: q, k and v of the last t tokens, [b, t, heads * d], before rotary embedding. Turned keys,
  and values, are written behind the first `before` tokens of keys and values [b, h, room, d]; then each query attends
  to its own token and all before it, or, where there is a `mask` [b or 1, 1, t, before + t], to what it says (True),
  if to nothing, with zeros. With `sinks` [q_heads], each head has one more score, whose value is 0 (GPT-OSS, arXiv
  2508.10925); on the CPU. Scores, softmax and sums are float32, the result [b, t, q_heads * d] is rounded once. (On a
  GPU: float16 or bfloat16, whole eights of channels, at most 256; several tokens need a mask; weights of the softmax
  are rounded, too.)
- `ptq::decode_attention_at`: the same behind `start` tokens, a number in a tensor, so that one graph serves every step,
  and is t more afterwards. Attention is to all of the room that the mask [b or 1, 1, t, room] shows. The CUDA kernel
  drops tokens that find no room, as it cannot say so.
- `ptq::silu_mul`: silu(gate) * up, silu rounded to the dtype. `ptq::gelu_mul`: the same with GELU, approximated by a
  tanh (Hendrycks and Gimpel, arXiv 1606.08415). `ptq::sigmoid_mul`: sigmoid(gate) * x, the sigmoid rounded likewise;
  on the CPU.
- `ptq::clamped_swiglu`: (u + 1) (g sigmoid(alpha g)), where g is the gate, at most `limit`, and u is up, within
  +-limit; every step is rounded to the dtype (the experts of GPT-OSS, arXiv 2508.10925).
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ptq.ops.op_declarations import like_first, reference_of


@reference_of("rms_norm", "(Tensor x, Tensor gain, float eps, float offset, bool round_first) -> Tensor", like_first)
def rms_norm(
    x: Float[Tensor, "*t k"], gain: Float[Tensor, " k"], eps: float, offset: float, round_first: bool
) -> Float[Tensor, "*t k"]:
    """`ptq::rms_norm` in plain torch."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        y = y.to(x.dtype).float()
    return (y * (gain.float() + offset)).to(x.dtype)


@reference_of(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda q, k, cos, sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
def rotary(
    q: Float[Tensor, "b q_heads t d"],
    k: Float[Tensor, "b h t d"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
) -> tuple[Float[Tensor, "b q_heads t d"], Float[Tensor, "b h t d"]]:
    """`ptq::rotary` in plain torch."""

    def quarter(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    return _with_rope(q, cos, sin, quarter), _with_rope(k, cos, sin, quarter)


@reference_of(
    "rotary_pairs",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    lambda q, k, cos, sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
def rotary_pairs(
    q: Float[Tensor, "b q_heads t d"],
    k: Float[Tensor, "b h t d"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
) -> tuple[Float[Tensor, "b q_heads t d"], Float[Tensor, "b h t d"]]:
    """`ptq::rotary_pairs` in plain torch."""

    def quarter(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return _with_rope(q, cos, sin, quarter), _with_rope(k, cos, sin, quarter)


def _with_rope(x: Tensor, cos: Tensor, sin: Tensor, quarter: Callable[[Tensor], Tensor]) -> Tensor:
    """x cos + quarter(x) sin of the first channels, in the dtype of the tables."""
    r = cos.shape[-1]
    part = x[..., :r].to(cos.dtype)
    y = part * cos.unsqueeze(1) + quarter(part) * sin.unsqueeze(1)
    return torch.cat((y.to(x.dtype), x[..., r:]), -1)


@reference_of(
    "decode_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "int before, float scaling, Tensor? mask=None, Tensor? sinks=None) -> Tensor",
    like_first,
)
def decode_attention(
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
    keys: Float[Tensor, "b h room d"],
    values: Float[Tensor, "b h room d"],
    before: int,
    scaling: float,
    mask: Bool[Tensor, "_ 1 t length"] | None = None,
    sinks: Float[Tensor, " q_heads"] | None = None,
) -> Float[Tensor, "b t q_width"]:
    """`ptq::decode_attention` in plain torch."""
    t, after = q.shape[1], before + q.shape[1]
    query = _entered(q, k, v, cos, sin, keys, values, before)
    if mask is None:
        mask = torch.ones(1, 1, t, after, dtype=torch.bool, device=q.device).tril(before)
    return attended(query, keys[:, :, :after], values[:, :, :after], scaling, mask, sinks)


@reference_of(
    "decode_attention_at",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!) start, float scaling, Tensor mask) -> Tensor",
    like_first,
)
def decode_attention_at(
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
    keys: Float[Tensor, "b h room d"],
    values: Float[Tensor, "b h room d"],
    start: Int64[Tensor, ""],
    scaling: float,
    mask: Bool[Tensor, "_ 1 t room"],
) -> Float[Tensor, "b t q_width"]:
    """`ptq::decode_attention_at` in plain torch."""
    query = _entered(q, k, v, cos, sin, keys, values, int(start))
    start.add_(q.shape[1])
    return attended(query, keys, values, scaling, mask)


def _entered(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, before: int
) -> Float[Tensor, "b q_heads t d"]:
    """Queries, turned; keys and values are behind the first `before` tokens now."""
    (b, h, _, d), t = keys.shape, q.shape[1]
    query, key = rotary(q.view(b, t, -1, d).transpose(1, 2), k.view(b, t, h, d).transpose(1, 2), cos, sin)
    keys[:, :, before : before + t] = key
    values[:, :, before : before + t] = v.view(b, t, h, d).transpose(1, 2)
    return query


def attended(
    query: Float[Tensor, "b q_heads t d"],
    keys: Tensor,
    values: Tensor,
    scaling: float,
    mask: Bool[Tensor, "_ 1 t s"],
    sinks: Float[Tensor, " q_heads"] | None = None,
) -> Float[Tensor, "b t width"]:
    """Attention of queries that are turned to keys and values [b, h, s, *]."""
    groups = query.shape[1] // keys.shape[1]
    seen = [x.float().repeat_interleave(groups, 1) for x in (keys, values)]
    score = query.float() * scaling @ seen[0].transpose(-1, -2)
    score = score.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.float()[:, None, None].expand(*score.shape[:3], 1)), -1)
    y = score.softmax(-1)[..., : mask.shape[-1]] @ seen[1]
    y = y.masked_fill(~mask.any(-1, keepdim=True), 0)
    return y.transpose(1, 2).flatten(2).to(query.dtype)


@reference_of("silu_mul", "(Tensor gate, Tensor up) -> Tensor", like_first)
def silu_mul(gate: Float[Tensor, "*t k"], up: Float[Tensor, "*t k"]) -> Float[Tensor, "*t k"]:
    """`ptq::silu_mul` in plain torch."""
    return torch.nn.functional.silu(gate) * up


@reference_of("gelu_mul", "(Tensor gate, Tensor up) -> Tensor", like_first)
def gelu_mul(gate: Float[Tensor, "*t k"], up: Float[Tensor, "*t k"]) -> Float[Tensor, "*t k"]:
    """`ptq::gelu_mul` in plain torch."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@reference_of("sigmoid_mul", "(Tensor gate, Tensor x) -> Tensor", like_first)
def sigmoid_mul(gate: Float[Tensor, "*t k"], x: Float[Tensor, "*t k"]) -> Float[Tensor, "*t k"]:
    """`ptq::sigmoid_mul` in plain torch."""
    return torch.sigmoid(gate) * x


@reference_of("clamped_swiglu", "(Tensor gate, Tensor up, float alpha, float limit) -> Tensor", like_first)
def clamped_swiglu(
    gate: Float[Tensor, "*t k"], up: Float[Tensor, "*t k"], alpha: float, limit: float
) -> Float[Tensor, "*t k"]:
    """`ptq::clamped_swiglu` in plain torch."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
