"""RMSNorm, rotary embedding and the gate of the MLP of a loaded model in one op each; for few tokens also its attention
(`ptq.fast.fast_attention`, `ptq.fast.latent_attention`), its router of experts and the steps of other mixers
(`ptq.fast.fast_mixers`).

No family is named. `install` looks for modules that could be an RMSNorm, for attention modules whose forward calls
`apply_rotary_pos_emb` (`ptq.fast.fast_rotary`), and for a gated MLP; each kind is tried on random numbers first, and
where the op's reference does not give the same bits as the model's own code (attention: up to rounding,
`ptq.fast.fast_attention`), that code is left alone. With gradients, other devices or dtypes
(`ptq.ops.matmul.ops_serve`), or under torch.compile, the model's own code runs.

Parts of models that run alone (`ptq.hf.blocks`) get the same, so that proofs may compare bits.

Norms and attention modules get a `forward` of their own in the instance, as accelerate does it. The one of attention is
the family's own function, with another `apply_rotary_pos_emb` among its globals, that of a router has another
`F.linear`, or, where it is a linear itself, another `super().forward`: nothing in transformers is changed.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast import fast_attention, fast_mixers, fast_rotary, latent_attention
from ptq.fast.trials import TRIAL_ERRORS, bare_copy, innermost, tried_once, with_globals
from ptq.fast.watched import InPlace
from ptq.layers.linear import must_be_called, stays_on_gpu
from ptq.layers.shared_input import products
from ptq.ops import steps
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve_few, few_tokens_linear, gpu_ops_serve, ops_serve
from ptq.ops.op_declarations import wants_gradient

EPSILON = ("variance_epsilon", "eps")
"""What families call the number that RMSNorm adds to the mean."""


def install(model: nn.Module) -> None:
    """Make the norms, rotary embeddings, attention and gates of a model fast where they are what the ops compute."""
    for module in model.modules():
        if "forward" in vars(module):
            continue  # somebody has put another one there
        kind = norm_kind(module)
        if kind is not None:
            module.forward = InPlace(norm_forward, module, *kind)
        elif (latent := latent_attention.kind_of(module)) is not None:
            module.forward = InPlace(latent_attention.forward, module, latent)
        elif (attention := fast_attention.kind_of(module)) or fast_rotary.with_fast_rotary(type(module).forward):
            module.forward = InPlace(attention_forward, module, attention)
        elif (act := gate_of(module)) is not None:
            module.forward = InPlace(_gated_forward, module, act, activation_of(module))
        elif is_router(module):
            module.forward = InPlace(router_forward, module)
        elif (forward := fast_mixers.forward_of(module)) is not None:
            module.forward = forward


def attention_forward(module: nn.Module, kind: fast_attention.Kind | None, *args: Any, **kwargs: Any) -> Any:
    """The forward of attention of this kind; None: any other that turns as `ptq::rotary` does."""
    if kind is not None and not args:
        found = fast_attention.decoded(module, kind, **kwargs)
        if found is not None:
            return found, None
    return fast_rotary.forward(module, *args, **kwargs)


# --- norms ----------------------------------------------------------------------------------------------------------


def norm_forward(module: nn.Module, eps: float, offset: float, round_first: bool, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an RMSNorm of this kind."""
    gain = module._parameters.get("weight")
    if len(args) == 1 and not kwargs and gain is not None:
        x = args[0]
        if x.dim() > 2 and x.numel() and ops_serve(x, gain):
            return torch.ops.ptq.rms_norm.default(x, gain, eps, offset, round_first)
    return type(module).forward(module, *args, **kwargs)


def norm_kind(module: nn.Module) -> tuple[float, float, bool] | None:
    """eps, offset and round_first of a module that is an RMSNorm; None for any other."""
    gain = module._parameters.get("weight")
    numbers = [tensor for tensor in module._buffers.values() if tensor is not None and tensor.is_floating_point()]
    alone = len(module._parameters) == 1 and not module._modules and not numbers
    eps = next((value for name in EPSILON if isinstance(value := getattr(module, name, None), float)), None)
    if not alone or gain is None or gain.dim() != 1 or eps is None or not eps > 0:
        return None
    return _tried_norm(module, gain.shape[0], eps)


@tried_once
def _tried_norm(module: nn.Module, k: int, eps: float) -> tuple[float, float, bool] | None:
    # k tells norms of other widths apart: `tried_once` remembers what it found by it
    parameters = inspect.signature(type(module).forward).parameters
    required = [p for p in parameters.values() if p.default is p.empty]
    alone = len(required) == 2 and "gate" not in parameters  # norms with a gate: `ptq.fast.fast_mixers`
    kinds = [(eps, offset, first) for offset in (0.0, 1.0) for first in (True, False)] if alone else []
    return next((kind for kind in kinds if _matches(module, *kind)), None)


def _matches(module: nn.Module, eps: float, offset: float, round_first: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype in FEW_DTYPES:
        alone = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
        gain = alone.get_parameter("weight")
        gain.copy_(torch.randn(gain.shape, generator=generator))
        x = torch.randn(1, 3, len(gain), generator=generator) * torch.tensor([eps**0.5, 1.0, 30.0])[:, None]
        x = x.to(dtype)
        try:
            found = type(module).forward(alone, x)
        except TRIAL_ERRORS:
            return False
        if not isinstance(found, Tensor) or not torch.equal(found, steps.rms_norm(x, gain, eps, offset, round_first)):
            return False
    return True


# --- the gate of the MLP --------------------------------------------------------------------------------------------

LINEARS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
"""What the linears of a gated MLP are called: gate, up and down, or one with the rows of gate and up, and down."""
ACTIVATIONS = ("act_fn", "activation_fn", "activation")
SILU, GELU = "silu", "gelu_tanh"
GATES = {SILU: steps.silu_mul, GELU: steps.gelu_mul}


def _gated_forward(module: nn.Module, act: str, activation: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    heard = activation._forward_hooks or activation._forward_pre_hooks or "forward" in vars(activation)
    same = activation_of(module) is activation and not heard  # those on all modules are not looked at
    if same and len(args) == 1 and not kwargs and args[0].dim() > 1 and not module.training:  # which may drop some
        x, linears = args[0], linears_of(module)
        fused = len(linears) == 2
        # halves of many tokens would be copied
        served = cpu_ops_serve_few(x.numel() // max(1, x.shape[-1]), x) if fused else ops_serve(x)
        if x.numel() and served and (act == SILU or not gpu_ops_serve(x)):
            gate, up = linears[0](x).chunk(2, -1) if fused else products(linears[:-1], x)
            learns = wants_gradient(gate, up)
            if gate.dtype == up.dtype and not learns:  # under autocast a plain linear gives another dtype
                return down(linears[-1], gate, up, act)
    return type(module).forward(module, *args, **kwargs)


def down(linear: Any, gate: Float[Tensor, "*t k"], up: Float[Tensor, "*t k"], act: str = SILU) -> Float[Tensor, "*t n"]:
    """What a linear gives for act(gate) * up; on a GPU act is silu."""
    if gpu_ops_serve(gate, up) and stays_on_gpu(linear) and not must_be_called(linear):
        seen = torch.ops.ptq.gate_input.default(gate, up, *linear.treatment())
        return linear.output_of(linear.product_of(seen, gate.dtype), gate.dtype)
    op = torch.ops.ptq.silu_mul if act == SILU else torch.ops.ptq.gelu_mul
    return linear(op.default(gate, up))


def gate_of(module: nn.Module) -> str | None:
    """Which of `GATES` act is where a module computes down(act(gate(x)) * up(x)); None for any other. Each is tried:
    the same class may have another gate."""
    for act_fn in ACTIVATIONS:
        if module._modules.keys() in [{*names, act_fn} for names in LINEARS]:
            act = module._modules[act_fn]
            plain = act is not None and not act._parameters and not act._modules
            return _gate_that_it_gives(module, act_fn) if plain else None
    return None


def activation_of(module: nn.Module) -> Any:
    """What act is in a gated MLP."""
    return next((found for act_fn in ACTIVATIONS if (found := module._modules.get(act_fn)) is not None), None)


def linears_of(module: nn.Module) -> list[Any]:
    """The linears of a gated MLP, in the order of `LINEARS`."""
    return [module._modules[name] for name in _names_of(module)]


def _names_of(module: nn.Module) -> tuple[str, ...]:
    return next(names for names in LINEARS if module._modules.keys() >= {*names})


@tried_once
def _gate_that_it_gives(module: nn.Module, act_fn: str) -> str | None:
    generator = torch.Generator().manual_seed(0)
    alone = bare_copy(module)
    *names, last = _names_of(module)
    for name, (n, k) in {**dict.fromkeys(names, (24 // len(names), 8)), last: (8, 12)}.items():
        setattr(alone, name, nn.utils.skip_init(nn.Linear, k, n))  # the caller's random numbers are left alone
        for parameter in alone.get_submodule(name).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    setattr(alone, act_fn, bare_copy(module.get_submodule(act_fn)))  # nobody who listens hears of the trial
    x = torch.randn(1, 3, 8, generator=generator)
    *gated, down = linears_of(alone)
    gate, up = (linear(x) for linear in gated) if len(gated) == 2 else gated[0](x).chunk(2, -1)
    try:
        found = type(module).forward(alone.eval(), x)
    except TRIAL_ERRORS:
        return None
    same = (
        act for act, step in GATES.items() if isinstance(found, Tensor) and torch.equal(found, down(step(gate, up)))
    )
    return next(same, None)


# --- the router of experts ------------------------------------------------------------------------------------------


class _Functional:
    """`torch.nn.functional`, with another product."""

    linear = staticmethod(few_tokens_linear)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


class FewTokensLinear(nn.Linear):
    """A plain linear layer with another `forward`, for few tokens."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None:  # it is pruned, or made of other parameters
            return nn.Linear.forward(self, input)  # `super` would be what `_with_fast_base` looks for
        return few_tokens_linear(input, weight, bias)


def is_router(module: nn.Module) -> bool:
    """Whether a module does something with one product of its input and its matrix; with a bias or not."""
    if isinstance(module, nn.Linear):
        return _with_fast_base(type(module)) is not None
    weight = module._parameters.get("weight")
    if module._parameters.keys() - {"weight", "bias"} or weight is None or weight.dim() != 2:
        return False
    others = any(isinstance(inside, nn.Linear | nn.Embedding) for inside in module.modules())
    return not others and _with_fast_linear(type(module).forward) is not None


def router_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = type(module).forward
    if torch.compiler.is_compiling():
        return own(module, *args, **kwargs)
    if (cls := _with_fast_base(type(module))) is not None:
        alike = object.__new__(cls)
        object.__setattr__(alike, "__dict__", vars(module))  # the same module, but for its class
        return own(alike, *args, **kwargs)
    return (_with_fast_linear(own) or own)(module, *args, **kwargs)


@functools.cache
def _with_fast_base(cls: Any) -> type[nn.Module] | None:
    """A class like one of linears that do more than a linear, whose `super().forward` is `ptq::dense_linear` for few
    tokens; None for any other."""
    inner = inspect.unwrap(cls.forward)
    does_more = cls.__bases__ == (nn.Linear,) and {"super", "forward"} <= set(inner.__code__.co_names)
    return type(cls.__name__, (cls, FewTokensLinear), {}) if does_more else None


@functools.cache
def _with_fast_linear(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A forward function whose products of few tokens are taken by `ptq::dense_linear`; None where it has none."""
    inner = innermost(forward)
    if inner is None or not {"F", "linear"} <= set(inner.__code__.co_names):
        return None
    if inner.__globals__.get("F") is not torch.nn.functional:
        return None
    return with_globals(forward, {"F": _Functional()})
