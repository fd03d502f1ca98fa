"""Detects changes to modules, while something else takes the place of their own code."""

import functools
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import is_, methodcaller
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ptq.layers.replaceable import all_are_heard

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

Hooks = dict[int, Any]
IS_OVER = methodcaller("is_over")


@runtime_checkable
class Expiring(Protocol):
    """What was found out about modules, and says itself when it is over."""

    def is_over(self) -> bool: ...


class Watched:
    """What modules hold: modules, parameters and forwards, their own and those of their classes; and the hooks of those
    that must not be listened to."""

    def __init__(self, modules: list[nn.Module], quiet: list[nn.Module], recorded: Iterable[nn.Module] = ()) -> None:
        """`quiet`: those that must not be listened to; `recorded`: likewise, and transformers may record them."""
        self._modules, self._types = modules, list(map(type, modules))
        self._own: dict[type[nn.Module], Any] = {cls: cls.forward for cls in self._types}
        self._owners = [owner for module in modules for owner in (module._modules, module._parameters) if owner]
        self._held = [held for owner in self._owners for held in owner.values()]
        self._instances = [vars(module) for module in modules]
        self._forwards = list(_forwards(self._instances))
        self._hooks: list[Hooks] = [hooks for m in quiet for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._recorded: list[Hooks] = [hooks for m in recorded for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._dropouts = [module for module in modules if isinstance(module, nn.Dropout)]
        self._found: list[Expiring] = []

    @classmethod
    def all_of(cls, watched: Iterable["Watched"], quiet: list[nn.Module]) -> "Watched":
        """What several watch, and hooks of more modules."""
        made = cls([], quiet)
        for each in watched:
            made._modules += each._modules
            made._types += each._types
            made._own |= each._own
            made._owners += each._owners
            made._held += each._held
            made._instances += each._instances
            made._forwards += each._forwards
            made._hooks += each._hooks
            made._recorded += each._recorded
            made._dropouts += each._dropouts
            made._found += each._found
        return made

    def expires_with(self, found: Expiring) -> None:
        """From now on `is_same` asks this, too."""
        self._found.append(found)

    def is_same(self) -> bool:
        """Whether they hold what they held, and what was found out about them is not over."""
        now = chain.from_iterable(map(dict.values, self._owners))
        return (
            sum(map(len, self._owners)) == len(self._held)
            and all(map(is_, now, self._held))
            and all(map(is_, _forwards(self._instances), self._forwards))
            and all(map(is_, map(type, self._modules), self._types))
            and all(cls.forward is own for cls, own in self._own.items())
            and not any(map(IS_OVER, self._found))
        )

    def are_ours(self) -> bool:
        """Whether every forward is that of its class, or one that this package has installed."""
        return all(map(forward_is_ours, self._forwards))

    def must_be_called(self) -> bool:
        """Whether somebody listens in, or a dropout drops."""
        heard = any(self._hooks) and not all(map(_is_idle, self._hooks))
        heard = heard or (any(self._recorded) and (_records() or not all(map(_is_idle, self._recorded))))
        return heard or all_are_heard() or any(dropout.training for dropout in self._dropouts)


class InPlace(functools.partial):
    """`InPlace(function, module, ...)` takes the place of the forward of the module's class, for as long as that stays
    the one that it was made for."""

    own: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "InPlace":
        made = super().__new__(cls, *args, **kwargs)
        if made.args:  # copies and pickles get it later
            made.own = type(made.args[0]).forward
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.args[0]).forward
        return super().__call__(*args, **kwargs) if forward is self.own else forward(self.args[0], *args, **kwargs)


def _forwards(instances: list[dict[str, Any]]) -> Iterator[Any]:
    """The forward that each instance has in the place of its class's; None for none."""
    return map(dict.get, instances, repeat("forward"))


def forward_is_ours(forward: Any) -> bool:
    """Whether a forward is none, an object of this package, or one of its functions with some arguments bound."""
    return forward is None or _module_of(getattr(forward, "func", type(forward))).startswith("ptq.")


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def _records() -> bool:
    """Whether transformers records more now than hidden states and attention weights, such as logits of routers."""
    collected = None if _active_collector is None else _active_collector.get()
    return _active_collector is None or bool((collected or {}).keys() - {"hidden_states", "attentions"})


def _is_idle(hooks: Hooks) -> bool:
    """Whether all hooks are those that transformers leaves behind where hidden states were asked for once. Those of a
    layer wait for the next time (`ptq.fast.layers.layer_runs` looks whether that is now), those inside of it for
    attention weights, which our attention has none of."""
    return all(getattr(hook, "__module__", None) == "transformers.utils.output_capturing" for hook in hooks.values())
