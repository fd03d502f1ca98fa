"""RMSNorm in one op, where a module gives its bits on random numbers."""

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptq.fast.trials import TRIAL_ERRORS, tried_once
from ptq.ops import steps
from ptq.ops.matmul import FEW_DTYPES, ops_serve

EPSILON = ("variance_epsilon", "eps")
"""What families call the number that RMSNorm adds to the mean."""


class RmsNormKind(NamedTuple):
    """What a module computes, as of `ptq::rms_norm`."""

    eps: float
    offset: float
    round_first: bool


def forward(module: nn.Module, eps: float, offset: float, round_first: bool, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an RMSNorm of this kind."""
    gain = module._parameters.get("weight")
    if len(args) == 1 and not kwargs and gain is not None:
        x = args[0]
        if x.dim() > 2 and x.numel() and ops_serve(x, gain):
            return torch.ops.ptq.rms_norm.default(x, gain, eps, offset, round_first)
    return type(module).forward(module, *args, **kwargs)


def kind_of(module: nn.Module) -> RmsNormKind | None:
    """What an RMSNorm computes; None for any other module."""
    gain = module._parameters.get("weight")
    numbers = [tensor for tensor in module._buffers.values() if tensor is not None and tensor.is_floating_point()]
    alone = len(module._parameters) == 1 and not module._modules and not numbers
    eps = next((value for name in EPSILON if isinstance(value := getattr(module, name, None), float)), None)
    if not alone or gain is None or gain.dim() != 1 or eps is None or not eps > 0:
        return None
    return _tried(module, gain.shape[0], eps)


@tried_once
def _tried(module: nn.Module, k: int, eps: float) -> RmsNormKind | None:
    # k tells norms of other widths apart: `tried_once` remembers what it found by it
    parameters = inspect.signature(type(module).forward).parameters
    required = [p for p in parameters.values() if p.default is p.empty]
    alone = len(required) == 2 and "gate" not in parameters  # norms with a gate: `ptq.fast.mixers.mixer_forwards`
    kinds = [RmsNormKind(eps, offset, first) for offset in (0.0, 1.0) for first in (True, False)] if alone else []
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
