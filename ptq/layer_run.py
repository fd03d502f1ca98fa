"""Decoder layers of a decoded token, as many in one call as come one after the other.

Nothing says beforehand which layers follow each other. It is learnt: a layer that is called with the very tensor that
another one gave comes after it. From then on the first layer computes for all that follow, as far as they are alike,
and each of them finds its result ready when it is called. What was computed ahead is given out only where the layer is
called as was foreseen: with the tensor that the layer before it gave, unchanged, and with the same cache and positions.
Otherwise it is thrown away, and the layer computes anew. Keys and values that were stored ahead lie behind the end of
the cache, where nobody reads them: a layer's cache gets longer when the layer is called. A layer whose followers do not
come is believed `TRIES` times. Inside `torch.inference_mode` tensors have no version: there, changing a layer's result
in place before the next layer sees it goes unnoticed.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Protocol, runtime_checkable

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
    scaling: float

    def is_alike(self, other: "Layer") -> bool:
        """Whether both may be in one call."""
        mine, others = ((x.format, x.heads, x.norms, x.input, x.down[1:], x.scaling) for x in (self, other))
        return mine == others and self.down[0] is other.down[0]


class Stack:
    """The first layers of several that are alike, and what does not change from call to call."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.given = tuple(layers)
        first = layers[0]
        count = next((i for i, layer in enumerate(layers) if not first.is_alike(layer)), len(layers))
        self.layers = layers[:count]
        self.gains = [gain for layer in self.layers for gain in layer.gains]
        eps, offset, round_first = (list(numbers) for numbers in zip(*first.norms, strict=True))
        weights = first.format.layer_weights([layer.weights for layer in self.layers])
        assert weights is not None
        self.arguments = (self.gains, eps, offset, [int(x) for x in round_first], *weights, *first.input, *first.down)

    def is_of(self, layers: Sequence[Layer]) -> bool:
        """Whether these very layers were given."""
        return len(layers) == len(self.given) and all(map(is_, layers, self.given))


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
    caches: list["weakref.ref[Any]"]
    results: Sequence[Tensor]
    turns: tuple[Tensor, Tensor]
    cache: "weakref.ref[Any]"
    before: int
    at: int = 0

    def is_next(self, known: Known, x: Tensor, turns: Any, cache: Any) -> bool:
        """Whether this call of a layer is the one that was foreseen."""
        layer = self.caches[self.at]()
        if self.layers[self.at]() is not known or x is not self.results[self.at - 1] or self.cache() is not cache:
            return False
        if turns is None or turns[0] is not self.turns[0] or turns[1] is not self.turns[1]:
            return False
        return layer is not None and layer.get_seq_length() == self.before and (x.is_inference() or not x._version)


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
        _learn(module, known, x)
        ahead = _run(module, known, x, **others)
        if ahead is None:
            return None
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


def _run(module: nn.Module, known: Known, x: Tensor, **others: Any) -> _Ahead | None:
    first = known.of(module)
    if first is None or fast_attention.layer_of(first.attention, x, **others) is None:
        return None
    layers, followers = [first], [known]
    while followers[-1].next is not None:
        after, follower = followers[-1].next[0](), followers[-1].next[1]()
        if after is None or follower is None or follower in followers:
            break
        layer = follower.of(after)
        if layer is None:
            break
        layers.append(layer)
        followers.append(follower)
    if known.stack is None or not known.stack.is_of(layers):
        known.stack = Stack(layers)
    return _computed(known.stack, followers, x, others["position_embeddings"], others["past_key_values"])


def _computed(
    stack: Stack, followers: list[Known], x: Tensor, turns: tuple[Tensor, Tensor], cache: Any
) -> _Ahead | None:
    if not is_few(x.shape[0], x, *stack.gains):
        return None
    found = [fast_attention.cache_layer(layer.attention, cache) for layer in stack.layers]
    first = stack.layers[0]
    rooms = _rooms(found, x, first.heads)
    if rooms is None:
        return None
    results = first.format.layers(x, *stack.arguments, *turns, *rooms, first.scaling)
    known = [weakref.ref(follower) for follower in followers[: len(results)]]
    caches = [weakref.ref(layer) for layer in found]
    return _Ahead(known, caches, results, turns, weakref.ref(cache), found[0].get_seq_length())  # pyright: ignore


def _rooms(
    found: Sequence[GrowingLayer | PackedLayer | None], x: Tensor, heads: tuple[int, int]
) -> tuple[Any, ...] | None:
    """The cache as `ptq::integer_layers` takes it; None where a layer has none that it serves, or they differ."""
    packed = [layer for layer in found if isinstance(layer, PackedLayer)]
    if len(packed) == len(found):
        length = packed[0].length
        if not all(layer.decodes and layer.length == length and layer.key.batch == len(x) for layer in packed):
            return None
        return [part for layer in packed for part in layer.room()], length, *packed[0].numbers()
    growing = [layer for layer in found if isinstance(layer, GrowingLayer)]
    if len(growing) != len(found):
        return None
    shape = len(x), heads[0], 1, heads[1]
    rooms = [layer.reserve(shape, shape, x) for layer in growing]
    if any(before != rooms[0][2] for _, _, before in rooms):
        return None
    return [part for keys, values, _ in rooms for part in (keys, values)], rooms[0][2], [0, 0], 1.0, [], 0
