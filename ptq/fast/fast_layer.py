"""A decoder layer in one call, of few decoded tokens on the CPU (`ptq.fast.cpu_layer`); on a GPU in few launches, of
any number of tokens (`ptq.fast.gpu_layer`).

No family is named. `install` tries decoder layers with stand-ins for attention and MLP first: one must compute

    y = x + m norm(attention(norm(x))),    result = y + m norm(mlp(norm(y))),

where two of the four norms may be missing, and m is mostly 1. The call needs what `ptq.fast.cpu_layer` or
`ptq.fast.gpu_layer` asks for, and nobody who listens in (hooks), or who trains a dropout. Otherwise the layer's own
code runs. Where an MLP is of another kind (experts), the call gives y, and the MLP's own code runs behind it. The
numbers are those of the single ops to the bit.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ptq.fast import cpu_layer, fast_attention, fast_steps, gpu_layer
from ptq.fast.trials import hollow, numbers_of, trial
from ptq.kv.attention import CACHE
from ptq.ops import matmul

ATTENTION, MLP = "self_attn", "mlp"
NormNames = tuple[str | None, str | None, str | None, str | None]
"""The norms before attention, before the MLP, behind attention, behind the MLP, by name; None: there is none."""
LAYOUTS: tuple[NormNames, ...] = (
    ("input_layernorm", "post_attention_layernorm", None, None),
    (None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
)
MULTIPLIER = "residual_multiplier"
"""What m is called where a layer has one."""
OTHERS = ("position_embeddings", "attention_mask", "position_ids", CACHE, "use_cache")
"""What a layer is called with besides its input."""


class _Known:
    """What is known of a decoder layer, for as long as it holds the very modules and parameters that `find` found."""

    def __init__(self, find: Callable[..., Any], layout: NormNames) -> None:
        self.find, self.layout = find, layout
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.found: Any = None
        self.owners: list[dict[str, Any]] = []
        self.held: list[Any] = []
        self.hooks: list[dict[int, Any]] = []
        self.instances: list[dict[str, Any]] = []
        self.forwards: list[Any] = []
        self.dropouts: list[nn.Module] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"find": self.find, "layout": self.layout}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Known.__init__(self, **state)

    def of(self, layer: nn.Module) -> Any:
        """What was found; None where there is nothing, or somebody listens in."""
        now = chain.from_iterable(map(dict.values, self.owners))
        same = sum(map(len, self.owners)) == len(self.held) and all(map(is_, now, self.held))
        if not self.held or not same or not all(map(is_, _forwards(self.instances), self.forwards)):
            parts = _parts(self.layout, layer)
            others = [layer._modules[name] for name in layer._modules.keys() - {ATTENTION, MLP, *self.layout}]
            self.dropouts = [module for module in others if type(module) is nn.Dropout]
            modules = [layer, *self.dropouts, *_watched(*parts)]
            self.owners = [owner for module in modules for owner in (module._modules, module._parameters) if owner]
            self.held = [held for owner in self.owners for held in owner.values()]
            self.hooks = [hooks for m in modules[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self.hooks.extend((_global_forward_hooks, _global_forward_pre_hooks))
            self.instances = [vars(module) for module in modules]
            self.forwards = list(_forwards(self.instances))
            known = len(self.dropouts) == len(others) and all(map(_is_ours, self.forwards))
            self.found = self.find(*parts) if known else None
        heard = any(self.hooks) and not all(map(_is_idle, self.hooks))
        return None if heard or any(dropout.training for dropout in self.dropouts) else self.found


def _watched(attention: nn.Module, mlp: nn.Module, norms: list[nn.Module | None]) -> Iterator[nn.Module]:
    """The modules that a call may take the place of. An MLP of another kind, with hundreds of experts say, is none."""
    inside = [attention, *norms, None if fast_steps.gate_of(mlp) is None else mlp]
    return chain.from_iterable(part.modules() for part in inside if part is not None)


def _forwards(instances: list[dict[str, Any]]) -> Iterator[Any]:
    """The forward that each instance has in the place of its class's; None for none."""
    return map(dict.get, instances, repeat("forward"))


def _is_ours(forward: Any) -> bool:
    """Whether a forward is the class's own (None), or one that this package has installed."""
    return forward is None or getattr(getattr(forward, "func", None), "__module__", "").startswith("ptq.")


def _is_idle(hooks: dict[int, Any]) -> bool:
    """Whether all hooks are those that transformers leaves behind where hidden states were asked for once; those inside
    of a layer wait for attention weights, which our attention has none of."""
    return all(getattr(hook, "__module__", None) == "transformers.utils.output_capturing" for hook in hooks.values())


def install(model: nn.Module) -> None:
    """Make the decoder layers of a model fast where they are what the steps compute."""
    for module in model.modules():
        layout = None if "forward" in vars(module) else _layout_of(module)
        if layout is not None:
            known = (_Known(find, layout) for find in (cpu_layer.layer_of, gpu_layer.steps_of))
            module.forward = functools.partial(_forward, module, *known)


def _forward(
    module: nn.Module, on_cpu: _Known, on_gpu: _Known, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not args and not module.training and not torch.compiler.is_compiling():
        if matmul.on_gpu(hidden_states):
            if on_cpu.held:
                on_cpu.forget()  # replaced weights would stay in memory
            steps = on_gpu.of(module) if _multiplier(module) == 1 else None
            if steps is not None and not gpu_layer.is_whole(steps):
                on_gpu.forget()
                steps = on_gpu.of(module)
            found = None if steps is None else gpu_layer.run(steps, hidden_states, kwargs)
        else:
            if on_gpu.held:
                on_gpu.forget()  # merged weights would stay on the GPU
            found = _decoded(module, on_cpu, hidden_states, **kwargs)
        if found is not None:
            return found
    return type(module).forward(module, hidden_states, *args, **kwargs)


def _decoded(module: nn.Module, known: _Known, x: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    if not fast_attention.are_decoded(x.shape[1], others.get("attention_mask")):
        return None
    layer = known.of(module)
    if layer is not None and layer.is_over():
        known.forget()
        layer = known.of(module)
    y = None if layer is None else cpu_layer.run(layer, x, others, _multiplier(module))
    if y is None or layer is None or layer.has_mlp:
        return y
    _, mlp, (_, before, _, after) = _parts(known.layout, module)
    z = mlp(y if before is None else before(y))
    z = z[0] if isinstance(z, tuple) else z  # experts may give their router's logits, too
    z = z if after is None else after(z)
    m = _multiplier(module)
    return y + (z if m == 1 else z * m)


def _multiplier(module: nn.Module) -> float:
    return vars(module).get(MULTIPLIER, 1.0)


def _parts(layout: NormNames, module: nn.Module) -> tuple[nn.Module, nn.Module, list[nn.Module | None]]:
    held: dict[str, Any] = module._modules
    return held[ATTENTION], held[MLP], [None if name is None else held[name] for name in layout]


# --- the trial ------------------------------------------------------------------------------------------------------


class _StandIn(nn.Module):
    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_attention and (args or kwargs):
            raise TypeError("more than `_decoded` gives an MLP")
        self.given = kwargs
        return (hidden_states.sin(), None) if self.is_attention else hidden_states.tanh()


_LAYOUTS: dict[Any, NormNames | None] = {}


def _layout_of(module: nn.Module) -> NormNames | None:
    """Where the norms of a decoder layer are; None for what is none as the docstring of this file has it."""
    names = {name for name, part in module._modules.items() if type(part) is not nn.Dropout}
    layouts = [layout for layout in LAYOUTS if names == {ATTENTION, MLP, *layout} - {None}]
    if not layouts:
        return None
    key = numbers_of(module)
    if key not in _LAYOUTS:
        _LAYOUTS[key] = next((layout for layout in layouts if _gives_its_numbers(module, layout)), None)
    return _LAYOUTS[key]


@trial()
def _gives_its_numbers(module: nn.Module, layout: NormNames) -> bool:
    generator = torch.Generator().manual_seed(0)
    alone = hollow(module)
    attention, mlp = _StandIn(True), _StandIn(False)
    setattr(alone, ATTENTION, attention)
    setattr(alone, MLP, mlp)
    for name in module._modules.keys() - {ATTENTION, MLP, *layout}:
        setattr(alone, name, nn.Dropout())
    norms, width = [], 8  # of norms without gains
    for name in layout:
        norm = (
            nn.Identity() if name is None else copy.deepcopy(module.get_submodule(name)).to_empty(device="cpu").float()
        )
        for gain in norm.parameters():
            width = len(gain.copy_(torch.rand(gain.shape, generator=generator) + 0.5))
        norms.append(norm)
        if name is not None:
            setattr(alone, name, norm)
    x = torch.randn(1, 2, width, generator=generator)
    others = {name: object() for name in OTHERS}  # attention gets them as they are
    try:
        found = type(module).forward(alone.eval(), x, **others)
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return False  # it wants something else
    if any(attention.given.get(name) is not value for name, value in others.items()):
        return False
    m = _multiplier(module)
    y = x + m * norms[2](attention(norms[0](x))[0])
    return isinstance(found, Tensor) and torch.equal(found, y + m * norms[3](mlp(norms[1](y))))
