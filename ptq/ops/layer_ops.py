"""Ops that do all that a decoder layer does to the last tokens of each row. One for each format of the weights takes
what does not change from token to token, and gives a tensor that stands for the layer; with some of those,
`ptq::decode_layers` takes tokens through the layers, one behind another: x [b, t, k], t mostly 1.

RMSNorm; q_proj, k_proj and v_proj; an RMSNorm of queries and keys, of each head or of all as one vector; rotary
embedding and attention, with key and value stored behind the first `before` tokens; o_proj; an RMSNorm; times
`residual_multiplier`; added to the layer's input. RMSNorm, gate_proj and up_proj, silu(gate) * up (or with `gelu`),
down_proj; an RMSNorm; times the same; added again.

In the place of attention, a layer may have a gated delta net (`ptq::delta_net_step` in `ptq.ops.mixer_ops`): what goes
through its convolution and the gate of its norm are the two products of the first input, and the state is the `cache`.

Where `rows` end with that of o, and inputs are two, `moe` stands for a router and experts in the place of that MLP
(`ptq.ops.moe_ops`); where it is empty, the op ends in front of the second part.

Lists:

- `gains` and the numbers of the norms: before attention, before the MLP, of queries, of keys, behind attention, behind
  the MLP. A gain of no elements is no norm.
- The seven weights are those of q, k, v, o, gate, up and down; of a delta net there are two before o. q, k and v may be
  one weight, whose rows are theirs in turn, and so may gate and up; lists of weights are then shorter. `rows` are those
  of the seven, in any case. `biases` are empty, or one for each weight (of no elements: none).
- `gated`: 0, or the size of a head of queries, whose rows those of a gate follow: what is attended is multiplied with
  the gate's sigmoid.
- `delta` is empty, or what a delta net has besides: conv, conv_bias (of no elements: none), a, b, a_log, dt_bias, gain;
  with `delta_eps`.
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
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.ops import kv_step as _kv_step  # noqa: F401 (registers the ops)
from ptq.ops import mixer_ops as _mixer_ops  # noqa: F401 (registers the ops)
from ptq.ops import moe_ops as _moe_ops  # noqa: F401 (registers the ops)
from ptq.ops.input_steps import Treatment, treated
from ptq.ops.op_declarations import declare

SCHEMA = (
    "Tensor[] gains, float[] eps, float[] offset, int[] round_first, Tensor[] biases, int[] input_bits, float[] clips, "
    "Tensor[] su, Tensor[] factors, int[] counts, int[] orders, Tensor[] sv, Tensor[] back_factors, int[] back_counts, "
    "int[] back_orders, bool gelu, int[] rows, Tensor[] moe, int gated, Tensor[] delta, float delta_eps"
)
DECODE_SCHEMA = (
    "(Tensor[] layers, Tensor x, Tensor cos, Tensor sin, Tensor(a!)[] cache, int[] before, int[] cache_bits, "
    "float cache_clip, Tensor[] cache_factors, int cache_order, float[] scaling, float[] residual_multiplier, "
    "Tensor? mask=None) -> Tensor"
)

FIRST_ROLES = {"attention": (0, 3, 4, 6, 7), "delta net": (0, 2, 3, 5, 6)}
"""Of q, k, v, o, gate, up and down, or what a delta net has in the place of the first three, that with which each input
starts."""
MIXER_INPUT, O_INPUT, GATE_UP_INPUT, DOWN_INPUT = range(4)
"""The inputs, in the order of `input_bits` and the lists beside it."""
ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, ATTENDED_NORM, MLP_OUTPUT_NORM = range(6)
"""The norms, in the order of `gains`: before attention, before the MLP, of queries, of keys, behind attention, behind
the MLP."""


class HeldLayer(NamedTuple):
    """What the op of a format takes of a layer, but its weights: the arguments of `SCHEMA`, in their order."""

    gains: list[Tensor]
    eps: list[float]
    offset: list[float]
    round_first: list[int]
    biases: list[Tensor]
    input_bits: list[int]
    clips: list[float]
    su: list[Tensor]
    factors: list[Tensor]
    counts: list[int]
    orders: list[int]
    sv: list[Tensor]
    back_factors: list[Tensor]
    back_counts: list[int]
    back_orders: list[int]
    gelu: bool
    rows: list[int]
    moe: list[Tensor]
    gated: int
    delta: list[Tensor]
    delta_eps: float


class Token(NamedTuple):
    """What `ptq::decode_layers` takes of one layer behind its handle: the arguments of `DECODE_SCHEMA`, in their
    order."""

    x: Float[Tensor, "b t k"]
    cos: Tensor
    sin: Tensor
    cache: list[Tensor]
    before: int
    cache_bits: list[int]
    cache_clip: float
    cache_factors: list[Tensor]
    cache_order: int
    scaling: float
    residual_multiplier: float
    mask: Tensor | None = None


Products = Callable[..., list[Tensor]]
"""products(input, biases, first, last, dtype, weights ...): those of weights [first, last) with an input of numbers
(one tensor), or integers and scales; only of these in `dtype`. `biases` are empty, or one for each."""


Layer = Callable[..., Tensor]
"""layer(x, cos, sin, ...): the fields of `Token`."""


def declare_layer(op: str, weights: str, products: Products) -> Callable[..., Layer]:
    """Declare `ptq::<op>`, whose last arguments are the `weights` of a schema. Returns a function that makes a layer in
    Python of the same arguments."""

    n_place = [argument.split()[1] for argument in weights.split(", ")].index("n")
    count = len(HeldLayer._fields)

    def layer(*arguments: Any) -> Layer:
        held, packed = HeldLayer(*arguments[:count]), arguments[count:]
        sites = _sites(packed[n_place], held)
        return lambda *token: _layer(products, held, sites, packed, Token(*token))

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


class _Site(NamedTuple):
    """An input of a layer, the weights [first, last) that multiply it, and what is done around them."""

    first: int
    last: int
    rows: list[int]
    """Of what the products are for: one weight may be for all of them."""
    treatment: Treatment
    """Of the input."""


def _sites(n: list[int], held: HeldLayer) -> list[_Site]:
    """The inputs of a layer whose weights have n rows each."""
    sites, first, factors = [], 0, _split(held.factors, held.counts)
    for i, (role, next_role) in enumerate(pairwise(FIRST_ROLES["delta net" if held.delta else "attention"])):
        if role < len(held.rows):
            rows = held.rows[role:next_role]
            last = first + (1 if n[first] == sum(rows) else len(rows))
            signs = held.su[i] if held.su else None
            treatment = Treatment(signs, factors[i], held.orders[i], held.input_bits[i], held.clips[i])
            sites.append(_Site(first, last, rows, treatment))
            first = last
    return sites


def _split(factors: list[Tensor], counts: list[int]) -> list[list[Tensor]]:
    ends = [0, *accumulate(counts)]
    return [factors[start:end] for start, end in pairwise(ends)]


def _layer(
    products: Products, held: HeldLayer, sites: list[_Site], weights: Sequence[Any], token: Token
) -> Float[Tensor, "b t k"]:
    """What a layer makes of the last tokens, step by step."""

    def norm(x: Float[Tensor, "b t k"], which: int) -> Float[Tensor, "b t k"]:
        return _norm(held, which, x)

    def linears(x: Float[Tensor, "b t k"], which: int) -> Sequence[Tensor]:
        return _linears(products, held, sites[which], weights, x)

    def added(x: Float[Tensor, "b t k"], y: Float[Tensor, "b t k"]) -> Float[Tensor, "b t k"]:
        return x + (y if token.residual_multiplier == 1 else y * token.residual_multiplier)

    x = norm(token.x, ATTENTION_NORM)
    mixed = _mixed(held, x, linears(x, MIXER_INPUT), token)
    y = added(token.x, norm(linears(mixed, O_INPUT)[0], ATTENDED_NORM))
    if held.moe:
        return added(y, norm(torch.ops.ptq.run_moe(held.moe[0], norm(y, MLP_NORM))[0], MLP_OUTPUT_NORM))
    if len(sites) <= GATE_UP_INPUT:
        return y
    act = torch.ops.ptq.gelu_mul if held.gelu else torch.ops.ptq.silu_mul
    gated = act(*linears(norm(y, MLP_NORM), GATE_UP_INPUT))
    return added(y, norm(linears(gated, DOWN_INPUT)[0], MLP_OUTPUT_NORM))


def _norm(held: HeldLayer, which: int, x: Float[Tensor, "b t k"]) -> Float[Tensor, "b t k"]:
    gain = held.gains[which]
    if not gain.numel():
        return x
    numbers = held.eps[which], held.offset[which], bool(held.round_first[which])
    return torch.ops.ptq.rms_norm(x.unflatten(-1, (-1, len(gain))), gain, *numbers).flatten(-2)


def _linears(
    products: Products, held: HeldLayer, site: _Site, weights: Sequence[Any], x: Float[Tensor, "b t k"]
) -> Sequence[Tensor]:
    """What the linears of one input give, in the rows that they are for."""
    first, last, rows, treatment = site
    seen = treated(x, *treatment)
    if held.back_orders[first]:
        factors, found = _split(held.back_factors, held.back_counts), []
        for i, y in enumerate(products(seen, [], first, last, torch.float32, *weights), first):
            signs, bias = held.sv[i] if held.sv else None, _bias_of(held.biases, i)
            y = torch.ops.ptq.hadamard(y.float(), signs, factors[i], held.back_orders[i], -1, True)
            found.append((y if bias is None else y + bias).to(x.dtype))
    else:
        found = products(seen, held.biases[first:last], first, last, x.dtype, *weights)
    return found if len(found) == len(rows) else found[0].split(rows, -1)


def _mixed(held: HeldLayer, x: Float[Tensor, "b t k"], products: Sequence[Tensor], token: Token) -> Tensor:
    """What the output product multiplies, of the first products with x."""
    if held.delta:
        conv, bias, *others = held.delta
        net = conv, bias if bias.numel() else None, *others, held.delta_eps
        return torch.ops.ptq.delta_net_step(x, *products, *token.cache, *net)
    (q, k, v), gate = products, None
    if held.gated:
        q, gate = (part.flatten(2) for part in q.unflatten(2, (-1, 2, held.gated)).unbind(3))
    y = _attended(_norm(held, Q_NORM, q), _norm(held, K_NORM, k), v, token)
    return y if gate is None else torch.ops.ptq.sigmoid_mul(gate, y)


def _attended(q: Tensor, k: Tensor, v: Tensor, token: Token) -> Tensor:
    turns, cache = (token.cos, token.sin), token.cache
    if len(cache) == 2:
        return torch.ops.ptq.decode_attention(q, k, v, *turns, *cache, token.before, token.scaling, token.mask)
    numbers = token.before, *token.cache_bits, token.cache_clip, token.cache_factors, token.cache_order, token.scaling
    sinks = cache[4:] or (None, None, None)
    return torch.ops.ptq.kv_decode_attention(q, k, v, *turns, *cache[:4], *numbers, *sinks, token.mask)
