"""Decoder layers of few decoded tokens on the CPU, in one call of an op of `ptq.ops.layer_ops`, which holds them
(`ptq.fast.layers.found_layer`). The numbers are those of the single ops to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.fast.attention import decoding
from ptq.fast.layers.found_layer import FoundLayer, Recurrent
from ptq.kv.growing_cache import GrowingLayer
from ptq.kv.packed_layer import PackedLayer
from ptq.ops import layer_ops as _layer_ops  # noqa: F401 (registers the op)

NO_NUMBERS: tuple[list[int], list[float], list[Tensor], int] = ([0, 0], [1.0, 1.0], [], 0)
"""Of a cache that is not packed: bits, clips, factors and order of a transform."""
DECODE = torch.ops.ptq.decode_layers.default


State = GrowingLayer | PackedLayer | tuple[Tensor, Tensor]
"""What a token goes to: the layer of a cache, or the states of a recurrent mixer, which are moved on in place."""


def run(
    layers: Sequence[FoundLayer],
    x: Float[Tensor, "b t k"],
    others: dict[str, Any],
    multipliers: list[float],
) -> Float[Tensor, "b t k"] | None:
    """What layers, one behind another, give for decoded tokens of each row; None where they are called with something
    else. `multipliers`: m of each."""
    if not decoding.are_decoded(x.shape[1], others.get("attention_mask")):
        return None
    if any(layer.moe is not None and not layer.moe.may_run(x.dtype) for layer in layers):
        return None
    cos_sin = _cos_sin(layers, x, others.get("position_embeddings"))
    states = None if cos_sin is None else _states(layers, x, cos_sin, others)
    scaling = None if states is None else _scaling(layers, others)
    if cos_sin is None or states is None or scaling is None:
        return None
    cache = _cache(layers, states, x)
    if cache is None:
        return None
    handles = [layer.handle for layer in layers]
    y = DECODE(handles, x, *cos_sin, *cache, scaling, multipliers, others.get("attention_mask"))
    for state in states:
        if not isinstance(state, tuple):
            state.advance(x.shape[1])
    return y


def _states(
    layers: Sequence[FoundLayer], x: Float[Tensor, "b t k"], cos_sin: tuple[Tensor, Tensor], others: dict[str, Any]
) -> list[State] | None:
    """Where the tokens of x go, for each layer; None where this is something else than decoding."""
    states: dict[int, State] = {}
    for kind in {type(layer.kind) for layer in layers}:
        places = [i for i, layer in enumerate(layers) if type(layer.kind) is kind]
        mixers: list[Any] = [(layers[i].mixer, layers[i].kind) for i in places]
        floats = [y for i in places for y in layers[i].floats]
        found: Any = kind.cache_layers(mixers, cos_sin, x, floats=floats, **others)
        if found is None:
            return None
        states.update(zip(places, found, strict=True))
    distinct = {id(state[0] if isinstance(state, tuple) else state) for state in states.values()}
    if len(distinct) < len(states):  # layers that are one see their own tokens
        return None
    return [states[i] for i in range(len(layers))]


def _cos_sin(layers: Sequence[FoundLayer], x: Float[Tensor, "b t k"], given: Any) -> tuple[Tensor, Tensor] | None:
    """cos and sin as all layers take them that turn something; None where they take them in different ways."""
    kinds = {layer.kind: layer.mixer for layer in layers if not isinstance(layer.kind, Recurrent)}
    if not kinds:
        return x, x  # which nobody looks at
    if len({(type(kind), kind.tables) for kind in kinds}) > 1:
        return None
    found = [kind.cos_sin(mixer, given, x) for kind, mixer in kinds.items()]
    return None if None in found else found[0]


def _scaling(layers: Sequence[FoundLayer], others: dict[str, Any]) -> list[float] | None:
    """What the scores of each layer's attention are multiplied with; None where that is not one number for all."""
    attentions = [(layer.mixer, layer.kind) for layer in layers if not isinstance(layer.kind, Recurrent)]
    found = decoding.scalings_of(attentions, others)
    if found is None:
        return None
    numbers = iter(found)
    return [1.0 if isinstance(layer.kind, Recurrent) else next(numbers) for layer in layers]


def _cache(layers: Sequence[FoundLayer], states: Sequence[State], x: Float[Tensor, "b t k"]) -> tuple[Any, ...] | None:
    """The arguments of `ptq::decode_layers` from `cache` to `cache_order`, with room for the tokens of x. All states
    are of one cache."""
    batch, tokens = x.shape[:2]
    room, before, numbers, sizes = [], [], NO_NUMBERS, set[int]()
    for layer, state in zip(layers, states, strict=True):
        if isinstance(state, tuple):
            held, length = state, 0
        elif isinstance(state, GrowingLayer):
            *held, length = state.reserve(*decoding.shapes_of(layer.cached, x), x)
        elif state.decodes and state.key.batch == batch:
            held, length, numbers = state.room(tokens), state.length, state.numbers()
        else:
            return None
        room.extend(held)
        before.append(length)
        sizes.add(len(held))
    return (room, before, *numbers) if len(sizes) == 1 else None
