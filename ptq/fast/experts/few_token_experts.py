"""The chosen experts of a block in one call, for few tokens on the CPU.

One by one, eight experts are some seventy ops, which take longer than their weights take to be read. The call needs a
format that computes it, experts that treat their inputs alike, and nobody who listens in (hooks); otherwise
`ptq.hf.experts` goes on one by one. The numbers are the same to the bit.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ptq.fast.steps import gated_mlp
from ptq.layers import changes
from ptq.layers.linear import Online, QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS
from ptq.layers.replaceable import all_are_heard, must_be_called, stays_on_cpu
from ptq.ops.expert_ops import ExpertRows, ExpertSteps, rows_of
from ptq.ops.input_steps import Treatment
from ptq.ops.matmul import cpu_ops_serve
from ptq.ops.op_declarations import wants_gradient
from ptq.weights.formats import Listed
from ptq.weights.layouts import LaidOut

CPU = torch.device("cpu")
ROLES = range(3)
"""Gate, up, down."""
MOST_TOKENS = 64
"""For more, one by one is as fast: each expert then has many rows."""


@dataclass(frozen=True)
class _Kind:
    """What experts must have in common."""

    format: LaidOut
    gate: Online
    """Of gates and ups."""
    down: Online
    has_biases: bool
    clamped: tuple[float, ...]
    """Alpha and limit of `ptq::clamped_swiglu`; empty: silu(gate) * up."""
    width: int
    """Rows of a gate."""
    names: tuple[str, ...]
    """What the parameters of each of its linears are called."""
    su: bytes = b""
    """The signs of the input of gates and ups, where there are any."""

    @functools.cached_property
    def treatments(self) -> tuple[Treatment, Treatment]:
        """What is done to the input of gate and up, and to that of down, but for signs."""
        return self.gate.treatment(None, CPU), self.down.treatment(None, CPU)

    def compute(
        self, x: Float[Tensor, "t k"], rows: ExpertRows, experts: Sequence["_Expert"]
    ) -> Float[Tensor, "t k"] | None:
        """What the experts make of x. None where a bias wants a gradient."""
        weights, steps = self._weights(experts)
        if torch.is_grad_enabled() and any(bias.requires_grad for bias in steps.biases):
            return None
        signs = None
        if self.gate.signs:
            gates, ups, downs = ([expert.linears[role] for expert in experts] for role in ROLES)
            su = [linear.signs(INPUT_SIGNS) for linear in (gates[0], *downs)]
            sv = [linear.signs(OUTPUT_SIGNS) for linear in (*gates, *ups, *downs)]
            signs = cast(list[Tensor], su), cast(list[Tensor], sv)
        return self.format.experts(x, rows, weights, signs, self.width, steps)

    def handle_of(self, experts: Sequence["_Expert"]) -> Tensor | None:
        """What stands for all experts; None where the format has no such op."""
        weights, steps = self._weights(experts)
        signs = None
        if self.gate.signs:
            su = [experts[0].held[INPUT_SIGNS][0], *(expert.held[INPUT_SIGNS][2] for expert in experts)]
            signs = su, _all_of(experts, OUTPUT_SIGNS)
        return self.format.all_experts(weights, signs, self.width, steps)

    def _weights(self, experts: Sequence["_Expert"]) -> tuple[Listed, ExpertSteps]:
        """Weights and steps of experts, as their format takes them."""
        first = experts[0].linears[0]
        weights = {part: _all_of(experts, name) for part, name in first.part_names.items()}
        biases = _all_of(experts, "bias") if self.has_biases else []
        return weights, ExpertSteps(*self.treatments, biases, self.clamped)


@dataclass(eq=False)
class HeldExperts:
    """All experts of a block, as an op holds them."""

    handles: list[Tensor]
    """Stand for them (`ptq.ops.expert_ops`): for all, or for all but one of another kind."""
    has_biases: bool
    """Which may learn."""
    ended: bool = False
    """Whether one of them has changed since."""


@dataclass(frozen=True)
class _Expert:
    """An expert as it was found."""

    linears: tuple[QuantLinear, ...]
    kind: _Kind
    """The same object for all experts that are alike."""
    held: dict[str, tuple[Any, ...]]
    """The parameters of its linears, by name: of gate, up and down."""


def _all_of(experts: Sequence[_Expert], name: str) -> list[Any]:
    """A parameter of all gates, all ups, all downs."""
    return [expert.held[name][role] for role in ROLES for expert in experts]


class FewTokenExperts:
    """What is known of the experts of a block."""

    def __init__(self) -> None:
        self._known: dict[int, _Expert] = {}
        """Emptied when one of the modules in question changes."""
        self._kinds: dict[_Kind, _Kind] = {}
        self._holders = weakref.WeakSet[HeldExperts]()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # copies and pickles find out anew

    def __call__(
        self,
        experts: Any,
        x: Float[Tensor, "t k"],
        top_k_index: Int[Tensor, "t chosen"],
        top_k_weights: Float[Tensor, "t chosen"],
    ) -> Float[Tensor, "t k"] | None:
        """What `ptq.hf.experts.Experts` give for few tokens; None where they must go on one by one."""
        few = 0 < len(x) <= MOST_TOKENS and cpu_ops_serve(x)
        if not few or wants_gradient(top_k_weights):
            return None
        if all_are_heard():
            return None
        chosen, weighed = top_k_index.tolist(), top_k_weights.tolist()
        if not top_k_index.numel() or any(len(set(row)) < len(row) for row in chosen):
            return None  # nothing to do; or somebody has chosen an expert twice
        numbers, rows = rows_of(chosen, weighed)
        known = [self._known.get(number) or self._find(experts, number) for number in numbers]
        first = known[0]
        if first is None or any(expert is None or expert.kind is not first.kind for expert in known):
            return None
        return first.kind.compute(x, rows, cast(list[_Expert], known))

    def handles_of(self, experts: Any, shared: nn.Module | None) -> HeldExperts | None:
        """All experts of a block, and behind them a gated MLP that every token goes through, as an op holds them; None
        where these are not alike, or where some are gone."""
        if experts.clamped is None:
            return None
        known = [self._known.get(number) or self._find(experts, number) for number in range(experts.count)]
        first, lists = known[0], [known]
        if shared is not None:
            own = self._found([shared], gated_mlp.linears_of(shared), ())
            if own is not None and first is not None and own.kind is first.kind:
                known.append(own)
            else:
                lists.append([own])
        handles = [_handle_of(each) for each in lists]
        held = [handle for handle in handles if handle is not None]
        if first is None or len(held) < len(handles):
            return None
        self._holders.add(made := HeldExperts(held, any(each[0].kind.has_biases for each in lists if each[0])))
        return made

    def forget(self) -> None:
        """What is called when a module in question has changed."""
        self._known.clear()
        for held in self._holders:
            held.ended = True
        self._holders.clear()

    def _find(self, experts: Any, number: int) -> _Expert | None:
        module = experts._modules.get(str(number))
        linears: list[Any] = [] if module is None else [module._modules.get(name) for name in experts.names]
        if module is None or None in linears:
            return None
        found = self._found([experts, module], linears, experts.clamped)
        if found is not None:
            self._known[number] = found
        return found

    def _found(self, owners: list[Any], linears: list[Any], clamped: tuple[float, ...]) -> _Expert | None:
        """An expert of these linears. `owners`: what else tells of changes."""
        for each in (*owners, *linears):
            changes.observe(each, self.forget)
        kind = _kind(linears, clamped)
        if kind is None:
            return None
        held = {name: tuple(linear._parameters[name] for linear in linears) for name in kind.names}
        return _Expert(tuple(linears), self._kinds.setdefault(kind, kind), held)


def _handle_of(experts: list[_Expert | None]) -> Tensor | None:
    """What stands for experts; None where they are not alike, or some are gone."""
    alike = [expert for expert in experts if expert is not None and experts[0] and expert.kind is experts[0].kind]
    return alike[0].kind.handle_of(alike) if alike and len(alike) == len(experts) else None


def _kind(linears: Sequence[Any], clamped: tuple[float, ...]) -> _Kind | None:
    """None where there is no one call for this expert."""
    if len(linears) != len(ROLES) or not all(
        type(linear) is QuantLinear and stays_on_cpu(linear) and not must_be_called(linear) for linear in linears
    ):
        return None
    gate, up, down = linears
    format, first, second = gate.format, gate.online, down.online
    if up.format != format or down.format != format or up.online != first:
        return None
    has_bias, *others = (linear._parameters["bias"] is not None for linear in linears)
    if others != [has_bias, has_bias]:
        return None
    names, *other_names = (tuple(linear._parameters) for linear in linears)
    if not isinstance(format, LaidOut) or other_names != [names, names]:
        return None
    alike = format, first, second, has_bias, clamped, gate.out_features, names
    if first.signs and second.signs:
        if (first.input, first.output) != (second.output, second.input):
            return None
        su = [linear._parameters[INPUT_SIGNS] for linear in (gate, up)]
        return _Kind(*alike, su[0].numpy().tobytes()) if torch.equal(*su) else None
    if first.input is not None or any(online.signs or online.output is not None for online in (first, second)):
        return None
    return _Kind(*alike)
