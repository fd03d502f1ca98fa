"""What can still be gained when LDLQ is done: guarded sweeps of coordinate descent, and the best scale for the codes.

Both lower tr((W - Ŵ) H (W - Ŵ)ᵀ), H with its damping, and neither can raise it: what does not lower it is not taken.
Sweeps are those of QuIP#'s code (`quip_tune_iters`; Tseng et al. 2024, arXiv:2402.04396), which accepts every step
unchecked: on steep Hessians that raises the loss, because a step rounds in the Euclidean norm what counts in that of H.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from ptq.ops.matmul import product
from ptq.weights.factor import energy, symmetric_rows
from ptq.weights.formats import BlockCodebook, Codebook, ScaledCodebook, Scales

COLUMN_BLOCK = 128
"""Columns between two products with H or its factor."""
STEPS = 4096
"""A scale is refitted in steps of one part in so many: the last digits of a sum depend on the number of threads, and
the scale then as a rule does not."""


@dataclass(frozen=True)
class Problem:
    """One weight to be rounded, columns first and in rounding order: from the last one to the first."""

    wt: Float32[Tensor, "k n"]
    factor: Float32[Tensor, "k k"]
    """Its lower triangle is the Cholesky factor of H with damping; above the diagonal H itself lies."""
    added: Float32[Tensor, " k"]
    """What damping added to the diagonal."""
    diagonal: Float32[Tensor, " k"]
    """The diagonal of H with damping."""
    columns: Int64[Tensor, " k"]
    """Where each column comes from."""
    codebook: Codebook

    def rows(self, every: int) -> "Problem":
        """The same for every `every`-th row of the weight."""
        return replace(self, wt=self.wt[:, ::every].contiguous())

    def loss(self, error: Float32[Tensor, "k n"]) -> float:
        """tr(E H Eᵀ), without damping."""
        return energy(error.contiguous(), self.factor, self.added)

    def decode(self, codes: Shaped[Tensor, "m n"], scales: Scales, first: int = 0) -> Float32[Tensor, "c n"]:
        """The numbers of the codes of some columns, the first of which is `first`."""
        columns = self.columns[first : first + len(codes) * self.codebook.dim]
        return self.codebook.decode(codes.t().contiguous(), scales, columns).t()


def sweep(problem: Problem, codes: Shaped[Tensor, "m n"], error: Float32[Tensor, "k n"], scales: Scales) -> float:
    """Once over all blocks of d columns: each is rounded anew, given all others, and kept where the loss of its row
    falls. `codes` and `error` = W - Ŵ change in place. Returns by how much the loss (with damping) fell."""
    k, fallen = len(error), 0.0
    single = problem.codebook.dim == 1 and isinstance(problem.codebook, BlockCodebook)
    sweep_columns = _sweep_singles if single else _sweep_columns
    for i in reversed(range(0, k, COLUMN_BLOCK)):
        j = min(i + COLUMN_BLOCK, k)
        h = symmetric_rows(problem.factor, problem.diagonal, i, j)
        gradient = product(h, error)
        fallen += sweep_columns(problem, codes, error, scales, i, gradient, h[:, i:j])
    return fallen


def _sweep_singles(
    problem: Problem,
    codes: Shaped[Tensor, "m n"],
    error: Float32[Tensor, "k n"],
    scales: Scales,
    first: int,
    gradient: Float32[Tensor, "c n"],
    h: Float32[Tensor, "c c"],
) -> float:
    """`_sweep_columns` for codes of single weights, of which the nearest is the best: a row is kept or not as a whole.

    What is rounded of column j is w_j - e_j + (g_j + sum h_ij (e'_i - e_i)) / h_jj, a sum over the columns i > j whose
    errors were e and are e' now: LDLQ with another target, and the factor h_ij / h_jj.
    """
    assert isinstance(problem.codebook, BlockCodebook)
    here, diagonal, behind = slice(first, first + len(h)), h.diagonal()[:, None], h.triu(1)
    w, e, columns = problem.wt[here], error[here], problem.columns[here]
    target = w - e + (gradient - product(behind, e.contiguous())) / diagonal
    factor = (behind / diagonal).t().contiguous()
    found, after = problem.codebook.round_block(target, w, factor, scales, columns)
    step = after - e
    change = (step * (2 * gradient + product(h, step))).sum(0)
    better = change < 0
    codes[here], error[here] = torch.where(better, found, codes[here]), torch.where(better, after, e)
    return -float(torch.where(better, change, 0.0).sum(dtype=torch.float64))


def _sweep_columns(
    problem: Problem,
    codes: Shaped[Tensor, "m n"],
    error: Float32[Tensor, "k n"],
    scales: Scales,
    first: int,
    gradient: Float32[Tensor, "c n"],
    h: Float32[Tensor, "c c"],
) -> float:
    """`sweep` over the columns from `first` on. `gradient` is H E, of these columns; `h` their corner of H."""
    d, fallen = problem.codebook.dim, 0.0
    for s in reversed(range(0, len(h), d)):
        block, here = slice(s, s + d), slice(first + s, first + s + d)
        corner, columns = h[block, block], problem.columns[here]
        # With e the error of the block and g its gradient, e - inverse(H_bb) g is best: round what that leaves of w.
        w, e, g = problem.wt[here], error[here], gradient[block]
        target = w - e + torch.cholesky_solve(g, torch.linalg.cholesky(corner))
        found = problem.codebook.round(target.t().contiguous(), scales, columns)
        step = w - problem.codebook.decode(found, scales, columns).t() - e
        change = (step * (2 * g + corner @ step)).sum(0)
        better = change < 0
        step = torch.where(better, step, 0.0)
        here_codes = slice(here.start // d, here.start // d + 1)
        codes[here_codes] = torch.where(better, found.t(), codes[here_codes])
        error[here] += step
        gradient[:s] += h[:s, block] @ step
        fallen -= float(torch.where(better, change, 0.0).sum(dtype=torch.float64))
    return fallen


def refit(problem: Problem, codes: Shaped[Tensor, "m n"], scales: Scales, every: int) -> Scales:
    """The scale with the least loss for these codes, by least squares over every `every`-th row; `scales` where it is
    no better."""
    assert isinstance(problem.codebook, ScaledCodebook)
    part, codes = problem.rows(every), codes[:, ::every]
    rounded = part.decode(codes, scales)
    square = part.loss(rounded)
    inner = (part.loss(rounded + part.wt) - part.loss(rounded - part.wt)) / 4
    if not 0 < inner < math.inf or not 0 < square < math.inf:
        return scales
    fitted = {"scale": scales["scale"] * (round(inner / square * STEPS) / STEPS)}
    before, after = (part.loss(part.wt - part.decode(codes, s)) for s in (scales, fitted))
    return fitted if after < before else scales
