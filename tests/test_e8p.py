"""The E8 codebooks: their definitions, the search against brute force, native kernels against the reference."""

import hashlib

import pytest
import torch
from conftest import ops_at

from ptq.errors import InputError
from ptq.ops import native
from ptq.weights import feedback, rounding
from quip_sharp import e8p, e8p_ops
from quip_sharp.codebook import CANDIDATES, E8Codebook

BITS = (2, 3, 4)
PAIR = torch.tensor([256 * ((code % 256).bit_count() % 2) + code // 256 for code in range(1 << 16)])
"""Of each code the pair (shift, entry) as a number in the order of the search."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=("reference", "portable", "avx2", "avx512"))
def implementation(request):
    yield from ops_at(request.param)


def every_point() -> torch.Tensor:
    """P(a, m) of all codes 256 a + m, from the definition, one bit after the other."""
    table, points = e8p.table().long(), []
    for code in range(1 << 16):
        a, m = divmod(code, 256)
        p = m.bit_count() % 2
        m ^= p
        points.append([int(t) * (-1) ** (m >> j & 1) + (-1) ** p for j, t in enumerate(table[a])])
    return torch.tensor(points)


@pytest.fixture(scope="module")
def points() -> torch.Tensor:
    return every_point()


# --- definitions ------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_rule_says():
    size = e8p.table().abs()
    norms = (size.double() / 4).square().sum(1)
    assert dict(zip(*(x.tolist() for x in norms.unique(return_counts=True)), strict=True)) == {
        2: 1, 4: 8, 6: 28, 8: 64, 10: 126, 12: 29
    }  # fmt: skip
    assert size.unique(dim=0).shape == (256, 8) and set(size.unique().tolist()) == {2, 6, 10}
    assert torch.equal(e8p.table()[:, 7] < 0, size.sum(1) // 4 % 2 == 1)
    keys = [(float(norm), row) for norm, row in zip(norms, size.tolist(), strict=True)]
    assert keys == sorted(keys)
    assert all(sorted(row) == [2, 2, 2, 6, 6, 6, 6, 6] for row in size[227:].tolist())


def test_there_are_65536_points_of_two_cosets(points):
    """Half of them are in D8 + 1/4 + 1/2, that is all points less their shift are half-integers with an even sum."""
    assert points.unique(dim=0).shape == (1 << 16, 8)
    assert bool((points % 2 == 1).all()) and int(points.abs().max()) == 11
    assert not points.sum(0).any(), "the mean is zero"
    assert float((points / 4).square().mean()) == pytest.approx(1.1963, abs=5e-5)
    p = torch.tensor([(code % 256).bit_count() % 2 for code in range(1 << 16)])
    shift = 1 - 2 * p
    halves = points - shift[:, None]  # four times the vectors of D8-hat
    assert bool((halves % 4 == 2).all()) and bool((halves.sum(1) % 8 == 0).all())


def test_the_residual_table_is_of_e8():
    table = e8p.residual_table().long()
    assert table.unique(dim=0).shape == (256, 8) and not table[0].any()
    whole, half = (table % 2 == 0).all(1), (table % 2 == 1).all(1)
    assert bool((whole | half).all()) and bool((table.sum(1) % 4 == 0).all()), "points of E8"
    assert table.square().sum(1).unique(return_counts=True)[1].tolist() == [1, 240, 15]
    assert table[:241].tolist() == [[0] * 8, *sorted(table[1:241].tolist())]
    assert table[241].tolist() == [4] + [0] * 7 and table[255].tolist() == [0] * 7 + [4]


def test_the_tables_never_change():
    """Checkpoints hold their entries."""
    digests = [
        hashlib.sha256(bytes(t.flatten().view(torch.uint8).tolist())).hexdigest()[:16] for t in e8p_ops.tables(3)
    ]
    assert digests == ["10b1434c216c07bd", "76fc37e422d3607d"]


def test_decode_is_the_definition(points, implementation):
    codes = torch.arange(1 << 16, dtype=torch.int32).view(256, 256)
    w = implementation["e8p_decode"](codes, torch.tensor([0.25]), e8p_ops.tables(2), 2)
    assert torch.equal(w.view(-1, 8), points / 4)
    high = (codes & 0x7FFF) << 16 | codes
    for bits in (3, 4):
        table = 8 * e8p.residual_table()[(codes & 255).flatten().long()].long()
        second = table if bits == 3 else 2 * points[codes.flatten() & 0x7FFF]
        w = implementation["e8p_decode"](high, torch.tensor([0.3]), e8p_ops.tables(bits), bits)
        assert torch.equal(w.view(-1, 8), (7 * points + second) * torch.tensor(0.3))


def test_every_number_fits_into_a_byte(points):
    """The largest of both stages, and that it is a byte: what kernels count on."""
    e8p_most, residual_most = int(points.abs().max()), int(e8p.residual_table().abs().max())
    of_stages = {2: [e8p_most], 3: [e8p_most, residual_most], 4: [e8p_most, e8p_most]}
    most = {bits: sum(a * b for a, b in zip(e8p.MULTIPLIERS[bits], of_stages[bits], strict=True)) for bits in BITS}
    assert most == {2: 11, 3: 109, 4: 99}


# --- search -----------------------------------------------------------------------------------------------------------


def on_a_grid() -> torch.Tensor:
    """Vectors in steps of 1/8 or 1/2 in units of the integer points, so that float32 is exact: deep holes, borders,
    points themselves, far away."""
    near = (randn(2600, 8) * 32).round() / 8
    coarse = (randn(1000, 8, seed=1) * 6).round() / 2
    far = (randn(400, 8, seed=2) * 300).round()
    special = torch.tensor([[0.0] * 8, [-0.0] * 8, [2.0] * 8, [-1.0] * 8, [1.0] * 7 + [-1.0], [64.0] + [0.0] * 7])
    return torch.cat([near, coarse, far, special])


def distances(y: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Squared distances of some vectors to all points, float64."""
    p = points.double()
    return y.double().square().sum(1, keepdim=True) - 2 * y.double() @ p.t() + p.square().sum(1)


@pytest.fixture(scope="module")
def brute_force(points):
    """Of each vector of `on_a_grid`: the least squared distance to any point, less its own square; how many points
    have it; one of them; the first pair (shift, entry) of them. All numbers are exact in float32."""
    p, found = points.float(), []
    for y in on_a_grid().split(64):
        distance = p.square().sum(1) - 2 * (y @ p.t())
        best, one = distance.min(1)
        nearest = distance == best[:, None]
        found.append((best, nearest.sum(1), one, torch.where(nearest, PAIR, 512).amin(1)))
    return [torch.cat(part) for part in zip(*found, strict=True)]


def test_search_is_brute_force(points, brute_force, implementation):
    """4006 vectors: the least distance, the very code where it is unique, and of equals the first pair."""
    y, (best, count, one, first) = on_a_grid(), brute_force
    codes = implementation["e8p_round"](y, torch.ones(1), e8p_ops.tables(2), 2, 1)[:, 0].long()
    mine = points[codes].float()
    assert torch.equal(mine.square().sum(1) - 2 * (y * mine).sum(1), best)
    assert torch.equal(codes[count == 1], one[count == 1])
    assert torch.equal(PAIR[codes], first)
    assert int((count > 1).sum()) > 500 and int((count == 1).sum()) > 500


def test_search_of_any_numbers(points, implementation):
    for scale in (1.0, 0.013, 700.0):
        x = randn(100, 16, seed=3) * 4 * scale
        x[:20] *= 30
        codes = implementation["e8p_round"](x, torch.tensor([scale]), e8p_ops.tables(2), 2, 1)
        distance = distances(x.view(-1, 8) / scale, points)
        mine = distance.gather(1, codes.view(-1, 1).long())[:, 0]
        torch.testing.assert_close(mine, distance.amin(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 4])
def test_two_stages_find_the_best_of_their_candidates(bits, points, implementation):
    """All pairs (entry, shift) by brute force; of each the nearest sign pattern; the second stage by brute force."""
    scale, (first_multiplier, multiplier) = torch.tensor([1 / 7]), e8p.MULTIPLIERS[bits]
    unit = multiplier / first_multiplier
    y = (randn(40, 8, seed=4) * 32).round() / 8
    second = points if bits == 4 else e8p.residual_table().long()
    best = torch.full((40, 512), torch.inf, dtype=torch.float64)
    distance = distances(y, points)
    best.scatter_reduce_(1, PAIR.expand(40, -1), distance, "amin")
    errors = []
    for count in (1, 4, 8):
        codes = implementation["e8p_round"](y, scale, e8p_ops.tables(bits), bits, count)
        first = codes[:, 0].long() & 0xFFFF
        ranks = (best < best.gather(1, PAIR[first][:, None])).sum(1)
        assert bool((ranks < count).all())
        decoded = e8p_ops.decode(codes, scale, e8p_ops.tables(bits), bits)
        left = distances((y - points[first]) / unit, second).amin(1) * unit**2
        torch.testing.assert_close((y - decoded).double().square().sum(1), left, rtol=1e-5, atol=1e-6)
        errors.append(float(left.sum()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("bits", BITS)
def test_every_level_finds_the_codes_of_the_reference(bits, implementation):
    """Odd sizes and strides; and numbers on a grid, among which are ties of every kind."""
    some, one, unit = torch.tensor([0.03]), torch.ones(1), e8p.MULTIPLIERS[bits][0]
    cases = [(randn(n, 2 * k, seed=bits)[:, ::2] * 0.1, some) for n, k in [(1, 8), (3, 40), (0, 16), (5, 0), (67, 24)]]
    for w, scale in [*cases, (on_a_grid()[2500:2700] * unit, one), (on_a_grid()[-6:] * unit, one)]:
        expected = e8p_ops.round_nearest(w, scale, e8p_ops.tables(bits), bits, 4)
        assert torch.equal(implementation["e8p_round"](w, scale, e8p_ops.tables(bits), bits, 4), expected)
        decoded = implementation["e8p_decode"](expected, scale, e8p_ops.tables(bits), bits)
        assert torch.equal(decoded, e8p_ops.decode(expected, scale, e8p_ops.tables(bits), bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("c,n", [(8, 1), (16, 3), (32, 37), (128, 130)])
def test_ldlq_block_is_the_generic_one(c, n, bits, implementation):
    book, w, target = E8Codebook(bits), randn(c, n), randn(c, n, seed=1)
    blocks = torch.block_diag(*[torch.ones(8, 8) for _ in range(c // 8)])
    factor = (randn(c, c, seed=2) * 0.1).tril() * (1 - blocks) + torch.eye(c)
    scales = book.fit(w)
    expected_codes, expected_error = feedback.round_block(book, target, w, factor, scales, torch.arange(c))
    arguments = (target, w, factor, scales["scale"], book.tables, bits, CANDIDATES[bits])
    codes, error = implementation["e8p_ldlq"](*arguments)
    # A product summed in another order can tip a rounding; what comes after it in that row then differs.
    same = (codes == expected_codes).all(0)
    assert (~same).sum() <= 1 + n // 30
    torch.testing.assert_close(error[:, same], expected_error[:, same])
    torch.testing.assert_close(error, w - book.decode(codes.t().contiguous(), scales).t())


def test_threads_do_not_change_the_result():
    if not native.load():
        pytest.skip("native kernels are not built")
    threads = torch.get_num_threads()
    book, w = E8Codebook(4), randn(200, 256)
    scales, factor = book.fit(w), torch.eye(256)
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            wt = w.t().contiguous()
            found.append((book.round(w, scales), *book.round_block(wt, wt, factor, scales, torch.arange(256))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# --- the codebook -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits,most", [(2, 0.0914), (3, 0.0288), (4, 0.0077)])
def test_error_on_a_gaussian(bits, most):
    """scripts/bench_codebooks.py measures it on more."""
    size = 1 << 22 if native.load() else 1 << 16
    found = rounding.nearest(randn(size // 256, 256, seed=5) * 0.02, E8Codebook(bits))
    assert found.error < most * (1.001 if native.load() else 1.02)


def test_the_chosen_scales_are_near_the_best():
    w = randn(64, 1024, seed=6)
    for bits in BITS:
        book = E8Codebook(bits)
        scales = book.fit(w)
        errors = [
            float((book.decode(book.round(w, trial), trial) - w).square().mean())
            for step in (0.9, 0.95, 1, 1.05, 1.1)
            for trial in [{"scale": scales["scale"] * step}]
        ]
        assert errors[2] < 1.01 * min(errors), errors


def test_zeros_stay_zeros():
    for bits in BITS:
        for tiny in (0.0, 1e-38):  # the inverse of a scale for the second would be infinite
            found = rounding.nearest(torch.full((3, 16), tiny), E8Codebook(bits))
            assert not found.scales["scale"].any()
        assert rounding.nearest(torch.zeros(3, 16), E8Codebook(bits)).error == 0
        assert not E8Codebook(bits).decode(found.codes, found.scales).any()


def test_columns_that_fill_the_last_code():
    w = randn(4, 13)
    found = rounding.nearest(w, E8Codebook(2))
    assert found.codes.shape == (4, 2)
    padded = torch.nn.functional.pad(w, (0, 3))
    assert torch.equal(found.codes, E8Codebook(2).round(padded, found.scales))
    error = E8Codebook(2).decode(found.codes, found.scales)[:, :13] - w
    assert found.error == pytest.approx(float(error.square().sum() / w.square().sum()), rel=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_references_run_on_the_device_of_the_weight(bits):
    """On a GPU there are no kernels: all that a reference makes must be there, with tables that come from the CPU."""
    w, factor, scale = (torch.empty(*shape, device="meta") for shape in ((16, 24), (16, 16), (1,)))
    rest = scale, e8p_ops.tables(bits), bits
    codes = e8p_ops.round_nearest(w.t(), *rest, CANDIDATES[bits])
    assert codes.is_meta and e8p_ops.decode(codes, *rest).is_meta
    assert all(x.is_meta for x in e8p_ops.ldlq(w, w, factor, *rest, CANDIDATES[bits]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused(bad):
    w = randn(4, 40)
    w[2, 37] = bad
    with pytest.raises(InputError, match=r"down_proj: NaN or infinity in row 2"):
        rounding.nearest(w, E8Codebook(2), name="down_proj")


def test_rows_whose_squares_are_too_large_are_refused():
    w = randn(4, 40)
    w[1] = 1e25
    with pytest.raises(InputError, match=r"down_proj: too large numbers in row 1"):
        rounding.nearest(w, E8Codebook(2), name="down_proj")


def test_opcheck():
    check, op = torch.library.opcheck, torch.ops.ptq
    w = randn(16, 24)
    for bits in BITS:
        book = E8Codebook(bits)
        scale, tables = book.fit(w)["scale"], book.tables
        check(op.e8p_round.default, (w, scale, tables, bits, 4))
        check(op.e8p_decode.default, (book.round(w, {"scale": scale}), scale, tables, bits))
        check(op.e8p_ldlq.default, (w, w, torch.eye(16), scale, tables, bits, 4))


def test_what_does_not_fit_is_refused():
    if not native.load():
        pytest.skip("native kernels are not built")
    op, one, tables = torch.ops.ptq, torch.ones(1), e8p_ops.tables(2)
    for arguments in [
        (randn(2, 12), one, tables, 2, 1),
        (randn(2, 16).double(), one, tables, 2, 1),
        (randn(2, 16), one, tables, 5, 1),
        (randn(2, 16), one, tables, 3, 1),
        (randn(2, 16), one, tables, 2, 3),
    ]:
        with pytest.raises(RuntimeError, match="e8p"):
            op.e8p_round(*arguments)
