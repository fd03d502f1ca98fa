"""What `ldlq` does with a codebook of few scales and with sweeps, against float64."""

import pytest
import torch

from fp6.minifloat import MinifloatGrid
from ptq.weights import factor, feedback, loss_scales, rounding, sweeps
from ptq.weights.rounding import ldlq, nearest
from quarot.integer import IntegerGrid
from quip_sharp.codebook import TRIALS, E8Codebook


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hessian(k: int, power: float, seed: int = 0) -> torch.Tensor:
    """Eigenvalues i^-power in a random basis, float64."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))[0]
    return (basis * torch.arange(1, k + 1, dtype=torch.float64) ** -power) @ basis.t()


def proxy_loss(w: torch.Tensor, what: torch.Tensor, h: torch.Tensor) -> float:
    d, w = w.double() - what.double(), w.double()
    return float((d @ h * d).sum() / (w @ h * w).sum())


def decoded(found: rounding.Rounded, codebook, k: int) -> torch.Tensor:
    return codebook.decode(found.codes, found.scales)[:, :k]


class HalfIntegers:
    """The best scalar grid of 2 bits for a Gaussian: -1.5, -0.5, 0.5, 1.5 times one step."""

    dim, per_row = 1, False

    def fit(self, w, *, name="weight"):
        return {"step": 0.9957 * w.square().mean().sqrt()}

    def round(self, w, scales, columns=None):
        return (w / scales["step"] + 1.5).round().clamp(0, 3).to(torch.uint8)

    def decode(self, codes, scales, columns=None):
        return (codes.float() - 1.5) * scales["step"]


def problem_of(w, h, codebook, power_damping=0.01):
    """What `ldlq` hands to a sweep, and its codes, errors and scales."""
    diagonal = h.diagonal().float()
    problem, scales, _, _ = rounding._problem(w, h.float(), diagonal, codebook, None, power_damping, "w")
    codes, error = feedback.feedback(problem, scales)
    return problem, codes, error, scales


def damped_loss(problem: sweeps.Problem, error: torch.Tensor) -> torch.Tensor:
    """e H eᵀ of every row, with damping, float64."""
    lower = problem.factor.tril().double()
    return (lower.t() @ error.double()).square().sum(0)


# --- LDLQ with the lattice --------------------------------------------------------------------------------------------


class InFloat64(E8Codebook):
    def round(self, w, scales, columns=None):
        return super().round(w.float(), scales)

    def decode(self, codes, scales, columns=None):
        return super().decode(codes, scales).double()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_times_factor_is_the_rounding_error(bits):
    """(W - Ŵ) L = target - Ŵ in float64."""
    k, seen = 48, []
    lower = torch.linalg.cholesky(hessian(k, 1.0) + 0.01 / k * torch.eye(k))
    unit, w = lower @ feedback.inverse_diagonal(lower, 8), randn(7, k).double()

    class Recorder(InFloat64):
        def round(self, w, scales, columns=None):
            seen.append(w.t())
            return super().round(w, scales)

    book = Recorder(bits)
    scales = book.fit(w.float())
    codes, error = feedback.round_block(book, w.t(), w.t(), unit, scales, torch.arange(k))
    targets, what = torch.cat(seen[::-1]), book.decode(codes.t().contiguous(), scales).t()
    torch.testing.assert_close((error.t() @ unit).t(), targets - what, rtol=0, atol=1e-10)


@pytest.mark.parametrize("power,most", [(0.0, 0.093), (1.0, 0.0425), (1.5, 0.0137)])
def test_the_lattice_beats_the_scalar_grid(power, most):
    """scripts/bench_codebooks.py measures it on larger layers."""
    w, h = randn(96, 256), hessian(256, power)
    lattice, scalar = (ldlq(w, h, book) for book in (E8Codebook(2), HalfIntegers()))
    assert lattice.loss < most and lattice.loss < 0.86 * scalar.loss
    assert lattice.loss == pytest.approx(proxy_loss(w, decoded(lattice, E8Codebook(2), 256), h), rel=1e-3)
    losses = [lattice.loss, *(ldlq(w, h, E8Codebook(bits)).loss for bits in (3, 4))]
    assert losses[0] > 2.8 * losses[1] > 2.8 * 3 * losses[2]


def test_scales_are_chosen_by_the_loss(monkeypatch):
    """Of scales that are too small, right and too large the right one is taken, whatever was fitted."""
    w, h = randn(48, 128), hessian(128, 1.0)
    usual = ldlq(w, h, E8Codebook(2))
    fit = E8Codebook.fit
    for wrong in (0.5, 2.0):
        monkeypatch.setattr(E8Codebook, "fit", lambda self, w, name="", f=wrong: {"scale": f * fit(self, w)["scale"]})
        monkeypatch.setattr("quip_sharp.codebook.TRIALS", (*TRIALS, 1 / wrong, wrong))
        found = ldlq(w, h, E8Codebook(2))
        assert found.loss < 1.03 * usual.loss
        assert float(found.scales["scale"][0] / usual.scales["scale"][0]) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("k", [5, 20, 131])
def test_columns_that_fill_the_last_code(k):
    """They are dead channels of zeros: neither in the loss nor in the count."""
    w, h = randn(20, k), hessian(k, 1.0)
    found = ldlq(w, h, E8Codebook(4), sweeps=2)
    assert found.codes.shape == (20, -(-k // 8)) and found.dead == 0
    what = decoded(found, E8Codebook(4), k)
    assert found.loss == pytest.approx(proxy_loss(w, what, h), rel=2e-3)
    error = (w - what).square().sum() / w.square().sum()
    assert found.error == pytest.approx(float(error), rel=1e-4)
    assert found.loss <= found.nearest_loss


@pytest.mark.parametrize("codebook", [E8Codebook(2), IntegerGrid(4)])
def test_a_hessian_that_is_not_finite(codebook):
    """The layer is rounded to nearest, and everybody is told."""
    for bad in (float("nan"), float("inf")):
        w, h = randn(6, 16), hessian(16, 1.0)
        h[3, 4] = bad
        with pytest.warns(UserWarning, match=r"layer\.7: the Hessian has NaN or infinity .*: rounded to nearest"):
            found = ldlq(w, h, codebook, name="layer.7")
        assert found.solver == "nearest" and "NaN or infinity" in str(found.statistics()["note"])
        assert torch.equal(found.codes, nearest(w, codebook).codes)


# --- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codebook", [E8Codebook(2), E8Codebook(4), IntegerGrid(3, 16), MinifloatGrid("e2m1", 24), HalfIntegers()]
)
@pytest.mark.parametrize("power", [0.5, 1.5])
def test_a_sweep_never_raises_the_loss_of_a_row(codebook, power, monkeypatch):
    monkeypatch.setattr(sweeps, "COLUMN_BLOCK", 32)
    w, h = randn(40, 144), hessian(144, power)
    problem, codes, error, scales = problem_of(w, h, codebook)
    for _ in range(3):
        before = damped_loss(problem, error)
        fallen = sweeps.sweep(problem, codes, error, scales)
        after = damped_loss(problem, error)
        assert bool((after <= before * (1 + 1e-5)).all())
        assert fallen == pytest.approx(float((before - after).sum()), rel=1e-2, abs=1e-5 * float(before.sum()))
        torch.testing.assert_close(error, problem.wt - problem.decode(codes, scales), rtol=0, atol=1e-6)
    assert float(before.sum()) <= float(damped_loss(problem, problem.wt).sum())


@pytest.mark.parametrize("codebook", [IntegerGrid(3, 16), IntegerGrid(2, 0, False), MinifloatGrid("e3m2", 24)])
def test_a_sweep_over_a_block_is_one_over_its_columns(codebook, monkeypatch):
    monkeypatch.setattr(sweeps, "COLUMN_BLOCK", 32)
    w, h = randn(24, 144), hessian(144, 1.0)
    problem, codes, error, scales = problem_of(w, h, codebook)
    one, other = (codes.clone(), error.clone()), (codes.clone(), error.clone())
    fallen = sweeps.sweep(problem, *one, scales)
    monkeypatch.setattr(sweeps, "_sweep_singles", sweeps._sweep_columns)
    assert fallen == pytest.approx(sweeps.sweep(problem, *other, scales), rel=1e-3) and fallen > 0
    assert not torch.equal(one[0], codes)
    assert float((one[0] != other[0]).float().mean()) < 0.002  # what lies beside the middle of two codes


def test_sweeps_lower_the_loss_and_are_counted():
    for power in (1.0, 1.5):
        w, h = randn(64, 256), hessian(256, power)
        without, few, many = (ldlq(w, h, E8Codebook(2), sweeps=count) for count in (0, 1, 30))
        assert without.sweeps is None and few.sweeps == 1 and 1 < many.sweeps < 30
        assert many.loss <= few.loss < 0.99 * without.loss
        assert many.loss == pytest.approx(proxy_loss(w, decoded(many, E8Codebook(2), 256), h), rel=1e-3)


def test_sweeps_end_where_nothing_is_gained():
    """Without correlation between columns LDLQ is nearest rounding, which no sweep improves."""
    found = ldlq(randn(16, 64), torch.eye(64), E8Codebook(2), sweeps=5)
    assert found.sweeps == 1


def test_rows_of_the_hessian_come_back_from_its_factor():
    h, order = hessian(40, 1.0).float(), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    whole = h[order][:, order].clone()
    diagonal = h.diagonal().clone()
    lower, added, _ = factor.factor(h, diagonal, order, 0.01, "w")
    whole += added.diag()
    for i, j in ((0, 8), (8, 24), (24, 40), (0, 40)):
        assert torch.equal(factor.symmetric_rows(lower, diagonal[order] + added, i, j), whole[i:j])


# --- scales for the codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_refit_is_least_squares(bits):
    w, h, book = randn(40, 64), hessian(64, 1.0), E8Codebook(bits)
    problem, codes, error, scales = problem_of(w, h, book)
    scales = {"scale": scales["scale"] * 1.2}
    fitted = sweeps.refit(problem, codes, scales, 1)
    lower = problem.factor.tril().double()
    plain = lower @ lower.t() - problem.added.double().diag()
    points = problem.decode(codes, {"scale": torch.ones(1)}).double()
    square = torch.einsum("kn,kj,jn->", points, plain, points)
    expected = torch.einsum("kn,kj,jn->", points, plain, problem.wt.double()) / square
    torch.testing.assert_close(fitted["scale"][0].double(), expected, rtol=1e-3, atol=0)
    again = sweeps.refit(problem, codes, fitted, 1)
    torch.testing.assert_close(again["scale"], fitted["scale"], rtol=1e-3, atol=0)


def test_refit_keeps_what_is_best_and_what_is_nothing():
    w, book = randn(16, 64), E8Codebook(2)
    problem, codes, _, scales = problem_of(w, hessian(64, 1.0), book)
    best = sweeps.refit(problem, codes, scales, 1)
    assert sweeps.refit(problem, codes, best, 1) is best
    problem, codes, _, zero = problem_of(torch.zeros(16, 64), hessian(64, 1.0), book)
    assert sweeps.refit(problem, codes, zero, 1) is zero


# --- scales of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codebook",
    [IntegerGrid(2, 0), IntegerGrid(3, 16), IntegerGrid(3, 16, False), MinifloatGrid("e2m1", 32)],
    ids=lambda codebook: f"{type(codebook).__name__}-{codebook.group_size}",
)
def test_each_row_has_the_scales_that_are_best_for_it(codebook):
    """Every row by itself, in float64, with every multiple of its scales."""
    w, h = randn(12, 96), hessian(96, 1.5)
    problem, _, _, fitted = problem_of(w, h, codebook)
    found = loss_scales.of_rows(problem, fitted)
    lower, choices = problem.factor.tril().double(), set()
    for row in range(len(w)):
        losses = []
        for multiple in (1.0, *loss_scales.MULTIPLES):
            scales = {**fitted, "scale": (fitted["scale"] * multiple).bfloat16().float()}
            error = feedback.feedback(problem, scales)[1][:, row].double()
            losses.append(float((lower.t() @ error).square().sum() - (problem.added * error.square()).sum()))
        best = losses.index(min(losses))
        choices.add(best)
        wanted = (fitted["scale"][row] * (1.0, *loss_scales.MULTIPLES)[best]).bfloat16().float()
        assert torch.equal(found["scale"][row], wanted)
    assert len(choices) > 1 and {*found} == {*fitted}


@pytest.mark.parametrize("bits,group_size,most", [(2, 0, 0.94), (3, 0, 0.95), (4, 32, 0.98)])
def test_sweeps_of_integers_lower_the_loss(bits, group_size, most):
    w, h, codebook = randn(48, 128), hessian(128, 1.0), IntegerGrid(bits, group_size)
    usual, found = (ldlq(w, h, codebook, sweeps=count) for count in (0, 4))
    assert found.loss == pytest.approx(proxy_loss(w, decoded(found, codebook, 128), h), rel=1e-3)
    assert found.loss < most * usual.loss and found.sweeps and usual.sweeps is None


@pytest.mark.parametrize(
    "codebook", [IntegerGrid(4, 32, scale="integer"), MinifloatGrid("e2m1", 32, "e8m0")], ids=["integer", "e8m0"]
)
def test_scales_without_neighbours_stay_as_fitted(codebook):
    w, h = randn(24, 128), hessian(128, 1.0)
    found = ldlq(w, h, codebook, sweeps=2)
    assert torch.equal(found.scales["scale"], codebook.fit(w)["scale"])
    assert found.loss < ldlq(w, h, codebook).loss


def test_multiples_that_give_no_loss_are_not_taken(monkeypatch):
    """Nor is another one where all are as good."""
    w, h = randn(8, 64), hessian(64, 1.0)
    w[3] = 0
    problem, _, _, fitted = problem_of(w, h, IntegerGrid(3, 16))
    calls = []

    def overflowing(*given):
        calls.append(1)
        return feedback.row_losses(*given) * (torch.nan if len(calls) > 1 else 1)

    found = loss_scales.of_rows(problem, fitted)
    assert not torch.equal(found["scale"], fitted["scale"]) and torch.equal(found["scale"][3], fitted["scale"][3])
    monkeypatch.setattr(loss_scales, "row_losses", overflowing)
    found = loss_scales.of_rows(problem, fitted)
    assert torch.equal(found["scale"], fitted["scale"]) and len(calls) == 1 + len(loss_scales.MULTIPLES)


@pytest.mark.parametrize("codebook", [IntegerGrid(3, 16), E8Codebook(2)])
def test_losses_of_rows(codebook, monkeypatch):
    monkeypatch.setattr(feedback, "COLUMN_BLOCK", 32)
    w, h = randn(12, 144), hessian(144, 1.0)
    problem, _, error, scales = problem_of(w, h, codebook)
    wanted = damped_loss(problem, error) - (problem.added[:, None] * error.double().square()).sum(0)
    torch.testing.assert_close(feedback.row_losses(problem, scales), wanted, rtol=1e-4, atol=0)
