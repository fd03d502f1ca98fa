"""Linears that are given the same tensor: q, k and v, or gate and up. What is done to it is done once, for few tokens.

Nothing says beforehand which linears belong together. `attach` gives those of one parent module that treat their input
alike a `SharedInput`, which watches them: where several in a row are called with the very same tensor object, the
first of them from then on transforms, quantises and multiplies for all, in one call if the format can
(`LaidOut.linears`), and the others find their product ready. Each product is that of the linear alone, to the bit.

Products wait in an entry of their own input: they are gone when they are taken, when the input is freed or changed in
place, or when the linears are given another. A first linear whose followers do not come is not believed again. Inside
`torch.inference_mode` tensors have no version: there, changing an input in place between two linears goes unnoticed.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, version
from ptq.layers.replaceable import must_be_called, stays_on_cpu, treat_input_alike
from ptq.ops import matmul
from ptq.ops.op_declarations import takes_forward_derivatives, wants_gradient
from ptq.weights.formats import IntegerInput
from ptq.weights.layouts import LaidOut

MOST_TIMES_ALONE = 3
"""A linear that was called alone so many times is not watched any more."""


@dataclass
class _Call:
    """The input that was seen last: the linears that were called with it, and the products that wait for those which
    will be."""

    x: "weakref.ref[Tensor]"
    version: int
    called: list[QuantLinear]
    ready: dict[QuantLinear, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Group:
    """Linears that were given the same tensor, in the order of their calls, with facts about them that are slow to find
    out."""

    members: tuple[QuantLinear, ...]
    signs: tuple[Any, ...]
    together: LaidOut | None

    @classmethod
    def of(cls, members: Sequence[QuantLinear]) -> "_Group":
        format = members[0].format
        one = isinstance(format, LaidOut) and all(linear.format == format for linear in members)
        return cls(tuple(members), _signs_of(members), format if one else None)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _First:
    """What is known of a linear that was the first one to be called with an input. It `leads`, once others were called
    behind it, until these do not come; then it is not believed again. One that nobody follows is let go."""

    leads: _Group | None = None
    """Itself and its followers: it multiplies for all of them."""
    times_alone: int = 0
    is_believed: bool = True


NEW = _First()


class SharedInput:
    """Watches the linears of one parent that treat their input alike, and shares the work between them."""

    def __init__(self) -> None:
        self._last: _Call | None = None
        self._firsts: dict[nn.Module, _First] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # copies and pickles learn anew

    def product(self, linear: QuantLinear, x: Tensor) -> Tensor | None:
        """See `ptq.layers.ready_products.ProductSource`; None: compute it alone."""
        last = self._last
        if last is not None and last.x() is x:
            found = last.ready.pop(linear, None)
            if found is not None and last.version == version(x):
                return found
            last.called.append(linear)
            return None
        if not _is_eligible(x):
            return None
        if last is not None:
            self._learn(last)
        call = _Call(weakref.ref(x, self._forget), version(x), [linear])
        group = self._firsts.get(linear, NEW).leads
        products = None if group is None else _products(group, x)
        if group is not None and products is not None:
            call.ready = dict(zip(group.members, products, strict=True))
        self._last = call
        return call.ready.pop(linear, None)

    def group(self, linears: Sequence[nn.Module]) -> _Group | None:
        """What is known of exactly these linears; None where one of them `must_be_called`."""
        found = self._firsts.get(linears[0], NEW).leads
        if found is None or len(found.members) != len(linears):
            return None
        for linear, member in zip(linears, found.members, strict=True):
            if linear is not member or must_be_called(linear):
                return None
        return found

    def _forget(self, gone: "weakref.ref[Tensor]", is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_over():  # globals may be gone
            return
        last = self._last
        if last is not None and last.x is gone:
            self._last = None
            self._learn(last)

    def _learn(self, last: _Call) -> None:
        """Note how the linears were called with an input that is over."""
        first, *others = last.called
        known = self._firsts.get(first, NEW)
        if last.ready:  # some of those that it leads have not come
            self._firsts[first] = _First(is_believed=False)
        elif known.leads is not None:
            return
        elif others:
            if known.is_believed and _belong_together(last.called):
                self._firsts[first] = _First(_Group.of(last.called))
        elif known.is_believed and known.times_alone + 1 < MOST_TIMES_ALONE:
            self._firsts[first] = _First(times_alone=known.times_alone + 1)
        else:
            first.shared = None


def _belong_together(called: Sequence[QuantLinear]) -> bool:
    """Whether the first of some linears may multiply for all. They were alike when they were attached, but signs may
    have been written to since."""
    alike = all(treat_input_alike(called[0], other) for other in called[1:])
    return alike and len(set(called)) == len(called) and all(map(stays_on_cpu, called))


def products(linears: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
    """The products of one input with several linears, in one call if they are known to share it."""
    shared = vars(linears[0]).get("shared")
    group = None if shared is None else shared.group(linears)
    if group is not None and all(linear.online.output is None for linear in linears) and _is_eligible(x):
        found = _products(group, x)
        if found is not None:
            return found
    return [linear(x) for linear in linears]


def attach(model: nn.Module) -> None:
    """Let the packed linears of a model share their inputs, parent by parent."""
    for parent in model.modules():
        left = [child for child in parent.children() if isinstance(child, QuantLinear) and stays_on_cpu(child)]
        while left:
            first, *others = left
            alike = [first, *(linear for linear in others if treat_input_alike(first, linear))]
            left = [linear for linear in others if linear not in alike]
            if len(alike) > 1:
                shared = SharedInput()
                for linear in alike:
                    linear.shared = shared


def _signs_of(members: Sequence[QuantLinear]) -> tuple[Any, ...]:
    """What tells whether sign vectors have changed since they were compared."""
    if not members[0].online.signs:
        return ()
    held = [linear._parameters[INPUT_SIGNS] for linear in members]
    return tuple((id(signs), version(signs)) for signs in held if signs is not None)


def _is_eligible(x: Tensor) -> bool:
    if not 0 < x.numel() <= matmul.FEW_TOKENS * x.shape[-1] or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    derived = takes_forward_derivatives() or wants_gradient(x)
    return not derived and not torch.is_autocast_enabled("cpu")


def _products(group: _Group, x: Tensor) -> Sequence[Tensor] | None:
    """The product of each linear; None where a weight has left, signs have changed, or a bias wants a gradient."""
    members, together = group.members, group.together
    first = members[0]
    if first.online.signs and _signs_of(members) != group.signs:
        return None
    parts = [linear.parts() for linear in members]
    if any(next(iter(part.values())).is_meta for part in parts):
        return None
    plain = first.online.output is None
    dtype = x.dtype if plain else torch.float32
    biases = [linear._parameters["bias"] if plain else None for linear in members]
    if wants_gradient(*biases):
        return None
    if first.online.activation is not None and first.takes_integers:
        q, scale = first.quantized_input(x)
        found = None if together is None else together.linears_quantized(q, scale, parts, biases, dtype)
        if found is not None:
            return found
        return [
            cast(IntegerInput, linear.format).linear_quantized(q, scale, part, bias, dtype, first.online.input_bits)
            for linear, part, bias in zip(members, parts, biases, strict=True)
        ]
    seen = first.effective_input(x)
    found = None if together is None else together.linears(seen, parts, biases)
    if found is None:
        found = [
            linear.format.linear(seen, part, bias) for linear, part, bias in zip(members, parts, biases, strict=True)
        ]
    return found if found[0].dtype == dtype else [y.to(dtype) for y in found]
