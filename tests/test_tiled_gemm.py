"""Many quantised tokens times tiled integer weights: every level against the reference, to the bit."""

import pytest
import torch

import ptq.tiles
from ptq import native
from quarot import tiled_ops

BITS = range(2, 9)
# n, k, t, group: no multiples of 16 rows, 32 columns, 4 tokens; groups within a panel of 512 columns, across, others
# that do not divide a panel, nor are divided by one.
SHAPES = [
    (50, 96, 9, 32), (33, 45, 13, 0), (17, 1024, 33, 64), (100, 1152, 10, 128), (16, 1536, 17, 0), (49, 2048, 11, 1024),
    (65, 515, 66, 0), (35, 1056, 37, 96), (20, 2304, 41, 768),
]  # fmt: skip


@pytest.fixture(params=native.CPU_LEVELS)
def level(request):
    """Runs the native kernels at one instruction set."""
    if not native.available():
        pytest.skip("native kernels are not built")
    try:
        if native.set_cpu_level(request.param) != request.param:
            pytest.skip(f"this machine has no {request.param}")
        yield request.param
    finally:
        native.set_cpu_level(None)


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
    tiles = ptq.tiles.prepack(torch.ops.ptq.integer_pack(codes, bits), bits, codes.shape[1])
    tiled = [None if x is None else ptq.tiles.tile_scales(x) for x in (scale, zero)]
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
