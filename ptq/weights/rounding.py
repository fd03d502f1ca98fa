"""The two solvers: `nearest`, and `ldlq` with feedback. GPTQ is `ldlq` with a codebook of dimension 1.

LDLQ (Chee et al. 2023, arXiv:2307.13304, section 3; block form: Tseng et al. 2024, arXiv:2402.04396, section 4.1)
minimises tr((W - Ŵ) H (W - Ŵ)ᵀ) one column, or one block of d columns, after the other. With H = L D Lᵀ, L unit lower
(block) triangular, columns are rounded from the last to the first,

    Ŵ_j = Q(W_j + sum_{i > j} (W_i - Ŵ_i) L_ij),

so that (W - Ŵ) L is exactly the matrix of rounding errors of Q, and the loss is the sum of its squares times D. GPTQ's
updates are the same numbers (same paper, section 5.1), but it takes them from the inverse, with four times the work.

Before, scales may be chosen by the loss of LDLQ itself (`ptq.weights.loss_scales`); behind, sweeps of coordinate
descent and a refit of a weight's one scale may lower it (`ptq.weights.sweeps`).

Columns are taken in the order of descending diag(H): the heavy ones are rounded first, while the others can still make
up for their errors. Groups stay what they are, and no order is stored.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ptq.errors import InputError
from ptq.files.json_numbers import six_digits
from ptq.weights import loss_scales
from ptq.weights.factor import factor, solved_rows, squares
from ptq.weights.feedback import feedback
from ptq.weights.formats import Codebook, OnePassCodebook, ScaledCodebook, Scales
from ptq.weights.sweeps import COLUMN_BLOCK, Problem, refit, sweep

ROW_CHUNK = 1 << 20
"""Weights that `nearest` works on at a time: they stay in the cache."""
LOSS_ROWS = 256
"""Rows, evenly spread, that the proxy loss is measured on: all would cost as much as the rounding itself."""
WORTHWHILE = 1e-3
"""Sweeps end when one lowers the loss by less than this share of it."""


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
    """The loss of nearest rounding with the scales that the codebook fits to the weight alone."""
    damping: float | None = None
    """What was added to the diagonal of H, relative to its mean."""
    dead: int = 0
    """Input channels that calibration never saw: diag(H) = 0."""
    sweeps: int | None = None
    """Sweeps of coordinate descent that were done; None where none were asked for."""
    note: str | None = None
    """Why `nearest` took the place of `ldlq`, if that is not what was asked for."""
    tokens: int | None = None
    """How many tokens of the calibration text a linear of an expert was given; None for others."""
    shrinkage: float | None = None
    """Likewise: the share of its Hessian that is not its own (`ptq.statistics.shrinkage`)."""

    def statistics(self) -> dict[str, object]:
        """Everything but the tensors, as JSON values; of floating-point scales the least, mean and largest size."""
        found = {key: x for key, x in vars(self).items() if key not in ("codes", "scales") and x is not None}
        for part, tensor in self.scales.items():
            if tensor.is_floating_point():
                size = tensor.abs()
                found[part] = [float(size.min()), float(size.mean(dtype=torch.float64)), float(size.max())]
        return six_digits(found)


def nearest(w: Float[Tensor, "n k"], codebook: Codebook, *, name: str = "weight") -> Rounded:
    """Every weight to its nearest code; columns that fill the last code count as zeros. Raises InputError, naming
    `name`, for NaN or infinity."""
    if isinstance(codebook, OnePassCodebook):
        found, scales, error, energy = codebook.nearest(w, name=name)
        return Rounded(found, scales, error=_ratio(error, energy))
    scales = None if codebook.per_row else codebook.fit(w.float(), name=name)
    return nearest_rows(w.split(max(1, ROW_CHUNK // max(1, w.shape[1]))), codebook, scales, name=name)


def nearest_rows(
    pieces: Iterable[Float[Tensor, "_ k"]], codebook: Codebook, scales: Scales | None = None, *, name: str = "weight"
) -> Rounded:
    """`nearest` of a weight that comes in pieces of whole rows; `scales`: of all rows, where they share them."""
    codes, fitted, error, energy = [], [], 0.0, 0.0
    for piece in pieces:
        x = piece.float().contiguous()
        fitted.append(codebook.fit(x, name=name) if scales is None else scales)
        codes.append(codebook.round(_filled(x, codebook), fitted[-1]))
        error += squares(codebook.decode(codes[-1], fitted[-1])[:, : x.shape[1]].sub_(x))
        energy += squares(x)
    if scales is None:
        scales = {part: torch.cat([piece[part] for piece in fitted]) for part in fitted[0]}
    return Rounded(torch.cat(codes), scales, error=_ratio(error, energy))


def ldlq(
    w: Float[Tensor, "n k"],
    h: Float[Tensor, "k k"],
    codebook: Codebook,
    *,
    drift: Float32[Tensor, "n k"] | None = None,
    damping: float = 0.01,
    sweeps: int = 0,
    name: str = "weight",
) -> Rounded:
    """LDLQ of W under the Hessian H = sum x xᵀ (any positive factor of it), float32 inside.

    `damping` times the mean of diag(H) is added to it, ten times more wherever that is not enough for a Cholesky
    factor. Channels with diag(H) = 0 neither give nor receive feedback. `sweeps`: the most sweeps of coordinate descent
    that follow; above 0, scales of rows are chosen by the loss, too. With a `drift`, some share of W sum (x - x̂) x̂ᵀ
    where H is that of x̂, it is W + drift (H + damping)⁻¹ that is rounded, and that errors and losses are relative to;
    `drift` is overwritten.
    The result is that of nearest rounding where this has the smaller loss and, with a warning and a note, where H has
    NaN or infinity. A float32 `h` is overwritten by its factor. Needs memory for two more [n, k], with a drift three.
    Raises InputError, naming `name`, where W is not finite, H does not fit W or is far from positive semidefinite.
    """
    w, h, k = w.float().contiguous(), h.float(), w.shape[1]
    diagonal = _checked_diagonal(h, k, name)
    if diagonal is None:
        note = "the Hessian has NaN or infinity (the calibration activations overflowed): rounded to nearest"
        warnings.warn(f"{name}: {note}", stacklevel=2)
        return replace(nearest(w, codebook, name=name), note=note)
    problem, scales, plain, used = _problem(w, h, diagonal, codebook, drift, damping, name)
    del w, h, drift
    every = -(-problem.wt.shape[1] // LOSS_ROWS)
    part = problem.rows(every)
    total, nearest_loss = part.loss(part.wt), part.loss(plain)
    scales = loss_scales.of_weight(part, scales)
    if sweeps:
        scales = loss_scales.of_rows(problem, scales)
    codes, error = feedback(problem, scales)
    scales, done = _improve(problem, codes, error, scales, sweeps, every)
    loss = part.loss(error[:, ::every])
    statistics = {"nearest_loss": _ratio(nearest_loss, total), "damping": used, "dead": int((diagonal == 0).sum())}
    wt, columns, d = problem.wt, problem.columns, codebook.dim
    del problem, part
    inverse = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))
    if loss > nearest_loss:
        kept = nearest(wt[inverse[:k]].t().contiguous(), codebook, name=name)
        return replace(kept, loss=_ratio(nearest_loss, total), **statistics)
    codes = codes[inverse[::d] // d].t().contiguous()
    real = columns < k
    share = _ratio(squares(error if len(real) == k else error[real]), squares(wt))
    return Rounded(codes, scales, "ldlq", share, _ratio(loss, total), sweeps=done if sweeps else None, **statistics)


def _filled(w: Float32[Tensor, "n k"], codebook: Codebook) -> Float32[Tensor, "n c"]:
    """W with columns of zeros that fill the last code of a row."""
    missing = -w.shape[1] % codebook.dim
    return pad(w, (0, missing)) if missing else w


def _checked_diagonal(h: Tensor, k: int, name: str) -> Float32[Tensor, " k"] | None:
    """diag(H); None where H is not finite."""
    if h.shape != (k, k):
        raise InputError(f"{name}: the Hessian is {list(h.shape)}, the weight has {k} columns")
    diagonal = h.diagonal().clone()
    if not bool(h.sum(1).isfinite().all()):
        return None
    if bool((diagonal < 0).any()):
        raise InputError(f"{name}: the Hessian has a negative diagonal entry, so it is no sum of x xT")
    return diagonal


def _problem(
    w: Float32[Tensor, "n k"],
    h: Float32[Tensor, "k k"],
    diagonal: Float32[Tensor, " k"],
    codebook: Codebook,
    drift: Float32[Tensor, "n k"] | None,
    damping: float,
    name: str,
) -> tuple[Problem, Scales, Float32[Tensor, "c r"], float]:
    """Everything in rounding order, the scales, the errors of nearest rounding of some rows, and the damping used.
    Memory is tight: the factor lies in h's place. Columns that fill the last code are dead channels."""
    k, missing = w.shape[1], -w.shape[1] % codebook.dim
    if missing:
        h, diagonal = pad(h, (0, missing, 0, missing)), pad(diagonal, (0, missing))
    columns = _columns(diagonal, codebook.dim)
    lower, added, used = factor(h, diagonal, columns, damping, name)
    if drift is not None:
        w = w + solved_rows(_filled(drift, codebook), lower, columns)[:, :k]
    scales = codebook.fit(w, name=name)
    w = _filled(w, codebook)
    every = -(-len(w) // LOSS_ROWS)
    plain = _nearest_error(w[::every].contiguous(), codebook, scales, every).t()[columns]
    wt = w.index_select(1, columns).t().contiguous()
    return Problem(wt, lower, added, diagonal[columns] + added, columns, codebook), scales, plain, used


def _nearest_error(w: Float32[Tensor, "r k"], codebook: Codebook, scales: Scales, every: int) -> Float32[Tensor, "r k"]:
    """Errors of nearest rounding of every `every`-th row of a weight: those in `w`; `scales` are those of all rows."""
    if codebook.per_row:
        scales = {part: tensor[::every].contiguous() for part, tensor in scales.items()}
    return w - codebook.decode(codebook.round(w, scales), scales)


def _columns(diagonal: Float32[Tensor, " k"], d: int) -> Int64[Tensor, " k"]:
    """Where each column comes from. Rounding goes from the last to the first, so the heavy ones go to the end."""
    blocks = diagonal.view(-1, d).sum(1).argsort(stable=True)
    return (blocks[:, None] * d + torch.arange(d, device=diagonal.device)).flatten()


def _improve(
    problem: Problem,
    codes: Shaped[Tensor, "m n"],
    error: Float32[Tensor, "k n"],
    scales: Scales,
    sweeps: int,
    every: int,
) -> tuple[Scales, int]:
    """Sweeps, and scales fitted to the codes: `codes` and `error` change in place. Returns the scales, and how many
    sweeps there were."""
    done, whole = 0, float(problem.loss(error[:, ::every])) * every if sweeps else 0.0
    while done < sweeps:
        done += 1
        if sweep(problem, codes, error, scales) < WORTHWHILE * whole:
            break
    if isinstance(problem.codebook, ScaledCodebook):
        fitted, d = refit(problem, codes, scales, every), problem.codebook.dim
        for i in range(0, len(error) if fitted is not scales else 0, COLUMN_BLOCK):
            part = codes[i // d : (i + COLUMN_BLOCK) // d]
            error[i : i + COLUMN_BLOCK] = problem.wt[i : i + COLUMN_BLOCK] - problem.decode(part, fitted, i)
        scales = fitted
    return scales, done


def _ratio(part: float, whole: float) -> float:
    return max(part, 0.0) / whole if whole > 0 else 0.0
