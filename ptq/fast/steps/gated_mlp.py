"""The gate of an MLP, down(act(gate(x)) * up(x)), in one op, where a module gives its bits on random numbers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.trials import TRIAL_ERRORS, bare_copy, tried_once
from ptq.layers.replaceable import must_be_called, stays_on_gpu
from ptq.layers.shared_input import products
from ptq.ops import steps
from ptq.ops.matmul import cpu_ops_serve_few, gpu_ops_serve, ops_serve
from ptq.ops.op_declarations import wants_gradient

LINEARS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
"""What the linears of a gated MLP are called: gate, up and down, or one with the rows of gate and up, and down."""
ACTIVATIONS = ("act_fn", "activation_fn", "activation")
SILU, GELU = "silu", "gelu_tanh"
GATES = {SILU: steps.silu_mul, GELU: steps.gelu_mul}


def forward(module: nn.Module, act: str, activation: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
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
