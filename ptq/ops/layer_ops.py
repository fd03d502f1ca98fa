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

What the ops take is said at `ptq.ops.held_layer.HeldLayer` and `Token`. `ptq::decode_layers` takes the cache of each
layer, one behind another; `before`, `scaling` and `residual_multiplier` have a number for each, the other numbers of a
cache and the mask are the same for all.

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
    handles, x, cos, sin, cache, before, cache_bits, cache_clips, cache_factors, cache_order, scaling,
    residual_multiplier, mask=None,
):  # fmt: skip
    if not all("layer" in vars(handle) for handle in handles):
        raise RuntimeError("decode_layers: expected what an op on layers gave, not a copy of it")
    count, counts = len(handles), {len(before), len(scaling), len(residual_multiplier)}
    if not count or counts != {count} or len(cache) % count:
        raise RuntimeError("decode_layers: expected as many of everything as layers")
    each, numbers = len(cache) // count, (cache_bits, cache_clips, cache_factors, cache_order)
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
