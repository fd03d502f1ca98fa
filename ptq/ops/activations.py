"""Quantised activations: integers per token, made when the model runs, with the Hadamard transform in front of them.

Every vector x of the last axis (a token) gets one scale s and the integers q, symmetric and without zero-point:

    s = max|x| * (clip / (2^(bits-1) - 1)),    q = clamp(round(x / s), -2^(bits-1), 2^(bits-1) - 1)

(QuaRot, section 4, stage 2c; clip 0.9 is its table 5.) All of it is float32, halves round to even, and x / s is
computed as x * (1 / s): kernels and reference agree to the bit. A token of zeros, or whose largest magnitude is below
`TINY`, has scale 1; one with a NaN or an infinity has the scale NaN and integers 0, so that the damage shows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from ptq.errors import InputError
from ptq.ops import hadamard
from ptq.ops.op_declarations import call, reference_of, refuse_gradient

TINY = 1e-30
"""Below this the scale could underflow."""
LEAST_CLIP = 1e-5
"""Of less the inverse of a scale could overflow."""

_Quantized = tuple[Int8[Tensor, "*batch k"], Float32[Tensor, "*batch"]]


@dataclass(frozen=True)
class Activation:
    """How the input of a linear layer is quantised. Raises InputError for values out of range."""

    bits: int
    clip: float
    """Share of the largest magnitude that the integers reach; what is larger is cut."""

    def __post_init__(self) -> None:
        _check(self.bits, self.clip)

    def quantize(
        self,
        x: Float[Tensor, "*batch k"],
        construction: str | None = None,
        signs: Float32[Tensor, " k"] | None = None,
    ) -> _Quantized:
        """Integers and scales of every token, after the Hadamard transform in float32 that `construction` names; before
        that, x is multiplied with `signs`."""
        if construction is None:
            return call(torch.ops.ptq.quantize_tokens.default, x, self.bits, self.clip)
        factors, order = hadamard.dense_factors(construction, x.device)
        op = torch.ops.ptq.hadamard_quantize.default
        return call(op, x, signs, factors, order, self.bits, self.clip)


def dequantize(q: Int8[Tensor, "*batch k"], scale: Float32[Tensor, "*batch"]) -> Float32[Tensor, "*batch k"]:
    """The numbers that the integers stand for."""
    return q.float() * scale[..., None]


def parse(entry: object) -> Activation:
    """The `activation` entry of a config.json. Raises InputError for anything that it cannot mean."""
    if not isinstance(entry, dict) or entry.keys() != {"bits", "clip"}:
        raise InputError(f"activation must be an object with bits and clip, found {entry!r}")
    return Activation(**entry)


def _check(bits: object, clip: object) -> None:
    if type(bits) is not int or not 2 <= bits <= 8:
        raise InputError(f"activation bits must be 2 to 8, found {bits!r}")
    if not isinstance(clip, int | float) or type(clip) is bool or not LEAST_CLIP <= clip <= 1:
        raise InputError(f"the activation clip must be {LEAST_CLIP:g} to 1, found {clip!r}")


# --- ops ------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return q, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@reference_of("quantize_tokens", "(Tensor x, int bits, float clip) -> (Tensor, Tensor)", _fake)
def reference(x: Float[Tensor, "*batch k"], bits: int, clip: float) -> _Quantized:
    """`ptq::quantize_tokens` in plain torch."""
    y = x.float()
    top = y.abs().amax(-1) if y.shape[-1] else y.new_zeros(y.shape[:-1])
    scale = top * torch.tensor(clip / (2 ** (bits - 1) - 1), dtype=torch.float32)
    scale = torch.where(top < TINY, 1.0, scale)
    q = (y * (1 / scale)[..., None]).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round_()
    finite = top.isfinite()
    q = torch.where(finite[..., None], q, 0.0).to(torch.int8)
    return q.contiguous(), torch.where(finite, scale, math.nan)


@reference_of(
    "hadamard_quantize",
    "(Tensor x, Tensor? signs, Tensor[] factors, int order, int bits, float clip) -> (Tensor, Tensor)",
    _fake,
)
def _hadamard_reference(
    x: Float[Tensor, "*batch k"], signs: Tensor | None, factors: list[Tensor], order: int, bits: int, clip: float
) -> _Quantized:
    y = torch.ops.ptq.hadamard(x.float(), signs, factors, order, -1, False)
    return torch.ops.ptq.quantize_tokens(y, bits, clip)


for _name in ("quantize_tokens", "hadamard_quantize"):
    refuse_gradient(_name)
