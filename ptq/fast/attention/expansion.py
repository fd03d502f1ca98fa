"""The matrix that makes keys and values of latent vectors (`ptq.fast.attention.latent_attention`), in plain numbers:
made of a module's linear with the first decoded token, and kept while that stays as it is."""

import functools
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.layers.linear import QuantLinear, plain_weight
from ptq.layers.packed_weight import version
from ptq.layers.replaceable import is_plain, stays_on_cpu
from ptq.ops.matmul import FEW_DTYPES
from ptq.ops.op_declarations import lasting

EXPANSION = "kv_b_proj"


class Expansion(NamedTuple):
    """The matrix that makes keys and values of latent vectors, as `ptq::latent_attention` takes it."""

    keys: Float[Tensor, "heads rank dk"]
    values: Float[Tensor, "heads dv rank"]


@dataclass(eq=False)
class HeldExpansion:
    """The matrix of a module in plain numbers, and what they were made of.

    Who writes to a linear through `x.data`, as peft does where it merges adapters, leaves no trace but the bytes, which
    are looked at once behind every prompt.
    """

    linear: nn.Module
    of: list[tuple[Tensor, int, int]]
    """The tensors of the linear, their versions, and where their numbers are."""
    digest: int
    """Of their bytes."""
    numbers: Expansion
    in_doubt: bool = False
    """Whether there was a prompt since the bytes were looked at."""

    def is_over(self) -> bool:
        """Whether something has been written to the linear, or put in the place of what it held."""
        now = _state_of(self.linear)
        if self.in_doubt:
            if _digest(self.linear) != self.digest:
                return True
            self.in_doubt = False
        return len(now) != len(self.of) or not all(
            a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, self.of, strict=True)
        )


_HELD: WeakKeyDictionary[nn.Module, HeldExpansion] = WeakKeyDictionary()
"""By module."""


def kept_matrix(module: Any, dtype: torch.dtype) -> HeldExpansion | None:
    """The matrix of a module in numbers of a dtype, kept while its linear stays as it is; None where that must be
    called, or is not on the CPU."""
    linear, known = module._modules[EXPANSION], _HELD.pop(module, None)
    if not may_be_read(linear):
        return None
    if known is None or known.linear is not linear or known.numbers.keys.dtype != dtype or known.is_over():
        with torch.no_grad(), lasting():
            numbers = _expansion(module, _weight(linear), dtype)
            known = HeldExpansion(linear, _state_of(linear), _digest(linear), numbers)
    _HELD[module] = known
    return known


def doubt(module: nn.Module, x: Tensor) -> None:
    """A module ran its own code with x: its linear may have been written to since. Elsewhere than on the CPU, and with
    other dtypes, nothing is kept."""
    known = _HELD.get(module)
    if known is not None and x.is_cpu and x.dtype in FEW_DTYPES:
        known.in_doubt = True
    elif known is not None:
        del _HELD[module]


def may_be_read(linear: Any) -> bool:
    """Whether a linear is one whose numbers may be used in its place: packed or plain, without a bias, on the CPU."""
    if type(linear) is QuantLinear:
        return linear.bias is None and stays_on_cpu(linear) and "forward" not in vars(linear)
    weight = linear._parameters.get("weight")
    if weight is None or not is_plain(linear):
        return False
    return weight.is_cpu and not hasattr(linear, "_hf_hook") and "forward" not in vars(linear)


def _state_of(linear: nn.Module) -> list[tuple[Tensor, int, int]]:
    return [(x, version(x), x.data_ptr()) for x in linear._parameters.values() if x is not None]


def _digest(linear: nn.Module) -> int:
    held = (x.detach().contiguous().view(-1).view(torch.uint8) for x in linear._parameters.values() if x is not None)
    return functools.reduce(lambda found, x: zlib.crc32(x.numpy().data, found), held, 0)


def _weight(linear: Any) -> Float[Tensor, "n k"]:
    return plain_weight(linear, linear.state_dict()) if isinstance(linear, QuantLinear) else linear.weight


def _expansion(module: Any, weight: Float[Tensor, "n k"], dtype: torch.dtype) -> Expansion:
    dk, dv = module.qk_nope_head_dim, module.v_head_dim
    keys, values = weight.to(dtype).unflatten(0, (-1, dk + dv)).split((dk, dv), 1)
    return Expansion(keys.transpose(1, 2).contiguous(), values.contiguous())
