"""The codebook and the format of small floats: scales, rounding, bytes, products."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_minifloat import implementation  # noqa: F401  (a fixture)

from fp6 import minifloat_ops as ops
from fp6.choice import AutoFormat, SearchedFormat
from fp6.element import ELEMENTS, Element, encode
from fp6.minifloat import MinifloatFormat, MinifloatGrid, as_bfloat16, as_e8m0
from ptq.errors import InputError
from ptq.ops import native
from ptq.weights import feedback, formats, rounding
from ptq.weights.formats import BlockCodebook, Choice, Codebook, Format, IntegerInput, OnePassCodebook

GOLDEN = json.loads((Path(__file__).parent / "golden" / "minifloat.json").read_text())
EVERY = pytest.mark.parametrize("element", ELEMENTS)
SHAPES = [(1, 1, 0), (7, 45, 15), (9, 64, 32), (16, 32, 0), (33, 128, 64), (18, 40, 0), (5, 250, 0)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(element: str) -> tuple[int, int]:
    return ELEMENTS[element].exponent, ELEMENTS[element].mantissa


# --- scales -----------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("group", [0, 11, 32])
def test_absmax_lands_on_the_largest_number(element: str, group: int, implementation) -> None:  # noqa: F811
    w = randn(6, 352) * torch.tensor([1e-25, 1e-4, 0.02, 1.0, 30.0, 1e25])[:, None]
    scale = implementation["minifloat_fit"](w, *bits(element), group, False, False)
    absmax = w.view(6, -1, group or 352).abs().amax(2)
    assert torch.equal(scale, (absmax / ELEMENTS[element].largest).bfloat16().float())


@EVERY
def test_powers_of_two_are_those_of_the_ocp_specification(element: str, implementation) -> None:  # noqa: F811
    w = randn(5, 64) * torch.tensor([1e-20, 0.02, 1.0, 4.0, 1e20])[:, None]
    w[3, 7] = 64.0  # a power of two itself
    scale = implementation["minifloat_fit"](w, *bits(element), 32, True, False)
    for row in range(5):
        for g in range(2):
            largest = float(w[row, 32 * g : 32 * g + 32].abs().max())
            power = math.frexp(largest)[1] - 1 - (math.frexp(ELEMENTS[element].largest)[1] - 1)
            assert float(scale[row, g]) == 2.0**power


@EVERY
@pytest.mark.parametrize("power", [False, True])
def test_search_takes_the_best_of_its_scales(element: str, power: bool, implementation) -> None:  # noqa: F811
    """Float64 brute force over the candidates, by the table of numbers alone."""
    w = randn(4, 96) * torch.tensor([1e-25, 0.02, 1.0, 1e25])[:, None]
    scale = implementation["minifloat_fit"](w, *bits(element), 32, power, True)
    x, numbers = w.view(4, 3, 32).double(), ELEMENTS[element].values()
    absmax = x.abs().amax(2).float()

    def loss(s: torch.Tensor) -> torch.Tensor:
        distance = (x[..., None] - numbers * s[..., None, None].double()).abs().amin(3)
        return (distance / absmax[..., None]).square().sum(2)

    if power:
        base = torch.floor(torch.log2(absmax)) - ELEMENTS[element].top
        candidates = [torch.exp2(base + offset) for offset in ops.POWERS]
    else:
        full = absmax / ELEMENTS[element].largest
        candidates = [(full * ((i + 1) / 16)).bfloat16().float() for i in range(ops.FACTORS)]
        assert any(torch.equal(candidate, full.bfloat16().float()) for candidate in candidates), "absmax is among them"
    losses = torch.stack([loss(candidate) for candidate in candidates])
    assert (loss(scale) <= losses.amin(0) * 1.0001).all()
    assert torch.stack([scale == candidate for candidate in candidates]).any(0).all()


def test_empty_and_tiny_groups_are_zeros(implementation) -> None:  # noqa: F811
    w = torch.zeros(3, 8)
    w[1], w[2, :4] = 1e-38, 1.0
    for power in (False, True):
        for search in (False, True):
            codes, scale, error, energy = implementation["minifloat_nearest"](w, 2, 3, 4, power, search)
            assert torch.equal(scale[:2], torch.ones(2, 2)) and scale[2, 1] == 1
            assert not codes[:2].any() and not codes[2, 4:].any()
            assert error.tolist()[0] == 0 and float(energy[2]) == pytest.approx(4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_with_the_name(bad: float, implementation) -> None:  # noqa: F811
    w = randn(4, 40)
    w[2, 37] = bad
    scale = implementation["minifloat_fit"](w, 3, 2, 8, False, True)
    assert scale.isnan().nonzero().tolist() == [[2, 4]]
    for grid in (MinifloatGrid("e3m2", 8), MinifloatGrid("e3m2", 8, "e8m0", "mse")):
        for run in (
            grid.fit,
            grid.nearest,
            lambda w, name, grid=grid: rounding.ldlq(w, torch.eye(40), grid, name=name),
        ):
            with pytest.raises(InputError, match="down_proj: NaN or infinity in row 2"):
                run(w, name="down_proj")


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="o_proj: 20 columns do not divide into groups of 16"):
        rounding.nearest(randn(2, 20), MinifloatGrid("e2m3", 16), name="o_proj")
    with pytest.raises(InputError, match="do not divide"):
        MinifloatFormat("e2m3", 16).buffers(2, 20)


# --- codes ------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("group", [0, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_is_fit_and_round(element: str, group: int, dtype: torch.dtype, implementation) -> None:  # noqa: F811
    w = (randn(7, 320) * 0.02).to(dtype)
    for kind in ("bfloat16", "e8m0"):
        for search in ("absmax", "mse"):
            grid = MinifloatGrid(element, group, kind, search)
            options = *bits(element), group, kind == "e8m0", search == "mse"
            codes, scale, error, energy = implementation["minifloat_nearest"](w, *options)
            # The reference adds up errors in another order: where two scales are as good, it may take the other one.
            scales = {"scale": implementation["minifloat_fit"](w.float(), *options)}
            expected = ops.encode(w.float(), scales["scale"], *options[:3])
            assert torch.equal(scale, scales["scale"]) and torch.equal(codes, expected)
            assert torch.equal(grid.round(w.float(), scales), expected)
            decoded = grid.decode(codes, scales)
            torch.testing.assert_close(error, (decoded.double() - w).square().sum(1), rtol=1e-5, atol=0)
            torch.testing.assert_close(energy, w.double().square().sum(1), rtol=1e-5, atol=0)


@EVERY
def test_codes_are_the_nearest_points_under_the_stored_scale(element: str) -> None:
    grid, w = MinifloatGrid(element, 16, search="mse"), randn(9, 48)
    rounded = rounding.nearest(w, grid)
    points = ELEMENTS[element].values() * rounded.scales["scale"][..., None].double()  # [n, g, codes]
    distance = (w.view(9, 3, 16, 1).double() - points[:, :, None]).abs()
    mine = distance.gather(3, rounded.codes.view(9, 3, 16, 1).long())[..., 0]
    torch.testing.assert_close(mine, distance.amin(3), rtol=1e-5, atol=1e-7)
    assert rounded.error == pytest.approx(float(mine.square().sum() / w.double().square().sum()), rel=1e-4)


def test_protocols_are_kept() -> None:
    grid, format = MinifloatGrid(), MinifloatFormat()
    assert isinstance(grid, Codebook) and isinstance(grid, BlockCodebook) and isinstance(grid, OnePassCodebook)
    assert isinstance(format, Format) and isinstance(format, IntegerInput) and not isinstance(format, Choice)
    assert isinstance(AutoFormat(), Choice)


@pytest.mark.parametrize(
    ("element", "group", "bar"), [("e2m3", 0, 0.029), ("e3m2", 0, 0.053), ("e2m2", 0, 0.059), ("e2m3", 128, 0.0275)]
)
def test_error_on_gaussian_rows(element: str, group: int, bar: float) -> None:
    w = randn(64, 4096)
    absmax = rounding.nearest(w, MinifloatGrid(element, group)).error ** 0.5
    searched = rounding.nearest(w, MinifloatGrid(element, group, search="mse")).error ** 0.5
    assert searched < absmax < bar


@EVERY
@pytest.mark.parametrize(("c", "n"), [(1, 1), (5, 3), (16, 64), (33, 130)])
def test_ldlq_block_is_the_generic_one(element: str, c: int, n: int, implementation) -> None:  # noqa: F811
    grid, w, target = MinifloatGrid(element, 4), randn(c, n), randn(c, n, seed=1)
    factor = (randn(c, c, seed=2) * 0.2).tril(-1) + torch.eye(c)
    scales = grid.fit(randn(n, 160, seed=4))
    columns = torch.randperm(160, generator=torch.Generator().manual_seed(5))[:c]
    expected_codes, expected_error = feedback.round_block(grid, target, w, factor, scales, columns)
    scale = scales["scale"].t().contiguous()
    codes, error = implementation["minifloat_ldlq"](target, w, factor, scale, columns // 4, *bits(element))
    # A product summed in another order can tip a rounding; the error then differs by one step in that row.
    assert (codes != expected_codes).float().mean() < 0.01
    same = (codes == expected_codes).all(0)
    torch.testing.assert_close(error[:, same], expected_error[:, same])


def test_feedback_lowers_the_loss() -> None:
    w, x = randn(40, 96), randn(400, 96, seed=1) @ randn(96, 96, seed=2)
    found = rounding.ldlq(w, x.t() @ x, MinifloatGrid("e2m1", 32))
    assert found.solver == "ldlq" and found.loss is not None and found.nearest_loss is not None
    assert found.loss < 0.6 * found.nearest_loss


# --- the choice of an element -----------------------------------------------------------------------------------------


def test_auto_takes_the_smaller_error_and_says_which() -> None:
    gaussian, outliers = randn(8, 512), randn(8, 512)
    outliers[:, 3] = 40.0
    auto = AutoFormat(search="mse")
    assert auto.options()["element"] == "auto"
    for w, expected in ((gaussian, "e2m3"), (outliers, "e3m2"), (torch.zeros(2, 64), "e3m2")):
        found = auto.choose(w)
        assert found == SearchedFormat(expected, search="mse")
        assert found.buffers(*w.shape) == auto.buffers(*w.shape)
        errors = [rounding.nearest(w, MinifloatGrid(name, search="mse")).error for name in ("e2m3", "e3m2")]
        assert rounding.nearest(w, found.codebook).error == min(errors)
    with pytest.raises(InputError, match="up_proj: NaN"):
        auto.choose(torch.full((2, 4), math.nan), name="up_proj")


# --- bytes ------------------------------------------------------------------------------------------------------------


@EVERY
def test_golden_bytes(element: str) -> None:
    numbers, case = torch.tensor([GOLDEN["numbers"]]), GOLDEN["elements"][element]
    codes = encode(numbers, ELEMENTS[element])
    parts = MinifloatFormat(element).pack(rounding.Rounded(codes, {"scale": torch.ones(1, 1)}))
    assert bytes(parts["codes"][0].tolist()).hex() == case["packed"]


def test_golden_scales() -> None:
    values, codes = torch.tensor([GOLDEN["scale"]["values"]]), torch.zeros(1, 5, dtype=torch.uint8)
    for kind, dtype in (("bfloat16", torch.int16), ("e8m0", torch.uint8)):
        scale = MinifloatFormat("e2m3", 1, kind).pack(rounding.Rounded(codes, {"scale": values}))["scale"]
        assert scale.dtype == dtype and scale.numpy().tobytes().hex() == GOLDEN["scale"][kind]


def test_every_e8m0_byte_is_a_bfloat16_number() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    bits = as_bfloat16(stored)
    assert torch.equal(as_e8m0(bits), stored)
    numbers = bits.view(torch.bfloat16).double()
    assert numbers[:255].tolist() == [2.0 ** (e - 127) for e in range(255)] and numbers[255].isnan()


def any_parts(format: MinifloatFormat, n: int, k: int) -> formats.Parts:
    """Any code, and scales of the format's kind."""
    draw = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 2**format.small_float.bits, (n, k), dtype=torch.uint8, generator=draw)
    scale = (randn(n, format.codebook.groups(k)) * 0.1).abs()
    scale = scale.bfloat16().float() if format.scale == "bfloat16" else torch.exp2(scale.log2().round())
    return format.pack(rounding.Rounded(codes, {"scale": scale}))


@EVERY
@pytest.mark.parametrize("scale", ["bfloat16", "e8m0"])
def test_unpack_inverts_pack_and_prepack_for_every_shape(element: str, scale: str) -> None:
    for n, k, group in [*SHAPES, *((3, k, 0) for k in range(1, 20))]:
        format = formats.get("fp6/minifloat", element=element, group_size=group, scale=scale)
        parts = any_parts(format, n, k)
        assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == format.buffers(n, k)
        assert not any(t.is_floating_point() for t in parts.values()), "loaders would cast it"
        codes, scales = format.unpack(parts, n, k)
        again = format.pack(rounding.Rounded(codes, scales))
        tiled = format.prepack(parts, "cpu")
        stored = format.unprepack(tiled)
        for part in parts:
            assert torch.equal(parts[part], again[part]) and torch.equal(parts[part], stored[part])
        assert torch.equal(format.dequantize(tiled, n, k), format.codebook.decode(codes, scales))
        assert formats.get(format.name, **format.options()) == format


def test_true_bits_per_weight() -> None:
    for options, expected in ((("e2m3", 128), 6.125), (("e2m2", 64), 5.25), (("e3m2", 32, "e8m0"), 6.25)):
        buffers = MinifloatFormat(*options).buffers(64, 1024)
        stored = sum(math.prod(shape) * dtype.itemsize * 8 for shape, dtype in buffers.values())
        assert stored / (64 * 1024) == expected


# --- products ---------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("scale", ["bfloat16", "e8m0"])
def test_linear_is_the_dequantised_product(element: str, scale: str) -> None:
    for n, k, group in SHAPES:
        format = MinifloatFormat(element, group, scale)
        parts, x, bias = any_parts(format, n, k), randn(2, 3, k, seed=1), randn(n, seed=2)
        expected = x.double() @ format.dequantize(parts, n, k).double().t() + bias
        for held in (parts, format.prepack(parts, "cpu")):
            y = format.linear(x, held, bias)
            assert (y - expected).norm() <= 1e-5 * expected.norm() + 1e-30
            short = format.linear(x.bfloat16(), held, bias)
            assert short.dtype == torch.bfloat16 and short.shape == expected.shape
            wanted = x.bfloat16().double() @ format.dequantize(parts, n, k).double().t() + bias
            assert (short - wanted).norm() <= 0.004 * wanted.norm()  # half of the last bit, of one in 256, and sums
            q, q_scale = torch.randint(-127, 128, (4, k), dtype=torch.int8), torch.rand(4)
            exact = (q.double() * q_scale[:, None]) @ format.dequantize(parts, n, k).double().t()
            found = format.linear_quantized(q, q_scale, held, None, torch.float32)
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_gradient_reaches_the_input() -> None:
    format, x = MinifloatFormat("e2m3", 5), randn(3, 20).requires_grad_()
    parts = any_parts(format, 4, 20)
    format.linear(x, parts).sum().backward()
    torch.testing.assert_close(x.grad, format.dequantize(parts, 4, 20).sum(0).expand(3, 20))


def test_opcheck() -> None:
    w, scale, check, op = randn(6, 24), torch.ones(6, 3), torch.library.opcheck, torch.ops.ptq
    codes = op.minifloat_encode(w, scale, 2, 3, 8)
    check(op.minifloat_fit.default, (w, 2, 3, 8, False, True))
    check(op.minifloat_nearest.default, (w.bfloat16(), 2, 3, 0, True, False))
    check(op.minifloat_encode.default, (w, scale, 2, 3, 8))
    check(op.minifloat_decode.default, (codes, scale, 2, 3, 8))
    target, group = w.t().contiguous(), torch.arange(24) // 8
    check(op.minifloat_ldlq.default, (target, target, torch.eye(24), scale.t().contiguous(), group, 2, 3))


def test_kernels_ignore_strides_threads_and_take_nothing() -> None:
    if not native.load():
        pytest.skip("native kernels are not built")
    w, threads = randn(300, 200)[:, ::2], torch.get_num_threads()
    expected = torch.ops.ptq.minifloat_nearest(w.contiguous(), 3, 2, 20, False, True)
    try:
        torch.set_num_threads(3)
        found = torch.ops.ptq.minifloat_nearest(w, 3, 2, 20, False, True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(RuntimeError, match=r"w must be \[n, k\]"):
        torch.ops.ptq.minifloat_nearest(torch.zeros(2, 32, 3), 3, 2, 0, False, False)
    codes, scale, _, energy = torch.ops.ptq.minifloat_nearest(torch.zeros(0, 8), 3, 2, 0, False, False)
    assert codes.shape == (0, 8) and scale.shape == (0, 1) and energy.shape == (0,)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"element": "e5m0"}, "unknown element 'e5m0'; known elements: e3m2, e2m3"),
        ({"element": "auto"}, "unknown element 'auto'"),
        ({"group_size": -1}, "group size must be 0"),
        ({"group_size": True}, "group size must be 0"),
        ({"scale": "float16"}, "scale must be bfloat16 or e8m0, found 'float16'"),
        ({"search": "mse"}, "unknown option 'search'; known options: element, group_size, scale"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        formats.get("fp6/minifloat", **options)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.pop("scale"),
        lambda p: p.update(codes=p["codes"][:, 1:]),
        lambda p: p.update(codes=torch.nn.functional.pad(p["codes"], (0, 1))),
        lambda p: p.update(scale=p["scale"].to(torch.uint8)),
    ],
)
def test_parts_that_do_not_fit(spoil) -> None:
    format = MinifloatFormat("e2m3", 8)
    parts = any_parts(format, 3, 16)
    spoil(parts)
    with pytest.raises(InputError, match=r"expected the parts codes uint8 \[3, 12\], scale int16 \[3, 2\]; found"):
        format.unpack(parts, 3, 16)


def test_elements_outside_the_kernels_are_refused() -> None:
    if not native.load():
        pytest.skip("native kernels are not built")
    for exponent, mantissa in ((1, 2), (6, 2), (3, 5), (2, 0), (3, 2**63 - 1)):
        with pytest.raises(RuntimeError, match="no element of"):
            torch.ops.ptq.minifloat_fit(randn(2, 4), exponent, mantissa, 0, False, False)
    assert Element(5, 2).bits == 8
