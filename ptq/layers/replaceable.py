"""What must be known of a linear by who takes its place: where it lies, what it does to its input, who listens."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS
from ptq.ops import matmul


def treat_input_alike(a: QuantLinear, b: QuantLinear) -> bool:
    """Whether two linears do the same to an input, and both or neither something to their output."""
    if a.in_features != b.in_features or a.takes_integers != b.takes_integers:
        return False
    if (a.online.input, a.online.signs, a.online.activation) != (b.online.input, b.online.signs, b.online.activation):
        return False
    if (a.online.output is None) != (b.online.output is None):
        return False
    return not a.online.signs or torch.equal(a.get_parameter(INPUT_SIGNS), b.get_parameter(INPUT_SIGNS))


def stays_on_cpu(linear: QuantLinear) -> bool:
    """Whether the weight is on the CPU, and nothing brings it there for a call and takes it away after."""
    parts = linear.parts().values()
    return all(part.device.type == "cpu" for part in parts) and not hasattr(linear, "_hf_hook")


def stays_on_gpu(linear: Any) -> bool:
    """Whether a linear is packed, stays on a GPU, and takes its input as `ptq.ops.input_steps` gives it."""
    if type(linear) is not QuantLinear or "forward" in vars(linear) or hasattr(linear, "_hf_hook"):
        return False
    takes = linear.online.activation is None or linear.takes_integers
    return takes and all(matmul.lies_on_gpu(part) for part in linear.parts().values())


def must_be_called(linear: nn.Module) -> bool:
    """Whether a linear must be called: somebody listens to it, or to all modules, or has changed what it does."""
    return has_hooks(linear) or "forward" in vars(linear)


def is_plain(linear: nn.Module | None) -> bool:
    """Whether a module multiplies with a plain weight as `nn.Linear` does, and has no bias."""
    own = type(linear) is nn.Linear or type(linear).__module__.startswith("ptq.")
    return isinstance(linear, nn.Linear) and own and linear.bias is None


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to a module, or to all of them."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own) or all_are_heard()


def all_are_heard() -> bool:
    """Whether somebody listens to all modules."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)
