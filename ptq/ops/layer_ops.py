"""Ops that do all that a decoder layer does to the last tokens of each row. One for each format of the weights takes
what does not change from token to token, and gives a tensor that stands for the layer; with some of those,
`ptq::decode_layers` takes tokens through the layers, one behind another: x [b, t, k], t mostly 1.

RMSNorm; q_proj, k_proj and v_proj; an RMSNorm of queries and keys, of each head or of all as one vector; rotary
embedding and attention, with key and value stored behind the first `before` tokens; o_proj; an RMSNorm; times
`residual_multiplier`; added to the layer's input. RMSNorm, gate_proj and up_proj, silu(gate) * up (or with `gelu`),
down_proj; an RMSNorm; times the same; added again.

Where `rows` are four and inputs two, the op ends in front of the second part.

Lists:

- `gains` and the numbers of the norms: before attention, before the MLP, of queries, of keys, behind attention, behind
  the MLP. A gain of no elements is no norm.
- The seven weights are those of q, k, v, o, gate, up and down. q, k and v may be one weight, whose rows are theirs in
  turn, and so may gate and up; lists of weights are then shorter. `rows` are those of the seven, in any case. `biases`
  are empty, or one for each weight (of no elements: none).
- Inputs are four: that of q, k and v; of o; of gate and up; of down. Each goes through a Hadamard transform of its
  order (0: none) behind the signs `su` (empty, or one vector for each), and is quantised to `input_bits` (0: it is
  not), with its clip. `factors` are the dense factors of all transforms, `counts` how many each has.
- The product of each weight is transformed back, with the signs `sv` behind; an order of 0 is none.
- `mask` says what each token sees, and hides padding, say (`ptq.ops.steps`); with a packed cache, several tokens need
  one.
- `cache`: keys and values [b, h, room, d], or codes and scales of keys and values (`ptq.ops.kv_ops`), or these, and
  `starts`, sink keys and sink values, which are only read. Those of each layer, one behind another; `before`, `scaling`
  and `residual_multiplier` have a number for each, its other numbers and the mask are the same for all.

Everything is done by the functions of the ops that do one step, in their order: the numbers are theirs to the bit. (On
a decoded token, calling them one by one takes as long as half of the products of a 1 B model in 4 bits, and longer than
those in 2 bits. Handing over forty tensors and twenty lists took 9 of 63 µs of a block of 256 x 512.)

A handle is a byte that nobody reads; a copy of it stands for nothing. It keeps the tensors alive, and with its last
reference the layer goes. The layer sees what is written to its tensors, and what takes their place (`x.data = ...`).
Since C++ refers to them, `torch.utils.swap_tensors` refuses them.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.ops import kv_step as _kv_step  # noqa: F401 (registers the ops)
from ptq.ops.input_steps import treated
from ptq.ops.op_declarations import declare

SCHEMA = (
    "Tensor[] gains, float[] eps, float[] offset, int[] round_first, Tensor[] biases, int[] input_bits, float[] clips, "
    "Tensor[] su, Tensor[] factors, int[] counts, int[] orders, Tensor[] sv, Tensor[] back_factors, int[] back_counts, "
    "int[] back_orders, bool gelu, int[] rows"
)
DECODE_SCHEMA = (
    "(Tensor[] layers, Tensor x, Tensor cos, Tensor sin, Tensor(a!)[] cache, int[] before, int[] cache_bits, "
    "float cache_clip, Tensor[] cache_factors, int cache_order, float[] scaling, float[] residual_multiplier, "
    "Tensor? mask=None) -> Tensor"
)

FIRST_ROLES = (0, 3, 4, 6, 7)
"""Of q, k, v, o, gate, up and down, that with which each input starts."""

Products = Callable[..., list[Tensor]]
"""products(input, biases, first, last, dtype, weights ...): those of weights [first, last) with an input of numbers
(one tensor), or integers and scales; only of these in `dtype`. `biases` are empty, or one for each."""


Layer = Callable[..., Tensor]
"""layer(x, cos, sin, ...), as `ptq::decode_layers` has them behind its first argument, but those of one layer."""


def declare_layer(op: str, weights: str, products: Products) -> Callable[..., Layer]:
    """Declare `ptq::<op>`, whose last arguments are the `weights` of a schema. Returns a function that makes a layer in
    Python of the same arguments."""

    of_rows = [argument.split()[1] for argument in weights.split(", ")].index("n")

    def layer(*held: Any) -> Layer:
        return lambda *token: _layer(products, of_rows, held, *token)

    def reference(*held: Any) -> Tensor:
        handle = torch.empty(1, dtype=torch.uint8)
        vars(handle)["layer"] = layer(*held)
        return handle

    declare(op, f"({SCHEMA}, {weights}) -> Tensor", reference, lambda *rest: torch.empty(1, dtype=torch.uint8))
    return layer


def _decode_layers(
    handles, x, cos, sin, cache, before, cache_bits, cache_clip, cache_factors, cache_order, scaling,
    residual_multiplier, mask=None,
):  # fmt: skip
    if not all("layer" in vars(handle) for handle in handles):
        raise RuntimeError("decode_layers: expected what an op on layers gave, not a copy of it")
    count, counts = len(handles), {len(before), len(scaling), len(residual_multiplier)}
    if not count or counts != {count} or len(cache) % count:
        raise RuntimeError("decode_layers: expected as many of everything as layers")
    each, numbers = len(cache) // count, (cache_bits, cache_clip, cache_factors, cache_order)
    for i, handle in enumerate(handles):
        own = cache[i * each : (i + 1) * each], before[i], *numbers, scaling[i], residual_multiplier[i]
        x = vars(handle)["layer"](x, cos, sin, *own, mask)
    return x


declare(
    "decode_layers",
    DECODE_SCHEMA,
    reference=_decode_layers,
    fake=lambda layers, x, *rest: x.new_empty(x.shape),
)


def one_by_one(op: str) -> Products:
    """Products by `ptq::<op>_linear_tiled` and `ptq::<op>_linear_quantized`, where the weights are tiles, scales and n,
    and then numbers."""

    def products(seen, biases, first, last, dtype, tiles, scale, n, *numbers):
        found = []
        for place, i in enumerate(range(first, last)):
            weight = tiles[i], scale[i], _bias_of(biases, place), n[i], *numbers
            if len(seen) == 1:
                found.append(getattr(torch.ops.ptq, f"{op}_linear_tiled")(*seen, *weight))
            else:
                found.append(getattr(torch.ops.ptq, f"{op}_linear_quantized")(*seen, *weight, dtype))
        return found

    return products


def _bias_of(biases: list[Tensor], which: int) -> Tensor | None:
    return biases[which] if biases and biases[which].numel() else None


def _split(factors: list[Tensor], counts: list[int]) -> list[list[Tensor]]:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return [factors[start:end] for start, end in pairwise(ends)]


def _sites(n: list[int], rows: list[int]) -> list[tuple[int, int, list[int]]]:
    """The first weight of each input, the one behind its last, and the rows of what they are for."""
    sites, at = [], 0
    for first, last in pairwise(FIRST_ROLES):
        if first < len(rows):
            each = rows[first:last]
            count = 1 if n[at] == sum(each) else len(each)
            sites.append((at, at + count, each))
            at += count
    return sites


def _layer(
    products, of_rows, held, x, cos, sin, cache, before, cache_bits, cache_clip, cache_factors, cache_order, scaling,
    residual_multiplier, mask=None,
):  # fmt: skip
    gains, eps, offset, round_first, biases, input_bits, clips, su, factors, counts, orders, *held = held
    sv, back_factors, back_counts, back_orders, gelu, rows, *weights = held
    inputs, outputs = _split(factors, counts), _split(back_factors, back_counts)
    sites = _sites(weights[of_rows], rows)

    def norm(x: Float[Tensor, "b t k"], which: int) -> Float[Tensor, "b t k"]:
        if not gains[which].numel():
            return x
        by_head = x.unflatten(-1, (-1, len(gains[which])))
        numbers = eps[which], offset[which], bool(round_first[which])
        return torch.ops.ptq.rms_norm(by_head, gains[which], *numbers).flatten(-2)

    def added(x: Float[Tensor, "b t k"], y: Float[Tensor, "b t k"]) -> Float[Tensor, "b t k"]:
        return x + (y if residual_multiplier == 1 else y * residual_multiplier)

    def linears(x: Float[Tensor, "b t k"], site: int) -> Sequence[Tensor]:
        first, last, each = sites[site]
        signs = su[site] if su else None
        seen = treated(x, signs, inputs[site], orders[site], input_bits[site], clips[site])
        if not back_orders[first]:
            found = products(seen, biases[first:last], first, last, x.dtype, *weights)
            return found if len(found) == len(each) else found[0].split(each, -1)
        back = []
        for i, y in enumerate(products(seen, [], first, last, torch.float32, *weights), first):
            y = torch.ops.ptq.hadamard(y.float(), sv[i] if sv else None, outputs[i], back_orders[i], -1, True)
            bias = _bias_of(biases, i)
            back.append((y if bias is None else y + bias).to(x.dtype))
        return back if len(back) == len(each) else back[0].split(each, -1)

    q, k, v = linears(norm(x, 0), 0)
    q, k = norm(q, 2), norm(k, 3)
    if len(cache) == 2:
        attended = torch.ops.ptq.decode_attention(q, k, v, cos, sin, *cache, before, scaling, mask)
    else:
        numbers = before, *cache_bits, cache_clip, cache_factors, cache_order, scaling
        sinks = cache[4:] or (None, None, None)
        attended = torch.ops.ptq.kv_decode_attention(q, k, v, cos, sin, *cache[:4], *numbers, *sinks, mask)
    y = added(x, norm(linears(attended, 1)[0], 4))
    if len(orders) == 2:
        return y
    act = torch.ops.ptq.gelu_mul if gelu else torch.ops.ptq.silu_mul
    gated = act(*linears(norm(y, 1), 2))
    return added(y, norm(linears(gated, 3)[0], 5))
