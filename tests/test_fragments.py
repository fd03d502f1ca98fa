"""The layout of integer weights for the tensor cores of a GPU, and the ops on it, on any device."""

import pytest
import torch
from torch import Tensor

import ptq  # noqa: F401 (the ops)
from ptq.ops import bitstream, fragments, tiles
from quarot import fragment_ops, tiled_ops
from quarot.integer import IntegerFormat


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def weight(n: int, k: int, bits: int, group_size: int, symmetric: bool) -> dict[str, Tensor]:
    """Stored parts of a random weight."""
    groups = k // group_size if group_size else 1
    generator = torch.Generator().manual_seed(n + k)
    scale = torch.rand(n, groups, generator=generator).add(0.5).bfloat16().view(torch.int16)
    parts = {"codes": bitstream.pack(random_codes(n, k, bits), bits), "scale": scale}
    return parts if symmetric else {**parts, "zero": random_codes(n, groups, bits, 1)}


def place(row: int, column: int, width: int) -> tuple[int, int]:
    """Bit in the plane of a block, and in the word, where a field of `width` bits begins: the docstring, by hand."""
    g, second, h = row % 8, row // 8, column // 32
    t, u, e = column % 32 // 8, column % 8 // 4, column % 4
    j, i, s = 2 * (e // 2) + second, e % 2, 2 * h + u
    word, bit = {
        4: (s, 4 * j + 16 * i),
        2: (h, 2 * (4 * u + j) + 16 * i),
        1: (0, 4 * s + j + 16 * i),
    }[width]
    return 32 * (width * (4 * g + t) + word), bit


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_bit_is_where_the_layout_says(bits: int) -> None:
    code = random_codes(20, 70, bits)
    packed = fragments.pack(code, bits)
    assert packed.shape == (2, 2, 128 * bits)
    padded = torch.zeros(32, 128, dtype=torch.uint8)
    padded[:20, :70] = code
    for tile in range(2):
        for block in range(2):
            bytes_ = packed[tile, block].tolist()
            low = start = 0
            for width in fragments.PLANES[bits]:
                plane = int.from_bytes(bytes(bytes_[start : start + 128 * width]), "little")
                for row in range(16):
                    for column in range(64):
                        word, bit = place(row, column, width)
                        field = plane >> (word + bit) & (2**width - 1)
                        assert field == int(padded[16 * tile + row, 64 * block + column]) >> low & (2**width - 1)
                low, start = low + width, start + 128 * width


@pytest.mark.parametrize("n, k", [(1, 1), (16, 64), (17, 65), (40, 200), (1100, 32), (0, 64), (16, 0)])
@pytest.mark.parametrize("bits", range(2, 9))
def test_unpack_is_the_inverse(n: int, k: int, bits: int) -> None:
    code = random_codes(n, k, bits)
    assert torch.equal(fragments.unpack(fragments.pack(code, bits), n, bits, k), code)
    if n * k == 0:
        return  # `bitstream` has no rows of nothing
    stored = bitstream.pack(code, bits)
    assert torch.equal(fragments.unprepack(fragments.prepack(stored, bits, k), n, bits, k), stored)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits, group_size", [(4, 32), (4, 0), (3, 96), (8, 64), (5, 0)])
def test_products_are_those_of_tiles(bits: int, group_size: int, symmetric: bool) -> None:
    n, k = 37, 192
    form = IntegerFormat(bits, group_size, symmetric)
    parts = weight(n, k, bits, group_size, symmetric)
    gpu, cpu = form.lay_out(parts, "fragments"), form.lay_out(parts, "tiles")
    assert all(torch.equal(form.unprepack(gpu)[part], parts[part]) for part in parts)
    x, bias = torch.randn(2, 3, k), torch.randn(n)
    assert torch.allclose(form.linear(x, gpu, bias), form.linear(x, cpu, bias), rtol=1e-4, atol=1e-3)
    assert torch.equal(form.dequantize(gpu, n, k), form.dequantize(parts, n, k))
    q, q_scale = torch.randint(-128, 128, (2, 3, k), dtype=torch.int8), torch.rand(2, 3)
    wanted = form.linear_quantized(q, q_scale, cpu, bias, torch.float32)
    assert torch.equal(form.linear_quantized(q, q_scale, gpu, bias, torch.float32), wanted)


def test_layouts_are_exchanged_when_a_weight_moves() -> None:
    form = IntegerFormat(4, 32, False)
    parts = weight(20, 64, 4, 32, False)
    moved = form.prepack(form.lay_out(parts, "fragments"), "cpu")
    assert moved.keys() == {"tiles", "scale", "zero", "shape"}
    assert torch.equal(moved["tiles"], form.prepack(parts, "cpu")["tiles"])
    assert form.prepack(moved, "cpu") is moved
    assert form.prepack(parts, "meta").keys() == parts.keys()  # no kernels there


@pytest.mark.parametrize("group_size, symmetric", [(32, False), (0, True)])
def test_opcheck(group_size: int, symmetric: bool) -> None:
    n, k = 20, 64
    form = IntegerFormat(4, group_size, symmetric)
    p = form.lay_out(weight(n, k, 4, group_size, symmetric), "fragments")
    x, bias = torch.randn(3, k, requires_grad=True), torch.randn(n, requires_grad=True)
    arguments = (x, p["fragments"], p["scale"], p.get("zero"), bias, n, 4, group_size)
    torch.library.opcheck(torch.ops.ptq.integer_linear_fragments.default, arguments)
    x.grad = None
    torch.ops.ptq.integer_linear_fragments(*arguments).sum().backward()
    w = fragment_ops.dequantize(p["fragments"], p["scale"], p.get("zero"), n, 4, group_size, k)
    assert x.grad is not None and torch.allclose(x.grad, w.sum(0).expand(3, -1), rtol=1e-4)
    q, q_scale = torch.randint(-128, 128, (3, k), dtype=torch.int8), torch.rand(3)
    quantised = (q, q_scale, p["fragments"], p["scale"], p.get("zero"), None, n, 4, group_size, 8, torch.bfloat16)
    torch.library.opcheck(torch.ops.ptq.integer_quantized_fragments.default, quantised)


def test_references_are_the_definition() -> None:
    n, k, bits, group_size = 18, 128, 4, 64
    parts = weight(n, k, bits, group_size, False)
    p = IntegerFormat(bits, group_size, False).lay_out(parts, "fragments")
    codes = bitstream.unpack(parts["codes"], bits, k)
    q, q_scale = torch.randint(-128, 128, (5, k), dtype=torch.int8), torch.rand(5)
    found = fragment_ops.quantized(
        q, q_scale, p["fragments"], p["scale"], p["zero"], None, n, bits, group_size, 8, torch.float32
    )
    wanted = tiled_ops.product(q, q_scale, codes, parts["scale"], parts["zero"], None, bits, group_size, torch.float32)
    assert torch.equal(found, wanted)
    assert torch.equal(tiles.untile_scales(p["scale"], n), parts["scale"])
