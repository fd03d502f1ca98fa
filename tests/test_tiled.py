"""Tiles: exact, golden, and every native kernel against the references, on quantised tokens to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEVELS, SLOW_PAIRS, ops_at, spoil_free_memory, use_level
from tiny_models import save_model
from transformers import AutoModelForCausalLM

import ptq
import ptq.ops.tiles
from ptq.layers.linear import QuantLinear
from ptq.ops import bitstream, native
from ptq.weights import formats, rounding
from quarot.integer import IntegerFormat
from quarot.plan import QuarotRecipe

BITS = range(2, 9)
SHAPES = [(1, 1, 0), (16, 32, 32), (17, 45, 0), (33, 256, 64), (50, 384, 128), (40, 1000, 0)]  # n, k, group size


@pytest.fixture(params=("reference", *LEVELS))
def implementation(request):
    yield from ops_at(request.param)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_parts(format: IntegerFormat, n: int, k: int) -> formats.Parts:
    """Any code, a row of zeros and one of the largest code, scales of either sign, zeros with both ends."""
    generator, g, top = draw(n * k + format.bits), format.codebook.groups(k), 2**format.bits
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, generator=generator)
    codes[0], codes[-1] = 0, top - 1
    scale = (torch.randn(n, g, generator=generator) * 0.1).bfloat16().view(torch.int16)
    parts = {"codes": bitstream.pack(codes, format.bits), "scale": scale}
    zero = torch.randint(0, top, (n, g), dtype=torch.uint8, generator=generator)
    zero[0], zero[-1] = top - 1, 0
    return parts if format.symmetric else {**parts, "zero": zero}


def random_tokens(t: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised tokens; the first two hold the extreme values only."""
    q = torch.randint(-128, 128, (t, k), dtype=torch.int8, generator=draw(t + k))
    if t > 1:
        q[0], q[1] = -128, 127
    return q, torch.rand(t, generator=draw(t))


def exact_product(q, q_scale, format, parts, bias) -> torch.Tensor:
    """The definition, number by number: Python integers, float32 steps."""
    n, k = parts["scale"].shape[0], q.shape[1]
    codes, scales = format.unpack(parts, n, k)
    number, size = (
        codes.long() - scales["zero"].repeat_interleave(k // scales["zero"].shape[1], 1),
        format.group_size or k,
    )
    y = torch.zeros(len(q), n)
    for g in range(k // size):
        columns = slice(g * size, (g + 1) * size)
        whole = (q[:, None, columns].long() * number[None, :, columns]).sum(2)
        y = y + scales["scale"][:, g] * whole.to(torch.float32)
    return y * q_scale[:, None] + bias


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_unpack_inverts_pack(bits, implementation):
    for n, k, _ in [*SHAPES, (15, 31, 0), (48, 33, 0), (3, 0, 0), (0, 40, 0)]:
        rows = bitstream.pack(torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=draw(k)), bits)
        tiles = implementation["integer_prepack"](rows, bits, k)
        assert tiles.shape == (-(-n // 16), -(-k // 32), 64 * bits)
        assert torch.equal(tiles, ptq.ops.tiles.prepack(rows, bits, k))
        assert torch.equal(implementation["integer_unprepack"](tiles, n, bits, k), rows)


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_is_where_the_layout_says(bits, implementation):
    """Golden bytes from the text of `ptq.ops.tiles`: one code at a time, all ones."""
    n, k, top = 20, 40, 2**bits - 1
    for row, column in [(0, 0), (3, 6), (15, 31), (19, 39), (7, 29), (16, 2)]:
        codes = torch.zeros(n, k, dtype=torch.uint8)
        codes[row, column] = top
        tiles = implementation["integer_prepack"](bitstream.pack(codes, bits), bits, k)
        expected, start = torch.zeros(2, 2, 64 * bits, dtype=torch.uint8), 0
        quad, j = divmod(column % 32, 4)
        for width in ptq.ops.tiles.PLANES[bits]:
            vector, field = divmod(quad, 8 // width)
            expected[row // 16, column // 32, (start + vector) * 64 + 4 * (row % 16) + j] = (
                2**width - 1
            ) << field * width
            start += width
        assert torch.equal(tiles, expected)


def test_golden_bytes(implementation):
    """INT4, one tile, code (row + column) % 16: row 0 begins with columns 0..3 and 4..7 in the halves of 4 bytes."""
    codes = (torch.arange(16)[:, None] + torch.arange(32)).remainder(16).byte()
    tiles = implementation["integer_prepack"](bitstream.pack(codes, 4), 4, 32)
    first = bytes(tiles[0, 0, :12].tolist()).hex()
    assert first == "40516273" + "51627384" + "62738495"  # rows 0, 1, 2
    assert bytes(tiles[0, 0, 64:68].tolist()).hex() == "c8d9eafb"  # row 0, columns 8..15


def test_true_bytes():
    format = IntegerFormat(3, 128)
    parts = format.prepack(random_parts(format, 64, 1024), "cpu")
    assert sum(t.numel() * t.itemsize for t in parts.values()) * 8 / (64 * 1024) == 3.125


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_quantised_tokens_to_the_bit(bits, symmetric, implementation):
    for n, k, group in SHAPES:
        format = IntegerFormat(bits, group, symmetric)
        parts = random_parts(format, n, k)
        tiled, bias = format.prepack(parts, "cpu"), torch.randn(n, generator=draw(n))
        for t in (0, 1, 2, 3, 4, 7, 9):
            q, q_scale = random_tokens(t, k)
            weight = (tiled["tiles"], tiled["scale"], tiled.get("zero"))
            y = implementation["integer_linear_quantized"](q, q_scale, *weight, bias, n, bits, group, torch.float32)
            assert torch.equal(y, exact_product(q, q_scale, format, parts, bias)), (n, k, group, t)
            for dtype in (torch.bfloat16, torch.float16):
                short = implementation["integer_linear_quantized"](q, q_scale, *weight, bias, n, bits, group, dtype)
                assert torch.equal(short, y.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_floats_against_float64(bits, dtype, implementation):
    few = zip(SHAPES, (1, 2, 3, 4, 7, 9), strict=True)
    many = zip(SHAPES, (16, 17, 18, 21, 24, 33), strict=True)
    for (n, k, group), t in (*few, *many):
        for symmetric in (True, False):
            format = IntegerFormat(bits, group, symmetric)
            tiled = format.prepack(random_parts(format, n, k), "cpu")
            x, bias = torch.randn(t, k, generator=draw(k)).to(dtype), torch.randn(n, generator=draw(n))
            weight = (tiled["tiles"], tiled["scale"], tiled.get("zero"))
            y = implementation["integer_linear_tiled"](x, *weight, bias, n, bits, group)
            w = format.dequantize(tiled, n, k).double()
            exact, size = x.double() @ w.t() + bias.double(), x.double().abs() @ w.abs().t() + bias.double().abs()
            rounding_error = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            assert y.dtype == dtype
            offsets = 1 if symmetric else 2**bits  # code - zero may be much smaller than both
            assert ((y.double() - exact).abs() <= 4e-6 * offsets * size + rounding_error * exact.abs() + 1e-7).all()


def test_more_columns_than_32_bits_hold(implementation):
    """One group of 70016 columns with 8 bits: integers up to 2.3e9."""
    format, k = IntegerFormat(8, 0, False), 70016
    parts = {
        "codes": torch.full((3, k), 255, dtype=torch.uint8),
        "scale": torch.ones(3, 1).bfloat16().view(torch.int16),
        "zero": torch.tensor([[0], [255], [128]], dtype=torch.uint8),
    }
    tiled = format.prepack(parts, "cpu")
    q, q_scale = torch.full((3, k), -128, dtype=torch.int8), torch.ones(3)
    weight = (tiled["tiles"], tiled["scale"], tiled["zero"])
    y = implementation["integer_linear_quantized"](q, q_scale, *weight, None, 3, 8, 0, torch.float32)
    assert torch.equal(y, torch.tensor([-128.0 * 255 * k, 0, -128.0 * 127 * k]).expand(3, 3))


def test_nan_shows(implementation):
    format = IntegerFormat(4, 32)
    parts = random_parts(format, 20, 64)
    parts["scale"].view(torch.bfloat16)[5, 1] = torch.nan
    tiled = format.prepack(parts, "cpu")
    q, q_scale = random_tokens(3, 64)
    q_scale[2] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        weight = (tiled["tiles"], tiled["scale"], None, None, 20, 4, 32)
        y = implementation["integer_linear_quantized"](q, q_scale, *weight, dtype)
        assert y[:, 5].isnan().all() and y[2].isnan().all() and y.isnan().sum() == 3 + 20 - 1
        y = implementation["integer_linear_tiled"](q.to(dtype), *weight)
        assert y[:, 5].isnan().all() and y.isnan().sum() == 3


@pytest.mark.parametrize("shape", [(0,), (), (2, 0), (2, 3)])
def test_leading_axes_and_strides(shape, implementation):
    format = IntegerFormat(4, 0)
    parts = random_parts(format, 18, 40)
    tiled = format.prepack(parts, "cpu")
    q = torch.randint(-8, 8, (*shape, 80), dtype=torch.int8, generator=draw(1))[..., ::2]
    q_scale = torch.rand(*shape, 2, generator=draw(2))[..., 0]
    weight = (tiled["tiles"], tiled["scale"], None, None, 18, 4, 0)
    y = implementation["integer_linear_quantized"](q, q_scale, *weight, torch.float32)
    expected = exact_product(q.reshape(-1, 40), q_scale.reshape(-1), format, parts, torch.zeros(18))
    assert y.shape == (*shape, 18) and torch.equal(y.reshape(-1, 18), expected)
    x = torch.randn(*shape, 80, generator=draw(3))[..., ::2]
    y = implementation["integer_linear_tiled"](x, *weight)
    assert y.shape == (*shape, 18)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, format.dequantize(parts, 18, 40)))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_threads_and_batch_position_do_not_change_a_result(bits):
    if not native.load():
        pytest.skip("native kernels are not built")
    format, threads = IntegerFormat(bits, 128, False), torch.get_num_threads()
    tiled = format.prepack(random_parts(format, 1000, 512), "cpu")
    x, (q, q_scale) = torch.randn(60, 512, generator=draw(0)), random_tokens(8, 512)
    try:
        for level in LEVELS:
            use_level(level)
            torch.set_num_threads(1)
            y, few = format.linear(x, tiled), format.linear(x[:16], tiled)
            z = format.linear_quantized(q, q_scale, tiled, None, torch.float32)
            torch.set_num_threads(3)
            for t in (36, 40, 60):  # whole blocks of four, and more than the kernel for few tokens takes
                assert torch.equal(format.linear(x[-t:], tiled), y[-t:])
            assert torch.equal(format.linear(x[:16], tiled), few)
            assert torch.equal(format.linear_quantized(q, q_scale, tiled, None, torch.float32), z)
            for t in (1, 2, 3):
                assert torch.equal(format.linear_quantized(q[-t:], q_scale[-t:], tiled, None, torch.float32), z[-t:])
    finally:
        torch.set_num_threads(threads)
        use_level(None)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_even_times_zero(damage, implementation):
    codes = torch.full((17, 64), 8, dtype=torch.uint8)
    tiles = ptq.ops.tiles.prepack(bitstream.pack(codes, 4), 4, 64)
    scale = ptq.ops.tiles.tile_scales(torch.ones(17, 1).bfloat16().view(torch.int16))
    x = torch.ones(40, 64)
    x[0, 63] = x[-1, 0] = damage
    for t in (1, 4, 40):
        for some in (x[:t], x[-t:]):
            y = implementation["integer_linear_tiled"](some, tiles, scale, None, None, 17, 4, 0)
            damaged = ~some.isfinite().all(1)
            assert y[damaged].isnan().all() and (y[~damaged] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [0, 64])
def test_few_tokens_as_bytes_do_not_depend_on_the_others(group, dtype):
    """Their sums are exact: with AVX-512 VNNI alone, and where pairs of bfloat16 are slow."""
    if not native.load():
        pytest.skip("native kernels are not built")
    format = IntegerFormat(4, group, False)
    tiled, x = format.prepack(random_parts(format, 50, 384), "cpu"), torch.randn(16, 384, generator=draw(0)).to(dtype)
    x[:, :64] *= torch.logspace(-20, 20, 16)[:, None].to(dtype)
    try:
        found = [
            format.linear(x[-t:], tiled)
            for level in ("avx512vnni", SLOW_PAIRS)
            if use_level(level)
            for t in (16, 7, 4, 1)
        ]
    finally:
        use_level(None)
    assert all(torch.equal(y, found[0][-len(y) :]) for y in found)


@pytest.mark.parametrize("t", [0, 1, 2, 40])
def test_no_columns(t, implementation):
    """Zero, or the bias: for few tokens, and for many."""
    n, ops = 32, implementation
    weight = (torch.zeros(2, 0, 256, dtype=torch.uint8), torch.ones(2, 1, 16, dtype=torch.int16), None)
    q, q_scale, x = torch.zeros(t, 0, dtype=torch.int8), torch.ones(t), torch.zeros(t, 0)
    for bias in (None, torch.randn(n, generator=draw(1))):
        for result in (
            lambda b=bias: ops["integer_linear_quantized"](q, q_scale, *weight, b, n, 4, 0, torch.float32),
            lambda b=bias: ops["integer_linear_tokens"](x, *weight, b, n, 4, 0, 8, 1.0, torch.float32),
            lambda b=bias: ops["integer_linear_tiled"](x, *weight, b, n, 4, 0),
        ):
            spoil_free_memory(n * t)
            assert torch.equal(result(), torch.zeros(t, n) if bias is None else bias.expand(t, n))


def test_plain_parts_give_the_same_bits():
    """Also where tiles do not apply: groups of 8."""
    for group in (0, 8, 32):
        format = IntegerFormat(4, group, False)
        parts, (q, q_scale) = random_parts(format, 19, 64), random_tokens(3, 64)
        tiled, bias = format.prepack(parts, "cpu"), torch.randn(19, generator=draw(0))
        assert ("tiles" in tiled) == (group != 8)
        y = format.linear_quantized(q, q_scale, tiled, bias, torch.float32)
        assert torch.equal(format.linear_quantized(q, q_scale, parts, bias, torch.float32), y)
        assert torch.equal(y, exact_product(q, q_scale, format, parts, bias))


def test_opcheck_and_gradients():
    format = IntegerFormat(3, 32, False)
    tiled, op = format.prepack(random_parts(format, 18, 64), "cpu"), torch.ops.ptq
    check, weight = torch.library.opcheck, (tiled["tiles"], tiled["scale"], tiled["zero"])
    x, bias = torch.randn(2, 5, 64, requires_grad=True), torch.randn(18, requires_grad=True)
    q, q_scale = random_tokens(4, 64)
    check(op.integer_linear_tiled.default, (x, *weight, bias, 18, 3, 32))
    check(op.integer_linear_quantized.default, (q, q_scale, *weight, bias.detach(), 18, 3, 32, torch.bfloat16))
    check(op.integer_unprepack.default, (tiled["tiles"], 18, 3, 64))
    check(op.integer_prepack.default, (op.integer_unprepack(tiled["tiles"], 18, 3, 64), 3, 64))
    format.linear(x, tiled, bias).square().sum().backward()
    twin, twin_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(twin, format.dequantize(tiled, 18, 64), twin_bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(bias.grad, twin_bias.grad)


def test_what_does_not_fit_is_refused():
    if not native.load():
        pytest.skip("native kernels are not built")
    format = IntegerFormat(4, 32)
    tiled, (q, q_scale) = format.prepack(random_parts(format, 18, 64), "cpu"), random_tokens(2, 64)
    good: list[Any] = [q, q_scale, tiled["tiles"], tiled["scale"], None, None, 18, 4, 32, torch.float32]
    wrong = {
        0: q[:, :32],
        1: q_scale[:1],
        2: tiled["tiles"][:1],
        3: tiled["scale"][:, :1],
        5: torch.ones(17),
        6: 40,
        7: 9,
        8: 24,
    }
    for place, value in wrong.items():
        with pytest.raises(RuntimeError, match="integer"):
            torch.ops.ptq.integer_linear_quantized(*good[:place], value, *good[place + 1 :])


# --- the layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k,group,symmetric", [(64, 32, False), (45, 0, True)])
def test_a_prepacked_layer_saves_and_loads_the_stored_bytes(k, group, symmetric, bias):
    format = IntegerFormat(3, group, symmetric)
    layers = [QuantLinear(k, 19, bias, format) for _ in range(2)]
    for layer, seed in zip(layers, (0, 1), strict=True):
        w = torch.randn(19, k, generator=draw(seed))
        parts = {f"weight_{part}": t for part, t in format.pack(rounding.nearest(w, format.codebook)).items()}
        if bias:  # a new layer's is whatever is in memory, a NaN too
            parts["bias"] = torch.randn(19, generator=draw(seed))
        layer.load_state_dict({**layer.state_dict(), **parts})
    stored = [layer.state_dict() for layer in layers]
    layers[0].prepack()
    layers[0].prepack()  # changes nothing
    names = {name for name, _ in layers[0].named_parameters()}
    assert "weight_tiles" in names and "weight_codes" not in names
    saved = layers[0].state_dict()
    assert list(saved) == list(stored[0]) and all(torch.equal(saved[name], stored[0][name]) for name in saved)
    x = torch.randn(2, k, generator=draw(5))
    torch.testing.assert_close(
        layers[0](x), torch.nn.functional.linear(x, format.dequantize(layers[0].parts(), 19, k), layers[0].bias)
    )
    layers[0].load_state_dict(stored[1])
    assert "weight_tiles" in dict(layers[0].named_parameters())
    torch.testing.assert_close(layers[0](x), layers[1](x))
    with pytest.raises(RuntimeError, match="size mismatch for weight_codes"):
        layers[0].load_state_dict({**stored[1], "weight_codes": stored[1]["weight_codes"][:, 1:]})


def test_a_loaded_model_is_tiled_and_saves_its_file_again(tmp_path: Path) -> None:
    recipe = QuarotRecipe(rounding="nearest", group_size=0)
    ptq.quantize(save_model(tmp_path / "model"), tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert layers and all("tiles" in layer.parts() and "codes" not in layer.parts() for layer in layers)
    model.save_pretrained(tmp_path / "saved")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
