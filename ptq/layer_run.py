"""Decoder layers of a decoded token, as many in one call as come one after the other.

Nothing says beforehand which layers follow each other. It is learnt: a layer that is called with the very tensor that
another one gave comes after it. From then on the first layer computes for all that follow, as far as they are alike and
their caches agree, and each of them finds its result ready when it is called. What was computed ahead is given out only
where the layer is called as was foreseen: with the tensor that the layer before it gave, unchanged, with the same
positions, and with the cache as it was. Otherwise it is thrown away, and the layer computes anew. Keys and values that
were stored ahead lie behind the end of the cache, where nobody reads them: a layer's cache gets longer when the layer
is called. A layer whose followers do not come is believed `TRIES` times in a row.

A change inside of a layer (a weight, a hook, numbers of its cache) while a token is on its way is seen by the next one.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq import fast_attention
from ptq.growing_cache import GrowingLayer
from ptq.matmul import is_few
from ptq.packed_layer import PackedLayer

TRIES = 3

Norm = tuple[float, float, bool]
"""eps, offset and round_first of `ptq::rms_norm`."""


@runtime_checkable
class WholeLayers(Protocol):
    """A format that does what decoder layers do in one call."""

    def layers(self, x: Float[Tensor, "b 1 k"], *arguments: Any) -> Sequence[Float[Tensor, "b 1 k"]]:
        """See `ptq::integer_layers`. `arguments`: norms, weights and inputs (`Stack`); cos, sin and the cache."""
        ...

    def layer_weights(self, layers: Sequence[tuple[Sequence[Any], Sequence[Tensor | None]]]) -> tuple[Any, ...] | None:
        """The parts and biases of the weights of several layers as `layers` takes them; None where it cannot."""
        ...


@dataclass(frozen=True)
class Layer:
    """A decoder layer as `WholeLayers` takes it."""

    format: WholeLayers
    attention: nn.Module
    heads: tuple[int, int]
    """Of keys and values: how many, and their size."""
    gains: tuple[Tensor, ...]
    weights: tuple[Sequence[Any], Sequence[Tensor | None]]
    norms: tuple[Norm, ...]
    input: tuple[int, float]
    down: tuple[list[Tensor], int, int, float]

    def is_alike(self, other: "Layer") -> bool:
        """Whether both may be in one call."""
        mine, others = ((x.format, x.heads, x.norms, x.input, x.down[1:]) for x in (self, other))
        return mine == others and all(map(is_, self.down[0], other.down[0]))


class Stack:
    """Layers that are alike, and what does not change from call to call. (It keeps a layer that was taken out of the
    model until the next token.)"""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        first = layers[0]
        self.floats = [gain for layer in layers for gain in layer.gains]
        eps, offset, round_first = (list(numbers) for numbers in zip(*first.norms, strict=True))
        weights = first.format.layer_weights([layer.weights for layer in layers])
        assert weights is not None
        norms = list(self.floats), eps, offset, [int(x) for x in round_first]
        self.arguments = (*norms, *weights, *first.input, *first.down)
        self.floats.extend(bias for layer in layers for bias in layer.weights[1] if bias is not None)

    def is_of(self, layers: Sequence[Layer]) -> bool:
        """Whether it is of these very layers."""
        return len(layers) == len(self.layers) and all(map(is_, layers, self.layers))


class Known:
    """What is known of a decoder layer, for as long as it holds the very modules and parameters that `find` found."""

    def __init__(self, find: Callable[[nn.Module], Any], parts: Callable[[nn.Module], list[nn.Module]]) -> None:
        self.find, self.parts = find, parts
        self.next: tuple[weakref.ref[nn.Module], weakref.ref[Known]] | None = None
        self.misled = 0
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.found: Any = None
        self.stack: Stack | None = None
        self.owners: list[dict[str, Any]] = []
        self.held: list[Any] = []
        self.hooks: list[dict[int, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"find": self.find, "parts": self.parts}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        Known.__init__(self, **state)

    def of(self, layer: nn.Module) -> Any:
        """What was found; None where there is nothing, or somebody listens in."""
        now = chain.from_iterable(map(dict.values, self.owners))
        if not self.held or sum(map(len, self.owners)) != len(self.held) or not all(map(is_, now, self.held)):
            modules = self.parts(layer)
            self.owners = [owner for module in modules for owner in (module._modules, module._parameters) if owner]
            self.held = [held for owner in self.owners for held in owner.values()]
            self.hooks = [hooks for m in modules[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self.found = self.find(layer)
        return None if any(self.hooks) else self.found


@dataclass
class _Ahead:
    """Results that wait for their layers. Nothing here keeps a model or a cache alive."""

    layers: list["weakref.ref[Known]"]
    caches: list["weakref.ref[GrowingLayer | PackedLayer]"]
    rooms: list["weakref.ref[Tensor]"]
    """Where the keys of each layer were stored."""
    results: Sequence[Tensor]
    turns: tuple[Tensor, Tensor]
    cache: "weakref.ref[Any]"
    before: int
    at: int = 0

    def is_next(self, known: Known, x: Tensor, turns: Any, cache: Any) -> bool:
        """Whether this call of a layer is the one that was foreseen."""
        if self.layers[self.at]() is not known or x is not self.results[self.at - 1] or x._version:
            return False
        if turns is None or turns[0] is not self.turns[0] or turns[1] is not self.turns[1]:
            return False
        layer, room = self.caches[self.at](), self.rooms[self.at]()
        return self.cache() is cache and layer is not None and room is not None and layer.ends_at(room, self.before)


class _Here(threading.local):
    ahead: _Ahead | None = None
    last: tuple["weakref.ref[Known]", "weakref.ref[Tensor]"] | None = None
    """The layer that was called last in this thread, and its result."""


HERE = _Here()


def decoded(module: nn.Module, known: Known, x: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """The result of a decoder layer for a decoded token; None where its own code must run."""
    if x.shape[1] != 1:
        return None
    ahead = HERE.ahead
    if ahead is not None and not _is_foreseen(ahead, known, x, **others):
        _mislead(ahead)
        ahead = None
    if ahead is None:
        ahead = _run(module, known, x, **others)
        if ahead is None:
            return None
        _learn(module, known, x)
    return _given(ahead, known)


def _is_foreseen(
    ahead: _Ahead,
    known: Known,
    x: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> bool:
    return attention_mask is None and ahead.is_next(known, x, position_embeddings, past_key_values)


def _given(ahead: _Ahead, known: Known) -> Tensor:
    result, layer = ahead.results[ahead.at], ahead.caches[ahead.at]()
    assert layer is not None
    layer.advance(1)
    known.misled = 0 if ahead.at else known.misled
    ahead.at += 1
    HERE.ahead = ahead if ahead.at < len(ahead.results) else None
    HERE.last = weakref.ref(known), weakref.ref(result)
    return result


def _mislead(ahead: _Ahead) -> None:
    HERE.ahead = None
    before = ahead.layers[ahead.at - 1]()
    if before is not None:
        before.next = None
        before.misled += 1


def _learn(module: nn.Module, known: Known, x: Tensor) -> None:
    if HERE.last is not None:
        before, result = HERE.last[0](), HERE.last[1]()
        if before is not None and result is x and before.misled < TRIES:
            before.next = weakref.ref(module), weakref.ref(known)


Held = GrowingLayer | PackedLayer | None


def _run(module: nn.Module, known: Known, x: Tensor, **others: Any) -> _Ahead | None:
    first, cache = known.of(module), others.get("past_key_values")
    if first is None or fast_attention.layer_of(first.attention, x, **others) is None:
        return None
    layers, followers, found = _following(first, known, cache)
    rooms = _rooms(found, x, first.heads)
    if rooms is None:
        return None
    layers = layers[: len(rooms[0])]
    stack = known.stack
    if stack is None or not stack.is_of(layers):
        stack = known.stack = Stack(layers)
    if not is_few(x.shape[0], x, *stack.floats):
        return None
    parts, turns = [part for room in rooms[0] for part in room], others["position_embeddings"]
    with torch.inference_mode(False), torch.no_grad():  # tensors whose version tells of changes
        results = first.format.layers(x, *stack.arguments, *turns, parts, *rooms[1:], first.attention.scaling)
    called = [weakref.ref(follower) for follower in followers]
    caches = [weakref.ref(held) for held in found if held is not None]
    keys = [weakref.ref(room[0]) for room in rooms[0]]
    return _Ahead(called, caches, keys, results, turns, weakref.ref(cache), rooms[1])


def _following(first: Layer, known: Known, cache: Any) -> tuple[list[Layer], list[Known], list[Held]]:
    """The layer, and those that are expected after it and are like it: what is known of each, and its cache."""
    layers, followers, found = [first], [known], [fast_attention.cache_layer(first.attention, cache)]
    seen, link = {id(found[0])}, known.next
    while link is not None:
        after, follower = link[0](), link[1]()
        if after is None or follower is None:
            break
        layer = follower.of(after)
        if layer is None or not first.is_alike(layer) or layer.attention.scaling != first.attention.scaling:
            break
        held = fast_attention.cache_layer(layer.attention, cache)
        if held is None or id(held) in seen:  # the latter: a layer of another model, with the same index
            break
        seen.add(id(held))
        layers.append(layer)
        followers.append(follower)
        found.append(held)
        link = follower.next
    return layers, followers, found


def _rooms(
    found: Sequence[Held], x: Tensor, heads: tuple[int, int]
) -> tuple[list[Sequence[Tensor]], int, list[int], float, list[Tensor], int] | None:
    """The cache as `ptq::integer_layers` takes it, but with a list for each layer, for as many as are like the first;
    None where that one is not served."""
    rooms, length = [], None
    shape = len(x), heads[0], 1, heads[1]
    for held in found:
        if isinstance(held, GrowingLayer):
            *room, before = held.reserve(shape, shape, x)
        elif held is not None and held.decodes and held.key.batch == len(x):
            room, before = held.room(), held.length
        else:
            break
        if length not in (None, before) or type(held) is not type(found[0]):
            break
        length = before
        rooms.append(room)
    if length is None:
        return None
    if isinstance(found[0], PackedLayer):
        return rooms, length, *found[0].numbers()
    return rooms, length, [0, 0], 1.0, [], 0
