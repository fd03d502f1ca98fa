"""The state space of Mamba-2 for one decoded token of each row, on the CPU: the product of its input,
`ptq::mamba2_step` for all that follows, and the output product.

No family is named. `kind_of` tries a module on random numbers first, as `ptq.fast.mixers.delta_net` does.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.mixers import gated_norm
from ptq.fast.mixers.mixer_states import CONV, cache_layers, matches, states_of
from ptq.fast.trials import TRIAL_ERRORS, tried_once
from ptq.fast.watched import forward_is_ours
from ptq.layers.replaceable import has_hooks
from ptq.ops.matmul import FEW_DTYPES
from ptq.ops.op_declarations import wants_gradient

INPUT, OUTPUT, NORM = "in_proj", "out_proj", "norm"
INSIDE = {INPUT, OUTPUT, NORM, CONV, "act"}
VECTORS = ("A_log", "D", "dt_bias")


class Space(NamedTuple):
    """What a module has besides its packed linears, as `ptq::mamba2_step` takes it."""

    conv: Float[Tensor, "channels 1 kernel"]
    conv_bias: Float[Tensor, " channels"] | None
    a_log: Float[Tensor, " heads"]
    d: Float[Tensor, " heads"]
    dt_bias: Float[Tensor, " heads"]
    gain: Float[Tensor, " width"]

    def floats(self) -> tuple[Tensor, ...]:
        """Those that must have the dtype of the input."""
        return tuple(x for x in (self.conv, self.conv_bias, self.gain) if x is not None)

    def vectors(self) -> tuple[Tensor, ...]:
        """Those that may have either of `FEW_DTYPES`."""
        return self.a_log, self.d, self.dt_bias


class StateSpaceKind(NamedTuple):
    """What a module does."""

    eps: float
    """Of the gated RMSNorm."""
    groups: int
    """Of that norm."""

    def sites(self, module: nn.Module) -> list[list[Any]]:
        """The linears of each input."""
        *first, last = linears_of(module)
        return [first, [last]]

    def parts(self, module: nn.Module) -> Space | None:
        """The parts of a module; None where one is of another kind now."""
        return parts_of(module)

    cache_layers = staticmethod(cache_layers)


def decoded(module: Any, kind: StateSpaceKind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """What a module of this kind makes of decoded tokens; None where it must do so itself."""
    inside = [module._modules.get(name) for name in (NORM, CONV)]
    if any(part is None or has_hooks(part) or not forward_is_ours(vars(part).get("forward")) for part in inside):
        return None
    space, x = parts_of(module), hidden_states
    states = None if space is None else states_of([module], x, space.floats(), **others)
    if space is None or states is None:
        return None
    product = module.in_proj(x)
    if product.dtype != x.dtype or wants_gradient(product):  # autocast, or somebody who listens
        return None
    return module.out_proj(torch.ops.ptq.mamba2_step.default(product, *states[0], *space, *kind))


def linears_of(module: nn.Module) -> list[Any]:
    """The packed linears: that of the input, and that of the output."""
    return [module._modules[name] for name in (INPUT, OUTPUT)]


def parts_of(module: nn.Module) -> Space | None:
    """The parts of a module; None where one is of another kind now."""
    parts = [module._modules.get(name) for name in (CONV, NORM)]
    if any(part is None or hasattr(part, "_hf_hook") for part in parts):  # which brings weights here for a call
        return None
    [conv, bias], [gain, _] = ([part._parameters.get(name) for name in ("weight", "bias")] for part in parts)  # pyright: ignore
    vectors = [module._parameters.get(name) for name in VECTORS]
    if conv is None or gain is None or any(x is None or x.dtype not in FEW_DTYPES for x in vectors):
        return None
    return Space(conv, bias, *vectors, gain)  # pyright: ignore


def kind_of(module: nn.Module) -> StateSpaceKind | None:
    """What a module does; None for one that is no such state space."""
    if not module._modules.keys() >= INSIDE - {"act"} or not module._modules.keys() <= INSIDE:
        return None
    norm = module._modules[NORM]
    found = None if norm is None or module._parameters.keys() != {*VECTORS} else gated_norm.kind_of(norm)
    if found is None or not found.before or parts_of(module) is None:
        return None
    kind = StateSpaceKind(found.eps, found.groups)
    return kind if _matches(module, kind) else None


@tried_once
def _matches(module: Any, kind: StateSpaceKind) -> bool:
    try:
        heads, width, channels = len(module.A_log), len(module.norm.weight), module.conv1d.weight.shape[0]
        n = (channels - width) // 2 // module.n_groups
    except TRIAL_ERRORS:
        return False
    return matches(module, OUTPUT, (heads, width // heads, n), decoded, kind)
