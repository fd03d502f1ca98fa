"""Integer scales: those of a row's groups as multiples of one step. And how stored scales of either kind are read.

With quantised tokens the sums of a row then stay integers over all of its groups, and meet one floating-point number at
the end: what "Integer Scale" (Li et al. 2024, arXiv:2405.14597) does for GPUs, who take multiples of ten bits and more.
Here they are -15 .. 15, without 0, so that the product of a code of up to four bits and its multiple is a byte: weights
are multiplied as if they had eight bits and one scale per row. The step of a row is a power of two, an eighth to a
sixteenth of its largest scale.

**Bytes**: `scale`, U8 [n, 1 + g]: e, which says that the step is 2^(e - 127); then the multiples in two's complement.
The largest multiple of a row has at least 8 in it, so that there is one way to write scales.
"""

from typing import Literal

import torch
from jaxtyping import Float32, Int16, UInt8
from torch import Tensor

from ptq.errors import InputError
from ptq.weights.grouped import loaded_scale, stored_scale

Scale = Literal["bfloat16", "integer"]
Stored = Int16[Tensor, "n _"] | UInt8[Tensor, "n _"]
"""Scales of either kind: bits of bfloat16 [n, g], or integer scales [n, 1 + g]."""
Tiled = Int16[Tensor, "tiles _ 16"] | UInt8[Tensor, "tiles _ 16"]
"""The same in tiles (`ptq.ops.tiles.tile_scales`)."""
TINY = 1e-30
"""A group whose largest magnitude is below this is stored as zeros with scale 1: its scale could underflow."""
MOST = 15
"""Largest multiple: times -8, the largest code of four bits, it is still a byte."""
MOST_BITS, MOST_COLUMNS = 4, 65536
"""Of a code; of a row, so that its sums fit into 32 bits."""
BIAS = 127
PIECE = 1 << 20
"""Weights that scales are chosen for at a time: they stay in the caches."""


def check_kind(kind: object, bits: int, group_size: int, symmetric: bool, where: str = "") -> None:
    """Raise InputError where there are no scales of this kind for such codes."""
    if kind not in ("bfloat16", "integer"):
        raise InputError(f"{where}scale must be bfloat16 or integer, found {str(kind)[:40]!r}")
    if kind == "integer" and not (bits <= MOST_BITS and group_size and symmetric):
        found = f"{bits} bits, a group size of {group_size}, {'no ' if symmetric else ''}zero-points"
        changes = ["--group-size 128 (or 64, 32)"] * (not group_size) + [f"--bits {MOST_BITS}"] * (bits > MOST_BITS)
        changes += ["no --asymmetric"] * (not symmetric)
        raise InputError(
            f"{where}integer scales are for weights of 2 to {MOST_BITS} bits in groups, without zero-points; found "
            f"{found}: choose {' and '.join(changes)}, or --scale bfloat16"
        )


def check_width(k: int) -> None:
    """Raise InputError for rows that are too long."""
    if k > MOST_COLUMNS:
        raise InputError(f"integer scales are for rows of up to {MOST_COLUMNS} columns, found {k}; take bfloat16")


def step_of(scale: Float32[Tensor, "n g"]) -> Float32[Tensor, "n 1"]:
    """The step of each row: its largest scale is at least 8 of it, and less than 16."""
    exponent = torch.frexp(scale.abs().amax(1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(scale[:, :1]), exponent - 4)


def fit(w: Float32[Tensor, "n k"], scale: Float32[Tensor, "n g"], bits: int) -> Float32[Tensor, "n g"]:
    """In the place of the best scales, the multiples beside them: of two, the one with less error. Scales of groups
    that are zero, up to `TINY`, do not count. NaN stays."""
    rows = max(1, PIECE // max(1, w.shape[1]))
    return torch.cat([_fit(*piece, bits) for piece in zip(w.split(rows), scale.split(rows), strict=True)])


def _fit(w: Float32[Tensor, "n k"], scale: Float32[Tensor, "n g"], bits: int) -> Float32[Tensor, "n g"]:
    x = w.view(*scale.shape, w.shape[1] // scale.shape[1])
    given = scale.masked_fill(x.abs().amax(2) < TINY, 0)
    given = torch.where((given != 0).any(1, keepdim=True), given, 1)
    step, sign = step_of(given), torch.where(given < 0, -1.0, 1.0)
    below = (given.abs() / step).floor()
    best, least = scale, torch.full_like(scale, torch.inf)
    for multiple in (below, below + 1):
        number = multiple.clamp(1, MOST) * sign * step
        q = (x * (1 / number)[..., None]).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round_()
        error = q.mul_(number[..., None]).sub_(x).square_().sum(2)
        best, least = torch.where(error < least, number, best), torch.minimum(error, least)
    return best


def encode(scale: Float32[Tensor, "n g"], kind: str) -> Stored:
    """Stored scales. Raises InputError where these are not of that kind."""
    if kind == "bfloat16":
        stored = stored_scale(scale)
    else:
        step = step_of(scale)
        exponent = (torch.frexp(step).exponent - 1 + BIAS).clamp(0, 255)
        multiples = (scale / step).round().clamp(-MOST, MOST).to(torch.int8)
        stored = torch.cat((exponent.to(torch.uint8), multiples.view(torch.uint8)), 1)
    if not torch.equal(numbers(stored), scale):
        raise InputError(f"these are no {kind} scales; the file is damaged: quantise the model again")
    return stored


def decode(scale: UInt8[Tensor, "n _"]) -> tuple[Float32[Tensor, "n 1"], Float32[Tensor, "n _g"]]:
    """Step and multiples of each row."""
    step = torch.ldexp(scale.new_ones(scale.shape[0], 1, dtype=torch.float32), scale[:, :1].int() - BIAS)
    return step, scale[:, 1:].contiguous().view(torch.int8).float()


def check_multiples(scale: Int16[Tensor, "..."] | UInt8[Tensor, "..."]) -> None:
    """Raise InputError where scales, stored or of a layout, have a multiple that kernels have no room for."""
    if scale.dtype == torch.uint8 and scale.numel():
        largest = int(scale[:, 1:].view(torch.int8).short().abs().max())
        if largest > MOST:
            raise InputError(f"a scale is {largest} times its row's step, {MOST} at most; the file is damaged")


def numbers(scale: Stored) -> Float32[Tensor, "n _g"]:
    """Scales as numbers."""
    if scale.dtype == torch.int16:
        return loaded_scale(scale)
    step, multiples = decode(scale)
    return multiples * step


def words(scale: Stored) -> Int16[Tensor, "n _g"]:
    """Scales as bits of bfloat16, which has room for all multiples of a power of two."""
    return scale if scale.dtype == torch.int16 else stored_scale(numbers(scale))
