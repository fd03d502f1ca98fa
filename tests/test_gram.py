"""Sums of the products of channels: every level against float64."""

import pytest
import torch
from conftest import spoil_free_memory, use_level
from torch import Tensor

from ptq.ops import gram
from ptq.statistics.hessian import panel_shapes

# t, k, and rows of a panel: no multiples of 32 tokens, of 16 channels, of blocks of eight or six; one panel, and many
SHAPES = [(1, 1, 1), (7, 5, 3), (33, 70, 35), (100, 130, 64), (513, 200, 1024), (40, 48, 1024), (2, 17, 16)]


def exact(sums: list[Tensor], x: Tensor) -> list[Tensor]:
    found = []
    for panel in sums:
        rows, end = panel.shape
        found.append(panel.double() + x[:, end - rows : end].double().T @ x[:, :end].double())
    return found


def below(panel: Tensor) -> Tensor:
    """What is left of the diagonal, and on it."""
    return panel.tril(panel.shape[1] - panel.shape[0])


def drawn(t: int, k: int, rows: int) -> tuple[list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(t + k)
    ends = [*range(rows, k, rows), k]
    sums = [torch.randn(b - a, b, generator=draw) for a, b in zip([0, *ends], ends, strict=False)]
    return sums, torch.randn(t, k, generator=draw)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_level_adds_the_products(bfloat16, level):
    for t, k, rows in SHAPES:
        sums, x = drawn(t, k, rows)
        wanted = exact(sums, x.bfloat16() if bfloat16 else x)
        gram.add_gram_(sums, x, bfloat16)
        for panel, right in zip(sums, wanted, strict=True):
            torch.testing.assert_close(below(panel.double()), below(right), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_level_adds_the_cross_products(bfloat16, level):
    for t, k, _ in SHAPES:
        draw = torch.Generator().manual_seed(t * k)
        sum, d, x = torch.randn(k, k, generator=draw), *torch.randn(2, t, k, generator=draw)
        seen = (d.bfloat16(), x.bfloat16()) if bfloat16 else (d, x)
        wanted = sum.double() + seen[0].double().T @ seen[1].double()
        spoil_free_memory(t * k)
        gram.add_cross_(sum, d, x, bfloat16)
        torch.testing.assert_close(sum.double(), wanted, rtol=1e-5, atol=1e-4)


def test_rounding_is_to_bfloat16(level):
    sums, x = drawn(300, 50, 50)
    others = [panel.clone() for panel in sums]
    gram.add_gram_(sums, x, True)
    gram.add_gram_(others, x.bfloat16().float(), False)
    torch.testing.assert_close(below(sums[0]), below(others[0]), rtol=1e-5, atol=1e-4)
    exactly = exact(drawn(300, 50, 50)[0], x)[0]
    assert (below(sums[0]).double() - below(exactly)).abs().max() > 1e-3  # so it was rounded


def test_the_reference():
    for bfloat16 in (False, True):
        sums, x = drawn(100, 130, 64)
        others = [panel.clone() for panel in sums]
        gram.add_gram_(sums, x, bfloat16)
        gram.reference(others, x, bfloat16)
        for panel, other in zip(sums, others, strict=True):
            torch.testing.assert_close(below(panel), below(other), rtol=1e-4, atol=1e-4)
        d, sum = x.flip(0), torch.randn(130, 130, generator=torch.Generator().manual_seed(1))
        other = sum.clone()
        gram.add_cross_(sum, d, x, bfloat16)
        gram.reference_cross(other, d, x, bfloat16)
        torch.testing.assert_close(sum, other, rtol=1e-4, atol=1e-4)


def test_sums_of_float32_do_not_depend_on_the_level(level):
    found = []
    for name in (level, "portable"):
        use_level(name)
        sums, x = drawn(333, 150, 64)
        spoil_free_memory(384 * 160)
        gram.add_gram_(sums, x, False)
        cross = torch.zeros(150, 150)
        gram.add_cross_(cross, x.flip(0), x, False)
        found.append([*map(below, sums), cross])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_opcheck(bfloat16):
    sums, x = drawn(40, 33, 20)
    torch.library.opcheck(gram.add_gram_, (sums, x, bfloat16))
    torch.library.opcheck(gram.add_cross_, (torch.zeros(33, 33), x.flip(0), x, bfloat16))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_threads_and_strides_do_not_matter(bfloat16):
    sums, x = drawn(777, 600, 256)
    before, found = torch.get_num_threads(), []
    try:
        for threads, seen in ((1, x), (2, x), (3, x.T.contiguous().T)):
            torch.set_num_threads(threads)
            others = [panel.clone() for panel in sums]
            gram.add_gram_(others, seen, bfloat16)
            cross = torch.zeros(600, 600)
            gram.add_cross_(cross, seen.flip(0) if threads < 3 else seen.T.flip(1).T, seen, bfloat16)
            found.append([*map(below, others), cross])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_more_rows_than_a_unit_of_work():
    """What lies right of the diagonal is then left out."""
    k = 1100
    x = torch.randn(65, k, generator=torch.Generator().manual_seed(0))
    sums = [torch.zeros(shape) for shape in panel_shapes(k)]
    gram.add_gram_(sums, x, False)
    for panel in sums:
        rows, end = panel.shape
        right = x[:, end - rows : end].double().T @ x[:, :end].double()
        torch.testing.assert_close(below(panel).double(), below(right), rtol=1e-5, atol=1e-4)


def test_no_tokens_leave_the_sums():
    sums, _ = drawn(4, 20, 8)
    others = [panel.clone() for panel in sums]
    gram.add_gram_(sums, torch.empty(0, 20), False)
    gram.add_gram_([], torch.empty(4, 20), True)
    assert all(map(torch.equal, sums, others))
    cross = torch.ones(20, 20)
    gram.add_cross_(cross, torch.empty(0, 20), torch.empty(0, 20), True)
    assert torch.equal(cross, torch.ones(20, 20))


native_only = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("ptq::add_gram_", "CPU"),
    reason="the native kernels are not built, or torch's own products serve",
)


@native_only
@pytest.mark.parametrize(
    ("sums", "x"),
    [
        ([torch.zeros(3, 5)], torch.zeros(2, 4)),  # wider than x
        ([torch.zeros(5, 3)], torch.zeros(2, 5)),  # more rows than columns
        ([torch.zeros(5, 5)], torch.zeros(2, 5).double()),
        ([torch.zeros(5, 5, dtype=torch.float64)], torch.zeros(2, 5)),
        ([torch.zeros(5, 10)[:, ::2]], torch.zeros(2, 5)),
        ([torch.zeros(5, 5)], torch.zeros(5)),
    ],
)
def test_bad_input_is_an_error(sums, x):
    with pytest.raises(RuntimeError, match="add_gram_"):
        gram.add_gram_(sums, x, False)


@native_only
@pytest.mark.parametrize(
    ("sum", "d", "x"),
    [
        (torch.zeros(5, 5), torch.zeros(2, 5), torch.zeros(3, 5)),  # other tokens
        (torch.zeros(5, 5), torch.zeros(2, 4), torch.zeros(2, 5)),
        (torch.zeros(4, 5), torch.zeros(2, 5), torch.zeros(2, 5)),
        (torch.zeros(5, 5), torch.zeros(2, 5).double(), torch.zeros(2, 5)),
        (torch.zeros(5, 5).double(), torch.zeros(2, 5), torch.zeros(2, 5)),
        (torch.zeros(5, 10)[:, ::2], torch.zeros(2, 5), torch.zeros(2, 5)),
    ],
)
def test_bad_input_of_cross_products_is_an_error(sum, d, x):
    with pytest.raises(RuntimeError, match="add_cross_"):
        gram.add_cross_(sum, d, x, False)
