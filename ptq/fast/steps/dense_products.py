"""Plain linears, and the products of routers of experts, by the op for few tokens (`ptq::dense_linear`).

The forward of a router is the family's own function with another `F.linear` among its globals, or, where the router is
a linear itself, with another `super().forward`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ptq.fast.trials import innermost, with_globals
from ptq.ops.matmul import few_tokens_linear


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


def install(model: nn.Module) -> None:
    """Make all plain linears of a model such layers."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokensLinear
            if module.out_features == 1:
                module.weight.data = module.weight.data.clone()  # as in `ptq.hf.blocks`, so that numbers are the same


def is_router(module: nn.Module) -> bool:
    """Whether a module does something with one product of its input and its matrix; with a bias or not."""
    if isinstance(module, nn.Linear):
        return _with_fast_base(type(module)) is not None
    weight = module._parameters.get("weight")
    if module._parameters.keys() - {"weight", "bias"} or weight is None or weight.dim() != 2:
        return False
    others = any(isinstance(inside, nn.Linear | nn.Embedding) for inside in module.modules())
    return not others and _with_fast_linear(type(module).forward) is not None


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a router, with faster products of few tokens."""
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
