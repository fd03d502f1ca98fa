"""A decoder layer in one call, of one decoded token on the CPU; on a GPU in few launches, of any number of tokens: see
`ptq.gpu_layer`.

No family is named. `install` tries decoder layers with stand-ins for attention and MLP first: one must compute

    y = x + attention(norm(x)),    result = y + mlp(norm(y)).

The call needs a format that computes it, linears that treat their input alike, attention and MLP of the kinds of
`ptq.fast_attention` and `ptq.fast_steps`, and nobody who listens in (hooks). Otherwise the layer's own code runs. The
numbers are those of the single ops to the bit.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import is_
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ptq import fast_attention, fast_steps, gpu_layer, hadamard, matmul
from ptq.formats import Parts
from ptq.growing_cache import GrowingLayer
from ptq.linear import Online, QuantLinear
from ptq.shared_input import is_here
from ptq.trials import trial


@runtime_checkable
class WholeLayer(Protocol):
    """A format that does all that a decoder layer does in one call."""

    def layer_weights(self, parts: Sequence[Parts], biases: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
        """The weights q, k, v, o, gate, up and down as `layer` takes them; None where it cannot."""
        ...

    def layer(self, x: Float[Tensor, "b 1 k"], *arguments: Any) -> Float[Tensor, "b 1 k"]:
        """See `ptq::integer_layer`. `arguments`: those of `_Layer`, cos and sin, the cache, the scaling."""
        ...


ATTENTION, MLP, NORMS = "self_attn", "mlp", ("input_layernorm", "post_attention_layernorm")
OTHERS = ("position_embeddings", "attention_mask", "position_ids", "past_key_values", "use_cache")
"""What a layer is called with besides its input."""


@dataclass(frozen=True)
class _Layer:
    """A layer as its format takes it."""

    format: WholeLayer
    attention: nn.Module
    heads: tuple[int, int]
    """Number and size of the heads of keys and values."""
    floats: tuple[Tensor, ...]
    """Gains and biases."""
    arguments: tuple[Any, ...]
    """Norms, weights, what is done to the inputs."""


class _Known:
    """What is known of a decoder layer, for as long as it holds the very modules and parameters that `find` found."""

    def __init__(self, find: Callable[[nn.Module], Any]) -> None:
        self.find = find
        self.forget()

    def forget(self) -> None:
        """Find out anew next time."""
        self.found: Any = None
        self.owners: list[dict[str, Any]] = []
        self.held: list[Any] = []
        self.hooks: list[dict[int, Any]] = []
        self.instances: list[dict[str, Any]] = []
        self.forwards: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"find": self.find}  # copies and pickles find out anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Known.__init__(self, state["find"])

    def of(self, layer: nn.Module) -> Any:
        """What was found; None where there is nothing, or somebody listens in."""
        now = chain.from_iterable(map(dict.values, self.owners))
        same = sum(map(len, self.owners)) == len(self.held) and all(map(is_, now, self.held))
        if not self.held or not same or not all(map(is_, _forwards(self.instances), self.forwards)):
            modules = [layer, *(module for name in (ATTENTION, MLP) for module in layer.get_submodule(name).modules())]
            modules.extend(layer.get_submodule(name) for name in NORMS)
            self.owners = [owner for module in modules for owner in (module._modules, module._parameters) if owner]
            self.held = [held for owner in self.owners for held in owner.values()]
            self.hooks = [hooks for m in modules[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self.hooks.extend((_global_forward_hooks, _global_forward_pre_hooks))
            self.instances = [vars(module) for module in modules]
            self.forwards = list(_forwards(self.instances))
            self.found = self.find(layer) if all(map(_is_ours, self.forwards)) else None
        return None if any(self.hooks) and not all(map(_is_idle, self.hooks)) else self.found


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
        if "forward" not in vars(module) and _is_plain(module):
            module.forward = functools.partial(_forward, module, _Known(_layer_of), _Known(_gpu_steps_of))


def _forward(
    module: nn.Module, on_cpu: _Known, on_gpu: _Known, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not args and not module.training and not torch.compiler.is_compiling():
        if matmul.on_gpu(hidden_states):
            steps = on_gpu.of(module)
            if steps is not None and not gpu_layer.is_whole(steps):
                on_gpu.forget()
                steps = on_gpu.of(module)
            found = None if steps is None else gpu_layer.run(steps, hidden_states, kwargs)
        else:
            if on_gpu.found is not None:
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
    layer = known.of(module)
    held = None if layer is None else fast_attention.layer_of(layer.attention, x, floats=layer.floats, **others)
    if layer is None or held is None:
        return None
    if isinstance(held, GrowingLayer):
        shape = len(x), layer.heads[0], 1, layer.heads[1]
        *room, before = held.reserve(shape, shape, x)
        cache = room, before, [0, 0], 1.0, [], 0
    elif held.decodes and held.key.batch == len(x):
        cache = held.room(), held.length, *held.numbers()
    else:
        return None
    y = layer.format.layer(x, *layer.arguments, *others["position_embeddings"], *cache, layer.attention.scaling)
    held.advance(1)
    return y


def _layer_of(module: nn.Module) -> _Layer | None:
    attention, mlp, *normed = (module.get_submodule(name) for name in (ATTENTION, MLP, *NORMS))
    kind = fast_attention.kind_of(attention)
    if kind is None or not fast_steps.is_gated(mlp):
        return None
    normed.extend(attention.get_submodule(name) for name in fast_attention.NORMS if kind)
    norms = tuple(fast_steps.norm_kind(norm) for norm in normed)
    names = (*fast_attention.INPUTS, fast_attention.OUTPUT)
    linears = [*(attention._modules[name] for name in names), *(mlp._modules[name] for name in fast_steps.GATED)]
    if None in norms or not all(
        type(linear) is QuantLinear and is_here(linear) and "forward" not in vars(linear) for linear in linears
    ):
        return None
    *others, down = (cast(QuantLinear, linear) for linear in linears)
    format, clips = down.format, _clips(others)
    if not isinstance(format, WholeLayer) or not all(linear.format == format for linear in others):
        return None
    if clips is None or down.online.signs or down.online.output is not None:
        return None
    factors, order = (
        ([], 0) if down.online.input is None else hadamard.dense_factors(down.online.input, torch.device("cpu"))
    )
    *_, down_clip = down.treatment()
    biases = [x._parameters["bias"] for x in (*others, down)]
    weights = format.layer_weights([x.parts() for x in (*others, down)], biases)
    if weights is None:
        return None
    gains = [cast(Tensor, norm._parameters["weight"]) for norm in normed]  # no Parameter under functional_call
    eps, offset, round_first = (list(numbers) for numbers in zip(*cast(Any, norms), strict=True))
    inputs = others[0].input_bits, clips, factors, order, down.input_bits, down_clip
    arguments = (gains, eps, offset, [int(x) for x in round_first], *weights, *inputs)
    shape = others[1].out_features // cast(int, attention.head_dim), cast(int, attention.head_dim)
    floats = (*gains, *(bias for bias in biases if bias is not None))
    return _Layer(format, attention, shape, floats, arguments)


def _clips(linears: Sequence[QuantLinear]) -> list[float] | None:
    """Those of the inputs of q, k and v; of o; of gate and up. None where these linears differ in more than that, or
    where something else is done to an input or a product."""
    q, k, v, o, gate, up = (linear.online for linear in linears)
    if not q == k == v or gate != up or len({linear.input_bits for linear in linears}) > 1:
        return None
    if any(replace(x, activation=None) != Online() for x in (q, o, gate)):
        return None
    return [1.0 if x.activation is None else x.activation.clip for x in (q, o, gate)]


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


@trial()
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
