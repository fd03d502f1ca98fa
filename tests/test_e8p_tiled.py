"""E8P tiles: exact, golden, and every native kernel against the references, on quantised tokens to the bit."""

from typing import Any

import pytest
import torch
from conftest import LEVELS, SLOW_PAIRS, ops_at, use_level

from ptq.ops import native
from ptq.ops.op_declarations import REFERENCES
from quip_sharp import e8p, tiled_ops

BITS = (2, 3, 4)
SHAPES = [(1, 1), (16, 32), (17, 45), (33, 256), (50, 392), (40, 1004)]  # n, k: few are multiples of 16, 32, 8


@pytest.fixture(params=("reference", *LEVELS))
def implementation(request):
    yield from ops_at(request.param)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_codes(bits: int, n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 256, (bits, n, -(-k // 8)), dtype=torch.uint8, generator=draw(n * k + bits))


SCALE = torch.tensor([0.137]).view(torch.int32)


def random_tokens(t: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised tokens; the first two hold the extreme values only."""
    q = torch.randint(-128, 128, (t, k), dtype=torch.int8, generator=draw(t + k))
    if t > 1:
        q[0], q[1] = -128, 127
    return q, torch.rand(t, generator=draw(t))


def e8p_points(entry: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The definition of `e8p`, coordinate by coordinate: [n, c, 8]."""
    m = signs.long()
    p = sum((m >> j) & 1 for j in range(8)) % 2
    true = m ^ p
    columns = [e8p.table()[:, j].long()[entry.long()] * (-1) ** ((true >> j) & 1) + 1 - 2 * p for j in range(8)]
    return torch.stack(columns, 2)


def points(codes: torch.Tensor, k: int) -> torch.Tensor:
    """The integer points [n, k]."""
    found = e8p_points(codes[0], codes[1])
    if len(codes) == 3:
        found = 7 * found + 8 * e8p.residual_table().long()[codes[2].long()]
    if len(codes) == 4:
        found = 7 * found + 2 * e8p_points(codes[2], codes[3])
    return found.flatten(1)[:, :k]


def exact_product(q, q_scale, codes, scale, bias) -> torch.Tensor:
    """The definition: integers, then float32 steps."""
    sums = (q[:, None].long() * points(codes, q.shape[1])[None]).sum(2)
    return scale.view(torch.float32) * sums.to(torch.float32) * q_scale[:, None] + bias


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_unpack_inverts_pack(bits, implementation):
    for n, k in [*SHAPES, (15, 31), (48, 33), (3, 0), (0, 40)]:
        codes = random_codes(bits, n, k)
        tiles = implementation["e8p_prepack"](codes)
        assert tiles.shape == (-(-n // 16), -(-k // 32) * bits, 64)
        assert torch.equal(tiles, tiled_ops.prepack(codes))
        assert torch.equal(implementation["e8p_unprepack"](tiles, n, bits, k), codes)


@pytest.mark.parametrize("bits", BITS)
def test_weights_to_the_bit(bits, implementation):
    for n, k in SHAPES:
        codes = random_codes(bits, n, k)
        w = SCALE.view(torch.float32) * points(codes, k)
        assert torch.equal(implementation["e8p_dequantize"](tiled_ops.prepack(codes), SCALE, n, bits, k), w)


@pytest.mark.parametrize("bits", BITS)
def test_tiles_are_renumbered_on_their_device(bits):
    """A model that was loaded on the CPU may be moved to a GPU: the tables must follow."""
    tiles = tiled_ops.prepack(torch.empty(bits, 21, 9, dtype=torch.uint8, device="meta"))
    assert tiles.is_meta and tiled_ops.unprepack(tiles, 21, bits, 72).is_meta


def test_a_strided_weight_is_packed_as_it_is(implementation):
    codes = random_codes(4, 21, 72)
    strided = torch.stack([codes, codes + 1], 3)[..., 0]
    tiles = implementation["e8p_prepack"](strided)
    assert torch.equal(tiles, tiled_ops.prepack(codes))
    strided = torch.stack([tiles, tiles + 1], 3)[..., 0]
    assert torch.equal(implementation["e8p_unprepack"](strided, 21, 4, 72), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_is_where_the_layout_says(bits, implementation):
    """Golden bytes from the text of `tiled_ops`: one code at a time."""
    blocks = 2
    for row, column in [(0, 0), (3, 8), (15, 31), (19, 39), (7, 63), (16, 2)]:
        codes = torch.zeros(bits, 20, 8, dtype=torch.uint8)
        # m = 0b10110001 has four ones: p = 0, and the signs are those of coordinates 0, 4, 5, 7. Bits 0, 1, 4 are
        # coordinates 4, 5, 0. With bit 1 too, p = 1: the true signs are those of 1, 4, 5, 7.
        values = [7, 0b10110001, *((50,) if bits == 3 else (200, 0b10110011))][:bits]
        codes[:, row, column // 8] = torch.tensor(values, dtype=torch.uint8)
        tiles = implementation["e8p_prepack"](codes)
        expected = torch.zeros(2, blocks * bits, 64, dtype=torch.uint8)
        block, byte = column // 32, 4 * (row % 16) + column % 32 // 8
        expected[row // 16, bits * block, byte] = 7
        expected[row // 16, bits * block + 1, byte] = 0b0010011
        if bits == 3:  # entry 50 is number 35 of those with odd coordinates: 0 and 14 others come before them
            expected[row // 16, bits * block + 2, byte] = 3 | 32 | 1 << 6
        if bits == 4:
            expected[row // 16, bits * block + 2, byte] = 200
            expected[row // 16, bits * block + 3, byte] = 0b10100011
        assert torch.equal(tiles, expected)


def test_true_bytes():
    for bits in BITS:
        assert tiled_ops.prepack(random_codes(bits, 64, 1024)).numel() * 8 == bits * 64 * 1024


# --- quantised tokens -------------------------------------------------------------------------------------------------


def test_all_codes(implementation):
    """Every code of E8P in either stage, and every entry of the residual book, as the definition has it."""
    byte = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([byte.repeat_interleave(256), byte.repeat(256), byte.flip(0).repeat(256)]).view(3, 256, 256)
    assert points(codes[:2], 2048).view(-1, 8).unique(dim=0).shape[0] == 65536
    q, q_scale = random_tokens(3, 2048)
    for bits, all_codes in ((2, codes[:2]), (3, codes), (4, codes[[0, 1, 1, 0]])):
        tiles = implementation["e8p_prepack"](all_codes)
        y = implementation["e8p_linear_quantized"](q, q_scale, tiles, SCALE, None, 256, bits, torch.float32)
        assert torch.equal(y, exact_product(q, q_scale, all_codes, SCALE, 0.0))
        w = implementation["e8p_linear_tiled"](torch.eye(2048), tiles, SCALE, None, 256, bits)
        assert torch.equal(w.t(), SCALE.view(torch.float32) * points(all_codes, 2048))


@pytest.mark.parametrize("bits", BITS)
def test_quantised_tokens_to_the_bit(bits, implementation):
    for n, k in SHAPES:
        codes, bias = random_codes(bits, n, k), torch.randn(n, generator=draw(n))
        tiles, scale = tiled_ops.prepack(codes), SCALE
        for t in (0, 1, 2, 3, 4, 7, 8, 9, 14):
            q, q_scale = random_tokens(t, k)
            y = implementation["e8p_linear_quantized"](q, q_scale, tiles, scale, bias, n, bits, torch.float32)
            assert torch.equal(y, exact_product(q, q_scale, codes, scale, bias)), (n, k, t)
        for dtype in (torch.bfloat16, torch.float16):
            short = implementation["e8p_linear_quantized"](q, q_scale, tiles, scale, bias, n, bits, dtype)
            assert torch.equal(short, y.to(dtype))


@pytest.mark.parametrize("t", [2, 13])
def test_the_largest_sums(t, implementation):
    """The largest points in all columns times -128: sums beyond 2^24, which float32 rounds once."""
    largest = e8p_points(torch.arange(256)[:, None], torch.zeros(256, 1)).flatten(1).abs().sum(1).argmax()
    codes = torch.full((4, 17, 8192), int(largest), dtype=torch.uint8)
    codes[1::2], codes[1::2, 1] = 0, 255
    q, q_scale = random_tokens(t, 65536)
    for bits in BITS:
        some = codes[:bits].clone()
        some[2:3] = 255 if bits == 3 else some[2:3]  # T1 with a 4
        tiles = tiled_ops.prepack(some)
        y = implementation["e8p_linear_quantized"](q, q_scale, tiles, SCALE, None, 17, bits, torch.float32)
        assert torch.equal(y, tiled_ops.product(q, q_scale, some, SCALE, None, torch.float32))


@pytest.mark.parametrize("bits", BITS)
def test_tokens_do_not_depend_on_the_others_nor_on_threads(bits, implementation):
    """More tokens than a unit takes; each one alone, and in any number of threads."""
    threads, n, k = torch.get_num_threads(), 100, 1100
    codes, (q, q_scale) = random_codes(bits, n, k), random_tokens(530, k)
    tiles, scale = tiled_ops.prepack(codes), SCALE
    expected = tiled_ops.product(q, q_scale, codes, scale, None, torch.float32)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for t in (530, 1, 5, 8, 9, 67):
                y = implementation["e8p_linear_quantized"](
                    q[-t:], q_scale[-t:], tiles, scale, None, n, bits, torch.float32
                )
                assert torch.equal(y, expected[-t:]), t
    finally:
        torch.set_num_threads(threads)


def test_strides_and_batch_axes(implementation):
    n, k = 35, 100
    codes, bias, (q, q_scale) = random_codes(3, n, k), torch.randn(n, generator=draw(1)), random_tokens(24, k)
    tiles, scale = tiled_ops.prepack(codes), SCALE
    expected = tiled_ops.product(q, q_scale, codes, scale, bias, torch.float32)
    strided = torch.stack([q, q + 1], 2)[..., 0].view(2, 12, k)
    op = implementation["e8p_linear_quantized"]
    y = op(strided, q_scale.view(2, 12), tiles, scale, bias, n, 3, torch.float32)
    assert torch.equal(y, expected.view(2, 12, n))
    q_scale[3] = float("nan")
    assert op(q, q_scale, tiles, scale, bias, n, 3, torch.bfloat16)[3].isnan().all()
    x = torch.randn(3, 2, k, generator=draw(2))
    strided = torch.stack([x, x + 1], 3)[..., 0]
    op = implementation["e8p_linear_tiled"]
    assert torch.equal(op(strided, tiles, scale, bias, n, 3), op(x.view(6, k), tiles, scale, bias, n, 3).view(3, 2, n))


def test_nothing(implementation):
    """No token, no row, no column."""
    tiles, scale = tiled_ops.prepack(random_codes(4, 20, 64)), SCALE
    q, q_scale = random_tokens(12, 64)
    quantized, floats = implementation["e8p_linear_quantized"], implementation["e8p_linear_tiled"]
    assert quantized(q[:0], q_scale[:0], tiles, scale, None, 20, 4, torch.float32).shape == (0, 20)
    assert floats(torch.zeros(0, 64), tiles, scale, None, 20, 4).shape == (0, 20)
    for t in (1, 12):
        assert quantized(q[:t], q_scale[:t], tiles[:0], scale, None, 0, 4, torch.float32).shape == (t, 0)
        assert floats(torch.zeros(t, 64), tiles[:0], scale, None, 0, 4).shape == (t, 0)
        bias = torch.randn(20, generator=draw(3))
        y = quantized(q[:t, :0], q_scale[:t], tiles[:, :0], scale, bias, 20, 4, torch.float32)
        assert torch.equal(y, bias.expand(t, 20))
        assert torch.equal(floats(torch.zeros(t, 0), tiles[:, :0], scale, bias, 20, 4), bias.expand(t, 20))
    assert implementation["e8p_prepack"](torch.zeros(2, 0, 4, dtype=torch.uint8)).shape == (0, 2, 64)


# --- floats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_floats_against_float64(bits, dtype, implementation):
    for n, k in SHAPES:
        codes = random_codes(bits, n, k)
        tiles, scale, bias = tiled_ops.prepack(codes), SCALE, torch.randn(n, generator=draw(n))
        w = scale.view(torch.float32).double() * points(codes, k)
        for t in (1, 2, 3, 5, 9, 37):
            x = torch.randn(t, k, generator=draw(k + t)).to(dtype)
            y = implementation["e8p_linear_tiled"](x, tiles, scale, bias, n, bits)
            exact, size = x.double() @ w.t() + bias.double(), x.double().abs() @ w.abs().t() + bias.double().abs()
            rounding_error = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= 4e-6 * size + rounding_error * exact.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_tokens_of_any_size(bits, dtype, implementation):
    """Each as exact as another: small, large, of zeros, with a number far beyond the others."""
    n, k = 33, 200
    codes = random_codes(bits, n, k)
    tiles, w = tiled_ops.prepack(codes), SCALE.view(torch.float32).double() * points(codes, k)
    x = torch.randn(8, k, generator=draw(bits))
    x *= torch.tensor([1e-30, 1e-20, 1e-3, 0, 1, 1e3, 1e20, 1e34])[:, None]
    x[4, 7] = 1e4
    x = x.to(dtype)
    for t in (1, 8):
        for first in range(0, 8, t):
            y = implementation["e8p_linear_tiled"](x[first : first + t], tiles, SCALE, None, n, bits)
            exact, size = (
                a.double() @ b.t() for a, b in ((x[first : first + t], w), (x[first : first + t].abs(), w.abs()))
            )
            rounding_error = 2**-8 if dtype == torch.bfloat16 else 0
            assert ((y.double() - exact).abs() <= 4e-6 * size + rounding_error * exact.abs()).all(), first


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(damage, implementation):
    tiles, x = tiled_ops.prepack(random_codes(2, 33, 200)), torch.randn(9, 200, generator=draw(1))
    for t in (1, 3, 9):
        expected = implementation["e8p_linear_tiled"](x[:t], tiles, SCALE, None, 33, 2)
        for token in (0, t - 1):
            damaged = x[:t].clone()
            damaged[token, 199] = damage
            y = implementation["e8p_linear_tiled"](damaged, tiles, SCALE, None, 33, 2)
            assert not y[token].isfinite().any()
            others = torch.arange(t) != token
            assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_few_tokens_as_bytes_give_the_same_at_every_level(bits, dtype):
    if not native.load():
        pytest.skip("native kernels are not built")
    n, k = 50, 1004
    tiles, x = tiled_ops.prepack(random_codes(bits, n, k)), torch.randn(8, k, generator=draw(bits)).to(dtype)
    found = []
    try:
        for level in ("avx512vnni", "avx512bf16", SLOW_PAIRS):
            if use_level(level):
                found += [torch.ops.ptq.e8p_linear_tiled(x[:t], tiles, SCALE, None, n, bits) for t in (8, 5, 1)]
    finally:
        use_level(None)
    assert all(torch.equal(y, found[0][: len(y)]) for y in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_do_not_depend_on_threads(dtype, implementation):
    threads, n, k = torch.get_num_threads(), 200, 1100
    tiles, x = tiled_ops.prepack(random_codes(3, n, k)), torch.randn(40, k, generator=draw(0)).to(dtype)
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([implementation["e8p_linear_tiled"](x[:t], tiles, SCALE, None, n, 3) for t in (1, 4, 40)])
    finally:
        torch.set_num_threads(threads)
    if implementation is not REFERENCES:  # whose sums are torch's
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_gradients(bits):
    n, k = 19, 45
    codes = random_codes(bits, n, k)
    tiles, scale = tiled_ops.prepack(codes), SCALE
    w = tiled_ops.dequantize(tiles, scale, n, bits, k)
    x, bias = torch.randn(2, 3, k, generator=draw(0)), torch.randn(n, generator=draw(1))
    grad = torch.randn(2, 3, n, generator=draw(2))
    x.requires_grad_(), bias.requires_grad_()
    torch.ops.ptq.e8p_linear_tiled(x, tiles, scale, bias, n, bits).backward(grad)
    assert x.grad is not None and bias.grad is not None
    torch.testing.assert_close(x.grad, grad @ w)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


# --- the ops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_ops_are_well_formed(bits):
    codes = random_codes(bits, 18, 40)
    tiles, (q, q_scale) = tiled_ops.prepack(codes), random_tokens(3, 40)
    x, bias = torch.randn(2, 40, requires_grad=True), torch.randn(18)
    ops: Any = torch.ops.ptq
    torch.library.opcheck(ops.e8p_prepack.default, (codes,))
    torch.library.opcheck(ops.e8p_unprepack.default, (tiles, 18, bits, 40))
    torch.library.opcheck(ops.e8p_dequantize.default, (tiles, SCALE, 18, bits, 40))
    torch.library.opcheck(ops.e8p_linear_tiled.default, (x, tiles, SCALE, bias, 18, bits))
    arguments = (q, q_scale, tiles, SCALE, bias, 18, bits, torch.bfloat16)
    torch.library.opcheck(ops.e8p_linear_quantized.default, arguments)


def test_what_does_not_fit_is_refused():
    if not native.load():
        pytest.skip("native kernels are not built")
    tiles, (q, q_scale) = tiled_ops.prepack(random_codes(4, 18, 64)), random_tokens(2, 64)
    good: list[Any] = [q, q_scale, tiles, SCALE, None, 18, 4, torch.float32]
    wrong = {0: q[:, :32], 1: q_scale[:1], 2: tiles[:1], 3: torch.cat([SCALE, SCALE]), 4: torch.ones(17), 5: 40, 6: 3}
    for place, value in wrong.items():
        with pytest.raises(RuntimeError, match="e8p"):
            torch.ops.ptq.e8p_linear_quantized(*good[:place], value, *good[place + 1 :])
    with pytest.raises(RuntimeError, match="more than 65536 columns"):
        wide = torch.zeros(1, 65544, dtype=torch.int8)
        torch.ops.ptq.e8p_linear_quantized(wide, q_scale[:1], tiles, SCALE, None, 18, 4, torch.float32)
    for codes in (torch.zeros(5, 2, 4, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, 2, 4)):
        with pytest.raises(RuntimeError, match="e8p"):
            torch.ops.ptq.e8p_prepack(codes)
