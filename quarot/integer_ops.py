"""The ops of the integer format: schema, fake and reference in PyTorch. Native kernels (`csrc/integer`) override them.

Codes are unsigned, 0 .. 2^bits - 1, and stand for scale * (code - zero). Scales are float32 numbers that bfloat16 can
hold. Group i of a row is its columns [i * group_size, (i + 1) * group_size); group_size 0 means one group per row.
"""

import math

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from ptq.ops.bitstream import unpack
from ptq.ops.op_declarations import declare_linear, reference_of
from quarot.integer_scales import TINY, Stored, numbers


def _fake_fit(w, bits, group_size, symmetric, steps, floor):
    groups = w.shape[1] // (group_size or w.shape[1])
    return w.new_empty(w.shape[0], groups), w.new_empty(w.shape[0], groups, dtype=torch.uint8)


@reference_of(
    "integer_fit",
    "(Tensor w, int bits, int group_size, bool symmetric, int steps, float floor) -> (Tensor, Tensor)",
    _fake_fit,
)
def fit(
    w: Float32[Tensor, "n k"],
    bits: int,
    group_size: int,
    symmetric: bool,
    steps: int,
    floor: float,
) -> tuple[Float32[Tensor, "n g"], UInt8[Tensor, "n g"]]:
    """Scale and zero of every group: of `steps` scales from the full range down to `floor` times it, the one with the
    least squared error. A group with a NaN or an infinity gets the scale NaN.
    """
    n, k = w.shape
    size = group_size or k
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    x = w.view(n, -1, size)
    low, high = x.amin(2), x.amax(2)
    finite = (x * 0).sum(2) == 0
    empty = torch.maximum(high, -low) < TINY
    if symmetric:
        # The larger side gets the one code more that two's complement has: the scale's sign turns it there.
        full = torch.where(high > -low, -1.0, 1.0) * torch.maximum(high, -low) / (middle - 1)
        zero = torch.full_like(full, middle)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        full = high / top - low / top
        zero = (-low / full).clamp(0, top).round()
    full, zero = torch.where(empty, 1.0, full), torch.where(empty & (not symmetric), 0.0, zero)
    best, scale = torch.full_like(full, math.inf), full.bfloat16().float()
    for i in range(steps):
        s = (full * shrink(i, steps, floor)).bfloat16().float()
        q = (x * (1 / s)[..., None]).add_(zero[..., None]).clamp_(0, top).round_().sub_(zero[..., None])
        e = q.mul_(s[..., None]).sub_(x).square_().sum(2)
        scale, best = torch.where(e < best, s, scale), torch.where(e < best, e, best)
    scale = torch.where(empty, 1.0, scale)
    return torch.where(finite, scale, math.nan), torch.where(finite, zero, 0.0).to(torch.uint8)


def shrink(step: int, steps: int, floor: float) -> float:
    """Share of the full range that step `step` of the clip search tries."""
    return 1 - step * (1 - floor) / max(steps - 1, 1)


@reference_of(
    "integer_round",
    "(Tensor w, Tensor scale, Tensor zero, int bits, int group_size) -> Tensor",
    lambda w, *rest: w.new_empty(w.shape, dtype=torch.uint8),
)
def round_nearest(
    w: Float32[Tensor, "n k"], scale: Float32[Tensor, "n g"], zero: UInt8[Tensor, "n g"], bits: int, group_size: int
) -> UInt8[Tensor, "n k"]:
    """Nearest codes; halves go to the even code."""
    x = w.view(*scale.shape, group_size or w.shape[1])
    code = (x * (1 / scale)[..., None]).add_(zero[..., None]).clamp_(0, 2**bits - 1).round_()
    return code.to(torch.uint8).view(w.shape)


@reference_of(
    "integer_ldlq",
    "(Tensor target, Tensor w, Tensor factor, Tensor scale, Tensor zero, Tensor group, int bits) -> (Tensor, Tensor)",
    lambda target, w, *rest: (w.new_empty(w.shape, dtype=torch.uint8), w.new_empty(w.shape)),
)
def ldlq(
    target: Float32[Tensor, "c n"],
    w: Float32[Tensor, "c n"],
    factor: Float32[Tensor, "c c"],
    scale: Float32[Tensor, "g n"],
    zero: Float32[Tensor, "g n"],
    group: Int64[Tensor, " c"],
    bits: int,
) -> tuple[UInt8[Tensor, "c n"], Float32[Tensor, "c n"]]:
    """`feedback.round_block` on the integer grid: columns from the last to the first, each error fed to those before.
    `group` is the group of each column; `factor` is unit lower triangular, what lies above its diagonal is not read.
    """
    target, error = target.clone(), torch.empty_like(w)
    codes = torch.empty_like(w, dtype=torch.uint8)
    for c in reversed(range(len(w))):
        s, z = scale[group[c]], zero[group[c]]
        q = (target[c] * (1 / s)).add_(z).clamp_(0, 2**bits - 1).round_()
        codes[c] = q.to(torch.uint8)
        error[c] = w[c] - (q - z) * s
        target[:c].addr_(factor[c, :c], error[c])
    return codes, error


def dequantize(
    codes: UInt8[Tensor, "n bytes"],
    scale: Stored,
    zero: UInt8[Tensor, "n g"] | None,
    bits: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that stored parts stand for."""
    return scaled(unpack(codes, bits, k), scale, zero, bits, group_size)


def scaled(
    codes: UInt8[Tensor, "n k"], scale: Stored, zero: UInt8[Tensor, "n g"] | None, bits: int, size: int
) -> Float32[Tensor, "n k"]:
    """The numbers that codes stand for, in groups of that size; 0: a whole row."""
    offset = 2 ** (bits - 1) if zero is None else zero[..., None].float()
    scale = numbers(scale)
    groups = codes.float().view(*scale.shape, size or codes.shape[1])
    return ((groups - offset) * scale[..., None]).flatten(1)


declare_linear("integer_linear", "Tensor codes, Tensor scale, Tensor? zero", "int bits, int group_size", dequantize)
