"""A gated delta net of one decoded token of each row, on the CPU: the products of its input, `ptq::delta_net_step` for
all that follows, and the output product.

No family is named. `kind_of` tries a module on random numbers first: only where the steps give what its own forward
gives, up to rounding, does `decoded` take the place of that, and only for a token behind others.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.mixers.mixer_states import CONV, cache_layers, matches, states_of
from ptq.fast.trials import TRIAL_ERRORS, tried_once
from ptq.fast.watched import forward_is_ours
from ptq.layers.replaceable import has_hooks, is_plain
from ptq.layers.shared_input import products
from ptq.ops.matmul import FEW_DTYPES
from ptq.ops.op_declarations import wants_gradient

INPUTS, OUTPUT = ("in_proj_qkv", "in_proj_z"), "out_proj"
PLAIN, NORM = ("in_proj_a", "in_proj_b"), "norm"
VECTORS = ("A_log", "dt_bias")


class Net(NamedTuple):
    """What a module has besides its packed linears, as `ptq::delta_net_step` takes it."""

    conv: Float[Tensor, "channels 1 kernel"]
    conv_bias: Float[Tensor, " channels"] | None
    a: Float[Tensor, "heads k"]
    b: Float[Tensor, "heads k"]
    a_log: Float[Tensor, " heads"]
    dt_bias: Float[Tensor, " heads"]
    gain: Float[Tensor, " dv"]

    def floats(self) -> tuple[Tensor, ...]:
        """Those that must have the dtype of the input."""
        return tuple(x for x in (self.conv, self.conv_bias, self.a, self.b, self.gain) if x is not None)

    def vectors(self) -> tuple[Tensor, ...]:
        """Those that may have either of `FEW_DTYPES`."""
        return self.a_log, self.dt_bias


class DeltaNetKind(NamedTuple):
    """What a module does."""

    eps: float
    """Of the gated RMSNorm."""

    def sites(self, module: nn.Module) -> list[list[Any]]:
        """The linears of each input."""
        *first, last = linears_of(module)
        return [first, [last]]

    def parts(self, module: nn.Module) -> Net | None:
        """The parts of a module; None where one is of another kind now."""
        return parts_of(module)

    cache_layers = staticmethod(cache_layers)


def decoded(module: Any, kind: DeltaNetKind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """What a module of this kind makes of decoded tokens; None where it must do so itself."""
    inside = [module._modules.get(name) for name in (*PLAIN, NORM, CONV)]
    if any(part is None or has_hooks(part) or not forward_is_ours(vars(part).get("forward")) for part in inside):
        return None
    net, x = parts_of(module), hidden_states
    states = None if net is None else states_of([module], x, net.floats(), **others)
    if net is None or states is None:
        return None
    *inputs, output = linears_of(module)
    qkv, z = products(inputs, x)
    if qkv.dtype != x.dtype or z.dtype != x.dtype or wants_gradient(qkv, z):  # autocast, or somebody who listens
        return None
    return output(torch.ops.ptq.delta_net_step.default(x, qkv, z, *states[0], *net, kind.eps))


def linears_of(module: nn.Module) -> list[Any]:
    """The packed linears: those of the input, and that of the output."""
    return [module._modules[name] for name in (*INPUTS, OUTPUT)]


def parts_of(module: nn.Module) -> Net | None:
    """The parts of a module; None where one is of another kind now."""
    linears = [module._modules.get(name) for name in PLAIN]
    conv, norm = module._modules.get(CONV), module._modules.get(NORM)
    if conv is None or norm is None or not all(map(is_plain, linears)):
        return None
    if any(hasattr(part, "_hf_hook") for part in (conv, norm, *linears)):
        return None  # which brings weights here for a call
    weights = [None if x is None else x._parameters.get("weight") for x in (conv, *linears, norm)]
    vectors = [module._parameters.get(name) for name in VECTORS]
    if any(x is None for x in (*weights, *vectors)) or any(x.dtype not in FEW_DTYPES for x in vectors if x is not None):
        return None
    kernel, a, b, gain = weights
    return Net(kernel, conv._parameters.get("bias"), a, b, *vectors, gain)  # pyright: ignore


def kind_of(module: nn.Module) -> DeltaNetKind | None:
    """What a module does; None for one that is no such net."""
    names = {*INPUTS, OUTPUT, *PLAIN, NORM, CONV}
    if module._modules.keys() != names or module._parameters.keys() != {*VECTORS}:
        return None
    eps = getattr(module._modules[NORM], "variance_epsilon", None)
    if not isinstance(eps, float) or parts_of(module) is None:
        return None
    return DeltaNetKind(eps) if _matches(module, eps) else None


# --- the trial ------------------------------------------------------------------------------------------------------


@tried_once
def _matches(module: Any, eps: float) -> bool:
    try:
        heads, width = len(module.A_log), len(module.norm.weight)
        dk = (module.conv1d.weight.shape[0] - heads * width) // 2 // module.num_k_heads
    except TRIAL_ERRORS:
        return False
    return matches(module, OUTPUT, (heads, dk, width), decoded, DeltaNetKind(eps))
