"""Experts as linears of their own, in the place of the fused parameters (`ptq.hf.fused`) in which transformers holds
them.

While a run quantises a block, and in a packed model that is loaded, gate, up and down of every expert, or up and down
where there are no gates, are `nn.Linear`: to the plan, the rewriter, the Hessians, `QuantLinear` and the files they are
linears like any other. No family is named: a module of fused experts is known by its parameters, and tried on random
numbers before another takes its place.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.fast.experts.few_token_experts import FewTokenExperts
from ptq.fast.steps import gated_mlp
from ptq.fast.trials import TRIAL_ERRORS, bare_copy, is_close, trial, tried_once
from ptq.hf.fused import BIASES, GATED, UNGATED, FusedLayout, take_apart
from ptq.layers.changes import ObservedModule
from ptq.layers.shared_input import products
from ptq.ops import expert_ops, steps
from ptq.ops.matmul import ops_serve
from ptq.ops.op_declarations import wants_gradient

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What the files of a checkpoint may call gate, up and down of an expert."""
ACTIVATION, OWN_GATE = "act_fn", "_apply_gate"
"""What fused experts call the activation inside the gate, and a function of both products in the place of that."""
EXPERT_LINEAR = re.compile(r"\.experts\.\d+\.([^.]+)$")


class Experts(ObservedModule):
    """The experts 0, 1, ... of a block, each with linears of the given `names`: y = sum_e p_e down_e(act(gate_e x) *
    up_e x) over the experts e that were chosen for a token x, or with `gated` of both products in the place of
    act(gate) * up; with two names, y = sum_e p_e down_e(act(up_e x)). Sums are taken in the order of the experts.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        count: int,
        hidden: int,
        width: int,
        act_fn: nn.Module | None,
        dtype: torch.dtype,
        gated: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.names = names
        shapes = {name: (hidden, width) for name in names} | {names[-1]: (width, hidden)}
        for number in range(count):
            linears = {name: nn.Linear(*shape, bias=bias, device="meta", dtype=dtype) for name, shape in shapes.items()}
            self.add_module(str(number), nn.ModuleDict(linears))
        self.count, self.act_fn, self.gated = count, act_fn, gated
        self.clamped: tuple[float, ...] | None = None
        """What an op of ours needs to know of the gate, as `ptq.ops.expert_ops.gated` takes it; None: there is none."""
        if gated is not None:
            self.clamped = _clamped(gated)
        elif act_fn is not None and len(names) == len(GATED) + 1 and _is_silu(act_fn):
            self.clamped = ()
        self.few_tokens = FewTokenExperts()

    def forward(
        self,
        hidden_states: Float[Tensor, "t k"],
        top_k_index: Int[Tensor, "t chosen"],
        top_k_weights: Float[Tensor, "t chosen"],
    ) -> Float[Tensor, "t k"]:
        """The weighted sum over the chosen experts of every token."""
        is_known = self.clamped is not None
        found = self.few_tokens(self, hidden_states, top_k_index, top_k_weights) if is_known else None
        if found is not None:
            return found
        if len(hidden_states) == 1:
            return self._of_one(hidden_states, top_k_index, top_k_weights)
        total = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == number)
            y = self._mlp(number, hidden_states[tokens])
            total.index_add_(0, tokens, (y * top_k_weights[tokens, places, None]).to(total.dtype))
        return total

    def _of_one(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Float[Tensor, "1 k"]:
        """The same of one token, without gathering: the products alone take time then."""
        total = torch.zeros_like(x)
        for number, place in sorted((number, place) for place, number in enumerate(top_k_index[0].tolist())):
            total = total + (self._mlp(number, x) * top_k_weights[0, place]).to(total.dtype)
        return total

    def _mlp(self, number: int, x: Float[Tensor, "t k"]) -> Float[Tensor, "t k"]:
        expert = cast(nn.ModuleDict, self._modules[str(number)])
        *gates, up_linear, down_linear = (cast(nn.Module, expert._modules[name]) for name in self.names)
        if not gates:
            assert self.act_fn is not None
            return down_linear(self.act_fn(up_linear(x)))
        [gate_linear] = gates
        if self.clamped is not None and len(x) and ops_serve(x):
            gate, up = products([gate_linear, up_linear], x)
            learns = wants_gradient(gate, up)
            if gate.dtype == up.dtype and not learns:  # under autocast a plain linear gives another dtype
                if self.clamped:
                    return down_linear(expert_ops.gated(gate, up, self.clamped))
                return gated_mlp.down(down_linear, gate, up)
        else:
            gate, up = gate_linear(x), up_linear(x)
        if self.gated is not None:
            return down_linear(self.gated(gate, up))
        assert self.act_fn is not None
        return down_linear(self.act_fn(gate) * up)


class SortedExperts(Experts):
    """The same with the router's weights on the input: y_e = down_e(act(gate_e p_e x) * up_e p_e x). Given are the rows
    p_0 x of all tokens, then p_1 x, ...; those of tokens that have not chosen the expert are zeros, and stay so."""

    def forward(self, hidden_states: Float[Tensor, "rows k"]) -> Float[Tensor, "rows k"]:  # pyright: ignore
        """What the experts make of their rows, one by one."""
        total, rows = torch.zeros_like(hidden_states), hidden_states.any(-1).nonzero()
        if len(rows):
            numbers, ones = rows // (len(total) // self.count), torch.ones_like(rows, dtype=total.dtype)
            total[rows[:, 0]] = super().forward(hidden_states[rows[:, 0]], numbers, ones)
        return total


def names_in(linears: Iterable[str]) -> tuple[str, ...] | None:
    """What these linears of a checkpoint call gate, should there be one, up and down of an expert; None where none
    belongs to an expert."""
    leaves = {found[1] for name in linears if (found := EXPERT_LINEAR.search(name))}
    return next((names for names in NAMES if leaves & set(names)), None)


def separate(model: nn.Module, names: tuple[str, ...] | None, layout: FusedLayout | None = None) -> bool:
    """Put `Experts` without weights, whose linears have these names (the last two, without gates), in the place of all
    fused experts of a model; nothing with None. Whether there were any. Raises InputError for experts that compute
    something else, or whose layout is not the one by which files were read."""
    if names is None:
        return False
    found = [(name, module) for name, module in model.named_modules() if is_fused(module)]
    for name, module in found:
        kind, cls = _kind_of(module), type(module).__name__
        if kind is None:
            raise InputError(f"{name}: {cls} are experts of a kind that ptq does not know")
        if layout not in (None, kind.layout):
            raise InputError(
                f"{name}: {cls} holds its experts as {kind.layout}, but the family's row says {layout}; "
                "see docs/add-a-family.md"
            )
        model.set_submodule(name, _separated(module, names, kind))
    return bool(found)


def is_fused(module: nn.Module) -> bool:
    """Whether these are all experts of a block in one."""
    matrices = _matrices(module)
    parameters, biases = module._parameters, {f"{name}_bias" for name in matrices}
    return (
        parameters.keys() in ({*matrices}, {*matrices} | biases)
        and (_activation(module) is not None or hasattr(module, OWN_GATE))
        and all(
            parameter is not None and parameter.dim() == (2 if name in BIASES else 3)
            for name, parameter in parameters.items()
        )
    )


def _matrices(module: nn.Module) -> tuple[str, str]:
    """What the two fused tensors of experts are called."""
    return GATED if GATED[0] in module._parameters else UNGATED


def _activation(module: nn.Module) -> nn.Module | None:
    """The activation inside the gate of fused experts, of which some hold a function."""
    found = getattr(module, ACTIVATION, None)
    return nn.SiLU() if found is nn.functional.silu else found if isinstance(found, nn.Module) else None


@dataclass(frozen=True)
class _Kind:
    """How fused experts are taken apart."""

    layout: FusedLayout
    own_gate: bool
    """Whether their class has a function of its own in the place of act(gate) * up."""
    experts: type[Experts]
    """What takes their place."""


def _separated(module: nn.Module, names: tuple[str, ...], kind: _Kind) -> Experts:
    matrices = _matrices(module)
    names, down = names if matrices == GATED else names[-2:], module.get_parameter(matrices[1])
    count, hidden, width = (down.transpose(1, 2) if kind.layout.transposed else down).shape
    gated = _OwnGate(bare_copy(module), kind.layout.interleaved) if kind.own_gate else None
    biased = f"{matrices[1]}_bias" in module._parameters
    return kind.experts(names, count, hidden, width, _activation(module), down.dtype, gated, biased)


class _OwnGate:
    """The function of a class of fused experts that makes one of the products of gate and up; no module, as the bare
    one that it belongs to has no parameters to fill."""

    def __init__(self, owner: Any, interleaved: bool) -> None:
        self.owner, self.interleaved = owner, interleaved

    def __call__(self, gate: Float[Tensor, "t n"], up: Float[Tensor, "t n"]) -> Float[Tensor, "t n"]:
        both = torch.stack((gate, up), dim=-1).flatten(-2) if self.interleaved else torch.cat((gate, up), dim=-1)
        return getattr(self.owner, OWN_GATE)(both)


# --- trials ---------------------------------------------------------------------------------------------------------


@tried_once
def _kind_of(module: nn.Module) -> _Kind | None:
    """The first kind of `Experts` that compute what fused ones do; None where there is none."""
    there = {False: _activation(module) is not None, True: hasattr(module, OWN_GATE)}
    gates = [own for own in there if there[own]]
    layouts = [FusedLayout(*flags) for flags in itertools.product((False, True), repeat=2)]
    kinds = (_Kind(*parts) for parts in itertools.product(layouts, gates, (Experts, SortedExperts)))
    return next((kind for kind in kinds if _matches(module, kind)), None)


def _matches(module: nn.Module, kind: _Kind) -> bool:
    generator = torch.Generator().manual_seed(0)
    fused: dict[str, Tensor] = {}
    matrices = _matrices(module)
    for name, outputs, inputs in ((matrices[0], 24 if matrices == GATED else 12, 8), (matrices[1], 8, 12)):
        shape = (3, inputs, outputs) if kind.layout.transposed else (3, outputs, inputs)
        fused[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        if (bias := f"{name}_bias") in module._parameters:
            fused[bias] = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    alone = bare_copy(module)
    alone.num_experts, alone.hidden_size = 3, 8
    alone.act_fn = _activation(module)
    for name, tensor in fused.items():
        alone.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    ours = _separated(alone, NAMES[0], kind)
    ours.load_state_dict(take_apart(fused, kind.layout, ours.names), assign=True)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 1], [0, 2]])
    shares = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    given = x, chosen, shares
    if kind.experts is SortedExperts:  # the weights of all experts are zeros where a token has not chosen them
        weights = torch.zeros(5, 3, dtype=torch.float64).scatter_(1, chosen, shares)
        given = ((weights.T[..., None] * x).flatten(0, 1),)
    try:
        if ours.gated is not None and not _keeps_channels_apart(ours.gated):
            return False
        found = inspect.unwrap(type(module).forward)(alone, *given)
        wanted = ours(*given)
    except TRIAL_ERRORS:
        return False
    return is_close(found, wanted, 1e-9, 1e-8)


def _keeps_channels_apart(gated: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a channel of what is gated comes of the same one of gate and up, and of no other: wherever they lie in
    the fused product, expert by expert the sums are the same."""
    gate, up = 0.1 * torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = gated(gate, up)
    gate[0, 3] += 0.1
    up[0, 3] += 0.1
    return (gated(gate, up) != before).nonzero().tolist() == [[0, 3]]


@trial()
def _clamped(gated: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float] | None:
    """Alpha and limit, where a gate of a class is what `ptq.ops.steps.clamped_swiglu` computes, to the bit."""
    numbers = tuple(getattr(getattr(gated, "owner", None), name, None) for name in ("alpha", "limit"))
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    alpha, limit = cast(tuple[float, float], numbers)
    gate, up = 2 * limit * torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        given = gate.to(dtype), up.to(dtype)
        if not torch.equal(gated(*given), steps.clamped_swiglu(*given, alpha, limit)):
            return None
    return alpha, limit


@tried_once
def _is_silu(act_fn: nn.Module) -> bool:
    """Whether a gate is what `ptq.ops.steps.silu_mul` computes, to the bit."""
    gate, up = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    return torch.equal(act_fn(gate) * up, steps.silu_mul(gate, up))
