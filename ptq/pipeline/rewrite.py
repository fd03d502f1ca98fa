"""The rewriter: one tensor of the source in, the same tensor with norms folded and rotations fused out.

Everything is one float64 expression, and the caller casts its result once: to the checkpoint's dtype, or to the float32
in which weights are rounded. Three casts on the way would be 1.7 times noisier, and rounding a bf16 copy would put an
error of its own under every code.
"""

import hashlib

import torch
from jaxtyping import Float, Float64, Int8
from torch import Tensor

from ptq.ops import hadamard
from ptq.planning.plan import LinearPlan, Rotation

Signs = dict[str, Tensor]
"""The +-1 vectors of a run, by name."""
MAX_ROW_SCALE = 2.0**10
PIECE = 256
"""Rows whose squares are held at once."""


def draw_signs(name: str, length: int, seed: int) -> Int8[Tensor, " length"]:
    """A random +-1 vector that depends on its name and the seed alone, not on what was drawn before it.

    The global random state is neither read nor changed.
    """
    return torch.randint(0, 2, (length,), generator=generator(name, seed), dtype=torch.int8) * 2 - 1


def generator(name: str, seed: int) -> torch.Generator:
    """Random numbers that depend on a name and the seed alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def signs_of(rotation: Rotation, signs: Signs) -> Float64[Tensor, " size"] | None:
    """The sign vector of a rotation in its full length, or None where all signs are +1."""
    if rotation.signs is None:
        return None
    stored = signs[rotation.signs]
    return stored.double().repeat(rotation.size // stored.numel())


def rotate(x: Float64[Tensor, "*batch k"], rotation: Rotation, signs: Signs) -> Float64[Tensor, "*batch k"]:
    """R x for every vector on the last axis. On the rows of a weight that is W Rᵀ, so that (W Rᵀ)(R x) = W x."""
    return hadamard.apply(x, signs_of(rotation, signs), rotation.order)


def weight(
    linear: LinearPlan,
    w: Float[Tensor, "r k"],
    gain: Float[Tensor, " k"] | None,
    signs: Signs,
    first: int = 0,
    factor: Float64[Tensor, " c"] | None = None,
    row_scale: Float64[Tensor, " n"] | None = None,
) -> Float64[Tensor, "r k"]:
    """The rewritten weight R_out W diag(g) R_inᵀ of one layer, in float64.

    `w` may be only some rows of W, from row `first` on: whole blocks of the output's Hadamard matrix. `factor`: what
    the plan's balance multiplies rows or columns with; `row_scale`: what rows are divided by.
    """
    w = w.to(torch.float64, copy=True)  # the one copy; everything else happens in its place
    if linear.balance is not None:
        assert factor is not None, linear.name
        w *= factor if linear.balanced_columns else factor[first : first + len(w), None]
    if linear.norm is not None:
        assert gain is not None, linear.name
        w *= gain.double()
    if linear.input is not None:
        hadamard.apply(w, signs_of(linear.input, signs), linear.input.order, inplace=True)
    if row_scale is not None:
        w /= row_scale[first : first + len(w), None]
    if linear.output is not None:
        output_signs = signs_of(linear.output, signs)
        output_signs = None if output_signs is None else output_signs[first : first + len(w)]
        hadamard.apply_columns(w, output_signs, linear.output.order, inplace=True)
    return w


def row_scale(w: Float[Tensor, "n k"]) -> Float64[Tensor, " n"]:
    """The root mean square of every row relative to that of the whole weight, as a float16 number; 1 for a zero row.

    A rotation of the output spreads the rounding error evenly over all rows. With rows of one size in front of it, and
    the scale behind it again, the error of a row is in proportion to its size, and the sum of all errors is what it
    was: r_i^2 e summed over rows is n e where the mean of r_i^2 is 1. (EXL3 does the same with its output scales.)
    """
    squares = torch.cat([piece.float().square().sum(1) for piece in w.split(PIECE)]).double()
    size = (squares / squares.mean()).sqrt().clamp(1 / MAX_ROW_SCALE, MAX_ROW_SCALE)
    return torch.where(squares > 0, size, 1.0).to(torch.float16).double()


def bias(
    linear: LinearPlan, b: Float[Tensor, " n"], signs: Signs, factor: Float64[Tensor, " c"] | None = None
) -> Float64[Tensor, " n"]:
    """The rewritten bias R_out b of one layer, in float64. `factor`: what the plan's balance multiplies the rows
    with."""
    if linear.balance is not None and not linear.balanced_columns:
        assert factor is not None, linear.name
        b = b.double() * factor
    if linear.output is None or linear.online_output is not None:  # added after the layer has turned its product back
        return b.double()
    return rotate(b.double(), linear.output, signs)
