"""What mixers that keep a state in the place of keys and values do on the CPU: an op for each step, or for a decoded
token one for all of them (`ptq.fast.mixers.delta_net`).

No family is named. A mixer is known by functions that its forward calls (`STEPS`), or is a gated norm; each is tried on
random numbers first, and where an op of `ptq.ops.mixer_ops` gives other numbers (up to rounding), it is left alone. The
state is moved on in place, as the cache does it with what it is given.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ptq.fast.mixers import delta_net, gated_norm, state_space
from ptq.fast.mixers.mixer_steps import STEPS, Step, step_for
from ptq.fast.trials import innermost, with_globals
from ptq.fast.watched import InPlace


def forward_of(module: nn.Module) -> Step | None:
    """The faster forward of a mixer or a gated norm; None for any other module."""
    norm = gated_norm.kind_of(module)
    if norm is not None:
        return InPlace(gated_norm.forward, module, norm)
    if _with_steps(type(module).forward) is None:
        return None
    for owner in (delta_net, state_space):
        if (kind := owner.kind_of(module)) is not None:
            return InPlace(_mixer_forward, module, owner.decoded, kind)
    return InPlace(_mixer_forward, module, None, None)


def _mixer_forward(
    module: nn.Module,
    decoded: Callable[..., Any] | None,
    kind: delta_net.DeltaNetKind | state_space.StateSpaceKind | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = type(module).forward
    if torch.compiler.is_compiling():
        return own(module, *args, **kwargs)
    if decoded is not None and len(args) < 2:
        found = decoded(module, kind, **({"hidden_states": args[0], **kwargs} if args else kwargs))
        if found is not None:
            return found
    return (_with_steps(own) or own)(module, *args, **kwargs)


@functools.cache
def _with_steps(forward: Step) -> Step | None:
    """A forward function that differs in the steps alone that it calls; None where it calls none."""
    inner = innermost(forward)
    if inner is None:
        return None
    names = {name: inner.__globals__.get(name) for name in STEPS if name in inner.__code__.co_names}
    known = {name: step for name, own in names.items() if (step := step_for(name, own)) is not None}
    return with_globals(forward, known) if known else None
