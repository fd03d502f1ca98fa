"""Decoder layers of few decoded tokens on the CPU, in one call of an op of `ptq.ops.layer_ops`, which holds them
(`ptq.fast.found_layer`). The numbers are those of the single ops to the bit.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.fast import decoding, fast_attention, latent_attention
from ptq.fast.found_layer import Layer, Recurrent
from ptq.fast.mixer_states import states_of
from ptq.kv.growing_cache import GrowingLayer
from ptq.kv.packed_layer import PackedLayer
from ptq.ops import layer_ops as _layer_ops  # noqa: F401 (registers the op)

NO_NUMBERS: tuple[list[int], float, list[Tensor], int] = ([0, 0], 1.0, [], 0)
"""Of a cache that is not packed: bits, clip, factors and order of a transform."""
DECODE = torch.ops.ptq.decode_layers.default


State = GrowingLayer | PackedLayer | tuple[Tensor, Tensor]
"""What a token goes to: the layer of a cache, or the states of a recurrent mixer, which are moved on in place."""


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
    attentions = [(layer.mixer, kind) for layer in layers if isinstance(kind := layer.kind, fast_attention.Kind)]
    others = fast_attention.with_turns(attentions, x, others) if attentions else others
    turns = _turns(layers, x, others)
    states = None if turns is None else _states(layers, x, turns, others)
    scaling = None if states is None else _scaling(layers, others)
    if turns is None or states is None or scaling is None:
        return None
    cache = _cache(layers, states, x)
    if cache is None:
        return None
    handles = [layer.handle for layer in layers]
    y = DECODE(handles, x, *turns, *cache, scaling, multipliers, others.get("attention_mask"))
    for state in states:
        if not isinstance(state, tuple):
            state.advance(x.shape[1])
    return y


def _states(
    layers: Sequence[Layer], x: Float[Tensor, "b t k"], turns: tuple[Tensor, Tensor], others: dict[str, Any]
) -> list[State] | None:
    """Where the tokens of x go, for each layer; None where this is something else than decoding."""
    states: dict[int, State] = {}
    for kind in {type(layer.kind) for layer in layers}:
        places = [i for i, layer in enumerate(layers) if type(layer.kind) is kind]
        mixers, floats = [layers[i].mixer for i in places], [y for i in places for y in layers[i].floats]
        if issubclass(kind, Recurrent):
            found = states_of(mixers, x, floats, **others)
        elif kind is latent_attention.Kind:
            latents = [(layers[i].mixer, cast(latent_attention.Kind, layers[i].kind)) for i in places]
            found = latent_attention.cache_layers(latents, turns, x, floats=floats, **others)
        else:
            attentions = [(layers[i].mixer, cast(fast_attention.Kind, layers[i].kind)) for i in places]
            found = fast_attention.cache_layers(attentions, x, floats=floats, **others)
        if found is None:
            return None
        states.update(zip(places, cast(list[State], found), strict=True))
    owners = {id(state[0] if isinstance(state, tuple) else state) for state in states.values()}
    if len(owners) < len(states):  # layers that are one see their own tokens
        return None
    return [states[i] for i in range(len(layers))]


def _turns(layers: Sequence[Layer], x: Float[Tensor, "b t k"], others: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """cos and sin as all layers take them that turn something; None where they take them in different ways."""
    given = others.get("position_embeddings")
    kinds = [layer.kind for layer in layers if not isinstance(layer.kind, Recurrent)]
    if len({kind.turning if isinstance(kind, latent_attention.Kind) else kind.halved for kind in kinds}) > 1:
        return None
    if not kinds:
        return x, x  # which nobody looks at
    if isinstance(kinds[0], latent_attention.Kind):
        return latent_attention.turns_of(kinds[0], given, x)
    return kinds[0].turns(given) if isinstance(given, tuple) and given[0].dim() == 3 else None


def _scaling(layers: Sequence[Layer], others: dict[str, Any]) -> list[float] | None:
    """What the scores of each layer's attention are multiplied with; None where that is not one number for all."""
    found, factors = [], dict[int, float | None]()
    for mixer, kind in ((layer.mixer, layer.kind) for layer in layers):
        scaled = not isinstance(kind, Recurrent) and kind.scaled
        if scaled and id(mixer.config) not in factors:
            factors[id(mixer.config)] = decoding.query_factor(mixer.config, others.get("position_ids"))
        factor = factors[id(mixer.config)] if scaled else 1.0
        if factor is None:
            return None
        found.append(1.0 if isinstance(kind, Recurrent) else mixer.scaling * factor)
    return found


def _cache(layers: Sequence[Layer], states: Sequence[State], x: Float[Tensor, "b t k"]) -> tuple[Any, ...] | None:
    """The arguments of `ptq::decode_layers` from `cache` to `cache_order`, with room for the tokens of x. All states
    are of one cache."""
    batch, tokens = x.shape[:2]
    room, before, numbers, sizes = [], [], NO_NUMBERS, set[int]()
    for layer, state in zip(layers, states, strict=True):
        if isinstance(state, tuple):
            held, length = state, 0
        elif isinstance(state, GrowingLayer):
            shape = batch, layer.heads[0], tokens, layer.heads[1]
            is_latent = isinstance(layer.kind, latent_attention.Kind)
            shapes = latent_attention.shapes_of(layer.mixer, batch, tokens) if is_latent else (shape, shape)
            *held, length = state.reserve(*shapes, x)
        elif state.decodes and state.key.batch == batch:
            held, length, numbers = state.room(tokens), state.length, state.numbers()
        else:
            return None
        room.extend(held)
        before.append(length)
        sizes.add(len(held))
    return (room, before, *numbers) if len(sizes) == 1 else None
