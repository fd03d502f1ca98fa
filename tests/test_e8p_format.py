"""The bytes of the format quip_sharp/e8p: golden, inverted exactly, refused where they are spoilt."""

import json
from pathlib import Path

import pytest
import torch

from ptq.errors import InputError
from ptq.weights import formats, rounding
from quip_sharp import e8p
from quip_sharp.e8p_format import PLANES, E8PFormat

BITS = (2, 3, 4)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "e8p.json").read_text())


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_parts(format: E8PFormat, n: int, k: int) -> formats.Parts:
    """Any bytes, positive scales."""
    draw = torch.Generator().manual_seed(n * k)
    planes = {
        part: torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        for part, (shape, dtype) in format.buffers(n, k).items()
        if dtype == torch.uint8
    }
    scale = torch.rand(format.buffers(n, k)["scale"][0], generator=draw) * 0.01
    return {**planes, "scale": scale.view(torch.int32)}


@pytest.mark.parametrize("case", GOLDEN["weights"], ids=lambda case: f"{case['bits']}bit")
def test_golden_bytes(case):
    """Stored bytes and what they stand for; and that again from the documented rule alone."""
    format, (n, k) = E8PFormat(case["bits"]), (2, 20)
    parts = {
        part: torch.frombuffer(bytearray.fromhex(case["parts"][part]), dtype=dtype).view(shape)
        for part, (shape, dtype) in format.buffers(n, k).items()
    }
    w = format.dequantize(parts, n, k)
    assert w.numpy().tobytes().hex() == case["numbers"]
    assert torch.equal(w, by_hand(case["parts"], case["bits"], n, k))
    codes, scales = format.unpack(parts, n, k)
    again = format.pack(rounding.Rounded(codes, scales))
    assert {part: t.numpy().tobytes().hex() for part, t in again.items()} == case["parts"]


def by_hand(parts: dict[str, str], bits: int, n: int, k: int) -> torch.Tensor:
    """W from the hexadecimal bytes of its parts."""
    t0, t1, c = e8p.table().tolist(), e8p.residual_table().tolist(), -(-k // 8)
    scale = torch.frombuffer(bytearray.fromhex(parts["scale"]), dtype=torch.float32)

    def e8(a: int, m: int) -> list[int]:
        p = bin(m).count("1") % 2
        m ^= p
        return [t0[a][j] * (1 - 2 * (m >> j & 1)) + (1 - 2 * p) for j in range(8)]

    planes = {part: bytes.fromhex(text) for part, text in parts.items()}
    rows = []
    for row in range(n):
        numbers = []
        for i in range(row * c, row * c + c):
            first = torch.tensor(e8(planes["abs"][i], planes["signs"][i]))
            if bits == 2:
                numbers.append(scale * first)
                continue
            second = (
                8 * torch.tensor(t1[planes["residual"][i]])
                if bits == 3
                else 2 * torch.tensor(e8(planes["residual_abs"][i], planes["residual_signs"][i]))
            )
            numbers.append(scale * (7 * first + second))
        rows.append(torch.cat(numbers)[:k])
    return torch.stack(rows)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n,k", [(1, 8), (5, 24), (3, 13), (17, 128), (0, 16), (4, 0)])
def test_unpack_inverts_pack(bits, n, k):
    format = formats.get("quip_sharp/e8p", bits=bits)
    assert isinstance(format, E8PFormat) and isinstance(format, formats.IntegerInput)
    parts = random_parts(format, n, k)
    codes, scales = format.unpack(parts, n, k)
    again = format.pack(rounding.Rounded(codes, scales))
    assert {part: (tuple(t.shape), t.dtype) for part, t in again.items()} == format.buffers(n, k)
    assert all(torch.equal(again[part], parts[part]) for part in parts)
    w = format.dequantize(parts, n, k)
    assert w.shape == (n, k) and torch.equal(w, format.codebook.decode(codes, scales)[:, :k])
    assert formats.get(format.name, **format.options()) == format
    assert not any(t.is_floating_point() for t in parts.values()), "loaders would cast it"


@pytest.mark.parametrize("bits", BITS)
def test_a_rounded_weight_comes_back(bits):
    w, format = randn(6, 40), E8PFormat(bits)
    rounded = rounding.nearest(w, format.codebook)
    codes, scales = format.unpack(format.pack(rounded), 6, 40)
    assert torch.equal(codes, rounded.codes) and torch.equal(scales["scale"], rounded.scales["scale"])


@pytest.mark.parametrize("bits", BITS)
def test_true_bits_per_weight(bits):
    buffers = E8PFormat(bits).buffers(64, 1024)
    stored = sum(torch.Size(shape).numel() * dtype.itemsize * 8 for shape, dtype in buffers.values())
    assert stored == 64 * 1024 * bits + 32


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n,k", [(1, 8), (19, 40), (16, 32), (33, 13)])
def test_prepack_and_linear(bits, n, k):
    format = E8PFormat(bits)
    parts = random_parts(format, n, k)
    packed = format.prepack(parts, "cpu")
    assert all(torch.equal(t, parts[part]) for part, t in format.unprepack(packed).items())
    w = format.dequantize(parts, n, k)
    assert torch.equal(format.dequantize(packed, n, k), w)
    assert format.prepack(packed, "cpu") is packed and format.unprepack(parts) is parts
    x, bias = randn(2, 3, k, seed=1), randn(n, seed=2)
    expected = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    for either in (parts, packed):
        torch.testing.assert_close(format.linear(x, either, bias).double(), expected, rtol=1e-5, atol=1e-6)
        short = format.linear(x.bfloat16(), either)
        assert short.dtype == torch.bfloat16 and short.shape == (2, 3, n)
    q = torch.randint(-127, 128, (2, 3, k), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    q_scale = torch.rand(2, 3) * 0.1
    exact = torch.nn.functional.linear(q.double() * q_scale[..., None].double(), w.double(), bias.double())
    found = [format.linear_quantized(q, q_scale, either, bias, torch.float32) for either in (parts, packed)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    format = E8PFormat(3)
    parts = random_parts(format, 9, 24)
    used = format.prepack(parts, "cpu") if packed else parts
    x, bias = randn(4, 24).requires_grad_(), randn(9, seed=1).requires_grad_()
    format.linear(x, used, bias).square().sum().backward()
    twin, twin_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(twin, format.dequantize(parts, 9, 24), twin_bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(bias.grad, twin_bias.grad)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"bits": 5}, "bits must be 2, 3 or 4, found 5"),
        ({"bits": True}, "bits must be 2, 3 or 4, found True"),
        ({"bit": 2}, "unknown option 'bit'; known options: bits"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        formats.get("quip_sharp/e8p", **options)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.pop("scale"),
        lambda p: p.pop("residual_signs"),
        lambda p: p.update(abs=p["abs"][:, :-1]),
        lambda p: p.update(signs=p["signs"][:-1]),
        lambda p: p.update(signs=p["signs"].to(torch.int16)),
        lambda p: p.update(scale=p["scale"].repeat(2)),
        lambda p: p.update(residual=p["signs"]),
    ],
)
def test_wrong_parts_are_named(spoil):
    format = E8PFormat(4)
    parts = random_parts(format, 5, 24)
    spoil(parts)
    for read in (format.unpack, format.dequantize):
        with pytest.raises(InputError, match=r"quip_sharp/e8p \[5, 24\]: expected the parts abs uint8 \[5, 3\]"):
            read(parts, 5, 24)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_bad_scale_is_refused(number):
    parts = random_parts(E8PFormat(3), 2, 8)
    parts["scale"] = torch.tensor([number]).view(torch.int32)
    with pytest.raises(InputError, match="`scale` must hold the bits of a finite float32 number, not negative"):
        E8PFormat(3).unpack(parts, 2, 8)


def test_every_plane_has_its_place():
    for bits in BITS:
        assert len(PLANES[bits]) == bits
        for place, part in enumerate(PLANES[bits]):
            parts = {name: torch.zeros(1, 1, dtype=torch.uint8) for name in PLANES[bits]}
            parts[part] += 0x81
            codes, _ = E8PFormat(bits).unpack({**parts, "scale": torch.zeros(1).view(torch.int32)}, 1, 8)
            shift = [8, 0, *([16] if bits == 3 else [24, 16])][place]
            assert int(codes) & 0xFFFFFFFF == 0x81 << shift
