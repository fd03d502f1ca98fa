"""The ops that round to small floats: schema, fake and reference in PyTorch; `csrc/minifloat` overrides them.

An element has `exponent` and `mantissa` bits (`fp6.element`). Scales are float32 numbers, one for every group of
`group_size` columns of a row (0: the whole row): bfloat16 numbers, or powers of two where `power` is true. The number
that code c stands for is scale * value(c).
"""

import math

import torch
from jaxtyping import Float, Float32, Float64, Int64, UInt8
from torch import Tensor

from fp6 import element
from fp6.element import Element
from ptq.ops.op_declarations import reference_of

TINY = 1e-30
"""A group whose largest magnitude is below this is stored as zeros with scale 1: its scale could underflow."""
FACTORS = 32
"""Scales that the search tries: absmax / largest times 1/16, 2/16, ... 2. Above 1 nothing saturates more, and the finer
binades fall elsewhere: in groups of 32 that is worth a sixth of the error."""
POWERS = (-2, -1, 0, 1)
"""Powers of two that the search tries beside the one of the OCP specification."""


def _groups(w: Tensor, group_size: int) -> Tensor:
    return w.new_empty(w.shape[0], w.shape[1] // (group_size or w.shape[1]), dtype=torch.float32)


def _fake_nearest(w, exponent, mantissa, group_size, power, search):
    sums = w.new_empty(w.shape[0], dtype=torch.float64)
    return w.new_empty(w.shape, dtype=torch.uint8), _groups(w, group_size), sums, torch.empty_like(sums)


@reference_of(
    "minifloat_fit",
    "(Tensor w, int exponent, int mantissa, int group_size, bool power, bool search) -> Tensor",
    lambda w, exponent, mantissa, group_size, *rest: _groups(w, group_size),
)
def fit(
    w: Float32[Tensor, "n k"], exponent: int, mantissa: int, group_size: int, power: bool, search: bool
) -> Float32[Tensor, "n g"]:
    """The scale of every group: the one that puts the largest magnitude on the largest number, as a bfloat16 number or,
    if `power`, 2^(floor(log2(absmax)) - top), as OCP MX 1.0 has it. If `search`, the best of several around it, by
    squared error. NaN for a group that is not finite.
    """
    code, n, k = Element(exponent, mantissa), *w.shape
    x = w.view(n, -1, group_size or max(k, 1))
    finite = (x * 0).sum(2) == 0
    absmax = x.abs().amax(2) if k else w.new_zeros(n, x.shape[1])
    empty = absmax < TINY
    absmax = absmax.where(~empty & finite, 1.0)
    if power:
        base = ((absmax.view(torch.int32) >> 23) - 127 - code.top).float()
        candidates = [torch.exp2(base + offset) for offset in (POWERS if search else (0,))]
    else:
        full = absmax / code.largest
        factors = [(i + 1) / 16 for i in range(FACTORS)] if search else [1.0]
        candidates = [(full * factor).bfloat16().float() for factor in factors]
    best, scale = torch.full_like(absmax, math.inf), candidates[0]
    for s in candidates if search else ():
        q = element.decode(element.encode((x * (1 / s)[..., None]).nan_to_num(), code), code)
        e = ((q * s[..., None] - x) / absmax[..., None]).square_().sum(2)
        scale, best = torch.where(e < best, s, scale), torch.where(e < best, e, best)
    return torch.where(finite, torch.where(empty, 1.0, scale), math.nan)


@reference_of(
    "minifloat_encode",
    "(Tensor w, Tensor scale, int exponent, int mantissa, int group_size) -> Tensor",
    lambda w, *rest: w.new_empty(w.shape, dtype=torch.uint8),
)
def encode(
    w: Float32[Tensor, "n k"], scale: Float32[Tensor, "n g"], exponent: int, mantissa: int, group_size: int
) -> UInt8[Tensor, "n k"]:
    """Codes of the numbers nearest to w (1 / scale), halves to the even mantissa."""
    x = w.view(*scale.shape, group_size or w.shape[1]) * (1 / scale)[..., None]
    return element.encode(x, Element(exponent, mantissa)).view(w.shape)


@reference_of(
    "minifloat_decode",
    "(Tensor codes, Tensor scale, int exponent, int mantissa, int group_size) -> Tensor",
    lambda codes, *rest: codes.new_empty(codes.shape, dtype=torch.float32),
)
def decode(
    codes: UInt8[Tensor, "n k"], scale: Float32[Tensor, "n g"], exponent: int, mantissa: int, group_size: int
) -> Float32[Tensor, "n k"]:
    """The numbers that codes stand for."""
    x = element.decode(codes, Element(exponent, mantissa)).view(*scale.shape, group_size or codes.shape[1])
    return (x * scale[..., None]).view(codes.shape)


@reference_of(
    "minifloat_nearest",
    "(Tensor w, int exponent, int mantissa, int group_size, bool power, bool search) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_nearest,
)
def nearest(
    w: Float[Tensor, "n k"], exponent: int, mantissa: int, group_size: int, power: bool, search: bool
) -> tuple[UInt8[Tensor, "n k"], Float32[Tensor, "n g"], Float64[Tensor, " n"], Float64[Tensor, " n"]]:
    """`fit` and `encode` in one pass: codes, scales, and per row the sums of (W - Ŵ)² and W²."""
    w = w.float()
    scale = fit(w, exponent, mantissa, group_size, power, search)
    codes = encode(w.nan_to_num(), scale.nan_to_num(1.0), exponent, mantissa, group_size)
    error = decode(codes, scale, exponent, mantissa, group_size).double() - w
    return codes, scale, error.square_().sum(1), w.double().square_().sum(1)


@reference_of(
    "minifloat_ldlq",
    "(Tensor target, Tensor w, Tensor factor, Tensor scale, Tensor group, int exponent, int mantissa)"
    " -> (Tensor, Tensor)",
    lambda target, w, *rest: (w.new_empty(w.shape, dtype=torch.uint8), w.new_empty(w.shape)),
)
def ldlq(
    target: Float32[Tensor, "c n"],
    w: Float32[Tensor, "c n"],
    factor: Float32[Tensor, "c c"],
    scale: Float32[Tensor, "g n"],
    group: Int64[Tensor, " c"],
    exponent: int,
    mantissa: int,
) -> tuple[UInt8[Tensor, "c n"], Float32[Tensor, "c n"]]:
    """`feedback.round_block` for small floats: columns from the last to the first, each error fed to those before.
    `group` is the group of each column; `factor` is unit lower triangular, what lies above its diagonal is not read.
    """
    code, target, error = Element(exponent, mantissa), target.clone(), torch.empty_like(w)
    codes = torch.empty_like(w, dtype=torch.uint8)
    for c in reversed(range(len(w))):
        s = scale[group[c]]
        codes[c] = element.encode(target[c] * (1 / s), code)
        error[c] = w[c] - element.decode(codes[c], code) * s
        target[:c].addr_(factor[c, :c], error[c])
    return codes, error
