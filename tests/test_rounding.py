"""The solvers against float64 oracles: a naive LDLQ, and GPTQ as its authors wrote it, through the inverse."""

import pytest
import torch

from ptq.errors import InputError
from ptq.weights import factor, feedback, rounding
from quarot.integer import IntegerGrid


def hessian(k: int, seed: int = 0, rank: int | None = None, spread: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rank or 2 * k, k, generator=g, dtype=torch.float64)
    x = (
        x
        @ torch.randn(k, k, generator=g, dtype=torch.float64)
        * torch.exp(spread * torch.randn(k, generator=g, dtype=torch.float64))
    )
    return x.t() @ x / len(x)


def weight(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def decode(rounded: rounding.Rounded, codebook) -> torch.Tensor:
    return codebook.decode(rounded.codes, rounded.scales).double()


def proxy_loss(w, what, h) -> float:
    d = w.double() - what.double()
    return float((d @ h * d).sum() / (w.double() @ h * w.double()).sum())


def damped(h: torch.Tensor, damping: float) -> torch.Tensor:
    return h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)


def unit_factor(h: torch.Tensor) -> torch.Tensor:
    """U of h = U D Uᵀ, unit upper triangular, straight from its definition by elimination from the last column."""
    k = len(h)
    a, u = h.clone(), torch.eye(k, dtype=h.dtype)
    for j in reversed(range(k)):
        u[:j, j] = a[:j, j] / a[j, j]
        a[:j, :j] -= torch.outer(u[:j, j], u[:j, j]) * a[j, j]
    return u


def naive_ldlq(w, h, codebook, scales, order) -> torch.Tensor:
    """Float64, one column after the other in the given order, feedback summed anew for each."""
    w, u = w.double()[:, order], unit_factor(h[order][:, order])
    what = torch.zeros_like(w)
    for j in range(w.shape[1]):
        target = w[:, j] + (w[:, :j] - what[:, :j]) @ u[:j, j]
        columns = order[j : j + 1]
        what[:, j] = codebook.decode(codebook.round(target[:, None].float(), scales, columns), scales, columns)[:, 0]
    return what[:, order.argsort()]


def gptq(w, h, codebook, scales, order) -> torch.Tensor:
    """Frantar et al. 2022, algorithm 1 without blocks: upper Cholesky factor of the inverse, updates to its right."""
    w = w.double()[:, order].clone()
    c = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    what = torch.zeros_like(w)
    for j in range(w.shape[1]):
        columns = order[j : j + 1]
        what[:, j] = codebook.decode(codebook.round(w[:, j : j + 1].float(), scales, columns), scales, columns)[:, 0]
        w[:, j:] -= torch.outer((w[:, j] - what[:, j]) / c[j, j], c[j, j:])
    return what[:, order.argsort()]


@pytest.mark.parametrize("bits,group,symmetric", [(2, 0, True), (3, 8, False), (4, 4, True), (8, 0, False)])
def test_ldlq_is_the_naive_ldlq_and_gptq(bits, group, symmetric):
    w, h, codebook = weight(6, 24), hessian(24), IntegerGrid(bits, group, symmetric)
    found = rounding.ldlq(w, h, codebook)
    assert found.solver == "ldlq"
    columns = h.diagonal().float().argsort(stable=True).flip(0)
    for oracle in (naive_ldlq, gptq):
        expected = oracle(w, damped(h, 0.01), codebook, found.scales, columns)
        torch.testing.assert_close(decode(found, codebook), expected, rtol=0, atol=1e-9)
    assert found.loss == pytest.approx(proxy_loss(w, decode(found, codebook), h), rel=1e-3)
    plain = codebook.decode(codebook.round(w, found.scales), found.scales)
    assert found.nearest_loss == pytest.approx(proxy_loss(w, plain, h), rel=1e-3)


def test_blocks_do_not_change_the_result():
    k = 2 * feedback.COLUMN_BLOCK + 37
    w, h, codebook = weight(5, k), hessian(k), IntegerGrid(3, 0, True)
    found = rounding.ldlq(w, h, codebook)
    order = h.diagonal().float().argsort(stable=True).flip(0)
    expected = naive_ldlq(w, damped(h, 0.01), codebook, found.scales, order)
    different = (decode(found, codebook) != expected).double().mean()
    assert different < 0.02, different  # float32 can tip a rounding now and then, and that moves the ones after it
    assert found.loss == pytest.approx(proxy_loss(w, expected, h), rel=0.01)


def test_error_times_factor_is_the_rounding_error():
    """(W - Ŵ) L = target - Ŵ exactly, in float64, for codebooks of dimension 1 and 8."""
    for d in (1, 8):
        k = 32
        lower = torch.linalg.cholesky(hessian(k, spread=0.2))
        unit, w = lower @ feedback.inverse_diagonal(lower, d), weight(4, k).double()
        blocks = torch.block_diag(*[torch.ones(d, d) for _ in range(k // d)])
        torch.testing.assert_close(unit * blocks, torch.eye(k, dtype=torch.float64))
        seen = []

        class Recorder(Halves):
            def round(self, w, scales, columns=None, seen=seen):
                seen.append(w.t())
                return super().round(w, scales, columns)

        codes, error = feedback.round_block(Recorder(d), w.t(), w.t(), unit, {}, torch.arange(k))
        targets = torch.cat(seen[::-1])
        what = Halves(d).decode(codes.t(), {}).t()
        torch.testing.assert_close((error.t() @ unit).t(), targets - what, rtol=0, atol=1e-10)
        torch.testing.assert_close(error, w.t() - what, rtol=0, atol=1e-12)


class Halves:
    """The grid of halves as a codebook of dimension d: the code of d weights is one number in base 64."""

    per_row = True

    def __init__(self, dim: int):
        self.dim = dim

    def fit(self, w, *, name="weight"):
        return {}

    def round(self, w, scales, columns=None):
        digits = (w * 2).round().clamp(-32, 31).long() + 32
        return (digits.reshape(len(w), -1, self.dim) * 64 ** torch.arange(self.dim)).sum(-1)

    def decode(self, codes, scales, columns=None):
        digits = codes[..., None] // 64 ** torch.arange(self.dim) % 64
        return ((digits - 32) / 2).to(torch.get_default_dtype()).reshape(len(codes), -1)


def test_block_ldlq_of_dimension_8():
    """Feedback between blocks only, as QuIP# defines it: the naive form with H = L D Lᵀ, D block diagonal."""
    d, k = 4, 24
    w, h, codebook = weight(5, k) * 3, hessian(k, spread=0.3), Halves(d)
    found = rounding.ldlq(w, h, codebook)
    blocks = h.diagonal().view(-1, d).sum(1).argsort(descending=True)
    order = (blocks[:, None] * d + torch.arange(d)).flatten()
    w, hd, what = w[:, order], damped(h, 0.01)[order][:, order], torch.zeros(5, k, dtype=torch.float64)
    for s in range(0, k, d):
        # Given what is fixed, the best target for this block when all later ones are free: the conditional minimum.
        done, rest = slice(0, s), slice(s, k)
        shift = (w.double()[:, done] - what[:, done]) @ hd[done, rest] @ torch.linalg.inv(hd[rest, rest])
        target = w.double()[:, s : s + d] + shift[:, :d]
        what[:, s : s + d] = codebook.decode(codebook.round(target, {}), {})
    torch.testing.assert_close(codebook.decode(found.codes, {}).double()[:, order], what)


def test_the_order_lowers_the_loss_on_uneven_hessians(monkeypatch):
    def loss(seed: int) -> float:
        return rounding.ldlq(weight(64, 128, seed), hessian(128, seed, spread=1.0), IntegerGrid(3, 32, True)).loss

    heavy_first = [loss(seed) for seed in range(3)]
    monkeypatch.setattr(rounding, "_columns", lambda diagonal, d: torch.arange(len(diagonal)).flip(0))
    assert all(loss(seed) > heavy_first[seed] for seed in range(3))


def test_ldlq_beats_nearest_and_reports_it():
    w, h = weight(32, 64), hessian(64)
    found = rounding.ldlq(w, h, IntegerGrid(4, 32))
    assert found.solver == "ldlq" and found.loss < 0.8 * found.nearest_loss


def test_never_worse_than_nearest(monkeypatch):
    """A solver gone wrong is caught: nearest is kept, and the record says so."""
    w, h, codebook = weight(8, 32), hessian(32), IntegerGrid(4)
    monkeypatch.setattr(
        IntegerGrid, "round_block", lambda self, target, w, *_: (torch.zeros_like(w, dtype=torch.uint8), w.clone())
    )
    found = rounding.ldlq(w, h, codebook)
    assert found.solver == "nearest" and found.loss == found.nearest_loss
    assert torch.equal(found.codes, codebook.round(w, found.scales))


def test_dead_channels_are_rounded_to_nearest_and_counted():
    w, h, codebook = weight(6, 24), hessian(24), IntegerGrid(4, 8)
    dead = torch.tensor([0, 7, 23])
    h[dead], h[:, dead] = 0, 0
    found = rounding.ldlq(w, h, codebook)
    assert found.dead == 3 and found.loss < found.nearest_loss
    assert torch.equal(found.codes[:, dead], codebook.round(w, found.scales)[:, dead])
    assert found.loss == pytest.approx(proxy_loss(w, decode(found, codebook), h), rel=1e-3)
    nothing = rounding.ldlq(w, torch.zeros(24, 24), codebook)
    assert nothing.dead == 24 and torch.equal(nothing.codes, codebook.round(w, nothing.scales))


def test_damping_adapts_to_a_rank_deficient_hessian():
    h = hessian(32, rank=3)
    h -= 0.05 * h.diagonal().mean() * torch.eye(32)
    h.diagonal().clamp_(min=0.01)
    found = rounding.ldlq(weight(4, 32), h, IntegerGrid(4))
    assert found.damping is not None and found.damping > 0.01
    assert rounding.ldlq(weight(4, 32), hessian(32), IntegerGrid(4)).damping == 0.01


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda w, h: h.__setitem__((3, 3), -1.0), "layer.7: the Hessian has a negative diagonal"),
        (
            lambda w, h: h.copy_(1 - 100 * torch.ones(16, 16).fill_diagonal_(0)),
            "semidefinite, even with damping 10",
        ),
        (lambda w, h: w.__setitem__((1, 2), float("inf")), "layer.7: NaN or infinity in row 1"),
    ],
)
def test_bad_input_is_named(spoil, message):
    w, h = weight(4, 16), hessian(16)
    spoil(w, h)
    with pytest.raises(InputError, match=message):
        rounding.ldlq(w, h, IntegerGrid(4), damping=0.5, name="layer.7")
    with pytest.raises(InputError, match=r"\[15, 15\], the weight has 16"):
        rounding._checked_diagonal(h[:15, :15], 16, "layer.7")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nearest_in_pieces(dtype, monkeypatch):
    monkeypatch.setattr(rounding, "ROW_CHUNK", 64)
    w, codebook = weight(10, 24).to(dtype), IntegerGrid(4, 8, False)
    found = rounding.nearest(w, codebook)
    scales = codebook.fit(w.float())
    assert all(torch.equal(found.scales[part], scales[part]) for part in scales)
    assert torch.equal(found.codes, codebook.round(w.float(), scales))
    d = decode(found, codebook) - w.double()
    assert found.error == pytest.approx(float(d.square().sum() / w.double().square().sum()), rel=1e-4)


@pytest.mark.parametrize("k", [1, 7, 64, 150])
def test_cholesky_and_energy_in_panels(k, monkeypatch):
    monkeypatch.setattr(factor, "PANEL", 32)
    added = torch.linspace(0.5, 2, k)
    h = hessian(k, spread=0.1)
    damped = h + added.double().diag()
    a = damped.float()
    assert factor.cholesky(a)
    assert torch.equal(a.triu(1), damped.float().triu(1)), "what lies above the diagonal is not touched"
    torch.testing.assert_close(a.tril().double(), torch.linalg.cholesky(damped), rtol=1e-3, atol=1e-3)
    assert not factor.cholesky(-torch.eye(k))
    x = weight(k, 5)
    assert factor.energy(x, a, added) == pytest.approx(float((x.double().t() @ h @ x.double()).trace()), rel=1e-4)


@pytest.mark.parametrize("k", [1, 7, 64])
def test_a_permutation_in_place(k, monkeypatch):
    monkeypatch.setattr(factor, "PANEL", 16)
    for seed in range(3):
        h, order = hessian(k).float(), torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        expected = h[order][:, order]
        factor.permute(h, order)
        assert torch.equal(h, expected)


def test_a_factor_that_needs_more_damping_is_that_of_the_whole_hessian(monkeypatch):
    """The first attempts end in the middle of the panels; the next one starts from the Hessian again."""
    monkeypatch.setattr(factor, "PANEL", 8)
    h = hessian(32, rank=3)
    h -= 0.05 * h.diagonal().mean() * torch.eye(32)
    h.diagonal().clamp_(min=0.01)
    h, order = h.float(), torch.randperm(32, generator=torch.Generator().manual_seed(0))
    found, added, damping = factor.factor(h.clone(), h.diagonal().clone(), order, 0.01, "w")
    assert damping > 0.01
    lower = found.tril().double()
    expected = h[order][:, order].double() + added.double().diag()
    torch.testing.assert_close(lower @ lower.t(), expected, rtol=1e-4, atol=1e-4)


def test_dead_channels_do_not_thin_the_damping():
    """The mean is of the channels that are alive; a dead one gets a one on the diagonal, whatever the others' size."""
    h = 100 * hessian(24).float()
    dead = torch.arange(24) % 4 > 0
    h[dead], h[:, dead] = 0, 0
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    _, added, damping = factor.factor(h.clone(), h.diagonal().clone(), order, 0.02, "w")
    expected = torch.where(dead, 1.0, 0.02 * h.diagonal()[~dead].mean())
    torch.testing.assert_close(added, expected[order])
    assert damping == 0.02


@pytest.mark.parametrize("_", range(12))
def test_the_last_piece_may_be_shorter(_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are checked on a piece that is drawn by chance."""
    w, codebook = torch.randn(5, 32), IntegerGrid(4)
    whole = rounding.nearest(w, codebook)
    monkeypatch.setattr(rounding, "ROW_CHUNK", 64)
    assert torch.equal(rounding.nearest(w, codebook).codes, whole.codes)
