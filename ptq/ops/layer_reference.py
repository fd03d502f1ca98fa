"""What the ops of `ptq.ops.layer_ops` compute, step by step, in plain torch and by the ops that do one step."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.ops import kv_step as _kv_step  # noqa: F401 (registers the ops)
from ptq.ops import latent_ops as _latent_ops  # noqa: F401 (registers the ops)
from ptq.ops import mixer_ops as _mixer_ops  # noqa: F401 (registers the ops)
from ptq.ops import moe_ops as _moe_ops  # noqa: F401 (registers the ops)
from ptq.ops.held_layer import (
    ATTENDED_NORM,
    ATTENTION_NORM,
    DOWN_INPUT,
    FIRST_ROLES,
    GATE_UP_INPUT,
    INPUTS,
    INSIDE_INPUT,
    K_NORM,
    MIXER_INPUT,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    O_INPUT,
    Q_NORM,
    HeldLayer,
    Products,
    Token,
)
from ptq.ops.input_steps import Treatment, treated


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


class Site(NamedTuple):
    """An input of a layer, the weights [first, last) that multiply it, and what is done around them."""

    first: int
    last: int
    rows: list[int]
    """Of what the products are for: one weight may be for all of them."""
    treatment: Treatment
    """Of the input."""


Sites = dict[int, Site]
"""By input."""


def sites_of(n: list[int], held: HeldLayer) -> Sites:
    """The inputs of a layer whose weights have n rows each."""
    mixer, sites, first, factors = held.mixer(), Sites(), 0, _split(held.factors, held.counts)
    inputs = [which for which in INPUTS if which != INSIDE_INPUT or mixer == "low rank"]
    for i, (which, (role, next_role)) in enumerate(zip(inputs, pairwise(FIRST_ROLES[mixer]), strict=True)):
        if role < len(held.rows):
            rows = held.rows[role:next_role]
            last = first + (1 if n[first] == sum(rows) else len(rows))
            signs = held.su[i] if held.su else None
            treatment = Treatment(signs, factors[i], held.orders[i], held.input_bits[i], held.clips[i])
            sites[which] = Site(first, last, rows, treatment)
            first = last
    return sites


def _split(factors: list[Tensor], counts: list[int]) -> list[list[Tensor]]:
    ends = [0, *accumulate(counts)]
    return [factors[start:end] for start, end in pairwise(ends)]


def layer_of(
    products: Products, held: HeldLayer, sites: Sites, weights: Sequence[Any], token: Token
) -> Float[Tensor, "b t k"]:
    """What a layer makes of the last tokens, step by step."""

    def norm(x: Float[Tensor, "b t k"], which: int) -> Float[Tensor, "b t k"]:
        return _norm(held, which, x)

    def linears(x: Float[Tensor, "b t k"], which: int) -> Sequence[Tensor]:
        return _linears(products, held, sites[which], weights, x)

    def added(x: Float[Tensor, "b t k"], y: Float[Tensor, "b t k"]) -> Float[Tensor, "b t k"]:
        return x + (y if token.residual_multiplier == 1 else y * token.residual_multiplier)

    x = norm(token.x, ATTENTION_NORM)
    first = linears(x, MIXER_INPUT)
    if INSIDE_INPUT in sites:
        low, latent = first
        first = [*linears(norm(low, Q_NORM), INSIDE_INPUT), latent]
    mixed = _mixed(held, x, first, token)
    y = added(token.x, norm(linears(mixed, O_INPUT)[0], ATTENDED_NORM))
    if held.moe:
        return added(y, norm(torch.ops.ptq.run_moe(held.moe[0], norm(y, MLP_NORM))[0], MLP_OUTPUT_NORM))
    if GATE_UP_INPUT not in sites:
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
    products: Products, held: HeldLayer, site: Site, weights: Sequence[Any], x: Float[Tensor, "b t k"]
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
    if held.recurrent:
        conv, bias, *others = held.recurrent
        net = conv, bias if bias.numel() else None, *others, held.recurrent_eps
        if held.norm_groups:
            return torch.ops.ptq.mamba2_step(*products, *token.cache, *net, held.norm_groups)
        return torch.ops.ptq.delta_net_step(x, *products, *token.cache, *net)
    if held.latent:
        return _attended_to_latents(held, products, token)
    q, k, v = products
    gate = None
    if held.gated:
        q, gate = (part.flatten(2) for part in q.unflatten(2, (-1, 2, held.gated)).unbind(3))
    y = _attended(_norm(held, Q_NORM, q), _norm(held, K_NORM, k), v, token, *held.sinks)
    return y if gate is None else torch.ops.ptq.sigmoid_mul(gate, y)


def _attended(q: Tensor, k: Tensor, v: Tensor, token: Token, sinks: Tensor | None = None) -> Tensor:
    cos_sin, cache = (token.cos, token.sin), token.cache
    if len(cache) == 2:
        return torch.ops.ptq.decode_attention(q, k, v, *cos_sin, *cache, token.before, token.scaling, token.mask, sinks)
    if sinks is not None:
        raise RuntimeError("decode_layers: a packed cache does not go with sinks of heads")
    numbers = token.before, *token.cache_bits, token.cache_clips, token.cache_factors, token.cache_order, token.scaling
    kept = (None, None, None) if len(cache) < 7 else cache[4:7]
    center = cache[-1] if len(cache) in (5, 8) else None
    return torch.ops.ptq.kv_decode_attention(q, k, v, *cos_sin, *cache[:4], *numbers, *kept, token.mask, center)


def _attended_to_latents(held: HeldLayer, products: Sequence[Tensor], token: Token) -> Tensor:
    q, latent = products
    latent, rotary = latent.tensor_split((held.latent[0].shape[1],), -1)
    cos_sin, numbers = (token.cos, token.sin), (held.rope_layout, token.scaling, token.mask)
    given = q, _norm(held, K_NORM, latent), rotary, *cos_sin, *token.cache, token.before, *held.latent
    return torch.ops.ptq.latent_attention(*given, *numbers)
