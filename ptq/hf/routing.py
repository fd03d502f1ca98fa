"""The choice of experts, told by one model to another.

Two experts that a router likes almost equally change places when its input changes in the last bits, and a rotation
changes these. A proof that compares two models must not stumble over that: the rotated model's routers are compared
with the original's number by number, and then it is given the original's choices.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ptq.hf.blocks import PartialModel

Routing = tuple[Tensor, ...] | Tensor
"""What a router gives: its logits, or these among others, such as weights and numbers of the chosen experts."""


class Routes:
    """What the routers of a block have given, call by call. `place`: that of the logits in what a router gives."""

    def __init__(self, place: int = 0) -> None:
        self.place = place
        self.made: list[Routing] = []
        self.again: list[Tensor] = []
        """The logits of the other model's routers, in the same calls."""

    def logits(self) -> Iterator[tuple[Float[Tensor, "1 t experts"], Float[Tensor, "1 t experts"]]]:
        """Logits of the routers, call by call: of the model that took the choices, and of the one that made them. Empty
        where no model has taken them."""
        return ((found[None], self.logits_in(self.made[call])[None]) for call, found in enumerate(self.again))

    def logits_in(self, choice: Routing) -> Float[Tensor, "t experts"]:
        """The logits in what a router gives."""
        return choice if isinstance(choice, Tensor) else choice[self.place]


@contextmanager
def recorded_routes(part: PartialModel, routers: Iterable[str], routes: Routes) -> Iterator[None]:
    """Keep what the named routers of a block give."""

    def keep(_: nn.Module, __: Any, choice: Routing) -> None:
        routes.made.append(choice)

    with _hooked(part, routers, keep):
        yield


@contextmanager
def replayed(part: PartialModel, routers: Iterable[str], routes: Routes) -> Iterator[None]:
    """Give what was kept in the place of what the named routers give, call by call; their own logits are kept too."""

    def replace(_: nn.Module, __: Any, choice: Routing) -> Routing:
        routes.again.append(routes.logits_in(choice))
        return routes.made[len(routes.again) - 1]

    with _hooked(part, routers, replace):
        yield


@contextmanager
def _hooked(part: PartialModel, routers: Iterable[str], hook: Any) -> Iterator[None]:
    with ExitStack() as hooks:
        for name in routers:
            hooks.enter_context(part.module(name).register_forward_hook(hook))
        yield
