"""A decoder layer in one call, of few decoded tokens on the CPU (`ptq.fast.layers.cpu_layer`); on a GPU in few
launches, of any number of tokens (`ptq.fast.layers.gpu_layer`).

No family is named. `install` tries decoder layers with stand-ins for attention and MLP first: one must compute

    y = x + m norm(attention(norm(x))),    result = y + m norm(mlp(norm(y))),

where two of the four norms may be missing, and m is mostly 1. The call needs what `ptq.fast.layers.cpu_layer` or
`ptq.fast.layers.gpu_layer` asks for, and nobody who listens in (hooks), or who trains a dropout. Otherwise the layer's
own code runs. Where an MLP is of another kind (some experts), the call gives y, and the MLP's own code runs behind it.
The numbers are those of the single ops to the bit.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.attention import decoding
from ptq.fast.experts.moe_block import FastMoe, looked_at
from ptq.fast.layers import cpu_layer, found_layer, gpu_layer
from ptq.fast.steps import gated_mlp
from ptq.fast.trials import TRIAL_ERRORS, bare_copy, random_norm, tried_once
from ptq.fast.watched import InPlace, Watched
from ptq.kv.attention import CACHE
from ptq.ops import matmul

ATTENTION = "self_attn"
MIXERS, MLPS = (ATTENTION, "linear_attn", "mamba"), ("mlp", "shared_mlp")
"""Attention, or what a layer has in its place; and what stands behind it."""
NormNames = tuple[str | None, str | None, str | None, str | None]
"""The norms before attention, before the MLP, behind attention, behind the MLP, by name; None: there is none."""
LAYOUTS: tuple[NormNames, ...] = (
    ("input_layernorm", "post_attention_layernorm", None, None),
    (None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
)
MULTIPLIER = "residual_multiplier"
"""What m is called where a layer has one."""
NEEDED = ("attention_mask", CACHE)
OTHERS = ("position_embeddings", "position_ids", "use_cache", *NEEDED)
"""What a layer is called with besides its input, and what of it a mixer without attention is given, too."""


class Replacement:
    """What may take the place of a decoder layer's own code: what `find` makes of its parts, for as long as the layer
    holds the very modules and parameters that it was found for."""

    def __init__(self, find: Callable[..., Any], layout: NormNames) -> None:
        self.find, self.layout = find, layout
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.found: Any = None
        self.watched: Watched | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"find": self.find, "layout": self.layout}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        Replacement.__init__(self, **state)

    def unless_hooked(self, layer: nn.Module) -> Any:
        """What `current` gives; None also where somebody listens in, or a dropout drops."""
        found = self.current(layer)
        return None if self.watched is None or self.watched.must_be_called() else found

    def current(self, layer: nn.Module) -> Any:
        """What was found, or is found now where the layer has changed; None where there is nothing."""
        if self.watched is None or not self.watched.is_same():
            self.forget()  # merged weights go before others are made
            parts = _parts(self.layout, layer)
            known = {None, *_names_of(layer), *self.layout}
            others = [part for name, part in layer._modules.items() if part is not None and name not in known]
            dropouts = [module for module in others if type(module) is nn.Dropout]
            inside = [*dropouts, *_inside(*parts)]
            watched = Watched([layer, *inside], inside)
            fits = len(dropouts) == len(others) and watched.are_ours() and _tried(layer, (self.layout,)) is not None
            self.found = self.find(*parts) if fits else None
            moe = getattr(self.found, "moe", None)
            if moe is not None:
                watched = Watched([layer, *inside, *moe.modules], inside, moe.modules)
            elif gated_mlp.gate_of(parts[1]) is None:
                watched = Watched([layer, *inside, *looked_at(parts[1])], inside)
            if self.found is not None:
                watched.expires_with(self.found)
            self.watched = watched  # last: another thread may look
        return self.found


def _inside(attention: nn.Module, mlp: nn.Module, norms: list[nn.Module | None]) -> Iterator[nn.Module]:
    """The modules that a call may take the place of, but a router and experts, which are observed."""
    inside = [attention, *norms, None if gated_mlp.gate_of(mlp) is None else mlp]
    return chain.from_iterable(part.modules() for part in inside if part is not None)


class FastForward:
    """The forward of a decoder layer that `install` has made fast. (Slots, because who wraps a forward copies its
    `__dict__`.)"""

    __slots__ = ("layer", "on_cpu", "on_gpu")

    def __init__(self, layer: nn.Module, layout: NormNames) -> None:
        self.layer = layer
        self.on_cpu = Replacement(found_layer.layer_of, layout)
        self.on_gpu = Replacement(gpu_layer.steps_of, layout)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not args and not layer.training and not torch.compiler.is_compiling():
            if matmul.lies_on_gpu(hidden_states):
                parts = self.on_gpu_in_parts(hidden_states, None, kwargs)
                found = None if parts is None else parts[0] + parts[1]
            else:
                if self.on_gpu.watched:
                    self.on_gpu.forget()  # merged weights would stay on the GPU
                held = self.on_cpu.found
                if hidden_states.shape[1] > decoding.MOST_DECODED and held is not None and not held.has_mlp:
                    self.on_cpu.forget()  # a prompt: who listened to its experts may be gone
                found = _decoded(layer, self.on_cpu, hidden_states, **kwargs)
            if found is not None:
                return found
        return type(layer).forward(layer, hidden_states, *args, **kwargs)

    def on_gpu_in_parts(
        self, x: Float[Tensor, "b t k"], added: Float[Tensor, "b t k"] | None, others: dict[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """`ptq.fast.layers.gpu_layer.run`; None also for layers that it does not take."""
        if self.on_cpu.watched:
            self.on_cpu.forget()  # replaced weights would stay in memory
        steps = self.on_gpu.unless_hooked(self.layer) if multiplier(self.layer) == 1 else None
        return None if steps is None else gpu_layer.run(steps, x, added, others)


def install(model: nn.Module) -> None:
    """Make the decoder layers of a model fast where they are what the steps compute."""
    for module in model.modules():
        layout = None if "forward" in vars(module) else _layout_of(module)
        if layout is not None:
            module.forward = FastForward(module, layout)


def fast_forward_of(layer: nn.Module) -> FastForward | None:
    """The forward that `install` has given a module; None for one that it has not made fast."""
    forward = vars(layer).get("forward")
    return forward if isinstance(forward, FastForward) else None


def let_copies_be(layers: Iterable[nn.Module]) -> None:
    """Take from modules what is the forward of others: a shallow copy (`copy.copy`, as of layers that are repeated with
    places of their own in a cache) would run as the module that it is of."""
    for module in chain.from_iterable(layer.modules() for layer in layers):
        forward = vars(module).get("forward")
        owner = forward.layer if isinstance(forward, FastForward) else module
        owner = forward.args[0] if isinstance(forward, InPlace) else owner
        owner = forward.module if isinstance(forward, FastMoe) else owner
        if owner is not module:
            del vars(module)["forward"]


def is_fast(layer: nn.Module) -> bool:
    """Whether `install` has made a module fast."""
    return fast_forward_of(layer) is not None


def _decoded(module: nn.Module, on_cpu: Replacement, x: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    if not decoding.are_decoded(x.shape[1], others.get("attention_mask")):
        return None
    layer = on_cpu.unless_hooked(module)
    y = None if layer is None else cpu_layer.run([layer], x, others, [multiplier(module)])
    if y is None or layer is None or layer.has_mlp:
        return y
    _, mlp, (_, before, _, after) = _parts(on_cpu.layout, module)
    z = _first(mlp(y if before is None else before(y)))
    z = z if after is None else after(z)
    m = multiplier(module)
    return y + (z if m == 1 else z * m)


def multiplier(module: nn.Module) -> float:
    """m of a decoder layer."""
    return vars(module).get(MULTIPLIER, 1.0)


def _parts(layout: NormNames, module: nn.Module) -> tuple[nn.Module, nn.Module, list[nn.Module | None]]:
    held: dict[str, Any] = module._modules
    mixer, mlp = _names_of(module)
    return held[mixer], held[mlp], [None if name is None else held[name] for name in layout]


def _names_of(module: nn.Module) -> tuple[str, str]:
    """What attention, or what stands in its place, and the MLP are called in a decoder layer."""
    there = [name for name, part in module._modules.items() if part is not None]
    mixer, mlp = ([name for name in names if name in there] for names in (MIXERS, MLPS))
    return mixer[0] if mixer else ATTENTION, mlp[0] if mlp else MLPS[0]


# --- the trial ------------------------------------------------------------------------------------------------------


class _StandIn(nn.Module):
    def __init__(self, is_mlp: bool, gives_more: bool) -> None:
        super().__init__()
        self.is_mlp, self.gives_more = is_mlp, gives_more

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_mlp and (args or kwargs):
            raise TypeError("more than `_decoded` gives an MLP")
        self.given = kwargs
        y = hidden_states.tanh() if self.is_mlp else hidden_states.sin()
        return (y, None) if self.gives_more else y


def _layout_of(module: nn.Module) -> NormNames | None:
    """Where the norms of a decoder layer are; None for what is none as the docstring of this file has it."""
    names = {name for name, part in module._modules.items() if part is not None and type(part) is not nn.Dropout}
    layouts = tuple(layout for layout in LAYOUTS if names == {*_names_of(module), *layout} - {None})
    return _tried(module, layouts) if layouts else None


@tried_once
def _tried(module: nn.Module, layouts: tuple[NormNames, ...]) -> NormNames | None:
    return next((layout for layout in layouts if any(_matches(module, layout, x) for x in (False, True))), None)


def _matches(module: nn.Module, layout: NormNames, mlp_gives_more: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    alone = bare_copy(module)
    names = mixer, _ = _names_of(module)
    stand_ins = attention, mlp = _StandIn(False, mixer == ATTENTION), _StandIn(True, mlp_gives_more)
    for name, stand_in in zip(names, stand_ins, strict=True):
        setattr(alone, name, stand_in)
    for name in module._modules.keys() - {*names, *layout}:
        setattr(alone, name, None if module._modules[name] is None else nn.Dropout())
    norms, width = [], 8  # of norms without gains
    for name in layout:
        norm = nn.Identity() if name is None else random_norm(module.get_submodule(name), generator)
        width = next((len(gain) for gain in norm.parameters()), width)
        norms.append(norm)
        if name is not None:
            setattr(alone, name, norm)
    x = torch.randn(1, 2, width, generator=generator)
    others = {name: object() for name in OTHERS}  # attention gets them as they are
    try:
        found = type(module).forward(alone.eval(), x, **others)
    except TRIAL_ERRORS:
        return False
    needed = OTHERS if mixer == ATTENTION else NEEDED
    if any(attention.given.get(name) is not others[name] for name in needed):
        return False
    m, y = multiplier(module), _first(attention(norms[0](x)))
    y = x + m * norms[2](y)
    return isinstance(found, Tensor) and torch.equal(found, y + m * norms[3](_first(mlp(norms[1](y)))))


def _first(given: Any) -> Tensor:
    """Of attention, or of experts, which may give their router's logits, too."""
    return given[0] if isinstance(given, tuple) else given
