"""Products that were computed before a linear is called, and that it gives in the place of its own."""

import threading
from typing import Any, Protocol

from torch import Tensor, nn


class ProductSource(Protocol):
    """What a linear asks for its product before it computes one."""

    def product(self, linear: Any, x: Tensor) -> Tensor | None:
        """The product of a linear with x, before what is done to its output; None: compute it."""
        ...


class ReadyProducts:
    """Within it, and in this thread, linears that are called with x on a GPU find their products ready, before what is
    done to their outputs."""

    def __init__(self, x: Tensor, ready: dict[nn.Module, Tensor]) -> None:
        self.x, self.ready = x, ready
        self.before: ReadyProducts | None = None

    def product(self, linear: nn.Module, x: Tensor) -> Tensor | None:
        """See `ProductSource`."""
        return self.ready.pop(linear, None) if x is self.x else None

    def __enter__(self) -> None:
        self.before, CURRENT.given = CURRENT.given, self

    def __exit__(self, *error: Any) -> None:
        CURRENT.given = self.before


class _Current(threading.local):
    given: ReadyProducts | None = None


CURRENT = _Current()
"""The `ReadyProducts` that this thread is in, if any."""
