"""Decoder layers one behind another in one call: of few decoded tokens on the CPU (`ptq.fast.layers.cpu_layer`), and of
any number of tokens on a GPU (`ptq.fast.layers.gpu_layer`).

On the CPU Python runs between two layers of a decoded token, on objects that the weights have pushed out of the caches.
On a GPU the sum at the end of a layer would be a launch of its own, and is part of the next layer's first norm. So the
model's own forward is given other layers to go through: those of a run remember what they are called with and give
their input back, and the last one answers for all of them. It is the same forward on the same model, seen through a
class of which `layers` alone is another (`_view_class`).

No family is named. The forward is tried first, with stand-ins for all layers: each must be called with what the one
before gave. What layers are called with besides may differ (those with a window get another mask): one call of the op
is for as many of them as are given the very same. Those that the op does not take are called one by one.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.attention import decoding
from ptq.fast.layers import cpu_layer, decoder_layer
from ptq.fast.layers.layer_trial import LAYERS, calls_in_turn
from ptq.fast.watched import Watched
from ptq.kv.attention import CACHE
from ptq.ops import matmul

CACHES = {CACHE, "past_key_values"}
GIVEN = CACHES | {"attention_mask", "position_ids", "cache_position", "use_cache", "return_dict"}
"""What the forward of a model may be called with besides tokens; everything else must be None or False."""


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer is called with besides its input."""


class Segment(NamedTuple):
    """Layers of a run, by number, and what the op takes for them: nothing, where they are called one by one."""

    first: int
    last: int
    found: list[cpu_layer.FoundLayer]


class Run:
    """Takes the place of decoder layers that a model calls one behind another."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.heard = Watched([], layers)
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.known: tuple[Watched, list[Segment]] | None = None

    def stand_ins(self) -> list[Callable[..., Tensor]]:
        """What one forward goes through in the place of the layers."""
        given: list[Given] = []

        def remember(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given.append((args, kwargs))
            return hidden_states

        def answer(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self(hidden_states, [*given, (args, kwargs)])

        return [remember] * (len(self.layers) - 1) + [answer]

    def __call__(self, hidden_states: Tensor, given: list[Given]) -> Tensor:
        """What the layers give, one behind another. `given`: what each is called with besides."""
        x = hidden_states
        if matmul.lies_on_gpu(x) and not any(args for args, _ in given) and not self.heard.must_be_called():
            self.forget()
            return self._on_gpu(x, given)
        for start, last, found in self._segments(x):
            first = start
            while first < last:
                end, y = _alike_until(given, first, last), None
                layers, some = self.layers[first:end], found[first - start : end - start]
                if some and not given[first][0]:
                    y = cpu_layer.run(some, x, given[first][1], list(map(decoder_layer.multiplier, layers)))
                if y is None:
                    for layer, (args, kwargs) in zip(layers, given[first:end], strict=True):
                        x = layer(x, *args, **kwargs)
                x, first = x if y is None else y, end
        return x

    def _on_gpu(self, x: Float[Tensor, "b t k"], given: list[Given]) -> Tensor:
        added: Tensor | None = None  # to x
        for layer, (_, others) in zip(self.layers, given, strict=True):
            fast = None if layer.training else decoder_layer.fast_forward_of(layer)
            parts = None if fast is None else fast.on_gpu_in_parts(x, added, others)
            if parts is None:
                x, added = layer(x if added is None else x + added, **others), None
            else:
                x, added = parts
        return x if added is None else x + added

    def _segments(self, x: Float[Tensor, "b t k"]) -> list[Segment]:
        """How the layers are called now, where the first of them is given x."""
        one_by_one = [Segment(0, len(self.layers), [])]
        if not x.is_cpu:
            self.forget()
        if not x.is_cpu or any(layer.training for layer in self.layers):
            return one_by_one
        known = self.known  # another thread may forget it
        if known is None or not known[0].is_same():
            known = self.known = self._find()
        return one_by_one if known[0].must_be_called() else known[1]

    def _find(self) -> tuple[Watched, list[Segment]]:
        """What a call is checked against, and the segments of this run."""
        known, segments, first = [_whole(layer) for layer in self.layers], [], 0
        for _, group in groupby(known, bool):
            found = [whole and whole[0] for whole in group]
            last = first + len(found)
            segments.append(Segment(first, last, [one for one in found if one]))
            first = last
        return Watched.all_of([whole[1] for whole in known if whole], self.layers), segments


def _alike_until(given: list[Given], first: int, last: int) -> int:
    """The end of those from the first one on that are called with the very same, by name."""
    (args, named), end = given[first], first + 1
    while end < last and not args and not given[end][0] and _is_same(named, given[end][1]):
        end += 1
    return end


def _is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(map(is_, map(a.get, b), b.values()))


def _whole(layer: nn.Module) -> tuple[cpu_layer.FoundLayer, Watched] | None:
    """What the op takes for all of a layer, and what that depends on; None where the layer must be called."""
    fast = decoder_layer.fast_forward_of(layer)
    if fast is not None:
        found, watched = fast.on_cpu.current(layer), fast.on_cpu.watched
        if found is not None and found.has_mlp and watched is not None:
            return found, watched
    return None


class Substitutes:
    """What a model's forward goes through in the place of `layers` where it is given few tokens, for as long as the
    model has the same layers and the same forward."""

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []
        self.tried: Any = None
        self.found: list[nn.Module | Run] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # copies and pickles find out anew

    def update(self, model: Any) -> None:
        """Find out anew where something has changed."""
        layers = model._modules[LAYERS]._modules
        same = len(layers) == len(self.layers) and all(map(is_, layers.values(), self.layers))
        if not same or type(model).forward is not self.tried:
            self.layers, self.tried = list(layers.values()), type(model).forward
            decoder_layer.let_copies_be(self.layers)
            self.found = _substitutes(model, self.layers)

    def of_one_forward(self) -> list[Callable[..., Tensor]]:
        """One for each layer."""
        return [one for found in self.found for one in (found.stand_ins() if isinstance(found, Run) else [found])]

    def runs(self) -> list[Run]:
        """The runs that were found last."""
        return [one for one in self.found if isinstance(one, Run)]


def _substitutes(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module | Run]:
    """A run for each series of fast layers, where the model calls them one behind another; the others themselves."""
    if sum(map(decoder_layer.is_fast, layers)) < 2 or not calls_in_turn(model, layers):
        return [*layers]
    found: list[nn.Module | Run] = []
    for fast, group in groupby(layers, decoder_layer.is_fast):
        some = list(group)
        found += [Run(some)] if fast and len(some) > 1 else some
    return found


def install(model: nn.Module) -> None:
    """Let decoder layers that are fast (`ptq.fast.layers.decoder_layer`) be called in runs where the model allows
    it."""
    for module in model.modules():
        if isinstance(module._modules.get(LAYERS), nn.ModuleList) and "forward" not in vars(module):
            substitutes = Substitutes()
            substitutes.update(module)
            if substitutes.runs():
                module.forward = functools.partial(_forward, module, substitutes)
                vars(module.forward)["__signature__"] = _signature(type(module).forward)


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """What the arguments of a method are called: others ask a model for that."""
    _, *parameters = inspect.signature(forward).parameters.values()
    return inspect.Signature([p.replace(annotation=p.empty) for p in parameters])


def _forward(model: Any, substitutes: Substitutes, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model with runs."""
    view = model
    if not torch.compiler.is_compiling():
        substitutes.update(model)
        if not args and _fits(model, **kwargs):
            view = object.__new__(_view_class(type(model)))
            object.__setattr__(view, "__dict__", vars(model))
            object.__setattr__(view, LAYERS, substitutes.of_one_forward())
        else:
            for run in substitutes.runs():
                run.forget()  # layers that were changed may fit again, and of those that have moved memory is freed
    return type(model).forward(view, *args, **kwargs)


def _fits(model: Any, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> bool:
    """Whether these are few tokens behind others on the CPU, or any on a GPU, and nothing is asked for but what comes
    of them."""
    x = inputs_embeds if input_ids is None else input_ids
    if not isinstance(x, Tensor) or x.dim() < 2 or model.training:
        return False
    if not matmul.lies_on_gpu(x):
        behind = any(others.get(name) is not None for name in CACHES)
        if not x.is_cpu or not behind or x.shape[1] > decoding.MOST_DECODED:
            return False
    if any(value is not None and value is not False for name, value in others.items() if name not in GIVEN):
        return False
    config = model.config
    if config.output_hidden_states or config.output_attentions:
        return False
    return config.num_hidden_layers == len(model._modules[LAYERS])


@functools.cache
def _view_class(cls: type) -> type:
    """A class whose instances hold what a model of this class does (they have its `__dict__`), but other `layers`."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {"__slots__": (LAYERS,), **names})
