"""What modules with a router and experts are made of, and how their routers choose, found out by trial.

No family is named: a module gets random weights and tokens, and stand-ins for what is not its router. What its router
gives must be what `ptq.ops.moe_ops` gives in one way, to the bit.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.steps import gated_mlp
from ptq.fast.trials import PLAIN, TRIAL_ERRORS, bare_copy, tried_once
from ptq.fast.watched import InPlace
from ptq.ops.expert_ops import rows_of
from ptq.ops.matmul import FEW_DTYPES, few_tokens_linear
from ptq.ops.moe_ops import Choosing, RouterWeights, chosen_of, logits_of

TRIALS = (16, 16, 13, 7, 3)
"""Tokens of each: vectors of numbers, and such as fill none, of which torch takes a sigmoid in another way."""
GROUPS, KEPT_GROUPS = ("n_group", "num_group"), "topk_group"
"""What routers call the number of groups of experts, and that of groups from which a token may choose."""

NOTHING, SHARES, MORE = "nothing", "shares", "more"
"""What a module gives besides what its experts make of tokens: maybe the shares of the chosen ones, or something else
that a decoder layer leaves out, such as the router's logits."""
SMALL = 1e-6
"""Numbers of a router below this may be the least that its sums are taken for."""


class MoeParts(NamedTuple):
    """What a module is made of."""

    router: nn.Module
    experts: Any
    shared: nn.Module | None
    """A gated MLP that every token goes through."""
    shared_gate: nn.Linear | None
    """Of what that gives."""


class Found(NamedTuple):
    """How a router chooses, and where its weights are."""

    how: Choosing
    bias: str | None
    """The path of a parameter or buffer."""
    correction: str | None
    gives: str
    """What the module gives besides: `NOTHING`, `SHARES` or `MORE`."""

    def essence(self) -> Any:
        """What must not be left open. Where shares come out alike in several precisions or orders, one is as good as
        another; a sigmoid changes no order."""
        late = self.how.late and (not self.how.sigmoid or self.correction is not None)
        return self.bias, self.correction, self.how._replace(single=True, rounded=True, sorted=True, late=late)


def parts_of(mlp: nn.Module) -> MoeParts | None:
    """The parts of a module; None for one that is something else."""
    parts = [part for part in mlp._modules.values() if part is not None]
    experts = [part for part in parts if hasattr(part, "few_tokens")]
    if len(experts) != 1:
        return None
    shared = [part for part in parts if gated_mlp.gate_of(part) == gated_mlp.SILU]
    gates = [part for part in parts if isinstance(part, nn.Linear) and part.out_features == 1 and part.bias is None]
    routers = [part for part in parts if part not in (*experts, *shared, *gates)]
    if len(routers) != 1 or len(shared) > 1 or len(gates) > len(shared):
        return None
    found = MoeParts(routers[0], experts[0], shared[0] if shared else None, gates[0] if gates else None)
    return None if _tensors(mlp, found) is None else found


class _Tensors(NamedTuple):
    """Where the tensors of a router are, by path from the module that it belongs to."""

    weight: str
    vectors: list[str]
    """Of one number for each expert."""


def _tensors(mlp: nn.Module, parts: MoeParts) -> _Tensors | None:
    """None where there are others."""
    [prefix] = (name for name, part in mlp._modules.items() if part is parts.router)
    held = {f"{prefix}.{name}": x for name, x in _named(parts.router)}
    held |= {name: x for name, x in _named(mlp) if "." not in name}
    count = parts.experts.count
    weights = [name for name, x in held.items() if x.dim() == 2 and x.shape[0] == count > 1]
    vectors = [name for name, x in held.items() if x.numel() == count and name not in weights]
    fits = len(weights) == 1 and len(vectors) <= 2 and len(held) == 1 + len(vectors)
    return _Tensors(weights[0], vectors) if fits else None


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def weights_of(mlp: nn.Module, found: Found) -> RouterWeights:
    """The tensors of a router that `router_of` has found, and the gate of what stands beside its experts."""
    parts = parts_of(mlp)
    tensors = None if parts is None else _tensors(mlp, parts)
    assert parts is not None and tensors is not None
    bias, correction = (None if path is None else _tensor(mlp, path) for path in (found.bias, found.correction))
    gate = None if parts.shared_gate is None else parts.shared_gate.weight
    return RouterWeights(_tensor(mlp, tensors.weight), bias, correction, gate)


def router_of(mlp: nn.Module) -> Found | None:
    """How the router of a module that `parts_of` takes apart chooses; None for one that does it in another way."""
    parts = parts_of(mlp)
    tensors = None if parts is None else _tensors(mlp, parts)
    if parts is None or tensors is None:
        return None
    shapes = tuple(tuple(_tensor(mlp, path).shape) for path in (tensors.weight, *tensors.vectors))
    ours = tuple(isinstance(vars(part).get("forward"), InPlace) for part in parts.router.modules())
    return _tried(mlp, tensors.weight, tuple(tensors.vectors), shapes, ours)


# --- the trial ------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A trial."""

    x: Float[Tensor, "t k"]
    weights: RouterWeights
    vectors: dict[str, Tensor]
    chosen: Any
    """What the experts were given for x."""
    gives: str


class _Experts(nn.Module):
    """Remembers what tokens have chosen."""

    def forward(self, x: Float[Tensor, "t k"], index: Tensor, shares: Tensor) -> Tensor:
        self.seen = x, rows_of(index.tolist(), shares.tolist()), shares
        return x.sin()


class _Shared(nn.Module):
    """Stands for an MLP that every token goes through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@tried_once
def _tried(mlp: nn.Module, weight: str, vectors: tuple[str, ...], *others: Any) -> Found | None:
    # `others` tell modules apart: `tried_once` remembers what it found by them
    parts = cast(MoeParts, parts_of(mlp))
    tensors, kinds = _Tensors(weight, list(vectors)), itertools.product(enumerate(TRIALS), FEW_DTYPES)
    seen = [_seen(mlp, parts, tensors, seed, tokens, dtype) for (seed, tokens), dtype in kinds]
    trials = [trial for trial in seen if trial is not None]
    if len(trials) < len(seen):
        return None
    fit = [found for found in _all_ways(mlp, parts, vectors, trials[0]) if all(_fits(found, one) for one in trials)]
    return fit[0] if len({found.essence() for found in fit}) == 1 else None


def _all_ways(mlp: nn.Module, parts: MoeParts, vectors: tuple[str, ...], seen: _Seen) -> Iterator[Found]:
    """Every way in which a router with these vectors may choose; the first that fits is taken."""
    chosen = len(seen.chosen[1][0]) // len(seen.x)
    values = {**vars(mlp), **vars(parts.router)}
    numbers = [x for x in values.values() if type(x) is float]
    grouped = next((values[name] for name in GROUPS if name in values), 1) or 1
    kept = values.get(KEPT_GROUPS, 1) if grouped > 1 else 1
    ways = dict(
        wide=(True, False),
        single=(True, False),
        sigmoid=(True, False),
        late=(False, True),
        sorted=(True, False),
        rounded=(True, False),
        normed=(None, 0.0, 1e-20, 1e-6),
        least=(0.0, *{x for x in numbers if 0 < x < SMALL}),
        scale=tuple({1.0, *numbers}),
        groups=tuple({1, grouped}),
    )
    places = [pair for pair in {*itertools.permutations((*vectors, None, None), 2)} if {*vectors} <= {*pair}]
    for (bias, correction), *way in itertools.product(places, *cast(Any, ways).values()):
        how = Choosing(chosen, **cast(Any, dict(zip(ways, way, strict=True))))
        how = how._replace(kept_groups=kept if how.groups > 1 else 1)
        if _is_distinct(how):
            yield Found(how, bias, correction, seen.gives)


def _is_distinct(how: Choosing) -> bool:
    """False for a way that is always another one, too."""
    return (
        (how.single or not (how.wide or how.rounded))
        and (how.sorted or how.normed is not None)
        and (how.sigmoid or not how.normed)
        and (not how.late or how.sigmoid or how.normed is None)
        and (how.normed == 0 or not how.least)
    )


def _fits(found: Found, seen: _Seen) -> bool:
    bias, correction = (None if path is None else seen.vectors[path] for path in (found.bias, found.correction))
    weights = seen.weights._replace(bias=bias, correction=correction)
    try:
        index, shares = chosen_of(logits_of(seen.x, weights, found.how.wide), correction, found.how, seen.x.dtype)
    except TRIAL_ERRORS:
        return False
    return rows_of(index.tolist(), shares.tolist()) == seen.chosen


def _seen(
    mlp: nn.Module, parts: MoeParts, tensors: _Tensors, seed: int, tokens: int, dtype: torch.dtype
) -> _Seen | None:
    """What the experts of a module are given for random tokens; None where that is not those, or where the module makes
    something else of what they give."""
    generator = torch.Generator().manual_seed(seed)
    weight = _tensor(mlp, tensors.weight)
    drawn = {path: 0.3 * torch.randn(_tensor(mlp, path).shape, generator=generator) for path in tensors.vectors}
    w, x = (torch.randn(size, generator=generator) for size in (weight.shape, (1, tokens, weight.shape[1])))
    w /= weight.shape[1] ** 0.5  # for shares that do not come to 1 before they are divided by their sum
    x[..., 0] = 0
    x[:, :2, 0], w[:, 0] = 1, -60  # for shares that almost vanish
    if tokens == TRIALS[-1]:  # for some that vanish beside one which is corrected away
        drawn = {path: 10 * vector for path, vector in drawn.items()}
        for vector in drawn.values():
            w[:, 0] = 0
            w[vector.flatten().argmin(), 0] = 60
    kept = {path: v.to(dtype) if _tensor(mlp, path).dtype == weight.dtype else v for path, v in drawn.items()}
    x, gate = x.to(dtype), torch.randn(1, weight.shape[1], generator=generator).div_(8).to(dtype)
    given = {tensors.weight: w.to(dtype), **kept}
    experts, shared = _Experts(), _Shared()
    try:
        alone = _alone(mlp, parts, given, gate, experts, shared)
        y = type(mlp).forward(alone.eval(), x)
        rows, chosen, shares = experts.seen
    except TRIAL_ERRORS:
        return None
    wanted = rows.sin()
    if parts.shared is not None:
        more = rows.tanh()
        wanted = wanted + (more if parts.shared_gate is None else few_tokens_linear(rows, gate).sigmoid() * more)
    first, *others = y if isinstance(y, tuple) else (y,)
    if not (isinstance(first, Tensor) and torch.equal(first, wanted.view_as(x)) and torch.equal(rows, x[0])):
        return None
    gives = NOTHING if first is y else SHARES if len(others) == 1 and others[0] is shares else MORE
    return _Seen(x[0], RouterWeights(given[tensors.weight]), kept, chosen, gives)


def _alone(
    mlp: nn.Module, parts: MoeParts, given: dict[str, Tensor], gate: Tensor, experts: nn.Module, shared: nn.Module
) -> Any:
    """A module with other tensors, and stand-ins."""

    def copy_of(module: nn.Module, prefix: str) -> Any:
        alone = bare_copy(module)
        for name in [name for name, x in vars(alone).items() if name[0] != "_" and not isinstance(x, PLAIN)]:
            delattr(alone, name)  # nobody would see a config change
        for name in module._parameters:
            x = given.get(prefix + name)
            alone.register_parameter(name, None if x is None else nn.Parameter(x, requires_grad=False))
        for name in module._buffers:
            alone.register_buffer(name, given.get(prefix + name))
        forward = vars(module).get("forward")
        if isinstance(forward, InPlace):  # the product of a router is ours
            alone.forward = InPlace(forward.func, alone, *forward.args[1:])
        return alone

    alone = copy_of(mlp, "")
    for name, part in mlp.named_children():
        if part is parts.router:
            made = copy_of(part, f"{name}.")
            for inner, module in part.named_modules():
                if inner:
                    made.set_submodule(inner, copy_of(module, f"{name}.{inner}."))
        elif part is parts.shared_gate:
            made = copy_of(part, f"{name}.")
            made.weight = nn.Parameter(gate, requires_grad=False)
        else:
            made = experts if part is parts.experts else shared if part is parts.shared else None
        setattr(alone, name, made)
    return alone
