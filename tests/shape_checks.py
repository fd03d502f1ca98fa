"""Makes jaxtyping check functions that have shapes in their signatures, and no others. To be imported before these: the
hook of `--jaxtyping-packages` calls `jaxtyping.jaxtyped` for every function of the packages.

A wrapper around the others, whose types pyright checks, took a third of the time of the tests.
"""

import functools
from typing import Any

import jaxtyping

check = jaxtyping.jaxtyped


def check_shapes(fn: Any = None, *, typechecker: Any) -> Any:
    """The decorator `jaxtyping.jaxtyped`, for functions and dataclasses with shapes."""
    if fn is None:
        return functools.partial(check_shapes, typechecker=typechecker)
    hints = getattr(fn.__init__ if isinstance(fn, type) else fn, "__annotations__", {})
    return check(fn, typechecker=typechecker) if "Tensor, " in repr(hints) else fn


jaxtyping.jaxtyped = check_shapes
