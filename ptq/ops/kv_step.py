"""`ptq::kv_decode_attention`: what attention over the packed cache does to decoded tokens, as one op.

q, k and v of the last t tokens of each row, [b, t, heads * d], before rotary embedding: rotary embedding; keys without
their `key_center`, if there is one; R3, a Hadamard transform of `order` (0: none), of queries and keys; keys and values
stored, shrunk by their `clips`, behind the first `before` tokens of
the cache (`ptq.ops.kv_ops`); attention to all of them that `mask` does not hide, and to the sinks, which are there
already. Several tokens need a mask, which says what each of them sees. Everything is done by the functions of the
ops that do one step, in their order: the numbers are theirs to the bit. (Calling eight ops takes three times as long as
what they do.) On a GPU all that stands before attention is one launch, R3 must have no dense factors, and heads at most
256 channels.

`ptq::kv_decode_attention_at` is the same behind `start` tokens, a number in a tensor, so that one graph serves every
step, and is t more afterwards; without sinks, to what the mask shows of the first tokens that it has.
"""

import torch
from jaxtyping import BFloat16, Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from ptq.ops import kv_ops as _kv_ops  # noqa: F401 (registers the ops)
from ptq.ops.op_declarations import like_first, reference_of

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_codes, Tensor(b!) k_scales, "
    "Tensor(c!) v_codes, Tensor(d!) v_scales"
)
NUMBERS = "int k_bits, int v_bits, float[] clips, Tensor[] factors, int order, float scaling"


@reference_of(
    "kv_decode_attention",
    f"({GIVEN}, int before, {NUMBERS}, Tensor? starts, Tensor? sink_keys, Tensor? sink_values, "
    "Tensor? mask=None, Tensor? key_center=None) -> Tensor",
    like_first,
)
def decode_attention(
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
    k_codes: UInt8[Tensor, "chunks b h k_bytes"],
    k_scales: BFloat16[Tensor, "chunks b h 2 256"],
    v_codes: UInt8[Tensor, "chunks b h v_bytes"],
    v_scales: BFloat16[Tensor, "chunks b h 2 256"],
    before: int,
    k_bits: int,
    v_bits: int,
    clips: list[float],
    factors: list[Tensor],
    order: int,
    scaling: float,
    starts: Int64[Tensor, " b"] | None = None,
    sink_keys: Float32[Tensor, "b h s d"] | None = None,
    sink_values: Float32[Tensor, "b h s d"] | None = None,
    mask: Bool[Tensor, "_ 1 t length"] | None = None,
    key_center: Float[Tensor, "h d"] | None = None,
) -> Float[Tensor, "b t q_width"]:
    """`ptq::kv_decode_attention` step by step."""
    ops, cache = torch.ops.ptq, (k_codes, k_scales, v_codes, v_scales)
    query, key, value = _before_append(q, k, v, cos, sin, k_codes.shape[2], factors, order, key_center)
    ops.kv_append(k_codes, k_scales, key, before, k_bits, clips[0], False)
    ops.kv_append(v_codes, v_scales, value, before, v_bits, clips[1], True)
    sinks = starts, sink_keys, sink_values
    return ops.kv_attend(query, *cache, before + q.shape[1], k_bits, v_bits, scaling, mask, *sinks).flatten(2)


@reference_of(
    "kv_decode_attention_at",
    f"({GIVEN}, Tensor(e!) start, {NUMBERS}, Tensor mask, Tensor? key_center=None) -> Tensor",
    like_first,
)
def decode_attention_at(
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    cos: Float[Tensor, "_ t r"],
    sin: Float[Tensor, "_ t r"],
    k_codes: UInt8[Tensor, "chunks b h k_bytes"],
    k_scales: BFloat16[Tensor, "chunks b h 2 256"],
    v_codes: UInt8[Tensor, "chunks b h v_bytes"],
    v_scales: BFloat16[Tensor, "chunks b h 2 256"],
    start: Int64[Tensor, ""],
    k_bits: int,
    v_bits: int,
    clips: list[float],
    factors: list[Tensor],
    order: int,
    scaling: float,
    mask: Bool[Tensor, "_ 1 t length"],
    key_center: Float[Tensor, "h d"] | None = None,
) -> Float[Tensor, "b t q_width"]:
    """`ptq::kv_decode_attention_at` step by step."""
    ops, cache = torch.ops.ptq, (k_codes, k_scales, v_codes, v_scales)
    query, key, value = _before_append(q, k, v, cos, sin, k_codes.shape[2], factors, order, key_center)
    ops.kv_append_at(k_codes, k_scales, key, start, k_bits, clips[0], False)
    ops.kv_append_at(v_codes, v_scales, value, start, v_bits, clips[1], True)
    start.add_(q.shape[1])
    y = ops.kv_attend(query, *cache, mask.shape[3], k_bits, v_bits, scaling, mask, None, None, None)
    return y.flatten(2)


def _before_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, heads: int, factors: list[Tensor], order: int,
    center: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys behind rotary embedding and R3, keys without their centre, and values: [b, heads, t, d]."""
    d = k.shape[2] // heads
    query, key, value = (x.unflatten(2, (-1, d)).transpose(1, 2) for x in (q, k, v))
    query, key = torch.ops.ptq.rotary(query, key, cos, sin)
    if center is not None:
        key = key - center.to(key.dtype)[:, None]
    if order:
        query, key = (torch.ops.ptq.hadamard(x, None, factors, order, -1, False) for x in (query, key))
    return query, key, value
