"""Where modules of a model are tried on random numbers, before others take their place, and how functions get them."""

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def trial() -> Iterator[None]:
    """Without gradients, in float32 and on the CPU, whatever the caller's default dtype and device are: a model that is
    being loaded is made on meta."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.no_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def innermost(function: Any) -> types.FunctionType | None:
    """The function that decorators are around; None where it is none, or has variables of its own beside globals."""
    inner = inspect.unwrap(function)
    return inner if isinstance(inner, types.FunctionType) and not inner.__closure__ else None


def with_globals(function: types.FunctionType, others: dict[str, Any]) -> types.FunctionType:
    """A function that differs in some global names alone, inside of the same decorators."""
    inner, names, closure = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if inner is None:
        names = {**names, **others}
    else:
        changed = types.CellType(with_globals(inner, others))
        closure = tuple(changed if cell.cell_contents is inner else cell for cell in closure or ())
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def numbers_of(module: nn.Module) -> tuple[Any, ...]:
    """The class of a module and all plain values that it holds: modules that agree in these compute the same."""
    held = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "layer_idx"}
    return type(module), *((name, x) for name, x in sorted(held.items()) if isinstance(x, int | float | str | None))


def hollow(module: nn.Module) -> Any:
    """A module of the same class with all plain values, but without parameters, modules and a forward of its own."""
    alone = type(module).__new__(type(module))
    nn.Module.__init__(alone)
    alone.__dict__.update({name: value for name, value in vars(module).items() if name[0] != "_" and name != "forward"})
    return alone
