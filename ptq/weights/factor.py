"""Factors of Hessians: damping, permutation, Cholesky in panels, and the proxy loss that a factor gives.

Everything works in the place of H, which is as large as all else together in `ptq.weights.rounding`.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from ptq.errors import InputError
from ptq.ops.matmul import product

PANEL = 1024
"""Columns between two products in `cholesky` and `energy`."""
MAX_DAMPING = 10.0
"""No factor is tried with more."""


def factor(
    h: Float32[Tensor, "k k"], diagonal: Float32[Tensor, " k"], columns: Int64[Tensor, " k"], damping: float, name: str
) -> tuple[Float32[Tensor, "k k"], Float32[Tensor, " k"], float]:
    """Lower Cholesky factor of the permuted, damped H in H's place, what was added to its diagonal, and the damping
    used. Above the diagonal the permuted H stays.

    `damping` is relative to the mean of diag(H), and ten times more wherever that is not enough for a factor.
    Raises InputError, naming `name`, for a matrix that is far from positive semidefinite.
    """
    diagonal = diagonal[columns]
    live = diagonal > 0
    mean = float(diagonal.sum(dtype=torch.float64)) / max(1, int(live.sum()))
    permute(h, columns)
    while True:
        # Dead rows and columns of H are zero but for the one put on the diagonal.
        added = torch.where(live, damping * mean, 1.0).float()
        h.diagonal().copy_(diagonal + added)
        if cholesky(h):
            return h, added, damping
        if damping >= MAX_DAMPING:
            raise InputError(f"{name}: the Hessian is not positive semidefinite, even with damping {damping:g}")
        damping = min(max(10 * damping, 1e-4), MAX_DAMPING)
        for start in range(0, len(h), PANEL):  # what lies above the diagonal is untouched
            end = start + PANEL
            h[end:, start:end] = h[start:end, end:].t()
            h[start:end, start:end] = h[start:end, start:end].triu(1).t() + h[start:end, start:end].triu(1)


def permute(h: Float32[Tensor, "k k"], order: Int64[Tensor, " k"]) -> None:
    """h[order][:, order] in the place of h: columns in panels of rows, then rows along the cycles of the order."""
    for start in range(0, len(h), PANEL):
        h[start : start + PANEL] = h[start : start + PANEL].index_select(1, order)
    source, moved = order.tolist(), [False] * len(order)
    for first in range(len(source)):
        if moved[first] or source[first] == first:
            continue
        kept, here = h[first].clone(), first
        while source[here] != first:
            h[here] = h[source[here]]
            moved[here], here = True, source[here]
        h[here], moved[here] = kept, True


def cholesky(a: Float32[Tensor, "k k"]) -> bool:
    """The lower Cholesky factor of `a` in its lower triangle; False where there is none. What lies above the diagonal
    is not touched.

    Panels, so that most of the work is products: LAPACK's own runs at a fifth of this machine's peak.
    """
    k = len(a)
    for i in range(0, k, PANEL):
        j = min(i + PANEL, k)
        corner = a[i:j, i:j].tril()  # all that is read of it
        if i:
            corner -= product(a[i:j, :i], a[i:j, :i].t())
            a[j:, i:j] -= product(a[j:, :i], a[i:j, :i].t())
        corner, failed = torch.linalg.cholesky_ex(corner)
        if int(failed):
            return False
        a[i:j, i:j] = corner.tril() + a[i:j, i:j].triu(1)
        if j < k:
            a[j:, i:j] = torch.linalg.solve_triangular(corner.t(), a[j:, i:j], upper=True, left=False)
    return True


def symmetric_rows(
    factor: Float32[Tensor, "k k"], diagonal: Float32[Tensor, " k"], i: int, j: int
) -> Float32[Tensor, "c k"]:
    """Rows i .. j - 1 of the matrix whose factor is the lower triangle of `factor`, whose part above the diagonal still
    lies there, and whose diagonal is given."""
    rows = torch.cat([factor[:i, i:j].t(), factor[i:j, i:]], 1)
    corner = rows[:, i:j].triu(1)
    rows[:, i:j] = corner + corner.t() + torch.diag(diagonal[i:j])
    return rows


def energy(x: Float32[Tensor, "k r"], factor: Float32[Tensor, "k k"], added: Float32[Tensor, " k"]) -> float:
    """tr(xᵀ H x) where H + diag(added) = L Lᵀ and L is the lower triangle of `factor`: |Lᵀ x|² less what was added."""
    total = 0.0
    for i in range(0, len(x), PANEL):
        j = min(i + PANEL, len(x))
        y = product(factor[i:j, i:j].tril().t().contiguous(), x[i:j].contiguous())
        if j < len(x):
            y += product(factor[j:, i:j].t(), x[j:])
        total += squares(y)
    return total - float((added * _row_squares(x)).sum())


def solve(factor: Float32[Tensor, "k k"], b: Float32[Tensor, "k r"]) -> Float32[Tensor, "k r"]:
    """x with L Lᵀ x = b, in the place of b; L is the lower triangle of `factor`."""
    bounds = [(i, min(i + PANEL, len(b))) for i in range(0, len(b), PANEL)]
    for i, j in bounds:
        if i:
            b[i:j] -= product(factor[i:j, :i], b[:i])
        b[i:j] = torch.linalg.solve_triangular(factor[i:j, i:j], b[i:j], upper=False)
    for i, j in reversed(bounds):
        if j < len(b):
            b[i:j] -= product(factor[j:, i:j].t(), b[j:])
        b[i:j] = torch.linalg.solve_triangular(factor[i:j, i:j].tril().t(), b[i:j], upper=True)
    return b


def solved_rows(
    b: Float32[Tensor, "n k"], factor: Float32[Tensor, "k k"], columns: Int64[Tensor, " k"]
) -> Float32[Tensor, "n k"]:
    """b times the inverse of the matrix whose `factor` is that of it in another order, in the place of b."""
    return b.index_copy_(1, columns, solve(factor, b.index_select(1, columns).t().contiguous()).t())


def squares(x: Float[Tensor, "m n"]) -> float:
    """Sum of squares, added up in float64 over rows."""
    return float(_row_squares(x).sum())


def _row_squares(x: Float[Tensor, "m n"]) -> Float64[Tensor, " m"]:
    return torch.linalg.vector_norm(x, dim=1).double().square()
