"""Decoder layers one behind another in one call: of few decoded tokens on the CPU (`ptq.fast.cpu_layer`), and of any
number of tokens on a GPU (`ptq.fast.gpu_layer`).

On the CPU Python runs between two layers of a decoded token, on objects that the weights have pushed out of the caches.
On a GPU the sum at the end of a layer would be a launch of its own, and is part of the next layer's first norm. So the
model's own forward is given other layers to go through: the first one of a run answers for all of it, and those behind
give their input back. It is the same forward on the same model, seen through a class of which `layers` alone is another
(`_view_class`).

No family is named. The forward is tried first, with stand-ins for all layers: each must be called with what the one
before gave, and layers are a run only where they are called with the very same objects besides (those with a window get
another mask). In a run those that the op does not take are called one by one.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from itertools import groupby, pairwise
from operator import is_
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ptq.fast import cpu_layer, decoding, fast_layer
from ptq.fast.trials import hollow, trial
from ptq.fast.watched import Watched
from ptq.kv.attention import CACHE
from ptq.ops import matmul

LAYERS = "layers"
CACHES = {CACHE, "past_key_values"}
GIVEN = CACHES | {"attention_mask", "position_ids", "cache_position", "use_cache", "return_dict"}
"""What the forward of a model may be called with besides tokens; everything else must be None or False."""


class Segment(NamedTuple):
    """Layers of a run, and what the op takes for them: nothing, where they are called one by one."""

    layers: list[nn.Module]
    found: list[cpu_layer.Layer]


class Run:
    """Takes the place of the first of some decoder layers that a model calls alike, and answers for all."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.heard = Watched([], layers)
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.known: tuple[Watched, list[Segment]] | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = hidden_states
        if not args and matmul.lies_on_gpu(x) and not self.heard.must_be_called():
            self.forget()
            return self._on_gpu(x, kwargs)
        for layers, found in [Segment(self.layers, [])] if args else self._segments(x):
            y = cpu_layer.run(found, x, kwargs, list(map(fast_layer.multiplier, layers))) if found else None
            if y is None:
                for layer in layers:
                    x = layer(x, *args, **kwargs)
            else:
                x = y
        return x

    def _on_gpu(self, x: Float[Tensor, "b t k"], others: dict[str, Any]) -> Tensor:
        added: Tensor | None = None  # to x
        for layer in self.layers:
            fast = None if layer.training else fast_layer.fast_forward_of(layer)
            parts = None if fast is None else fast.on_gpu_in_parts(x, added, others)
            if parts is None:
                x, added = layer(x if added is None else x + added, **others), None
            else:
                x, added = parts
        return x if added is None else x + added

    def _segments(self, x: Float[Tensor, "b t k"]) -> list[Segment]:
        """How the layers are called now, where the first of them is given x."""
        one_by_one = [Segment(self.layers, [])]
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
        known = [(layer, _whole(layer)) for layer in self.layers]
        segments = []
        for _, group in groupby(known, lambda pair: pair[1] and type(pair[1][0].kind)):
            pairs = list(group)
            segments.append(Segment([layer for layer, _ in pairs], [whole[0] for _, whole in pairs if whole]))
        return Watched.all_of([whole[1] for _, whole in known if whole], self.layers), segments


def _whole(layer: nn.Module) -> tuple[cpu_layer.Layer, Watched] | None:
    """What the op takes for all of a layer, and what that depends on; None where the layer must be called."""
    fast = fast_layer.fast_forward_of(layer)
    if fast is not None:
        found, watched = fast.on_cpu.current(layer), fast.on_cpu.watched
        if found is not None and found.has_mlp and watched is not None:
            return found, watched
    return None


def _pass_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Takes the place of a layer that the first one of its run has answered for."""
    return hidden_states


Substitute = Run | nn.Module | Callable[..., Tensor]


class Substitutes:
    """What a model's forward goes through in the place of `layers` where it is given few tokens, for as long as the
    model has the same layers and the same forward."""

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []
        self.tried: Any = None
        self.found: list[Substitute] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def current(self, model: Any) -> list[Substitute]:
        """One for each layer."""
        layers = model._modules[LAYERS]._modules
        same = len(layers) == len(self.layers) and all(map(is_, layers.values(), self.layers))
        if not same or type(model).forward is not self.tried:
            self.layers, self.tried = list(layers.values()), type(model).forward
            fast_layer.let_copies_be(self.layers)
            self.found = _substitutes(model, self.layers)
        return self.found

    def runs(self) -> list[Run]:
        """The runs that were found last."""
        return [one for one in self.found if isinstance(one, Run)]


def _substitutes(model: nn.Module, layers: list[nn.Module]) -> list[Substitute]:
    """One for each layer: a run for the first of some that are fast and called alike, `_pass_on` for those behind it,
    and else the layer itself."""
    found: list[Substitute] = list(layers)
    fast = list(map(fast_layer.is_fast, layers))
    if sum(fast) < 2:
        return found
    start = 0
    for i, alike in enumerate([*_called_alike(model, layers), False], 1):
        if not alike or not fast[i - 1] or not fast[i]:
            if i - start > 1:
                found[start:i] = [Run(layers[start:i]), *[_pass_on] * (i - start - 1)]
            start = i
    return found


def install(model: nn.Module) -> None:
    """Let decoder layers that are fast (`ptq.fast.fast_layer`) be called in runs where the model allows it."""
    for module in model.modules():
        if isinstance(module._modules.get(LAYERS), nn.ModuleList) and "forward" not in vars(module):
            substitutes = Substitutes()
            substitutes.current(module)
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
        current = substitutes.current(model)
        if not args and _fits(model, **kwargs):
            view = object.__new__(_view_class(type(model)))
            object.__setattr__(view, "__dict__", vars(model))
            object.__setattr__(view, LAYERS, current)
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
        if not x.is_cpu or not behind or x.shape[1] > decoding.MOST_TOKENS:
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


# --- the trial ------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Remembers how it is called."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        assert not hasattr(self, "given"), "called twice"
        self.given, self.others, self.result = hidden_states, kwargs, hidden_states.sin()
        return self.result


class _Other(nn.Module):
    """Stands for a norm, whose input is one tensor, or for a rotary embedding."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (torch.ones(()), torch.ones(())) if args or kwargs else x


def _called_alike(model: Any, layers: list[nn.Module]) -> list[bool]:
    """Whether a model's forward calls each layer but the last with what it calls the next one with, besides what the
    first of them gives; all False where it does something else between layers. Of a prompt, and of a token behind it.
    """
    tries = (_tried(model, len(layers), tokens) for tokens in (3, 1))
    return [all(alike) for alike in zip(*tries, strict=True)]


@trial()
def _tried(model: Any, count: int, tokens: int) -> list[bool]:
    alone = hollow(model).eval()
    for name in model._modules:
        setattr(alone, name, _Other())
    layers = [_Layer() for _ in range(count)]
    setattr(alone, LAYERS, nn.ModuleList(layers))
    mask = torch.tensor([[0, 1, 1]])  # so that the model makes tensors of it
    try:
        alone.config = copy.copy(model.config)
        alone.config._attn_implementation = "sdpa"
        cache, before = DynamicCache(config=alone.config), torch.zeros(1, 1, 3 - tokens, 8)
        for i in range(count):
            cache.update(before, before, i)
        x = torch.randn(1, tokens, alone.config.hidden_size, generator=torch.Generator().manual_seed(0))
        type(model).forward(alone, inputs_embeds=x, attention_mask=mask, use_cache=True, **{CACHE: cache})
        one_by_one = all(b.given is a.result for a, b in pairwise(layers))
    except Exception:  # whatever a forward raises where it wants something else
        one_by_one = False
    if not one_by_one:
        return [False] * (count - 1)
    return [
        a.others.keys() == b.others.keys() and all(value is b.others[name] for name, value in a.others.items())
        for a, b in pairwise(layers)
    ]
