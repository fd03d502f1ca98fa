"""Decoder layers of few decoded tokens on the CPU, in one call of an op of `ptq.ops.layer_ops`, which holds them
(`ptq.fast.found_layer`). The numbers are those of the single ops to the bit.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.fast import decoding, delta_net, fast_attention, latent_attention
from ptq.fast.found_layer import Layer
from ptq.kv.growing_cache import GrowingLayer
from ptq.kv.packed_layer import PackedLayer
from ptq.ops import layer_ops as _layer_ops  # noqa: F401 (registers the op)

NO_NUMBERS: tuple[list[int], float, list[Tensor], int] = ([0, 0], 1.0, [], 0)
"""Of a cache that is not packed: bits, clip, factors and order of a transform."""
DECODE = torch.ops.ptq.decode_layers.default


def run(
    layers: Sequence[Layer],
    x: Float[Tensor, "b t k"],
    others: dict[str, Any],
    multipliers: list[float],
) -> Float[Tensor, "b t k"] | None:
    """What layers, one behind another, give for decoded tokens of each row; None where they are called with something
    else. `multipliers`: m of each."""
    if any(layer.moe is not None and not layer.moe.may_run(x.dtype) for layer in layers):
        return None
    handles, floats = [layer.handle for layer in layers], chain.from_iterable(layer.floats for layer in layers)
    if isinstance(layers[0].kind, latent_attention.Kind):
        return _run_latent(layers, layers[0].kind, x, others, multipliers)
    if isinstance(layers[0].kind, delta_net.Kind):
        moved = delta_net.states_of([layer.mixer for layer in layers], x, [*floats], **others)
        if moved is None or len({id(conv) for conv, _ in moved}) < len(moved):
            return None
        cache = [*chain.from_iterable(moved)], [0] * len(layers), *NO_NUMBERS
        return DECODE(handles, x, x, x, *cache, [1.0] * len(layers), multipliers, None)
    attentions = [(layer.mixer, cast(fast_attention.Kind, layer.kind)) for layer in layers]
    states = fast_attention.cache_layers(attentions, x, floats=floats, **others)
    scaling = _scaling(layers, others)
    if states is None or scaling is None:
        return None
    if len(set(map(id, states))) < len(states):  # layers that are one see their own tokens
        return None
    cache = _cache(layers, states, x)
    if cache is None:
        return None
    turns, mask = attentions[0][1].turns(others["position_embeddings"]), others.get("attention_mask")
    y = DECODE(handles, x, *turns, *cache, scaling, multipliers, mask)
    for state in cast(list[GrowingLayer | PackedLayer], states):
        state.advance(x.shape[1])
    return y


def _run_latent(
    layers: Sequence[Layer],
    kind: latent_attention.Kind,
    x: Float[Tensor, "b t k"],
    others: dict[str, Any],
    multipliers: list[float],
) -> Float[Tensor, "b t k"] | None:
    """`run` for layers with latent attention."""
    mixers, turns = (
        [layer.mixer for layer in layers],
        latent_attention.turns_of(kind, others.get("position_embeddings"), x),
    )
    floats = chain.from_iterable(layer.floats for layer in layers)
    states, scaling = latent_attention.cache_layers(mixers, turns, x, floats=floats, **others), _scaling(layers, others)
    if states is None or turns is None or scaling is None or len(set(map(id, states))) < len(states):
        return None
    room, before = [], []
    for mixer, state in zip(mixers, states, strict=True):
        *held, length = state.reserve(*latent_attention.shapes_of(mixer, *x.shape[:2]), x)
        room.extend(held)
        before.append(length)
    handles = [layer.handle for layer in layers]
    cache = room, before, *NO_NUMBERS
    y = DECODE(handles, x, *turns, *cache, scaling, multipliers, others.get("attention_mask"))
    for state in states:
        state.advance(x.shape[1])
    return y


def _scaling(layers: Sequence[Layer], others: dict[str, Any]) -> list[float] | None:
    """What the scores of each layer's attention are multiplied with; None where that is not one number for all."""
    found = [decoding.scaling_of(layer.mixer, layer.kind, others) for layer in layers]
    return None if None in found else cast(list[float], found)


def _cache(
    layers: Sequence[Layer], states: Sequence[decoding.CacheLayer], x: Float[Tensor, "b t k"]
) -> tuple[Any, ...] | None:
    """The arguments of `ptq::decode_layers` from `cache` to `cache_order`, with room for the tokens of x. All states
    are of one cache."""
    batch, tokens = x.shape[:2]
    room, before, numbers = [], [], NO_NUMBERS
    for layer, state in zip(layers, states, strict=True):
        if isinstance(state, GrowingLayer):
            shape = batch, layer.heads[0], tokens, layer.heads[1]
            *held, length = state.reserve(shape, shape, x)
        elif isinstance(state, PackedLayer) and state.decodes and state.key.batch == batch:
            held, length, numbers = state.room(tokens), state.length, state.numbers()
        else:
            return None
        room.extend(held)
        before.append(length)
    return room, before, *numbers
