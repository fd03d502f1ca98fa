"""Functions with other global names: what changes, and what stays."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from ptq.fast.trials import innermost, with_globals

FACTOR = 3


def plain(x: int, more: int = 1, *, most: int = 2) -> int:
    return FACTOR * x + more + most


def doubled(function: Callable[..., int]) -> Callable[..., int]:
    factor = 2

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> int:
        return factor * function(*args, **kwargs)

    return around


@pytest.mark.parametrize("times", [0, 1, 2])
def test_decorators_stay_around_a_changed_function(times: int) -> None:
    function: Any = plain
    for _ in range(times):
        function = doubled(function)
    changed = with_globals(function, {"FACTOR": 5})
    assert innermost(function) is plain
    for factor, each in ((3, function), (5, changed)):
        assert each(1) == (factor + 3) * 2**times
        assert each(1, 7, most=9) == (factor + 16) * 2**times


def test_only_functions_without_variables_of_their_own() -> None:
    name = 3
    assert innermost(lambda: name) is None and innermost(len) is None
    assert innermost(functools.partial(plain, 1)) is None
