"""A decoder layer of one decoded token in three steps: what comes before attention, attention, what comes after it. On
a GPU, of any number of tokens: see `ptq.gpu_layer`.

No family is named. `install` tries decoder layers with stand-ins for attention and MLP first: one must compute

    y = x + attention(norm(x)),    result = y + mlp(norm(y)).

The steps need a format that computes them (`WholeLayer`), linears that treat their input alike, attention and MLP of
the kinds of `ptq.fast_attention` and `ptq.fast_steps`, and nobody who listens in (hooks). Otherwise the layer's own
code runs. The numbers are those of the single ops to the bit.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq import fast_attention, fast_steps, gpu_layer, hadamard, matmul
from ptq.formats import Parts
from ptq.linear import QuantLinear
from ptq.shared_input import is_here

Norm = tuple[Tensor, float, float, bool]
"""Gain, eps, offset and round_first of `ptq::rms_norm`."""


@runtime_checkable
class WholeLayer(Protocol):
    """A format that does what surrounds attention in one call each."""

    def layer_weights(self, parts: Sequence[Parts], biases: Sequence[Tensor | None]) -> Any:
        """Several weights as the methods below take them; None where they cannot."""
        ...

    def layer_start(
        self, x: Float[Tensor, "*t k"], norm: Norm, weights: Any, input: tuple[int, float]
    ) -> Sequence[Tensor]:
        """The products of norm(x), quantised to `input` = bits, clip (0 bits: as it is), with each weight."""
        ...

    def layer_end(
        self,
        attended: Float[Tensor, "*t n"],
        x: Float[Tensor, "*t k"],
        norm: Norm,
        weights: Any,
        input: tuple[int, float],
        down: tuple[list[Tensor], int, int, float],
    ) -> Float[Tensor, "*t k"]:
        """y = x + o(attended), then y + mlp(norm(y)), with the weights o, gate, up and down. `down`: dense factors and
        order (0: none) of the Hadamard transform of its input, bits and clip."""
        ...


ATTENTION, MLP, NORMS = "self_attn", "mlp", ("input_layernorm", "post_attention_layernorm")
OTHERS = ("position_embeddings", "attention_mask", "position_ids", "past_key_values", "use_cache")
"""What a layer is called with besides its input."""


@dataclass(frozen=True)
class _Steps:
    """A layer as the calls of its format take it."""

    format: WholeLayer
    attention: nn.Module
    kind: str
    gains: tuple[Tensor, Tensor]
    norms: tuple[Norm, Norm]
    weights: tuple[Any, Any]
    input: tuple[int, float]
    down: tuple[list[Tensor], int, int, float]


class _Known:
    """The steps of a layer, for as long as it holds the very modules and parameters that `find` found them for."""

    def __init__(self, find: Callable[[nn.Module], Any]) -> None:
        self.find = find
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.steps: Any = None
        self.owners: list[dict[str, Any]] = []
        self.held: list[Any] = []
        self.hooks: list[dict[int, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"find": self.find}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Known.__init__(self, state["find"])

    def of(self, layer: nn.Module) -> Any:
        """The steps of a layer; None where there are none, or somebody listens in."""
        now = chain.from_iterable(map(dict.values, self.owners))
        if not self.held or sum(map(len, self.owners)) != len(self.held) or not all(map(is_, now, self.held)):
            modules = [layer, *(module for name in (ATTENTION, MLP) for module in layer.get_submodule(name).modules())]
            modules.extend(layer.get_submodule(name) for name in NORMS)
            self.owners = [owner for module in modules for owner in (module._modules, module._parameters) if owner]
            self.held = [held for owner in self.owners for held in owner.values()]
            self.hooks = [hooks for m in modules[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self.steps = self.find(layer)
        return None if any(self.hooks) else self.steps


def install(model: nn.Module) -> None:
    """Make the decoder layers of a model fast where they are what the steps compute."""
    for module in model.modules():
        if "forward" not in vars(module) and _is_plain(module):
            module.forward = functools.partial(_forward, module, _Known(_steps_of), _Known(_gpu_steps_of))


def _forward(
    module: nn.Module, on_cpu: _Known, on_gpu: _Known, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not args and not torch.compiler.is_compiling():
        if matmul.on_gpu(hidden_states):
            steps = on_gpu.of(module)
            if steps is not None and not gpu_layer.is_whole(steps):
                on_gpu.forget()
                steps = on_gpu.of(module)
            found = None if steps is None else gpu_layer.run(steps, hidden_states, kwargs)
        else:
            if on_gpu.steps is not None:
                on_gpu.forget()  # merged weights would stay on the GPU
            found = _decoded(module, on_cpu, hidden_states, **kwargs)
        if found is not None:
            return found
    return type(module).forward(module, hidden_states, *args, **kwargs)


def _gpu_steps_of(layer: nn.Module) -> gpu_layer.Steps | None:
    attention, mlp, *norms = (layer.get_submodule(name) for name in (ATTENTION, MLP, *NORMS))
    return gpu_layer.steps_of(attention, mlp, norms)


def _decoded(module: nn.Module, known: _Known, x: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    if x.shape[1] != 1:
        return None
    steps = known.of(module)
    layer = None if steps is None else fast_attention.layer_of(steps.attention, x, gains=steps.gains, **others)
    if steps is None or layer is None:
        return None
    q, k, v = steps.format.layer_start(x, steps.norms[0], steps.weights[0], steps.input)
    attended = fast_attention.attend(steps.attention, steps.kind, q, k, v, others["position_embeddings"], layer)
    return steps.format.layer_end(attended, x, steps.norms[1], steps.weights[1], steps.input, steps.down)


def _steps_of(layer: nn.Module) -> _Steps | None:
    attention, mlp, *normed = (layer.get_submodule(name) for name in (ATTENTION, MLP, *NORMS))
    kind, norms = fast_attention.kind_of(attention), [fast_steps.norm_kind(norm) for norm in normed]
    if kind is None or None in norms or not fast_steps.is_gated(mlp):
        return None
    names = (*fast_attention.INPUTS, fast_attention.OUTPUT)
    linears = [*(attention._modules[name] for name in names), *(mlp._modules[name] for name in fast_steps.GATED)]
    if not all(type(linear) is QuantLinear and is_here(linear) and "forward" not in vars(linear) for linear in linears):
        return None
    *others, down = (cast(QuantLinear, linear) for linear in linears)
    format, online = down.format, others[0].online
    if not isinstance(format, WholeLayer) or not all(linear.format == format for linear in others):
        return None
    if online.input is not None or any(linear.online != online for linear in others):
        return None
    if any(x.signs or x.output is not None for x in (online, down.online)):
        return None
    transform = ([], 0) if down.online.input is None else hadamard.dense_factors(down.online.input, torch.device("cpu"))
    bits = [(0, 1.0) if x.activation is None else (x.activation.bits, x.activation.clip) for x in (online, down.online)]
    parts, biases = [x.parts() for x in (*others, down)], [x._parameters["bias"] for x in (*others, down)]
    weights = tuple(format.layer_weights(parts[at], biases[at]) for at in (slice(0, 3), slice(3, 7)))
    if None in weights:
        return None
    gains = tuple(norm.get_parameter("weight") for norm in normed)
    full = tuple((gain, *cast(tuple[float, float, bool], norm)) for gain, norm in zip(gains, norms, strict=True))
    return _Steps(format, attention, kind, gains, full, weights, bits[0], (*transform, *bits[1]))  # pyright: ignore


# --- the trial ------------------------------------------------------------------------------------------------------


class _StandIn(nn.Module):
    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = kwargs
        return (hidden_states.sin(), None) if self.is_attention else hidden_states.tanh()


_PLAIN: dict[Any, bool] = {}


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a decoder layer as the docstring of this file has it."""
    if module._modules.keys() != {ATTENTION, MLP, *NORMS}:
        return False
    key = fast_attention.numbers_of(module)
    if key not in _PLAIN:
        _PLAIN[key] = _gives_its_numbers(module)
    return _PLAIN[key]


@torch.no_grad()
def _gives_its_numbers(module: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    alone = type(module).__new__(type(module))
    nn.Module.__init__(alone)
    alone.__dict__.update({name: value for name, value in vars(module).items() if name[0] != "_"})
    attention, mlp = _StandIn(True), _StandIn(False)
    setattr(alone, ATTENTION, attention)
    setattr(alone, MLP, mlp)
    norms = []
    for name in NORMS:
        norms.append(copy.deepcopy(module.get_submodule(name)).to_empty(device="cpu").float())
        for gain in norms[-1].parameters():
            gain.copy_(torch.rand(gain.shape, generator=generator) + 0.5)
        setattr(alone, name, norms[-1])
    x = torch.randn(1, 2, *next(norms[0].parameters()).shape, generator=generator)
    others = {name: object() for name in OTHERS}  # attention gets them as they are
    try:
        found = type(module).forward(alone.eval(), x, **others)
    except (RuntimeError, TypeError, AttributeError):
        return False  # it wants something else
    if any(attention.given.get(name) is not value for name, value in others.items()):
        return False
    y = x + attention(norms[0](x))[0]
    return isinstance(found, Tensor) and torch.equal(found, y + mlp(norms[1](y)))
