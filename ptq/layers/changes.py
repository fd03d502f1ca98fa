"""Tells of changes to modules. To look at all that the chosen experts of a block hold, for every token, took half as
long as their products: what is found out about them is kept until they say that they have changed.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

HELD = ("_parameters", "_modules")


class TellingDict(dict[str, Any]):
    """A dict that calls its listeners when it is changed. Copies and pickles of it are plain."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.listeners: list[Callable[[], None]] = []

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def tell(self) -> None:
        """Call all listeners."""
        for listener in self.listeners:
            listener()


def _telling(name: str) -> Callable[..., Any]:
    own = getattr(dict, name)

    def method(self: TellingDict, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        self.tell()
        return found

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(TellingDict, _name, _telling(_name))


def listen(module: nn.Module, listener: Callable[[], None]) -> None:
    """Have `listener` called when a parameter or a module takes the place of another in a module, and when `tell` is
    called with it: a `ptq.layers.linear.QuantLinear` does that when it is changed otherwise."""
    for name in HELD:
        held = vars(module)[name]
        if type(held) is not TellingDict:
            vars(module)[name] = held = TellingDict(held)
        if listener not in held.listeners:
            held.listeners.append(listener)


def tell(module: nn.Module) -> None:
    """Call those who listen to a module."""
    held = vars(module).get(HELD[0])
    if type(held) is TellingDict:
        held.tell()
