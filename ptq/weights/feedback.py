"""LDLQ with given scales: columns, or blocks of them, are rounded one after the other, from the last to the first, each
with the errors of those before it fed back (`ptq.weights.rounding` has the formulas)."""

import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from ptq.ops.matmul import product
from ptq.weights.formats import BlockCodebook, Codebook, Scales
from ptq.weights.sweeps import COLUMN_BLOCK, Problem


def feedback(
    problem: Problem, scales: Scales, losses: Float64[Tensor, " n"] | None = None
) -> tuple[Shaped[Tensor, "m n"], Float32[Tensor, "k n"]]:
    """Codes, and errors W - Ŵ; the feedback into a block is one product with the errors of all columns behind it. The
    loss of every row is added to `losses`."""
    wt, factor, codebook = problem.wt, problem.factor, problem.codebook
    d, k = codebook.dim, len(wt)
    assert COLUMN_BLOCK % d == 0 and k % d == 0, (d, k)
    error, codes = torch.empty_like(wt), []
    for i in reversed(range(0, k, COLUMN_BLOCK)):
        j = min(i + COLUMN_BLOCK, k)
        block = factor[i:j, i:j].tril()
        inverse = inverse_diagonal(block, d)
        behind = product(factor[j:, i:j].t(), error[j:]) if j < k else torch.zeros_like(wt[i:j])
        target = torch.addmm(wt[i:j], inverse.t(), behind) if d > 1 else wt[i:j] + behind * inverse.diagonal()[:, None]
        run = codebook.round_block if isinstance(codebook, BlockCodebook) else None
        arguments = target, wt[i:j], block @ inverse, scales, problem.columns[i:j]
        found, error[i:j] = run(*arguments) if run else round_block(codebook, *arguments)
        codes.append(found)
        if losses is not None:  # with C the factor, Cᵀ E is made of what is behind, and of the block's own errors
            losses += _column_squares(torch.addmm(behind, block.t(), error[i:j]))
            losses -= _column_squares(error[i:j] * problem.added[i:j, None].sqrt())
    return torch.cat(codes[::-1]), error


def row_losses(problem: Problem, scales: Scales) -> Float64[Tensor, " n"]:
    """The loss of every row, without damping, with these scales."""
    losses = torch.zeros(problem.wt.shape[1], dtype=torch.float64, device=problem.wt.device)
    feedback(problem, scales, losses)
    return losses


def inverse_diagonal(block: Float[Tensor, "c c"], d: int) -> Float[Tensor, "c c"]:
    """The inverse of the d x d blocks on the diagonal, zero elsewhere: a factor times it is unit (block) triangular."""
    if d == 1:
        return torch.diag(1 / block.diagonal())
    corners = torch.stack([block[s : s + d, s : s + d] for s in range(0, len(block), d)])
    return torch.block_diag(
        *torch.linalg.solve_triangular(corners, torch.eye(d).to(corners).expand_as(corners), upper=False)
    )


def round_block(
    codebook: Codebook,
    target: Float[Tensor, "c n"],
    w: Float[Tensor, "c n"],
    factor: Float[Tensor, "c c"],
    scales: Scales,
    columns: Int64[Tensor, " c"],
) -> tuple[Shaped[Tensor, "m n"], Float[Tensor, "c n"]]:
    """The inner loop of LDLQ for any codebook: `target` is W plus the feedback from behind the block, `factor` the unit
    lower (block) triangular factor. Returns codes and errors W - Ŵ."""
    d, target, error, codes = codebook.dim, target.clone(), torch.empty_like(w), []
    for s in reversed(range(0, len(w), d)):
        here = slice(s, s + d)
        code = codebook.round(target[here].t().contiguous(), scales, columns[here])
        error[here] = w[here] - codebook.decode(code, scales, columns[here]).t()
        target[:s] += factor[here, :s].t() @ error[here]
        codes.append(code.t())
    return torch.cat(codes[::-1]), error


def _column_squares(x: Float32[Tensor, "c n"]) -> Float64[Tensor, " n"]:
    return torch.linalg.vector_norm(x, dim=0).double().square()
