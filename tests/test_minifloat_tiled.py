"""Small floats in tiles: every native kernel against the references, on quantised tokens to the bit."""

import itertools
import math
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, spoil_free_memory, use_level

import ptq.ops.tiles
from fp6 import tiled_ops
from fp6.element import ELEMENTS, Element
from ptq.ops import native
from ptq.ops.op_declarations import REFERENCES

WHOLE = [name for name, element in ELEMENTS.items() if element.int8_shift is not None]
# n, k, group size: no multiples of 16 rows and 32 columns, a last group that is not full, groups beyond a panel.
SHAPES = [
    (1, 1, 0), (16, 32, 32), (33, 45, 0), (50, 384, 128), (17, 160, 64), (100, 1152, 576), (40, 1000, 0),
    (35, 1000, 96), (20, 1400, 768),
]  # fmt: skip
TOKENS = (0, 1, 2, 3, 5, 9, 18)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(element: Element, n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and scales: any code, a row of the smallest and one of the largest number, scales of either sign."""
    generator = draw(n * k + element.bits)
    codes = torch.randint(0, 2**element.bits, (n, k), dtype=torch.uint8, generator=generator)
    codes[0], codes[-1] = 2 ** (element.bits - 1) + 1, 2 ** (element.bits - 1) - 1
    scale = (torch.randn(n, -(-k // group) if group else 1, generator=generator) * 0.1).bfloat16().view(torch.int16)
    rows = torch.ops.ptq.integer_pack(codes, element.bits)
    return ptq.ops.tiles.prepack(rows, element.bits, k), ptq.ops.tiles.tile_scales(scale)


def tokens(t: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised tokens; the first two hold the extreme values only."""
    q = torch.randint(-128, 128, (t, k), dtype=torch.int8, generator=draw(t + k))
    if t > 1:
        q[0], q[1] = -128, 127
    return q, torch.rand(t, generator=draw(t))


def numbers(element: Element) -> list[float]:
    """The numbers of the codes from their definition, in Python."""
    found, bias, steps = [], 2 ** (element.exponent - 1) - 1, 2**element.mantissa
    for code in range(2**element.bits):
        sign, rest = divmod(code, 2 ** (element.bits - 1))
        field, fraction = divmod(rest, steps)
        size = 2.0 ** (field - bias) * (1 + fraction / steps) if field else 2.0 ** (1 - bias) * fraction / steps
        found.append(-size if sign else size)
    return found


def exact_product(q, q_scale, tiles, scale, bias, n, element, group) -> torch.Tensor:
    """The definition of W6A8 with integers and float32 steps, one group after the other."""
    k = q.shape[1]
    codes = ptq.ops.tiles.unpack(tiles, n, element.bits, k).long()
    whole = torch.tensor([int(x * 2**element.int8_shift) for x in numbers(element)])[codes]
    size, y = group or k, torch.zeros(len(q), n)
    for g, number in enumerate(ptq.ops.tiles.untile_scales(scale, n).view(torch.bfloat16).float().t()):
        columns = slice(g * size, (g + 1) * size)
        y = y + number * (q[:, None, columns].long() * whole[None, :, columns]).sum(2).to(torch.float32)
    return y * (q_scale * 2.0**-element.int8_shift)[:, None] + bias


def quantized(q, q_scale, tiles, scale, bias, n, element, group, dtype=torch.float32):
    shape = n, element.exponent, element.mantissa, group
    return torch.ops.ptq.minifloat_linear_quantized(q, q_scale, tiles, scale, bias, *shape, dtype)


def floats(x, tiles, scale, bias, n, element, group):
    return torch.ops.ptq.minifloat_linear_tiled(x, tiles, scale, bias, n, element.exponent, element.mantissa, group)


# --- quantised tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_the_reference_is_the_definition(name):
    element = ELEMENTS[name]
    for n, k, group in SHAPES:
        q, q_scale = tokens(3, k)
        tiles, bias = weight(element, n, k, group), torch.randn(n, generator=draw(n))
        shape = n, element.exponent, element.mantissa, group
        y = tiled_ops.linear_quantized(q, q_scale, *tiles, bias, *shape, torch.float32)
        assert torch.equal(y, exact_product(q, q_scale, *tiles, bias, n, element, group)), (n, k, group)


@pytest.mark.parametrize("name", WHOLE)
def test_quantised_tokens_to_the_bit(name, level):
    element = ELEMENTS[name]
    for n, k, group in SHAPES:
        tiles, bias = weight(element, n, k, group), torch.randn(n, generator=draw(n))
        for t in TOKENS:
            q, q_scale = tokens(t, k)
            expected = exact_product(q, q_scale, *tiles, bias, n, element, group)
            assert torch.equal(quantized(q, q_scale, *tiles, bias, n, element, group), expected), (n, k, group, t)
        for dtype in (torch.bfloat16, torch.float16):
            y = quantized(q, q_scale, *tiles, bias, n, element, group, dtype)
            assert torch.equal(y, expected.to(dtype))


@pytest.mark.parametrize("name", sorted(set(ELEMENTS) - set(WHOLE)))
def test_other_elements_take_quantised_tokens_as_numbers(name, level):
    element = ELEMENTS[name]
    for n, k, group in SHAPES:
        tiles, bias = weight(element, n, k, group), torch.randn(n, generator=draw(n))
        w = tiled_ops.dequantize(*tiles, n, element.exponent, element.mantissa, group, k).double()
        for t in TOKENS:
            q, q_scale = tokens(t, k)
            x = q.double() * q_scale[:, None].double()
            y = quantized(q, q_scale, *tiles, bias, n, element, group)
            size = x.abs() @ w.abs().t() + bias.abs()
            assert ((y - x @ w.t() - bias).abs() <= 4e-6 * size).all(), (n, k, group, t)


@pytest.mark.parametrize("t", [2, 9])
def test_more_columns_than_32_bits_hold(t, level):
    """One group of 300000 columns: integers up to 2.3e9."""
    element, k = ELEMENTS["e2m3"], 300000
    codes = torch.full((3, k), 31, dtype=torch.uint8)
    codes[1], codes[2, 0] = 63, 0
    tiles = ptq.ops.tiles.prepack(torch.ops.ptq.integer_pack(codes, 6), 6, k)
    scale = ptq.ops.tiles.tile_scales(torch.ones(3, 1).bfloat16().view(torch.int16))
    q, q_scale = torch.full((t, k), -128, dtype=torch.int8), torch.full((t,), 8.0)
    y = quantized(q, q_scale, tiles, scale, None, 3, element, 0)
    assert torch.equal(y, torch.tensor([-128 * 60.0 * k, 128 * 60.0 * k, -128 * 60.0 * (k - 1)]).expand(t, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_numbers_are_quantised_as_by_the_single_op(name, dtype, level):
    """`minifloat_linear_tokens`, with integers and with numbers behind it."""
    element, op = ELEMENTS[name], torch.ops.ptq.minifloat_linear_tokens
    for n, k, group in SHAPES:
        tiles, bias = weight(element, n, k, group), torch.randn(n, generator=draw(n))
        for t in TOKENS:
            x = torch.randn(t, 2, k, generator=draw(t))[:, 1].to(dtype)
            arguments = (x, *tiles, bias, n, element.exponent, element.mantissa, group, 8, 0.95, dtype)
            expected = REFERENCES["minifloat_linear_tokens"](*arguments)
            assert torch.equal(op(*arguments), expected), (n, k, group, t)
    torch.library.opcheck(op.default, arguments)


# --- floats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ELEMENTS)
def test_floats_against_float64(name, dtype, level):
    element = ELEMENTS[name]
    for n, k, group in SHAPES:
        tiles, bias = weight(element, n, k, group), torch.randn(n, generator=draw(n))
        codes = ptq.ops.tiles.unpack(tiles[0], n, element.bits, k).long()
        scale = ptq.ops.tiles.untile_scales(tiles[1], n).view(torch.bfloat16).double()
        w = torch.tensor(numbers(element), dtype=torch.float64)[codes]
        w = w * scale.repeat_interleave(group or k, 1)[:, :k]
        for t in TOKENS:
            x = torch.randn(t, k, generator=draw(k)).to(dtype)
            y = floats(x, *tiles, bias, n, element, group)
            exact, size = x.double() @ w.t() + bias.double(), x.double().abs() @ w.abs().t() + bias.double().abs()
            rounding_error = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            assert y.dtype == dtype and y.shape == (t, n)
            assert ((y.double() - exact).abs() <= 4e-6 * size + rounding_error * exact.abs() + 1e-7).all(), (n, k, t)


@pytest.mark.parametrize("name", ELEMENTS)
def test_sums_of_floats_are_the_same_at_every_level_without_pairs(name):
    if not native.load():
        pytest.skip("native kernels are not built")
    element = ELEMENTS[name]
    tiles, x = weight(element, 50, 384, 128), torch.randn(18, 384, generator=draw(1))
    try:
        plain, others = ("portable", "avx2", "avxvnni", "avx512", "dotprod"), ("avx512vnni", SLOW_PAIRS)
        of_bytes = element.int8_shift is not None  # where others bring x to bytes
        for levels, t in itertools.product((plain, others) if of_bytes else (plain + others,), (1, 2, 4, 7, 8, 9, 18)):
            found = [floats(x[:t], *tiles, None, 50, element, 128) for level in levels if use_level(level)]
            assert all(torch.equal(y, found[0]) for y in found), t
    finally:
        use_level(None)


@pytest.mark.parametrize("spread", [0, 1e3, 1e12, 1e60])
def test_scales_of_any_size(spread, level):
    """Scales of a row that are zero, or up to `spread` apart in either direction: each group counts as it should."""
    element, (n, k, group) = ELEMENTS["e3m2"], (50, 1408, 128)
    tiles, _ = weight(element, n, k, group)
    scale = torch.randn(n, 11, generator=draw(1)) * 0.1
    scale = scale * torch.exp((torch.rand(n, 11, generator=draw(2)) - 0.5) * math.log(spread or 1))
    scale[3, 0] = scale[4, 1:3] = scale[5, 10] = scale[6] = scale[7, :10] = 0
    w = tiled_ops.dequantize(tiles, ptq.ops.tiles.tile_scales(scale.bfloat16().view(torch.int16)), n, 3, 2, group, k)
    for t in (9, 18):
        x = torch.randn(t, k, generator=draw(k)).bfloat16()
        y = floats(
            x.float(), tiles, ptq.ops.tiles.tile_scales(scale.bfloat16().view(torch.int16)), None, n, element, group
        )
        z = floats(x, tiles, ptq.ops.tiles.tile_scales(scale.bfloat16().view(torch.int16)), None, n, element, group)
        exact, size = x.double() @ w.t().double(), x.double().abs() @ w.t().double().abs()
        assert ((y - exact).abs() <= 4e-6 * size).all()
        assert ((z - exact).abs() <= 4e-6 * size + 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("t", [1, 7])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_alone(name, t, level):
    """One weight that is not zero in a row, at any place: the product is exact, signs and subnormal numbers too."""
    element, k = ELEMENTS[name], 64
    n = 2**element.bits
    codes = torch.zeros(n, k, dtype=torch.uint8)
    places = torch.arange(n) % k
    codes[torch.arange(n), places] = torch.arange(n).byte()
    tiles = ptq.ops.tiles.prepack(torch.ops.ptq.integer_pack(codes, element.bits), element.bits, k)
    scale = ptq.ops.tiles.tile_scales(torch.ones(n, 1).bfloat16().view(torch.int16))
    x = torch.arange(1, k + 1).float().expand(t, k)
    expected = torch.tensor(numbers(element)) * (places + 1)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(
            floats(x.to(dtype), tiles, scale, None, n, element, 0).float(), expected.to(dtype).float().expand(t, n)
        )


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e2m3", "e3m2", "e3m3"])
def test_threads_and_batch_position_do_not_change_a_result(name, level):
    """More tokens than a unit takes, more rows than a strip."""
    element, threads, n, k = ELEMENTS[name], torch.get_num_threads(), 200, 256
    tiles = weight(element, n, k, 64)
    (q, q_scale), x = tokens(530, k), torch.randn(530, k, generator=draw(0)).bfloat16()
    try:
        torch.set_num_threads(1)
        y, z = quantized(q, q_scale, *tiles, None, n, element, 64), floats(x, *tiles, None, n, element, 64)
        torch.set_num_threads(3)
        assert torch.equal(quantized(q, q_scale, *tiles, None, n, element, 64), y)
        assert torch.equal(floats(x, *tiles, None, n, element, 64), z)
        for t in (5, 8, 14, 257):
            assert torch.equal(floats(x[-t:], *tiles, None, n, element, 64), z[-t:]), t
        few = floats(x[:3], *tiles, None, n, element, 64)
        torch.set_num_threads(1)
        assert torch.equal(floats(x[:3], *tiles, None, n, element, 64), few)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0,), (), (2, 0), (2, 3), (3, 4)])
def test_leading_axes_and_strides(shape, level):
    element = ELEMENTS["e2m3"]
    tiles = weight(element, 18, 40, 0)
    q = torch.randint(-8, 8, (*shape, 80), dtype=torch.int8, generator=draw(1))[..., ::2]
    q_scale = torch.rand(*shape, 2, generator=draw(2))[..., 0]
    y = quantized(q, q_scale, *tiles, None, 18, element, 0)
    expected = exact_product(q.reshape(-1, 40), q_scale.reshape(-1), *tiles, torch.zeros(18), 18, element, 0)
    assert y.shape == (*shape, 18) and torch.equal(y.reshape(-1, 18), expected)
    x = torch.randn(*shape, 80, generator=draw(3))[..., ::2]
    y = floats(x, *tiles, None, 18, element, 0)
    assert y.shape == (*shape, 18)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, tiled_ops.dequantize(*tiles, 18, 2, 3, 0, 40)))


def test_nan_shows(level):
    element = ELEMENTS["e2m3"]
    tiles, scale = weight(element, 20, 64, 32)
    scale.view(torch.bfloat16)[0, 1, 5] = torch.nan
    for t in (3, 9):
        q, q_scale = tokens(t, 64)
        q_scale[2] = torch.nan
        y = quantized(q, q_scale, tiles, scale, None, 20, element, 32)
        assert y[:, 5].isnan().all() and y[2].isnan().all() and y.isnan().sum() == t + 20 - 1
        for dtype in (torch.float32, torch.bfloat16):
            y = floats(q.to(dtype), tiles, scale, None, 20, element, 32)
            assert y[:, 5].isnan().all() and y.isnan().sum() == t


def test_nothing(level):
    tiles, scale = torch.zeros(0, 2, 384, dtype=torch.uint8), torch.zeros(0, 1, 16, dtype=torch.int16)
    for t in (0, 1, 9):
        q, q_scale = tokens(t, 64)
        assert quantized(q, q_scale, tiles, scale, None, 0, ELEMENTS["e2m3"], 0).shape == (t, 0)
        assert floats(q.float(), tiles, scale, None, 0, ELEMENTS["e3m2"], 0).shape == (t, 0)


@pytest.mark.parametrize("t", [0, 1, 2, 40])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_no_columns(name, t, level):
    """Zero, or the bias: for few tokens, and for many."""
    element, n, op = ELEMENTS[name], 32, torch.ops.ptq
    tiles, scale = torch.zeros(2, 0, 64 * element.bits, dtype=torch.uint8), torch.ones(2, 1, 16, dtype=torch.int16)
    q, q_scale, x = torch.zeros(t, 0, dtype=torch.int8), torch.ones(t), torch.zeros(t, 0)
    for bias in (None, torch.randn(n, generator=draw(1))):
        weight = (tiles, scale, bias, n, element.exponent, element.mantissa, 0)
        for result in (
            lambda w=weight: op.minifloat_linear_quantized(q, q_scale, *w, torch.float32),
            lambda w=weight: tiled_ops.linear_quantized(q, q_scale, *w, torch.float32),
            lambda w=weight: op.minifloat_linear_tokens(x, *w, 8, 1.0, torch.float32),
            lambda w=weight: op.minifloat_linear_tiled(x, *w),
            lambda w=weight: op.minifloat_linear_tiled(x.bfloat16(), *w).float(),
        ):
            spoil_free_memory(n * t)
            torch.testing.assert_close(
                result(), torch.zeros(t, n) if bias is None else bias.expand(t, n), rtol=2**-8, atol=0
            )


# --- the op -----------------------------------------------------------------------------------------------------------


def test_opcheck_and_gradients():
    element, check, op = ELEMENTS["e3m2"], torch.library.opcheck, torch.ops.ptq
    tiles = weight(element, 18, 64, 32)
    x, bias = torch.randn(2, 5, 64, requires_grad=True), torch.randn(18, requires_grad=True)
    q, q_scale = tokens(4, 64)
    check(op.minifloat_linear_tiled.default, (x, *tiles, bias, 18, 3, 2, 32))
    check(op.minifloat_linear_quantized.default, (q, q_scale, *tiles, bias.detach(), 18, 3, 2, 32, torch.bfloat16))
    floats(x, *tiles, bias, 18, element, 32).square().sum().backward()
    twin, twin_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    w = tiled_ops.dequantize(*tiles, 18, 3, 2, 32, 64)
    torch.nn.functional.linear(twin, w, twin_bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad, twin_bias.grad, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    if not native.load():
        pytest.skip("native kernels are not built")
    tiles, (q, q_scale) = weight(ELEMENTS["e2m3"], 18, 64, 32), tokens(2, 64)
    good: list[Any] = [q, q_scale, *tiles, None, 18, 2, 3, 32, torch.float32]
    wrong = {
        0: q[:, :32],
        1: q_scale[:1],
        2: tiles[0][:1],
        3: tiles[1][:, :1],
        4: torch.ones(17),
        5: 40,
        6: 5,
        7: 4,
        8: 24,
    }
    for place, value in wrong.items():
        with pytest.raises(RuntimeError, match="minifloat"):
            torch.ops.ptq.minifloat_linear_quantized(*good[:place], value, *good[place + 1 :])
