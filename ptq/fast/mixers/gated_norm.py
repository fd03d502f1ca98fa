"""RMSNorms with a gate, as `ptq::gated_rms_norm` computes them. Each is tried on random numbers first."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptq.fast.trials import TRIAL_ERRORS, bare_copy, tried_once
from ptq.ops import mixer_ops
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve


class GatedNormKind(NamedTuple):
    """What `ptq::gated_rms_norm` takes for a module, behind its tensors."""

    eps: float
    groups: int
    before: bool


def forward(module: nn.Module, norm: GatedNormKind, *args: Any, **kwargs: Any) -> Tensor:
    gain = module._parameters.get("weight")
    if len(args) == 2 and not kwargs and gain is not None:
        x, gate = args
        if isinstance(gate, Tensor) and x.shape == gate.shape and x.numel() and _serves(x, gate, gain):
            return torch.ops.ptq.gated_rms_norm.default(x, gate, gain, *norm)
    return type(module).forward(module, *args, **kwargs)


def _serves(x: Tensor, *others: Tensor) -> bool:
    return cpu_ops_serve(x) and cpu_ops_serve(*others) and x.dtype in (torch.float32, others[0].dtype)


def kind_of(module: nn.Module) -> GatedNormKind | None:
    """What a module does that is `ptq::gated_rms_norm`; None for any other."""
    gain, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", None)
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if not alone or gain is None or gain.dim() != 1 or not isinstance(eps, float) or not eps > 0:
        return None
    if [*inspect.signature(type(module).forward).parameters][2:] != ["gate"]:
        return None
    size, groups = getattr(module, "group_size", len(gain)), getattr(module, "n_groups", 1)
    groups = groups if size == len(gain) else len(gain) // size
    kinds = (GatedNormKind(eps, groups, before) for before in (False, True))
    return next((kind for kind in kinds if _matches(module, len(gain), kind)), None)


@tried_once
def _matches(module: nn.Module, k: int, norm: GatedNormKind) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype in FEW_DTYPES:
        alone = bare_copy(module)
        gain, x, gate = (torch.randn(shape, generator=generator).to(dtype) for shape in ((k,), (4, k), (4, k)))
        alone.weight = nn.Parameter(gain, requires_grad=False)
        x[0] *= norm.eps**0.5
        for given in (x, x.float()):
            try:
                found = type(module).forward(alone, given, gate)
            except TRIAL_ERRORS:
                return False
            wanted = mixer_ops.gated_rms_norm(given, gate, gain, *norm)
            if not isinstance(found, Tensor) or found.dtype != given.dtype or not torch.equal(found, wanted):
                return False
    return True
