"""`ptq::integer_layer`: all that a decoder layer does to a decoded token of each row, as one op, for integer weights in
tiles.

RMSNorm; q_proj, k_proj and v_proj; an RMSNorm of queries and keys where there is one, of each head or of all as one
vector; rotary embedding and attention, with key and value stored behind the first `before` tokens; o_proj, added to
the layer's input; RMSNorm, gate_proj and up_proj, silu(gate) * up, down_proj, added again.

Lists: 2 or 4 norms; 7 weights (`zero` and `bias` may be empty; a bias of no elements is none); the tensors of the
cache, which are keys and values [b, h, room, d], or codes and scales of keys and values (`ptq.kv_ops`), or these, and
`starts`, sink keys and sink values, which are only read.
Products quantise their input to `input_bits` first (0: they don't), with a clip for q, k and v, one for o, and one for
gate and up; that of down_proj goes through a Hadamard transform of `order` before (0: none), and has bits and a clip of
its own. Everything is done by the functions of the ops that do one step, in their order: the numbers are theirs to the
bit. (On a decoded token, calling them one by one takes as long as half of the products.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ptq import kv_step as _kv_step  # noqa: F401 (registers the ops)
from ptq.input_steps import treated
from ptq.op_declarations import declare

SCHEMA = (
    "(Tensor x, Tensor[] gains, float[] eps, float[] offset, int[] round_first, Tensor[] tiles, Tensor[] scale, "
    "Tensor[] zero, Tensor[] bias, int[] n, int bits, int group_size, int input_bits, float[] clips, Tensor[] factors, "
    "int order, int down_bits, float down_clip, Tensor cos, Tensor sin, Tensor(a!)[] cache, int before, "
    "int[] cache_bits, float cache_clip, Tensor[] cache_factors, int cache_order, float scaling) -> Tensor"
)


def products(
    x: Float[Tensor, "*t k"],
    bits: int,
    clip: float,
    factors: list[Tensor],
    order: int,
    weights: Sequence[Sequence[Any]],
    grid: tuple[int, int],
) -> list[Tensor]:
    """x, transformed and quantised if need be, times several weights."""
    seen = treated(x, None, factors, order, bits, clip)
    if len(seen) == 1:
        return torch.ops.ptq.integer_linears_tiled(*seen, *weights, *grid)
    return torch.ops.ptq.integer_linears_quantized(*seen, *weights, *grid, x.dtype)


def layer(
    x, gains, eps, offset, round_first, tiles, scale, zero, bias, n, bits, group_size, input_bits, clips, factors,
    order, down_bits, down_clip, cos, sin, cache, before, cache_bits, cache_clip, cache_factors, cache_order, scaling,
):  # fmt: skip
    """`ptq::integer_layer` step by step."""

    def norm(x: Float[Tensor, "b 1 k"], which: int) -> Float[Tensor, "b 1 k"]:
        by_head = x.unflatten(-1, (-1, len(gains[which])))
        numbers = eps[which], offset[which], bool(round_first[which])
        return torch.ops.ptq.rms_norm(by_head, gains[which], *numbers).flatten(-2)

    def weights(first: int, last: int) -> list[Any]:
        return [part[first:last] for part in (tiles, scale, zero, bias, n)]

    def plain(x: Float[Tensor, "b 1 k"], which: int, first: int, last: int) -> list[Tensor]:
        return products(x, input_bits, clips[which], [], 0, weights(first, last), (bits, group_size))

    q, k, v = plain(norm(x, 0), 0, 0, 3)
    if len(gains) == 4:
        q, k = norm(q, 2), norm(k, 3)
    if len(cache) == 2:
        attended = torch.ops.ptq.decode_attention(q, k, v, cos, sin, *cache, before, scaling)
    else:
        numbers = before, *cache_bits, cache_clip, cache_factors, cache_order, scaling
        sinks = cache[4:] or (None, None, None)
        attended = torch.ops.ptq.kv_decode_attention(q, k, v, cos, sin, *cache[:4], *numbers, *sinks)
    y = x + plain(attended, 1, 3, 4)[0]
    gated = torch.ops.ptq.silu_mul(*plain(norm(y, 1), 2, 4, 6))
    return y + products(gated, down_bits, down_clip, factors, order, weights(6, 7), (bits, group_size))[0]


declare("integer_layer", SCHEMA, layer, lambda x, *rest: x.new_empty(x.shape))
