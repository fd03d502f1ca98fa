"""The rotary embedding of an attention module in one op.

No family is named: where a module's forward calls `apply_rotary_pos_emb`, that function is tried on random numbers, and
where `ptq::rotary` gives the same bits, the forward runs with another function under that name among its globals."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ptq.fast.trials import MISFIT, innermost, trial, with_globals
from ptq.ops import steps
from ptq.ops.matmul import FEW_DTYPES, ops_serve

ROTARY = "apply_rotary_pos_emb"


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the own forward of a module gives, with this rotary embedding where it fits."""
    own = type(module).forward
    fast = None if torch.compiler.is_compiling() else with_fast_rotary(own)
    return (fast or own)(module, *args, **kwargs)


@functools.cache
def with_fast_rotary(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A forward function that differs in its rotary embedding alone; None where it has none that the op computes."""
    inner = innermost(forward)
    own = inner.__globals__.get(ROTARY) if inner is not None and ROTARY in inner.__code__.co_names else None
    if not isinstance(own, types.FunctionType) or not _turns_alike(own, 16):
        return None
    in_part = _turns_alike(own, 10)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == 3:
            served = cos.shape[2] == q.shape[3] or (in_part and cos.shape[2] < q.shape[3] and q.is_cpu)
            if served and cos.shape[1] == q.shape[2] and q.numel() and ops_serve(q, k, cos, sin):
                return torch.ops.ptq.rotary.default(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **kwargs)

    return with_globals(forward, {ROTARY: rotary})


@trial()
def _turns_alike(own: types.FunctionType, turned: int) -> bool:
    required = [p for p in inspect.signature(own).parameters.values() if p.default is p.empty]
    if len(required) != 4:
        return False
    generator = torch.Generator().manual_seed(0)
    for dtype in FEW_DTYPES:
        shapes = ((2, 4, 3, 16), (2, 2, 3, 16), (2, 3, turned), (2, 3, turned))
        q, k, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        try:
            found, wanted = own(q, k, cos, sin), steps.rotary(q, k, cos, sin)
        except MISFIT:
            return False  # it turns whole heads, or wants other tables, such as one angle for two channels
        if len(found) != 2 or not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            return False
    return True
