"""A router and its experts in one op, for few tokens on the CPU: as a part of a decoder layer (`ptq.fast.cpu_layer`).

No family is named. A module that is nothing but a router and `ptq.hf.experts.Experts` is tried on random numbers: its
router must be one of `ptq.ops.expert_ops`, to the bit.
"""

import itertools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ptq.fast import fast_steps
from ptq.fast.fast_experts import FewTokens, HeldMoe
from ptq.fast.trials import MISFIT, hollow, tried_once
from ptq.fast.watched import InPlace
from ptq.layers.linear import must_be_called
from ptq.ops.expert_ops import choice, rows_of
from ptq.ops.matmul import FEW_DTYPES

TOKENS = 5
"""Of a trial."""


class Router(NamedTuple):
    """How tokens choose, as `ptq.ops.expert_ops` has it."""

    chosen: int
    normed: bool
    rounded: bool


class _Parts(NamedTuple):
    """What a module is made of."""

    router: nn.Module
    experts: Any


def held(mlp: nn.Module) -> HeldMoe | None:
    """A router and its experts as an op holds them; None where none does."""
    parts = _parts(mlp)
    router = None if parts is None else _router_of(mlp)
    if parts is None or router is None or must_be_called(parts.experts):
        return None
    if mlp.training or parts.router.training or "forward" in vars(mlp):
        return None
    if not type(parts.experts).__module__.startswith("ptq."):
        return None  # somebody's own class
    few, forward = parts.experts.few_tokens, vars(parts.router).get("forward")
    if not isinstance(forward, InPlace) or forward.func is not fast_steps.router_forward:
        return None  # last bits of its product are others
    return few.held(parts.experts, (mlp, parts.router), router) if isinstance(few, FewTokens) else None


def _parts(mlp: nn.Module) -> _Parts | None:
    """A router, which is not tried yet, and its experts; None for a module that is anything else."""
    experts = [part for part in mlp._modules.values() if hasattr(part, "few_tokens")]
    others = [part for part in mlp._modules.values() if part is not None and part not in experts]
    if len(experts) != 1 or len(others) != 1 or mlp._parameters or mlp._buffers:
        return None
    [router] = others
    weight = router._parameters.get("weight")
    if router._modules or router._buffers or weight is None or len(router._parameters) != 1 or weight.dim() != 2:
        return None
    return _Parts(router, experts[0])


class _StandIn(nn.Module):
    """Remembers what tokens have chosen."""

    def forward(self, x: Float[Tensor, "t k"], index: Int[Tensor, "t chosen"], shares: Tensor) -> Tensor:
        self.seen = x, *rows_of(index.tolist(), shares.tolist())
        return x.sin()


@tried_once
def _router_of(mlp: nn.Module) -> Router | None:
    """The router of a module that `_parts` takes apart; None for another."""
    parts = _parts(mlp)
    assert parts is not None
    generator = torch.Generator().manual_seed(0)
    shape = parts.router.get_parameter("weight").shape
    weight, x = (torch.randn(size, generator=generator) for size in (shape, (1, TOKENS, shape[1])))
    weight /= shape[1] ** 0.5  # for shares that do not come to 1 before they are divided by their sum
    given = [(weight.to(dtype), x.to(dtype)) for dtype in FEW_DTYPES]
    seen = [_seen(mlp, parts, *each) for each in given]
    if None in seen:
        return None
    chosen = len(seen[0][1][0]) // TOKENS
    kinds = (Router(chosen, *flags) for flags in itertools.product((True, False), repeat=2))
    fit = [
        kind
        for kind in kinds
        if all(choice(x[0], weight, *kind) == one for (weight, x), one in zip(given, seen, strict=True))
    ]
    return fit[0] if len(fit) == 1 else None  # one expert alone has a share of 1 in several ways


def _seen(mlp: nn.Module, parts: _Parts, weight: Tensor, x: Float[Tensor, "b t k"]) -> Any:
    """What the experts of a module are given for x; None where that is not x itself, or where it gives something else
    than they do."""
    alone, router, experts = hollow(mlp), hollow(parts.router), _StandIn()
    router.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    router.forward = InPlace(fast_steps.router_forward, router)  # whose product is ours
    for name, part in mlp._modules.items():
        setattr(alone, name, router if part is parts.router else experts)
    try:
        found = type(mlp).forward(alone.eval(), x)
        given, *rows = experts.seen
    except MISFIT:
        return None
    found = found[0] if isinstance(found, tuple) else found
    rows_alike = torch.equal(given, x.flatten(0, 1)) and isinstance(found, Tensor)
    return tuple(rows) if rows_alike and torch.equal(found, x.sin()) else None
