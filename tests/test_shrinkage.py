"""Hessians from few tokens, drawn towards those of others: against the formulas, and against what is right."""

import pytest
import torch
from torch import Tensor

from ptq.statistics import shrinkage
from ptq.statistics.shrinkage import shrunk


def tokens(count: int, size: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(count, len(size), generator=torch.Generator().manual_seed(seed)) * size


def gram(x: Tensor) -> Tensor:
    return x.T @ x


SIZE = torch.logspace(-1, 1, 24)


@pytest.mark.parametrize("pooled", [False, True])
def test_the_share_and_the_mean(pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinkage, "PIECE", 7)
    x, others = tokens(40, SIZE), tokens(500, SIZE.flip(0), 1)
    s = gram(x.double()) / 40
    target = gram(others.double()) / 500 if pooled else s.trace() / 24 * torch.eye(24).double()
    expected = (s.trace() ** 2 / (40 * (s - target).square().sum())).item()
    found, share = shrunk(gram(x), 40, *((gram(others), 500) if pooled else ()))
    assert 0.05 < share < 0.95 and share == pytest.approx(expected, rel=1e-4)
    assert found is not None
    torch.testing.assert_close(found.double(), (1 - expected) * s + expected * target, rtol=1e-4, atol=1e-4)


def test_many_tokens_leave_nothing_of_it() -> None:
    shares = []
    for count in (1, 30, 300, 30000):
        h, share = shrunk(gram(tokens(count, SIZE)), count)
        assert h is not None and torch.linalg.eigvalsh(h).min() > -1e-4
        shares.append(share)
    assert shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[-1] < 1e-3


def test_nothing_seen() -> None:
    zero = torch.zeros(24, 24)
    assert shrunk(zero.clone(), 0)[0] is None
    assert shrunk(zero.clone(), 0, zero, 0)[0] is None
    pool = gram(tokens(50, SIZE))
    found, share = shrunk(zero.clone(), 0, pool, 50)
    assert found is not None and share == 1
    torch.testing.assert_close(found, pool / 50)
    dead, share = shrunk(zero.clone(), 3)  # three tokens of zeros
    assert dead is not None and dead.isfinite().all() and share == 0


def test_it_comes_nearer_to_what_is_right() -> None:
    """To the mean of many tokens, from few; on average over draws."""
    right = torch.diag(SIZE**2)
    for count, ratio in ((5, 0.5), (20, 0.75), (80, 0.95)):
        errors = torch.zeros(2)
        for seed in range(20):
            own = gram(tokens(count, SIZE, seed))
            pool = gram(tokens(2000, SIZE * torch.linspace(0.8, 1.2, 24), 1000 + seed))
            found, _ = shrunk(own.clone(), count, pool, 2000)
            assert found is not None
            errors += torch.stack([(own / count - right).norm(), (found - right).norm()])
        assert errors[1] < ratio * errors[0]
