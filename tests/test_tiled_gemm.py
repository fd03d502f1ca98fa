"""Many quantised tokens times tiled integer weights: every level against the reference, to the bit."""

import pytest
import torch
from conftest import SLOW_PAIRS, at_level

import ptq.ops.tiles
from ptq.ops.op_declarations import REFERENCES
from quarot import tiled_ops

BITS = range(2, 9)
# n, k, t, group: no multiples of 16 rows, 32 columns, 4 tokens; groups within a panel of 512 columns, across, others
# that do not divide a panel, nor are divided by one.
SHAPES = [
    (50, 96, 9, 32), (33, 45, 13, 0), (17, 1024, 33, 64), (100, 1152, 10, 128), (16, 1536, 17, 0), (49, 2048, 11, 1024),
    (65, 515, 66, 0), (35, 1056, 37, 96), (20, 2304, 41, 768), (70, 1152, 35, 128), (113, 2304, 33, 768),
]  # fmt: skip


def arguments(n, k, t, bits, group, symmetric, extreme=False):
    """Random codes, scales of either sign and activations; or the largest that there are."""
    draw = torch.Generator().manual_seed(n + k + t + bits)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=draw)
    q = torch.randint(-128, 128, (t, k), generator=draw).to(torch.int8)
    zero = torch.randint(0, 2**bits, (n, k // (group or k)), dtype=torch.uint8, generator=draw)
    if extreme:
        codes.fill_(2**bits - 1), q.fill_(-128), zero.zero_()
    scale = (torch.randn(zero.shape, generator=draw) * 0.1).bfloat16().view(torch.int16)
    parts = (codes, scale, None if symmetric else zero)
    return q, torch.rand(t, generator=draw), parts, torch.randn(n, generator=draw)


def multiply(q, q_scale, parts, bias, bits, group, dtype=torch.float32):
    """The native op, on tiles made by the references."""
    codes, scale, zero = parts
    tiles = ptq.ops.tiles.prepack(torch.ops.ptq.integer_pack(codes, bits), bits, codes.shape[1])
    tiled = [None if x is None else ptq.ops.tiles.tile_scales(x) for x in (scale, zero)]
    return torch.ops.ptq.integer_linear_quantized(q, q_scale, tiles, *tiled, bias, codes.shape[0], bits, group, dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_every_level_gives_the_bits_of_the_reference(bits, symmetric, level):
    for n, k, t, group in SHAPES:
        q, q_scale, parts, bias = arguments(n, k, t, bits, group, symmetric)
        expected = tiled_ops.product(q, q_scale, *parts, bias, bits, group, torch.float32)
        assert torch.equal(multiply(q, q_scale, parts, bias, bits, group), expected), (n, k, t, group)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_codes_and_activations(bits, level):
    """255 * 128 would overflow pairs of 16 bits; its sum over 2048 columns still is exact."""
    for group in (0, 128):
        q, q_scale, parts, bias = arguments(18, 2048, 12, bits, group, False, extreme=True)
        expected = tiled_ops.product(q, q_scale, *parts, None, bits, group, torch.float32)
        assert torch.equal(multiply(q, q_scale, parts, None, bits, group), expected)
        assert torch.equal(multiply(-1 - q, q_scale, parts, bias, bits, group),
                           tiled_ops.product(-1 - q, q_scale, *parts, bias, bits, group, torch.float32))  # fmt: skip


def test_groups_around_the_largest_whose_sums_are_32_bits(level):
    for k in (65536, 65568):
        q, q_scale, parts, bias = arguments(3, k, 9, 8, 0, False, extreme=True)
        expected = tiled_ops.product(q, q_scale, *parts, bias, 8, 0, torch.float32)
        assert torch.equal(multiply(q, q_scale, parts, bias, 8, 0), expected)


def test_tokens_do_not_depend_on_the_others_nor_on_threads(level):
    """More tokens than a unit takes; each one alone, and in any number of threads."""
    threads = torch.get_num_threads()
    q, q_scale, parts, bias = arguments(40, 96, 1030, 4, 32, True)
    expected = tiled_ops.product(q, q_scale, *parts, bias, 4, 32, torch.float32)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(multiply(q, q_scale, parts, bias, 4, 32), expected)
            for t in (1, 5, 8, 9, 15, 257):
                assert torch.equal(multiply(q[-t:], q_scale[-t:], parts, bias, 4, 32), expected[-t:]), t
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_strides_and_batch_axes(dtype, level):
    q, q_scale, parts, bias = arguments(35, 128, 24, 5, 64, False)
    expected = tiled_ops.product(q, q_scale, *parts, bias, 5, 64, dtype)
    strided = torch.stack([q, q + 1], 2)[..., 0].view(2, 12, 128)
    y = multiply(strided, q_scale.view(2, 12), parts, bias.double(), 5, 64, dtype)
    assert y.dtype == dtype and torch.equal(y, expected.view(2, 12, 35))
    q_scale[3] = float("nan")
    assert multiply(q, q_scale, parts, bias, 5, 64, dtype)[3].isnan().all()


def test_nothing(level):
    q, q_scale, parts, bias = arguments(20, 64, 12, 4, 32, True)
    assert multiply(q[:0], q_scale[:0], parts, bias, 4, 32).shape == (0, 20)
    tiles, scale = torch.zeros(0, 2, 256, dtype=torch.uint8), torch.zeros(0, 2, 16, dtype=torch.int16)
    y = torch.ops.ptq.integer_linear_quantized(q, q_scale, tiles, scale, None, None, 0, 4, 32, torch.float32)
    assert y.shape == (12, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_numbers_are_quantised_as_by_the_single_op(dtype, symmetric, level):
    """`integer_linear_tokens`: few and many tokens, columns that fill no super-block, strides, NaN, any dtype."""
    threads = torch.get_num_threads()
    shapes = [(33, 45, 1, 0), (50, 96, 8, 32), (33, 45, 13, 0), (100, 1152, 530, 128), (20, 2304, 41, 768)]
    for n, k, t, group in shapes:
        _, _, (codes, *rest), bias = arguments(n, k, 1, 4, group, symmetric)
        x = torch.randn(t, 2 * k, generator=torch.Generator().manual_seed(t)).to(dtype)[:, ::2]
        x[t - 1] = 0
        x[t // 2, 3] = torch.nan
        tiles = ptq.ops.tiles.prepack(torch.ops.ptq.integer_pack(codes, 4), 4, k)
        weight = (
            tiles,
            *[None if part is None else ptq.ops.tiles.tile_scales(part) for part in rest],
            bias,
            n,
            4,
            group,
        )
        try:
            for bits, clip, count in ((8, 1.0, 1), (4, 0.9, 3)):
                torch.set_num_threads(count)
                expected = REFERENCES["integer_linear_tokens"](x, *weight, bits, clip, dtype)
                y = torch.ops.ptq.integer_linear_tokens(x, *weight, bits, clip, dtype)
                torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
                assert y[t // 2].isnan().all()
        finally:
            torch.set_num_threads(threads)


def test_numbers_with_any_axes_and_what_is_refused():
    tiles, scale = torch.zeros(2, 2, 256, dtype=torch.uint8), torch.zeros(2, 2, 16, dtype=torch.int16)
    op = torch.ops.ptq.integer_linear_tokens
    for shape in ((64,), (0, 64), (2, 0, 64), (2, 3, 64), (3, 4, 64)):
        y = op(torch.randn(shape), tiles, scale, None, None, 20, 4, 32, 8, 1.0, torch.bfloat16)
        assert y.shape == (*shape[:-1], 20) and y.dtype == torch.bfloat16
    x = torch.randn(4, 64, requires_grad=True)
    rest = (tiles, scale, None, None, 20, 4, 32, 8, 1.0, torch.float32)
    torch.library.opcheck(op.default, (x.detach(), *rest))
    with pytest.raises(RuntimeError, match="no gradient"):
        op(x, *rest).sum().backward()
    with pytest.raises(RuntimeError, match="bits"):
        op(x.detach(), *rest[:7], 9, 1.0, torch.float32)


@pytest.fixture(params=["avx512bf16", SLOW_PAIRS, "amx"])
def matrix_level(request):
    """The levels of the machines that have matrix units, without them and with them."""
    yield from at_level(request.param)


@pytest.mark.parametrize("n, k, t, group", [(450, 4128, 530, 0), (450, 4096, 530, 64), (100, 6144, 200, 2048)])
def test_many_tokens_rows_and_columns(n, k, t, group, matrix_level):
    """More tokens than a unit takes, more strips than share a slice of x, and slices of columns."""
    threads = torch.get_num_threads()
    for bits, symmetric in ((4, True), (8, False)):
        q, q_scale, parts, bias = arguments(n, k, t, bits, group, symmetric)
        expected = tiled_ops.product(q, q_scale, *parts, bias, bits, group, torch.float32)
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                assert torch.equal(multiply(q, q_scale, parts, bias, bits, group), expected)
        finally:
            torch.set_num_threads(threads)
        codes, scale, zero = parts
        x = torch.randn(t, k, generator=torch.Generator().manual_seed(bits)).bfloat16()
        tiles = ptq.ops.tiles.prepack(torch.ops.ptq.integer_pack(codes, bits), bits, k)
        tiled = [None if part is None else ptq.ops.tiles.tile_scales(part) for part in (scale, zero)]
        y = torch.ops.ptq.integer_linear_tiled(x, tiles, *tiled, bias, n, bits, group)
        size = group or k
        numbers = codes.double().view(n, -1, size) - (2 ** (bits - 1) if zero is None else zero.double()[..., None])
        weight = (numbers * scale.view(torch.bfloat16).double()[..., None]).view(n, k)
        close = x.double() @ weight.T + bias.double()
        assert (y.double() - close).norm() / close.norm() < 3e-3


def test_torch_finds_its_own_matrix_units_as_it_left_them(matrix_level):
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(96, 256).bfloat16()
    expected = torch.nn.functional.linear(x, weight)
    q, q_scale, parts, bias = arguments(50, 96, 40, 4, 32, True)
    for _ in range(3):
        multiply(q, q_scale, parts, bias, 4, 32)
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)
