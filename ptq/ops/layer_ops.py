"""Ops that do all that a decoder layer does to the last tokens of each row. One for each format of the weights takes
what does not change from token to token, and gives a tensor that stands for the layer; with some of those,
`ptq::decode_layers` takes tokens through the layers, one behind another: x [b, t, k], t mostly 1.

RMSNorm; q_proj, k_proj and v_proj; an RMSNorm of queries and keys, of each head or of all as one vector; rotary
embedding and attention, with key and value stored behind the first `before` tokens; o_proj; an RMSNorm; times
`residual_multiplier`; added to the layer's input. RMSNorm, gate_proj and up_proj, silu(gate) * up (or with `gelu`),
down_proj; an RMSNorm; times the same; added again.

In the place of attention, a layer may have a gated delta net (`ptq::delta_net_step` in `ptq.ops.mixer_ops`): what goes
through its convolution and the gate of its norm are the two products of the first input, and the state is the `cache`.
Or a state space (`ptq::mamba2_step`), for which the first input has one product. Or it has latent attention
(`ptq.ops.latent_ops`): the products are queries, or what queries of low rank are made of, and latent vectors with what
is rotated behind them; the cache is `latents` and `rope_keys`.

Where `rows` end with that of o, and inputs are two, `moe` stands for a router and experts in the place of that MLP
(`ptq.ops.moe_ops`); where it is empty, the op ends in front of the second part.

Lists:

- `gains` and the numbers of the norms: before attention, before the MLP, of queries, of keys, behind attention, behind
  the MLP. A gain of no elements is no norm.
- The seven weights are those of q, k, v, o, gate, up and down; of a state space there is one before o, of a delta net
  there are two, and of latent attention, too, or three with low rank: the third makes queries of what the norm of
  queries gives. q, k and v may be one weight, whose rows are theirs in turn, and so may gate and up; lists of weights
  are then shorter. `rows` are those of the seven, in any case. `biases` are empty, or one for each weight (of no
  elements: none).
- `gated`: 0, or the size of a head of queries, whose rows those of a gate follow: what is attended is multiplied with
  the gate's sigmoid.
- `recurrent` is empty, or what a delta net has besides: conv, conv_bias (of no elements: none), a, b, a_log, dt_bias,
  gain; or what a state space has: conv, conv_bias, a_log, D, dt_bias, gain. With `recurrent_eps`, and the `norm_groups`
  of a state space (of a delta net: 0).
- `latent` is empty, or the two matrices of latent attention, with `rope_layout`. Its norms are those of queries (of low
  rank) and of keys.
- `sinks` are empty, or those of the heads of attention over a plain cache, as one tensor.
- Inputs are four: that of q, k and v; of o; of gate and up; of down; with low rank, its own is the second of five.
  Each goes through a Hadamard transform of its order (0: none) behind the signs `su` (empty, or one vector for each),
  and is quantised to `input_bits` (0: it is not), with its clip. `factors` are the dense factors of all transforms,
  `counts` how many each has.
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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ptq.ops.held_layer import DECODE_SCHEMA, SCHEMA, HeldLayer, LayerFunction, Products, Token
from ptq.ops.layer_reference import layer_of, sites_of
from ptq.ops.op_declarations import declare


def declare_layer(op: str, weights: str, products: Products) -> Callable[..., LayerFunction]:
    """Declare `ptq::<op>`, whose last arguments are the `weights` of a schema. Returns a function that makes a layer in
    Python of the same arguments."""

    n_place = [argument.split()[1] for argument in weights.split(", ")].index("n")
    count = len(HeldLayer._fields)

    def layer(*arguments: Any) -> LayerFunction:
        held, packed = HeldLayer(*arguments[:count]), arguments[count:]
        sites = sites_of(packed[n_place], held)
        return lambda *token: layer_of(products, held, sites, packed, Token(*token))

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
