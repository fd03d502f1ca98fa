"""The CUDA kernels of small floats on a GPU, against the references: odd shapes, strides, dtypes, poisoned memory."""

import functools

import pytest
import torch
from test_ops import GPU, HALVES, agrees, check_graphs_and_compile, error, poison, random
from torch import Tensor

from fp6 import tiled_ops
from fp6.element import ELEMENTS
from fp6.minifloat import MinifloatFormat
from ptq.ops import bitstream

__all__ = ["poison"]  # the fixture

SHAPES = [(16, 64, 0), (33, 128, 128), (70, 608, 32), (5, 96, 96), (4096, 4096, 128), (1000, 11008, 0), (17, 37, 0),
          (28672, 512, 128), (9000, 8320, 0)]  # fmt: skip
NAMES = pytest.mark.parametrize("name", ELEMENTS)


@functools.lru_cache(maxsize=64)
def weight(n: int, k: int, form: MinifloatFormat) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Stored parts of a random weight, on the GPU; fragments; the float64 weight."""
    generator = torch.Generator().manual_seed(n + k)
    g = form.codebook.groups(k)
    codes = torch.randint(0, 2**form.small_float.bits, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, g, generator=generator).add(0.5).mul(0.02).bfloat16().view(torch.int16)
    if form.scale == "e8m0":
        scale = torch.randint(118, 124, (n, g), generator=generator, dtype=torch.uint8)
    parts = {"codes": bitstream.pack(codes.to(GPU), form.small_float.bits), "scale": scale.to(GPU)}
    packed = form.prepack(parts, GPU)
    assert "fragments" in packed
    return parts, packed, form.dequantize(parts, n, k).double()


@pytest.mark.parametrize("op", ["minifloat_linear_fragments", "minifloat_quantized_fragments"])
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


@HALVES
@NAMES
def test_every_code_becomes_its_number(name: str, dtype: torch.dtype) -> None:
    """Subnormal float16 numbers too, which the tensor cores have to take as they are."""
    form = MinifloatFormat(name)
    codes = torch.arange(32 * 64, device=GPU).mul(7).view(32, 64) % 2**form.small_float.bits
    stored = bitstream.pack(codes.to(torch.uint8), form.small_float.bits)
    parts = {"codes": stored, "scale": torch.ones(32, 1, device=GPU).bfloat16().view(torch.int16)}
    found = form.linear(torch.eye(64, device=GPU, dtype=dtype), form.prepack(parts, GPU))
    assert torch.equal(found.t().float(), form.dequantize(parts, 32, 64))


@HALVES
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 256, 300, 512])
@NAMES
def test_linear(name: str, tokens: int, dtype: torch.dtype) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES):
        form = MinifloatFormat(name, group_size, "e8m0" if i == 2 else "bfloat16")
        _, packed, w = weight(n, k, form)
        x, bias = random(tokens, k, dtype=dtype, seed=i).to(GPU), None
        if i % 3:
            bias = random(n, dtype=dtype, seed=i).to(GPU)
        found = form.linear(x, packed, bias)
        wanted = x.double() @ w.T + (0 if bias is None else bias.double())
        assert error(found, wanted) < (1e-3 if dtype == torch.float16 else 6e-3), (n, k, group_size)
        assert torch.equal(found, form.linear(x, packed, bias))


def test_linear_of_float32_and_strides() -> None:
    form = MinifloatFormat("e2m3", 64)
    _, packed, w = weight(100, 320, form)
    x = random(4, 6, 640).to(GPU)
    assert error(form.linear(x[..., :320], packed), x[..., :320].double() @ w.T) < 1e-5
    halves = x.half()
    assert error(form.linear(halves[..., 1:321], packed), halves[..., 1:321].double() @ w.T) < 1e-3
    assert form.linear(halves[:0, :, :320], packed).shape == (0, 6, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 17, 64, 65, 300])
@NAMES
def test_quantised_tokens(name: str, tokens: int, dtype: torch.dtype) -> None:
    """To the bit where the element's numbers fit int8 and a row has one scale."""
    for i, (n, k, group_size) in enumerate(SHAPES):
        form = MinifloatFormat(name, group_size)
        parts, packed, _ = weight(n, k, form)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8).to(GPU)
        q_scale = 0.01 * torch.rand(tokens, device=GPU) + 0.001  # float16 ends at 65504
        bias = random(n, seed=i).to(GPU) if i % 3 else None
        found = form.linear_quantized(q, q_scale, packed, bias, dtype)
        codes = bitstream.unpack(parts["codes"], form.small_float.bits, k)
        wanted = tiled_ops.product(q, q_scale, codes, parts["scale"], bias, form.small_float, group_size, dtype)
        if form.small_float.int8_shift is not None:
            assert agrees(found, wanted, k, group_size), (n, k, group_size)
        else:
            assert error(found, wanted) < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


def test_stored_parts_come_back_from_the_gpu() -> None:
    for name in ELEMENTS:
        form = MinifloatFormat(name, 32, "e8m0")
        parts, packed, _ = weight(70, 640, form)
        back = form.unprepack(packed)
        assert all(torch.equal(back[part], parts[part]) for part in parts)


def test_wrong_weights_are_refused() -> None:
    form = MinifloatFormat("e3m2", 32)
    _, packed, _ = weight(32, 64, form)
    with pytest.raises(RuntimeError, match="prepack it again"):
        form.linear(torch.zeros(1, 128, device=GPU, dtype=torch.half), packed)
    with pytest.raises(RuntimeError, match="another device"):
        form.linear(torch.zeros(1, 64, device=GPU, dtype=torch.half), {**packed, "scale": packed["scale"].cpu()})
    with pytest.raises(RuntimeError, match="no element e5m2"):
        torch.ops.ptq.minifloat_linear_fragments(
            torch.zeros(1, 64, device=GPU, dtype=torch.half), packed["fragments"], packed["scale"], None, 32, 5, 2, 32
        )
    torch.cuda.synchronize()  # no error sticks


@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_graphs_and_compile(name: str) -> None:
    form = MinifloatFormat(name, 128)
    check_graphs_and_compile(form, weight(512, 1024, form)[1])
