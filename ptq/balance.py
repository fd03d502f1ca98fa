"""Balance: a scale per channel that two linears share, so that no channel between them is far larger than the others.

Where a linear reads another one's output channel by channel, rows of the first times s and columns of the second over s
compute the same. A rotation between them then mixes channels of like size; it would spread one of 64 times the size
over all the others. SmoothQuant (Xiao et al. 2022, equation 4) with strength 1/2, on weights alone, and in powers of
two: these are exact in every dtype, and channels of usual size are left as they are, to the bit.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ptq.plan import LinearPlan

MAX_ROW_SCALE = 2.0**10
PIECE = 256
"""Rows whose squares are held at once."""


def row_scale(w: Float[Tensor, "n k"]) -> Float64[Tensor, " n"]:
    """The root mean square of every row relative to that of the whole weight, as a float16 number; 1 for a zero row.

    A rotation of the output spreads the rounding error evenly over all rows. With rows of one size in front of it, and
    the scale behind it again, the error of a row is in proportion to its size, and the sum of all errors is what it
    was: r_i^2 e summed over rows is n e where the mean of r_i^2 is 1. (EXL3 does the same with its output scales.)
    """
    squares = torch.cat([piece.float().square().sum(1) for piece in w.split(PIECE)]).double()
    size = (squares / squares.mean()).sqrt().clamp(1 / MAX_ROW_SCALE, MAX_ROW_SCALE)
    return torch.where(squares > 0, size, 1.0).to(torch.float16).double()


def scale_of(linear: LinearPlan, read: Callable[[str], Tensor]) -> Float64[Tensor, " c"] | None:
    """The scale of a linear's balance, None where it has none; `read` gives a tensor of the source by name."""
    return scale(read(linear.balance.producer), read(linear.balance.reader)) if linear.balance else None


def scale(producer: Float[Tensor, "c k"], reader: Float[Tensor, "n c"]) -> Float64[Tensor, " c"]:
    """The scale s of every channel c: the power of two nearest to sqrt(|reader[:, c]| / |producer[c]|), relative to
    the median channel's. 1 for a channel that is zero on one side."""
    into = torch.cat([piece.float().square().sum(1) for piece in producer.split(PIECE)]).double().sqrt()
    out = torch.stack([piece.float().square().sum(0) for piece in reader.split(PIECE)]).double().sum(0).sqrt()
    alive = (into > 0) & (out > 0)
    result = torch.ones_like(into)
    if bool(alive.any()):
        ratio = (out[alive] / into[alive]).log2() / 2
        result[alive] = (ratio - ratio.median()).round().exp2()
    return result
