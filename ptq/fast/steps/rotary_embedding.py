"""The rotary embedding of an attention module in one op.

No family is named: where a module's forward calls `apply_rotary_pos_emb`, that function is tried on random numbers, and
where `ptq::rotary` or `ptq::rotary_pairs` gives the same bits, the forward runs with another function under that name
among its globals."""

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptq.fast.trials import TRIAL_ERRORS, innermost, trial, with_globals
from ptq.ops import steps
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve, ops_serve

ROTARY = "apply_rotary_pos_emb"


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the own forward of a module gives, with this rotary embedding where it fits."""
    own = type(module).forward
    fast = None if torch.compiler.is_compiling() else with_fast_rotary(own)
    return (fast or own)(module, *args, **kwargs)


class Pairs(NamedTuple):
    """How a function that turns neighbours is given its tables."""

    spread: bool
    """Whether the first half of the numbers of cos and sin are those of the pairs; else each channel has its own."""
    wide: bool
    """Whether products are float32, and only what comes out is rounded."""

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as `ptq::rotary_pairs` takes them."""
        if self.spread:
            cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
        return (cos.float(), sin.float()) if self.wide else (cos, sin)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What such a function gives."""
        return steps.rotary_pairs(q, k, *self.tables(cos, sin))


@functools.cache
def with_fast_rotary(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A forward function that differs in its rotary embedding alone; None where it has none that an op computes."""
    inner = innermost(forward)
    own = inner.__globals__.get(ROTARY) if inner is not None and ROTARY in inner.__code__.co_names else None
    if not isinstance(own, types.FunctionType) or len(_required(own)) != 4:
        return None
    if _rotates_alike(own, 16, steps.rotary):
        fast, in_part = _of_halves, _rotates_alike(own, 10, steps.rotary)
    else:
        kinds = [Pairs(*kind) for kind in itertools.product((False, True), repeat=2)]
        pairs = next((kind for kind in kinds if _rotates_alike(own, 16, kind.rotate, kind.wide)), None)
        if pairs is None:
            return None
        fast, in_part = functools.partial(_of_pairs, pairs), _rotates_alike(own, 10, pairs.rotate, pairs.wide)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and q.dim() == k.dim() == 4 and _are_theirs(q, k, cos):
            served = cos.shape[2] == q.shape[3] or (in_part and cos.shape[2] < q.shape[3] and q.is_cpu)
            if served and (rotated := fast(q, k, cos, sin)) is not None:
                return rotated
        return own(q, k, cos, sin, *args, **kwargs)

    return with_globals(forward, {ROTARY: rotary})


def _are_theirs(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Whether a table is for the tokens of queries and keys, of which there are as many: nothing is broadcast."""
    same = q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and q.numel() > 0
    return same and cos.dim() == 3 and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2]


def _of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    return torch.ops.ptq.rotary.default(q, k, cos, sin) if ops_serve(q, k, cos, sin) else None


def _of_pairs(kind: Pairs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    alike = cos.dtype == q.dtype or (kind.wide and cos.dtype == torch.float32)
    if not alike or not cpu_ops_serve(q, k) or not cpu_ops_serve(cos, sin):
        return None
    return torch.ops.ptq.rotary_pairs.default(q, k, *kind.tables(cos, sin))


def _required(own: types.FunctionType) -> list[str]:
    return [name for name, p in inspect.signature(own).parameters.items() if p.default is p.empty]


@trial()
def _rotates_alike(own: types.FunctionType, rotary_dim: int, rotate: Callable[..., Any], wide: bool = False) -> bool:
    generator = torch.Generator().manual_seed(0)
    same = [(dtype, dtype) for dtype in FEW_DTYPES]
    for dtype, table in [*same, (torch.bfloat16, torch.float32)] if wide else same:
        shapes = ((2, 4, 3, 16), (2, 2, 3, 16), (2, 3, rotary_dim), (2, 3, rotary_dim))
        q, k, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
        given = q.to(dtype), k.to(dtype), cos.to(table), sin.to(table)
        try:
            found, wanted = own(*given), rotate(*given)
        except TRIAL_ERRORS:
            return False  # it turns whole heads, or wants other tables, such as one angle for two channels
        if len(found) != 2 or not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            return False
    return True
