"""The integer grid, its bytes and its ops: against brute force, golden bytes, and native kernels against references."""

import ctypes
import json
import mmap
from pathlib import Path

import pytest
import torch
from conftest import ops_at

from ptq.errors import InputError
from ptq.ops import bitstream, native
from ptq.weights import feedback, formats, rounding
from quarot import integer_ops as ops
from quarot.integer import IntegerFormat, IntegerGrid

BITS = range(2, 9)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "integer.json").read_text())


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(
        0, 2**bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits * 1000 + k)
    )


@pytest.fixture(params=("reference", *native.CPU_LEVELS))
def implementation(request):
    yield from ops_at(request.param)


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["codes"], ids=lambda case: f"{case['bits']}bit")
def test_golden_bytes(case, implementation):
    codes = torch.tensor(case["codes"], dtype=torch.uint8)
    packed = implementation["integer_pack"](codes, case["bits"])
    assert [bytes(row.tolist()).hex() for row in packed] == case["packed"]


def test_golden_scales():
    values = torch.tensor([GOLDEN["scale"]["values"]])
    rounded = rounding.Rounded(
        torch.zeros(1, 6, dtype=torch.uint8), {"scale": values, "zero": torch.zeros(1, 3).byte()}
    )
    scale = IntegerFormat(4, 2).pack(rounded)["scale"]
    assert scale.dtype == torch.int16 and scale.numpy().astype("<i2").tobytes().hex() == GOLDEN["scale"]["bytes"]


@pytest.mark.parametrize("bits", BITS)
def test_unpack_inverts_pack_for_every_width(bits, implementation):
    for k in [*range(20), 63, 64, 65, 128]:
        codes = codes_of(3, k, bits)
        packed = implementation["integer_pack"](codes, bits)
        assert packed.shape == (3, -(-k * bits // 8))
        assert torch.equal(bitstream.unpack(packed, bits, k), codes)
        assert torch.equal(packed, bitstream.pack(codes, bits))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_format_round_trip_and_dequantize(bits, symmetric):
    n, k = 5, 24
    for group in (0, 8, 24):
        format = formats.get("quarot/integer", bits=bits, group_size=group, symmetric=symmetric)
        rounded = rounding.nearest(randn(n, k), format.codebook)
        parts = format.pack(rounded)
        assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == format.buffers(n, k)
        codes, scales = format.unpack(parts, n, k)
        assert torch.equal(codes, rounded.codes)
        assert all(torch.equal(scales[part], rounded.scales[part]) for part in scales)
        assert torch.equal(format.dequantize(parts, n, k), format.codebook.decode(codes, scales))
        assert formats.get(format.name, **format.options()) == format
        assert not any(t.is_floating_point() for t in parts.values()), "loaders would cast it"


def test_true_bits_per_weight():
    for options, expected in (((4, 32, True), 4.5), ((4, 32, False), 4.75), ((3, 128, True), 3.125)):
        buffers = IntegerFormat(*options).buffers(64, 1024)
        stored = sum(torch.Size(shape).numel() * dtype.itemsize * 8 for shape, dtype in buffers.values())
        assert stored / (64 * 1024) == expected


# --- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_round_is_the_nearest_code(bits, symmetric, implementation):
    w, grid = randn(7, 45), IntegerGrid(bits, 15, symmetric)
    scales = grid.fit(w)
    codes = implementation["integer_round"](w, scales["scale"], scales["zero"], bits, 15)
    every = torch.arange(2**bits)
    points = (every - scales["zero"][..., None].double()) * scales["scale"][..., None].double()  # [n, g, codes]
    distance = (w.view(7, 3, 15, 1).double() - points[:, :, None]).abs()
    mine = distance.gather(3, codes.view(7, 3, 15, 1).long())[..., 0]
    torch.testing.assert_close(mine, distance.amin(3), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fit_is_the_best_of_its_scales(bits, symmetric, implementation):
    """Float64 brute force over the candidates; no scale of the search may be better than the one taken."""
    w = randn(6, 66) * torch.tensor([1e-4, 0.02, 1.0, 30.0, 1e6, 1.0])[:, None]
    w[5] = w[5].abs()
    for group, steps in ((0, 1), (11, 16), (33, 21)):
        scale, zero = implementation["integer_fit"](w, bits, group, symmetric, steps, 0.4)
        assert torch.equal(scale, scale.bfloat16().float())
        x, z = w.view(6, -1, group or 66).double(), zero[..., None].double()
        low, high = x.amin(2).clamp(max=0).float(), x.amax(2).clamp(min=0).float()
        if symmetric:
            full = torch.where(high > -low, -high, -low) / (2 ** (bits - 1) - 1)
        else:
            full = high / (2**bits - 1) - low / (2**bits - 1)

        def loss(s, x=x, z=z):
            q = (x / s[..., None].double() + z).round().clamp(0, 2**bits - 1)
            return ((q - z) * s[..., None] - x).square().sum(2)

        best = torch.stack([loss((full * ops.shrink(i, steps, 0.4)).bfloat16().float()) for i in range(steps)]).amin(0)
        assert (loss(scale) <= best * 1.0001).all()
        reference = loss(ops.fit(w, bits, group, symmetric, steps, 0.4)[0])
        torch.testing.assert_close(loss(scale), reference, rtol=1e-4, atol=0)
        assert torch.equal(zero, ops.fit(w, bits, group, symmetric, steps, 0.4)[1])


def test_clip_search_lowers_the_error():
    w = randn(16, 128)
    error = {steps: rounding.nearest(w, IntegerGrid(3, 0, steps=steps)).error for steps in (1, 16)}
    assert error[16] < 0.8 * error[1]


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_and_tiny_groups_have_scale_one(symmetric, implementation):
    w = torch.zeros(3, 8)
    w[1], w[2, :4] = 1e-38, 1.0
    scale, zero = implementation["integer_fit"](w, 4, 4, symmetric, 8, 0.4)
    assert torch.equal(scale[:2], torch.ones(2, 2)) and scale[2, 1] == 1
    codes = implementation["integer_round"](w, scale, zero, 4, 4)
    assert not IntegerGrid(4, 4, symmetric).decode(codes, {"scale": scale, "zero": zero})[:2].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused(bad, implementation):
    w = randn(4, 40)
    w[2, 37] = bad
    scale, _ = implementation["integer_fit"](w, 4, 8, True, 8, 0.4)
    assert scale.isnan().nonzero().tolist() == [[2, 4]]
    with pytest.raises(InputError, match=r"down_proj: NaN or infinity in row 2"):
        rounding.nearest(w, IntegerGrid(4, 8), name="down_proj")


# --- the inner loop of LDLQ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("c,n", [(1, 1), (5, 3), (16, 64), (33, 130)])
def test_ldlq_block_is_the_generic_one(c, n, symmetric, implementation):
    grid, w, target = IntegerGrid(3, 4, symmetric), randn(c, n), randn(c, n, seed=1)
    factor = (randn(c, c, seed=2) * 0.2).tril(-1) + torch.eye(c)
    scales = grid.fit(randn(n, 160, seed=4))
    columns = torch.randperm(160, generator=torch.Generator().manual_seed(5))[:c]
    expected_codes, expected_error = feedback.round_block(grid, target, w, factor, scales, columns)
    scale, zero = scales["scale"].t().contiguous(), scales["zero"].t().float().contiguous()
    codes, error = implementation["integer_ldlq"](target, w, factor, scale, zero, columns // 4, 3)
    # A product summed in another order can tip a rounding; the error then differs by one step in that row.
    assert (codes != expected_codes).float().mean() < 0.01
    same = (codes == expected_codes).all(0)
    torch.testing.assert_close(error[:, same], expected_error[:, same])


# --- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_linear_is_the_dequantised_product(bits, dtype, implementation):
    for (n, k, group), shape in zip(
        [(1, 1, 0), (7, 45, 15), (9, 64, 32), (66, 33, 0)], [(3,), (), (2, 0), (2, 1, 5)], strict=True
    ):
        for symmetric in (True, False):
            format = IntegerFormat(bits, group, symmetric)
            parts = format.pack(rounding.nearest(randn(n, k), format.codebook))
            x = randn(*shape, 2 * k, seed=2)[..., ::2].to(dtype)
            for bias in (None, randn(n, seed=3)):
                y = implementation["integer_linear"](
                    x, parts["codes"], parts["scale"], parts.get("zero"), bias, bits, group
                )
                w = format.dequantize(parts, n, k).double()
                expected = x.double() @ w.t() + (0 if bias is None else bias.double())
                assert y.dtype == dtype and y.shape == (*shape, n)
                rough = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
                torch.testing.assert_close(y.double(), expected, rtol=rough, atol=rough)


def random_parts(format: IntegerFormat, n: int, k: int) -> formats.Parts:
    """Any code, scales of either sign, any zero."""
    g, draw = format.codebook.groups(k), torch.Generator().manual_seed(k)
    parts = {
        "codes": torch.ops.ptq.integer_pack(codes_of(n, k, format.bits), format.bits),
        "scale": (torch.randn(n, g, generator=draw) * 0.1).bfloat16().view(torch.int16),
    }
    zero = torch.randint(0, 2**format.bits, (n, g), dtype=torch.uint8, generator=draw)
    return parts if format.symmetric else {**parts, "zero": zero}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_native_linear_is_exact_and_ignores_batch_position_level_and_threads(bits, symmetric):
    """Whole blocks of 128 codes and rests; one scale per block, per lane of eight codes, per code; every batch path."""
    if not native.load():
        pytest.skip("native kernels are not built")
    threads = torch.get_num_threads()
    try:
        for n, k, group in [
            *[(25, 384, size) for size in (0, 8, 24, 32, 64, 128)], (9, 512, 256), (10, 137, 0), (7, 264, 24),
            (5, 45, 15), (27, 100, 20),
        ]:  # fmt: skip
            format, x = IntegerFormat(bits, group, symmetric), randn(133, k, seed=n)
            parts = random_parts(format, n, k)
            torch.set_num_threads(1)
            y = format.linear(x, parts)
            exact = x.double() @ format.dequantize(parts, n, k).double().t()
            assert ((y - exact).norm(dim=1) <= 2e-6 * exact.norm(dim=1)).all()
            torch.set_num_threads(3)
            for level in native.CPU_LEVELS:
                native.set_cpu_level(level)
                assert torch.equal(format.linear(x, parts), y), (level, k, group)
                for t in (1, 2, 3, 4, 7, 11, 18):  # the last t rows, alone
                    assert torch.equal(format.linear(x[-t:], parts), y[-t:]), (level, k, group, t)
                short = format.linear(x[:3].bfloat16(), parts)
                assert torch.equal(short, format.linear(x[:3].bfloat16().float(), parts).bfloat16())
    finally:
        torch.set_num_threads(threads)
        native.set_cpu_level(None)


@pytest.mark.parametrize("bits", BITS)
def test_linear_reads_no_byte_behind_the_codes(bits, implementation):
    """Whole blocks of codes that end where an untouchable page begins."""
    page, n, k = mmap.PAGESIZE, 3, 256
    memory = mmap.mmap(-1, 2 * page)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(behind, page, 0) == 0, ctypes.get_errno()
    parts = random_parts(IntegerFormat(bits, 0), n, k)
    size = n * k * bits // 8
    codes = torch.frombuffer(memory, dtype=torch.uint8, offset=page - size, count=size).view(n, -1)
    codes.copy_(parts["codes"])
    for t in (1, 3, 40):
        x, linear = randn(t, k), implementation["integer_linear"]
        y = linear(x, codes, parts["scale"], None, None, bits, 0)
        assert torch.equal(y, linear(x, parts["codes"], parts["scale"], None, None, bits, 0))


def test_linear_of_nothing():
    format = IntegerFormat(4, 0)
    parts = {"codes": torch.zeros(3, 0, dtype=torch.uint8), "scale": torch.zeros(3, 0, dtype=torch.int16)}
    assert torch.equal(format.linear(torch.ones(2, 0), parts, torch.arange(3.0)), torch.arange(3.0).expand(2, 3))


def test_opcheck_and_gradients():
    format = IntegerFormat(3, 8, False)
    parts = format.pack(rounding.nearest(randn(6, 24), format.codebook))
    x, bias = randn(2, 5, 24, seed=1).requires_grad_(), randn(6, seed=2).requires_grad_()
    arguments = (x, parts["codes"], parts["scale"], parts["zero"], bias, 3, 8)
    torch.library.opcheck(torch.ops.ptq.integer_linear.default, arguments)
    format.linear(x, parts, bias).square().sum().backward()
    twin, twin_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(twin, format.dequantize(parts, 6, 24), twin_bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(bias.grad, twin_bias.grad)


def test_opcheck_of_the_solver_ops():
    w, grid = randn(6, 24), IntegerGrid(4, 8, False)
    scales = grid.fit(w)
    scale, zero = scales["scale"], scales["zero"]
    check, op = torch.library.opcheck, torch.ops.ptq
    check(op.integer_fit.default, (w, 4, 8, False, 8, 0.4))
    check(op.integer_round.default, (w, scale, zero, 4, 8))
    check(op.integer_pack.default, (grid.round(w, scales), 4))
    target, factor = w.t().contiguous(), torch.eye(24)
    group, st, zt = torch.arange(24) // 8, scale.t().contiguous(), zero.t().float().contiguous()
    check(op.integer_ldlq.default, (target, target, factor, st, zt, group, 4))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options,message",
    [
        ({"bits": 9}, "bits must be 2 to 8, found 9"),
        ({"bits": True}, "bits must be 2 to 8"),
        ({"group_size": -1}, "group size must be 0"),
        ({"grup": 3}, "unknown option 'grup'; known options: bits, group_size, symmetric"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        formats.get("quarot/integer", **options)


def test_unknown_format():
    with pytest.raises(InputError, match="unknown format 'os.system'; known formats: dense, "):
        formats.get("os.system")


def test_group_that_does_not_divide():
    with pytest.raises(InputError, match="o_proj: 20 columns do not divide into groups of 16"):
        rounding.nearest(randn(2, 20), IntegerGrid(4, 16), name="o_proj")
    with pytest.raises(InputError, match="do not divide"):
        IntegerFormat(4, 16).buffers(2, 20)


@pytest.mark.parametrize("spoil", [lambda p: p.pop("scale"), lambda p: p.update(codes=p["codes"][:, 1:])])
def test_parts_that_do_not_fit(spoil):
    format = IntegerFormat(4, 8)
    parts = format.pack(rounding.nearest(randn(3, 16), format.codebook))
    spoil(parts)
    with pytest.raises(InputError, match=r"expected the parts codes uint8 \[3, 8\], scale int16 \[3, 2\]; found"):
        format.unpack(parts, 3, 16)


def test_dense_format():
    format = formats.get("dense", dtype="bfloat16")
    w, x = randn(4, 6), randn(3, 6, seed=1)
    parts = format.pack(rounding.Rounded(w, {}))
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == format.buffers(4, 6)
    torch.testing.assert_close(format.linear(x, parts), x @ w.bfloat16().float().t())
    assert formats.get(format.name, **format.options()) == format


@pytest.mark.skipif(not native.load(), reason="checks of the kernel")
def test_the_search_for_a_scale_has_no_negative_number_of_steps():
    with pytest.raises(RuntimeError, match="steps must not be negative, found -1"):
        torch.ops.ptq.integer_fit(randn(2, 8), 4, 0, True, -1, 0.4)
