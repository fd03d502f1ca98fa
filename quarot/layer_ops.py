"""`ptq::integer_layers`: what decoder layers do to a decoded token of each row, as one op, for integer weights in
tiles.

Layer by layer: RMSNorm; q_proj, k_proj and v_proj; an RMSNorm of queries and keys where there is one, of each head or
of all as one vector; rotary embedding and attention, with key and value stored behind the first `before` tokens;
o_proj, added to the layer's input; RMSNorm, gate_proj and up_proj, silu(gate) * up, down_proj, added again. The results
are the outputs of all layers.

Lists hold what belongs to each layer, layer by layer: 2 or 4 `gains` (the numbers of these norms are the same in all
layers), 7 weights (`zero` and `bias` may be empty; a bias of no elements is none), and the tensors of its cache: keys
and values [b, h, room, d], or codes and scales of keys and values (`ptq.kv_ops`), or these, `starts`, sink keys and
sink values.
Products quantise their input to `input_bits` first (0: they don't); that of down_proj goes through a Hadamard transform
of `order` before (0: none) and has bits of its own. Everything is done by the functions of the ops that do one step, in
their order: the numbers are theirs to the bit. (On a decoded token, calling them one by one takes as long as half of
the products.)
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ptq import kv_step as _kv_step  # noqa: F401 (registers the ops)
from ptq.op_declarations import declare

PER_LAYER = 7

SCHEMA = (
    "(Tensor x, Tensor[] gains, float[] eps, float[] offset, int[] round_first, Tensor[] tiles, Tensor[] scale, "
    "Tensor[] zero, Tensor[] bias, int[] n, int bits, int group_size, int input_bits, float clip, Tensor[] factors, "
    "int order, int down_bits, float down_clip, Tensor cos, Tensor sin, Tensor(a!)[] cache, int before, "
    "int[] cache_bits, float cache_clip, Tensor[] cache_factors, int cache_order, float scaling) -> Tensor[]"
)


def products(x, bits, clip, factors, order, weights, grid):
    """x, transformed and quantised if need be, times several weights."""
    if not bits:
        x = torch.ops.ptq.hadamard(x, None, factors, order, -1, False) if order else x
        return torch.ops.ptq.integer_linears_tiled(x, *weights, *grid)
    if order:
        q, q_scale = torch.ops.ptq.hadamard_quantize(x, None, factors, order, bits, clip)
    else:
        q, q_scale = torch.ops.ptq.quantize_tokens(x, bits, clip)
    return torch.ops.ptq.integer_linears_quantized(q, q_scale, *weights, *grid, x.dtype)


def layers(
    x, gains, eps, offset, round_first, tiles, scale, zero, bias, n, bits, group_size, input_bits, clip, factors, order,
    down_bits, down_clip, cos, sin, cache, before, cache_bits, cache_clip, cache_factors, cache_order, scaling,
):  # fmt: skip
    """`ptq::integer_layers` step by step."""
    count, results = len(n) // PER_LAYER, []

    def norm(x: Float[Tensor, "b 1 k"], which: int) -> Float[Tensor, "b 1 k"]:
        gain = gains[layer * len(eps) + which]
        by_head = x.unflatten(-1, (-1, len(gain)))
        return torch.ops.ptq.rms_norm(by_head, gain, eps[which], offset[which], bool(round_first[which])).flatten(-2)

    def plain(x: Float[Tensor, "b 1 k"], first: int, last: int) -> list[Tensor]:
        return products(x, input_bits, clip, [], 0, weights(first, last), (bits, group_size))

    def weights(first: int, last: int) -> list:
        at = slice(layer * PER_LAYER + first, layer * PER_LAYER + last)
        return [part[at] for part in (tiles, scale, zero, bias, n)]

    for layer in range(count):
        q, k, v = plain(norm(x, 0), 0, 3)
        if len(eps) == 4:
            q, k = norm(q, 2), norm(k, 3)
        held = cache[layer * len(cache) // count : (layer + 1) * len(cache) // count]
        if len(held) == 2:
            attended = torch.ops.ptq.decode_attention(q, k, v, cos, sin, *held, before, scaling)
        else:
            numbers = before, *cache_bits, cache_clip, cache_factors, cache_order, scaling
            sinks = held[4:] or (None, None, None)
            attended = torch.ops.ptq.kv_decode_attention(q, k, v, cos, sin, *held[:4], *numbers, *sinks)
        y = x + plain(attended, 3, 4)[0]
        gated = torch.ops.ptq.silu_mul(*plain(norm(y, 1), 4, 6))
        x = y + products(gated, down_bits, down_clip, factors, order, weights(6, 7), (bits, group_size))[0]
        results.append(x)
    return results


def _fake(x, gains, eps, offset, round_first, tiles, scale, zero, bias, n, *rest):
    return [x.new_empty(x.shape) for _ in range(len(n) // PER_LAYER)]


declare("integer_layers", SCHEMA, layers, _fake)
