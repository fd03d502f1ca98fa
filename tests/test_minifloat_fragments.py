"""The layout of small floats for the tensor cores of a GPU, and the ops on it, on any device."""

import pytest
import torch
from torch import Tensor

import ptq  # noqa: F401 (the ops)
from fp6 import fragment_ops, fragments, tiled_ops
from fp6.element import ELEMENTS, Element
from fp6.minifloat import MinifloatFormat
from ptq.ops import bitstream
from ptq.ops.fragments import PLANES

EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))


def random_codes(n: int, k: int, element: Element, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**element.bits, (n, k), generator=generator, dtype=torch.uint8)


def weight(n: int, k: int, form: MinifloatFormat) -> dict[str, Tensor]:
    """Stored parts of a random weight."""
    groups = k // form.group_size if form.group_size else 1
    generator = torch.Generator().manual_seed(n + k)
    scale = torch.rand(n, groups, generator=generator).add(0.5).bfloat16().view(torch.int16)
    if form.scale == "e8m0":
        scale = torch.randint(120, 130, (n, groups), generator=generator, dtype=torch.uint8)
    return {"codes": bitstream.pack(random_codes(n, k, form.small_float), form.small_float.bits), "scale": scale}


def place(element: Element, row: int, column: int, bit: int) -> tuple[int, int]:
    """Of a block: word among the lane's and bit in it that hold a bit of a code; the docstring, bit by bit."""
    layout, b = fragments.LAYOUTS[element.name], element.bits
    h, u, p, i = column // 32, column % 8 // 4, column % 4 // 2, column % 2
    pair = 8 * h + 4 * u + 2 * p + row // 8
    per_group, slots = 16 * layout.group // b, len(layout.slots)
    group, rest = divmod(pair, per_group)
    gathered = rest >= slots * layout.group
    sign, low = layout.slots[rest - slots * layout.group if gathered else rest % slots]
    at = (sign if bit == b - 1 else low + bit) + 16 * i
    if not gathered:
        return group * layout.group + rest // slots, at
    taken = {s for s, _ in layout.slots} | {m + j for _, m in layout.slots for j in range(b - 1)}
    sources = [(word, (at - turn) % 32) for word, turn in enumerate(layout.turns) if (at - turn) % 16 not in taken]
    assert len(sources) == 1
    return group * layout.group + sources[0][0], sources[0][1]


@EVERY
def test_every_bit_is_where_the_layout_says(element: Element) -> None:
    n, k, b = 20, 70, element.bits
    code = random_codes(n, k, element)
    packed = fragments.pack(code, element)
    assert packed.shape == (2, 2, 128 * b)
    padded = torch.zeros(32, 128, dtype=torch.uint8)
    padded[:n, :k] = code
    first = {low + i: (low, width, i) for width, low in _planes(b) for i in range(width)}
    for tile in range(2):
        for block in range(2):
            number = int.from_bytes(bytes(packed[tile, block].tolist()), "little")
            seen = set()
            for row in range(16):
                for column in range(64):
                    lane = 4 * (row % 8) + column % 32 // 8
                    for bit in range(b):
                        word, at = place(element, row, column, bit)
                        low, width, i = first[word]
                        position = 32 * (32 * low + width * lane + i) + at
                        seen.add(position)
                        assert number >> position & 1 == int(padded[16 * tile + row, 64 * block + column]) >> bit & 1
            assert len(seen) == 1024 * b  # no bit is used twice, none is left


def _planes(bits: int) -> list[tuple[int, int]]:
    widths = PLANES[bits]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


@pytest.mark.parametrize("n, k", [(1, 1), (16, 64), (17, 65), (40, 200), (1100, 32), (0, 64), (16, 0)])
@EVERY
def test_unpack_is_the_inverse(n: int, k: int, element: Element) -> None:
    code = random_codes(n, k, element)
    assert torch.equal(fragments.unpack(fragments.pack(code, element), n, element, k), code)
    if n * k == 0:
        return  # `bitstream` has no rows of nothing
    stored = bitstream.pack(code, element.bits)
    assert torch.equal(fragments.unprepack(fragments.prepack(stored, element, k), n, element, k), stored)


@pytest.mark.parametrize("scale", ["bfloat16", "e8m0"])
@pytest.mark.parametrize("name, group_size", [("e2m3", 0), ("e3m2", 32), ("e2m2", 96), ("e3m3", 64), ("e2m1", 0)])
def test_products_are_those_of_tiles(name: str, group_size: int, scale: str) -> None:
    n, k = 37, 192
    form = MinifloatFormat(name, group_size, scale)
    parts = weight(n, k, form)
    gpu, cpu = form.lay_out(parts, "fragments"), form.lay_out(parts, "tiles")
    assert all(torch.equal(form.unprepack(gpu)[part], parts[part]) for part in parts)
    x, bias = torch.randn(2, 3, k), torch.randn(n)
    assert torch.allclose(form.linear(x, gpu, bias), form.linear(x, cpu, bias), rtol=1e-4, atol=1e-3)
    assert torch.equal(form.dequantize(gpu, n, k), form.dequantize(parts, n, k))
    q, q_scale = torch.randint(-128, 128, (2, 3, k), dtype=torch.int8), torch.rand(2, 3)
    found, wanted = (form.linear_quantized(q, q_scale, p, bias, torch.float32) for p in (gpu, cpu))
    exact = form.small_float.int8_shift is not None
    assert torch.equal(found, wanted) if exact else torch.allclose(found, wanted, 1e-4, 1e-2)


def test_layouts_are_exchanged_when_a_weight_moves() -> None:
    form = MinifloatFormat("e2m3", 32)
    parts = weight(20, 64, form)
    moved = form.prepack(form.lay_out(parts, "fragments"), "cpu")
    assert moved.keys() == {"tiles", "scale", "shape"}
    assert torch.equal(moved["tiles"], form.prepack(parts, "cpu")["tiles"])
    assert form.prepack(moved, "cpu") is moved
    assert form.prepack(parts, "meta").keys() == parts.keys()  # no kernels there
    assert (
        MinifloatFormat("e2m3", 16).prepack(weight(20, 64, MinifloatFormat("e2m3", 16)), "cpu").keys() == parts.keys()
    )


@pytest.mark.parametrize("name, group_size", [("e2m3", 32), ("e3m2", 0)])
def test_opcheck(name: str, group_size: int) -> None:
    n, k, element = 20, 64, ELEMENTS[name]
    p = (form := MinifloatFormat(name, group_size)).lay_out(weight(n, k, form), "fragments")
    x, bias = torch.randn(3, k, requires_grad=True), torch.randn(n, requires_grad=True)
    numbers = (n, element.exponent, element.mantissa, group_size)
    arguments = (x, p["fragments"], p["scale"], bias, *numbers)
    torch.library.opcheck(torch.ops.ptq.minifloat_linear_fragments.default, arguments)
    x.grad = None
    torch.ops.ptq.minifloat_linear_fragments(*arguments).sum().backward()
    w = fragment_ops.dequantize(p["fragments"], p["scale"], *numbers, k)
    assert x.grad is not None and torch.allclose(x.grad, w.sum(0).expand(3, -1), rtol=1e-4, atol=1e-5)
    q, q_scale = torch.randint(-128, 128, (3, k), dtype=torch.int8), torch.rand(3)
    quantised = (q, q_scale, p["fragments"], p["scale"], None, *numbers, torch.bfloat16)
    torch.library.opcheck(torch.ops.ptq.minifloat_quantized_fragments.default, quantised)


def test_references_are_the_definition() -> None:
    n, k, form = 18, 128, MinifloatFormat("e2m3", 64)
    parts = weight(n, k, form)
    p = form.lay_out(parts, "fragments")
    codes = bitstream.unpack(parts["codes"], 6, k)
    q, q_scale = torch.randint(-128, 128, (5, k), dtype=torch.int8), torch.rand(5)
    found = fragment_ops.quantized(q, q_scale, p["fragments"], p["scale"], None, n, 2, 3, 64, torch.float32)
    wanted = tiled_ops.product(q, q_scale, codes, parts["scale"], None, form.small_float, 64, torch.float32)
    assert torch.equal(found, wanted)
