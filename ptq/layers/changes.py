"""Observers of changes to modules. To look at all that the chosen experts of a block hold, for every token, took a
sixth of the time of their products: what is found out about them is kept until they say that they have changed.
"""

from collections.abc import Callable
from operator import call
from typing import Any
from weakref import WeakMethod

from torch import nn
from torch.utils.hooks import RemovableHandle

HELD = ("_parameters", "_modules")


class ObservedDict(dict[str, Any]):
    """A dict that calls its observers when it is changed. Copies and pickles of it are plain."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.observers: list[WeakMethod[Callable[[], None]]] = []

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def notify(self) -> None:
        """Call all observers."""
        for observer in map(call, self.observers):
            if observer is not None:
                observer()


def _notifying(name: str) -> Callable[..., Any]:
    own = getattr(dict, name)

    def method(self: ObservedDict, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        self.notify()
        return found

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(ObservedDict, _name, _notifying(_name))


class ObservedModule(nn.Module):
    """A module that notifies of attributes and hooks, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "training":  # which decides nothing here
            self._notify()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._notify()

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As a module does it."""
        handle = super().register_forward_hook(*args, **kwargs)
        self._notify()
        return handle

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As a module does it."""
        handle = super().register_forward_pre_hook(*args, **kwargs)
        self._notify()
        return handle

    def _notify(self) -> None:
        held = vars(self).get(HELD[0])
        if type(held) is ObservedDict:
            held.notify()


def observe(module: nn.Module, observer: Callable[[], None]) -> None:
    """Have `observer`, a method of an object for as long as that lives, called when a parameter or a module takes the
    place of another in a module; in an `ObservedModule` also when an attribute is set, or somebody begins to listen in.
    """
    for name in HELD:
        held = vars(module)[name]
        if type(held) is not ObservedDict:
            vars(module)[name] = held = ObservedDict(held)
        method = WeakMethod(observer)
        if method not in held.observers:
            held.observers = [each for each in held.observers if each() is not None] + [method]
