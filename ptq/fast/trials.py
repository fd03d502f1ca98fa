"""Checks on random inputs that a replacement gives a module's numbers, and functions with other globals."""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ptq.ops.defaults import own_defaults

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = int | float | str | None | types.FunctionType | types.BuiltinFunctionType
TRIAL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a module's own code raises where it wants something else than a trial gives it."""
HIDDEN = 24
"""Width of what trials of mixers give a module, whose linears are as small."""
OF_ONE = ("layer_idx", "forward")
"""What modules of one kind hold each for itself: its place, and what took the place of its own code."""


@contextmanager
def trial() -> Iterator[None]:
    """Without gradients, and whatever the caller's defaults are."""
    with torch.no_grad(), own_defaults():
        yield


def tried_once(find: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """`find(module, *others)` as a trial, made once for all modules of one kind and the same other arguments."""
    known: dict[Any, R] = {}

    @functools.wraps(find)
    def remembered(module: nn.Module, *others: P.args, **named: P.kwargs) -> R:
        key = _key_of(module), *others, *named.items()
        if key not in known:
            with trial():
                known[key] = find(module, *others, **named)
        return known[key]

    vars(remembered)["cache_clear"] = known.clear
    return remembered


def is_close(found: object, wanted: object, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether two results of a trial are tensors of one shape and dtype, whose numbers are the same up to rounding."""
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return False
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and torch.allclose(found, wanted, rtol=rtol, atol=atol)


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


def _key_of(module: nn.Module) -> tuple[Any, ...]:
    """Modules that agree in this compute the same, but for the numbers of their parameters: class, its forward, plain
    values, names of parameters, what the config says; and the same of the modules inside."""
    inside = ((name, *_held(part)) for name, part in module._modules.items() if part is not None)
    parameters = (name for name, parameter in module._parameters.items() if parameter is not None)
    return *_held(module), frozenset(parameters), *inside


def _held(module: nn.Module) -> tuple[Any, ...]:
    held = ((name, x) for name, x in sorted(vars(module).items()) if name[0] != "_" and name not in OF_ONE)
    config = vars(module).get("config")
    said = () if config is None else ((name, repr(x)) for name, x in sorted(vars(config).items()) if name[0] != "_")
    return type(module), type(module).forward, *((name, x) for name, x in held if isinstance(x, PLAIN)), *said


def bare_copy(module: nn.Module) -> Any:
    """A module of the same class with all plain values, but without parameters, modules and a forward of its own."""
    alone = type(module).__new__(type(module))
    nn.Module.__init__(alone)
    alone.__dict__.update({name: value for name, value in vars(module).items() if name[0] != "_" and name != "forward"})
    return alone


def random_linear(n: int, k: int, generator: torch.Generator) -> nn.Module:
    """A linear of random weights, whose outputs are as large as its inputs. The caller's random numbers are left
    alone."""
    made = nn.utils.skip_init(nn.Linear, k, n, bias=False)
    made.get_parameter("weight").copy_(torch.randn(n, k, generator=generator) / k**0.5)
    return made


def random_norm(norm: nn.Module, generator: torch.Generator) -> nn.Module:
    """A norm of the same kind with random gains, on the CPU in float32."""
    made = copy.deepcopy(norm).to_empty(device="cpu").float()
    for gain in made.parameters():
        gain.copy_(torch.rand(gain.shape, generator=generator) + 0.5)
    return made


def mask_of(tokens: int, before: int) -> Bool[Tensor, "2 1 tokens seen"] | None:
    """A mask of two rows of tokens behind others: causal, but that the first one sees the last (masks may), and that
    the second row does not see its first two. None for one token."""
    seen = torch.ones(tokens, before + tokens, dtype=torch.bool).tril(before)
    seen[0, -1] = True
    return None if tokens == 1 else torch.stack([seen, seen & (torch.arange(before + tokens) > 1)])[:, None]
