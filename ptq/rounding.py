"""The two solvers: `nearest`, and `ldlq` with feedback. GPTQ is `ldlq` with a codebook of dimension 1.

LDLQ (Chee et al. 2023, arXiv:2307.13304, section 3; block form: Tseng et al. 2024, arXiv:2402.04396, section 4.3)
minimises tr((W - Ŵ) H (W - Ŵ)ᵀ) one column, or one block of d columns, after the other. With H = L D Lᵀ, L unit lower
(block) triangular, columns are rounded from the last to the first,

    Ŵ_j = Q(W_j + sum_{i > j} (W_i - Ŵ_i) L_ij),

so that (W - Ŵ) L is exactly the matrix of rounding errors of Q, and the loss is the sum of its squares times D. GPTQ's
updates are the same numbers (same paper, section 5.1), but it takes them from the inverse, with four times the work.

Columns are taken in the order of descending diag(H): the heavy ones are rounded first, while the others can still make
up for their errors. Scales are fitted before, on W itself, so groups stay what they are and no order is stored.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import BlockCodebook, Codebook, Scales
from ptq.matmul import product

ROW_CHUNK = 1 << 20
"""Weights that `nearest` works on at a time: they stay in the cache."""
COLUMN_BLOCK = 128
"""Columns between two products with the factor in `ldlq`."""
PANEL = 1024
"""Columns between two products in `cholesky` and `energy`."""
MAX_DAMPING = 10.0
LOSS_ROWS = 256
"""Rows, evenly spread, that the proxy loss is measured on: all would cost as much as the rounding itself."""


@dataclass(frozen=True)
class Rounded:
    """One weight in a codebook, and how well it went."""

    codes: Shaped[Tensor, "n m"]
    scales: Scales
    solver: str = "nearest"
    """`nearest` or `ldlq`; `nearest` from `ldlq` too, where feedback would have been worse."""
    error: float = 0.0
    """Squared error relative to the weight's: |W - Ŵ|² / |W|²."""
    loss: float | None = None
    """Relative proxy loss tr(dW H dWᵀ) / tr(W H Wᵀ), over at most LOSS_ROWS rows; None without a Hessian."""
    nearest_loss: float | None = None
    """The same for nearest rounding with the same scales."""
    damping: float | None = None
    """What was added to the diagonal of H, relative to its mean."""
    dead: int = 0
    """Input channels that calibration never saw: diag(H) = 0."""

    def statistics(self) -> dict[str, object]:
        """Everything but the tensors, as JSON values; of floating-point scales the least, mean and largest size.

        Six digits: the last ones of a sum depend on the number of threads, and the record of a run must not.
        """
        found = {
            key: value for key, value in vars(self).items() if key not in ("codes", "scales") and value is not None
        }
        for part, tensor in self.scales.items():
            if tensor.is_floating_point():
                size = tensor.abs()
                found[part] = [float(size.min()), float(size.mean(dtype=torch.float64)), float(size.max())]
        return {key: _six_digits(value) for key, value in found.items()}


def nearest(w: Float[Tensor, "n k"], codebook: Codebook, *, name: str = "weight") -> Rounded:
    """Every weight to its nearest code. Raises InputError, naming `name`, for NaN or infinity."""
    rows = max(1, ROW_CHUNK // max(1, w.shape[1]))
    scales = {} if codebook.per_row else codebook.fit(w.float(), name=name)
    codes, fitted, error, energy = [], [], 0.0, 0.0
    for piece in w.split(rows):
        x = piece.float().contiguous()
        if codebook.per_row:
            fitted.append(scales := codebook.fit(x, name=name))
        codes.append(codebook.round(x, scales))
        error += _squares(codebook.decode(codes[-1], scales).sub_(x))
        energy += _squares(x)
    if fitted:
        scales = {part: torch.cat([piece[part] for piece in fitted]) for part in scales}
    return Rounded(torch.cat(codes), scales, error=_ratio(error, energy))


def ldlq(
    w: Float[Tensor, "n k"],
    h: Float[Tensor, "k k"],
    codebook: Codebook,
    *,
    damping: float = 0.01,
    order: str = "descending",
    name: str = "weight",
) -> Rounded:
    """LDLQ of W under the Hessian H = sum x xᵀ (any positive factor of it), float32 inside.

    `damping` times the mean of diag(H) is added to it, ten times more wherever that is not enough for a Cholesky
    factor. `order`: `descending` diag(H), or `given`. Channels with diag(H) = 0 neither give nor receive feedback.
    Where nearest rounding has the smaller loss, that is the result. A float32 H is used up: its factor takes its place,
    since it is as large as everything else together. Needs memory for two more [n, k].
    Raises InputError, naming `name`, where W or H is not finite, H does not fit W or is far from positive semidefinite.
    """
    w, h = w.float().contiguous(), h.float()
    diagonal = _checked_diagonal(h, w.shape[1], name)
    scales = codebook.fit(w, name=name)
    columns = _columns(diagonal, codebook.dim, order)
    inverse = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))
    factor, added, used = _factor(h, diagonal, columns, damping, name)
    # Memory is tight: the factor lies in h's place, and soon weights are columns first, in rounding order.
    every = -(-len(w) // LOSS_ROWS)
    plain = _nearest_error(w[::every].contiguous(), codebook, scales, every)
    wt = w.index_select(1, columns).t().contiguous()
    del w
    codes, error = _feedback(wt, factor, codebook, scales, columns)
    samples = (wt[:, ::every], plain.t()[columns], error[:, ::every])
    total, nearest_loss, loss = (energy(x.contiguous(), factor, added) for x in samples)
    del factor
    statistics = {"nearest_loss": _ratio(nearest_loss, total), "damping": used, "dead": int((diagonal == 0).sum())}
    if loss > nearest_loss:
        kept = nearest(wt[inverse].t().contiguous(), codebook, name=name)
        return replace(kept, loss=_ratio(nearest_loss, total), **statistics)
    codes = codes[inverse[:: codebook.dim] // codebook.dim].t().contiguous()
    share = _ratio(_squares(error), _squares(wt))
    return Rounded(codes, scales, "ldlq", share, _ratio(loss, total), **statistics)


def _nearest_error(w: Float32[Tensor, "r k"], codebook: Codebook, scales: Scales, every: int) -> Float32[Tensor, "r k"]:
    """Errors of nearest rounding of every `every`-th row of a weight: those in `w`; `scales` are those of all rows."""
    if codebook.per_row:
        scales = {part: tensor[::every].contiguous() for part, tensor in scales.items()}
    return w - codebook.decode(codebook.round(w, scales), scales)


def _checked_diagonal(h: Tensor, k: int, name: str) -> Float32[Tensor, " k"]:
    if h.shape != (k, k):
        raise InputError(f"{name}: the Hessian is {list(h.shape)}, the weight has {k} columns")
    diagonal = h.diagonal().clone()
    if not bool(h.sum(1).isfinite().all()):
        raise InputError(f"{name}: the Hessian has NaN or infinity; the calibration activations overflowed")
    if bool((diagonal < 0).any()):
        raise InputError(f"{name}: the Hessian has a negative diagonal entry, so it is no sum of x xT")
    return diagonal


def _columns(diagonal: Float32[Tensor, " k"], d: int, order: str) -> Int64[Tensor, " k"]:
    """Where each column comes from. Rounding goes from the last to the first, so the heavy ones go to the end."""
    assert order in ("descending", "given"), order
    blocks = torch.arange(len(diagonal) // d, device=diagonal.device)
    blocks = diagonal.view(-1, d).sum(1).argsort(stable=True) if order == "descending" else blocks.flip(0)
    return (blocks[:, None] * d + torch.arange(d, device=diagonal.device)).flatten()


def _factor(
    h: Float32[Tensor, "k k"], diagonal: Float32[Tensor, " k"], columns: Int64[Tensor, " k"], damping: float, name: str
) -> tuple[Float32[Tensor, "k k"], Float32[Tensor, " k"], float]:
    """Lower Cholesky factor of the permuted, damped H in H's place, what was added to its diagonal, and the damping
    used."""
    diagonal = diagonal[columns]
    live = diagonal > 0
    mean = float(diagonal.sum(dtype=torch.float64)) / max(1, int(live.sum()))
    _permute(h, columns)
    while True:
        # Dead rows and columns of H are zero but for the one put on the diagonal.
        added = torch.where(live, damping * mean, 1.0).float()
        h.diagonal().copy_(diagonal + added)
        if cholesky(h):
            return h, added, damping
        if damping >= MAX_DAMPING:
            raise InputError(f"{name}: the Hessian is not positive semidefinite, even with damping {damping:g}")
        damping = max(10 * damping, 1e-4)
        for start in range(0, len(h), PANEL):  # what lies above the diagonal is untouched
            end = start + PANEL
            h[end:, start:end] = h[start:end, end:].t()
            h[start:end, start:end] = h[start:end, start:end].triu(1).t() + h[start:end, start:end].triu(1)


def _permute(h: Float32[Tensor, "k k"], order: Int64[Tensor, " k"]) -> None:
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


def _feedback(
    wt: Float32[Tensor, "k n"],
    factor: Float32[Tensor, "k k"],
    codebook: Codebook,
    scales: Scales,
    columns: Int64[Tensor, " k"],
) -> tuple[Shaped[Tensor, "m n"], Float32[Tensor, "k n"]]:
    """Codes, errors W - Ŵ, and |(W - Ŵ) L|², each block fed by one product with all behind it."""
    d, k = codebook.dim, len(wt)
    assert COLUMN_BLOCK % d == 0 and k % d == 0, (d, k)
    error, codes = torch.empty_like(wt), []
    for i in reversed(range(0, k, COLUMN_BLOCK)):
        j = min(i + COLUMN_BLOCK, k)
        block = factor[i:j, i:j].tril()
        inverse = _inverse_diagonal(block, d)
        behind = product(factor[j:, i:j].t(), error[j:]) if j < k else torch.zeros_like(wt[i:j])
        target = torch.addmm(wt[i:j], inverse.t(), behind) if d > 1 else wt[i:j] + behind * inverse.diagonal()[:, None]
        run = codebook.round_block if isinstance(codebook, BlockCodebook) else None
        arguments = target, wt[i:j], block @ inverse, scales, columns[i:j]
        found, error[i:j] = run(*arguments) if run else round_block(codebook, *arguments)
        codes.append(found)
    return torch.cat(codes[::-1]), error


def _inverse_diagonal(block: Float[Tensor, "c c"], d: int) -> Float[Tensor, "c c"]:
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


def energy(x: Float32[Tensor, "k r"], factor: Float32[Tensor, "k k"], added: Float32[Tensor, " k"]) -> float:
    """tr(xᵀ H x) where H + diag(added) = L Lᵀ and L is the lower triangle of `factor`: |Lᵀ x|² less what was added."""
    total = 0.0
    for i in range(0, len(x), PANEL):
        j = min(i + PANEL, len(x))
        y = product(factor[i:j, i:j].tril().t().contiguous(), x[i:j].contiguous())
        if j < len(x):
            y += product(factor[j:, i:j].t(), x[j:])
        total += _squares(y)
    return total - float((added * _row_squares(x)).sum())


def _row_squares(x: Float[Tensor, "m n"]) -> Float64[Tensor, " m"]:
    return torch.linalg.vector_norm(x, dim=1).double().square()


def _squares(x: Float[Tensor, "m n"]) -> float:
    """Sum of squares, added up in float64 over rows."""
    return float(_row_squares(x).sum())


def _six_digits(value: Any) -> Any:
    if isinstance(value, list):
        return [_six_digits(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _ratio(part: float, whole: float) -> float:
    return max(part, 0.0) / whole if whole > 0 else 0.0
