"""Multi-head latent attention (arXiv 2405.04434, section 2.1) of few decoded tokens, on the CPU.

A matrix makes a key and a value for each head of a latent vector c of each token: k = W_k c, v = W_v c. Transformers'
own code, whose cache has the latent vectors, makes them anew for all tokens of the context with every new one. Yet

    q · k = (W_kᵀ q) · c        and        sum of p_s v_s = W_v (sum of p_s c_s),

so the matrix can meet the query and the result instead: all heads attend to the latent vectors themselves.

`ptq::latent_attention`: q [b, t, heads (dk + r)] are queries, of each head dk numbers and then r for the rotary
embedding; `latent` [b, t, rank] (behind its norm) and `rotary` [b, t, r] are what t new tokens have, and go to the
caches `latents` [b, 1, room, rank] and, rotated, `rope_keys` [b, 1, room, r] behind the first `before` tokens. `keys`
[heads, rank, dk] is the matrix W_kᵀ of each head, `values` [heads, dv, rank] is W_v. The result is [b, t, heads dv].
Queries and what is attended are rounded to q's dtype between the products; sums are float32. `mask` is as in
`ptq.ops.steps`. `rope_layout` is one of `RopeLayout`.
"""

from enum import IntEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ptq.ops import steps
from ptq.ops.op_declarations import reference_of


class RopeLayout(IntEnum):
    """How the rotary embedding pairs numbers."""

    HALVES = 0
    """Those of the first half with those of the second: `ptq::rotary`. cos and sin are [b or 1, t, r]."""
    PAIRS = 1
    """Neighbours, whose first ones come to lie in front of all second ones."""
    COMPLEX = 2
    """Neighbours, which stay where they are, in float32: cos and sin are [b or 1, t, r / 2], in float32."""
    NONE = 3
    """Not at all; cos and sin are not looked at."""


@reference_of(
    "latent_attention",
    "(Tensor q, Tensor latent, Tensor rotary, Tensor cos, Tensor sin, Tensor(a!) latents, Tensor(b!) rope_keys, "
    "int before, Tensor keys, Tensor values, int rope_layout, float scaling, Tensor? mask=None) -> Tensor",
    lambda q, latent, rotary, cos, sin, latents, rope_keys, before, keys, values, *rest: q.new_empty(
        *q.shape[:2], values.shape[0] * values.shape[1]
    ),
)
def latent_attention(
    q: Float[Tensor, "b t q_width"],
    latent: Float[Tensor, "b t rank"],
    rotary: Float[Tensor, "b t r"],
    cos: Float[Tensor, "_ t _"],
    sin: Float[Tensor, "_ t _"],
    latents: Float[Tensor, "b 1 room rank"],
    rope_keys: Float[Tensor, "b 1 room r"],
    before: int,
    keys: Float[Tensor, "heads rank dk"],
    values: Float[Tensor, "heads dv rank"],
    rope_layout: int,
    scaling: float,
    mask: Bool[Tensor, "_ 1 t length"] | None = None,
) -> Float[Tensor, "b t width"]:
    """`ptq::latent_attention` in plain torch."""
    (heads, _, dk), (b, t), dtype = keys.shape, q.shape[:2], q.dtype
    after = before + t
    query, rotated = q.view(b, t, heads, -1).transpose(1, 2).split((dk, rotary.shape[2]), -1)
    rope = RopeLayout(rope_layout), cos, sin
    latents[:, 0, before:after] = latent
    rope_keys[:, :, before:after] = _with_rope(rotary[:, None], *rope)
    absorbed = torch.einsum("bhtd,hrd->bhtr", query.float(), keys.float()).to(dtype)
    asked, seen = torch.cat((absorbed, _with_rope(rotated, *rope)), -1), latents[:, :, :after]
    if mask is None:
        mask = torch.ones(1, 1, t, after, dtype=torch.bool, device=q.device).tril(before)
    known = torch.cat((seen, rope_keys[:, :, :after]), -1)
    attended = steps.attended(asked, known, seen, scaling, mask).view(b, t, heads, -1).float()
    return torch.einsum("bthr,hdr->bthd", attended, values.float()).to(dtype).flatten(2)


def _with_rope(
    x: Float[Tensor, "b h t r"], rope_layout: RopeLayout, cos: Float[Tensor, "_ t _"], sin: Float[Tensor, "_ t _"]
) -> Float[Tensor, "b h t r"]:
    if rope_layout is RopeLayout.NONE:
        return x
    if rope_layout is not RopeLayout.COMPLEX:
        x = x if rope_layout is RopeLayout.HALVES else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return steps.rotary(x, x, cos, sin)[0]
    re, im = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2).to(x.dtype)
