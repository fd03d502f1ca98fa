"""The CUDA kernels of E8P weights on a GPU, against the references: odd shapes, strides, dtypes, poisoned memory."""

import functools

import pytest
import torch
from test_ops import GPU, HALVES, error, poison, random
from torch import Tensor

from ptq.layers.linear import Online, QuantLinear
from ptq.ops import hadamard
from ptq.ops.activations import Activation
from quip_sharp import tiled_ops
from quip_sharp.e8p_format import E8PFormat

__all__ = ["poison"]  # the fixture

SHAPES = [(16, 128), (33, 256), (70, 608), (5, 96), (17, 37), (4096, 4096), (1000, 11008), (40, 4224), (28672, 256)]


@functools.lru_cache(maxsize=64)
def weight(n: int, k: int, bits: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Random codes on the GPU; fragments; the float64 weight."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (bits, n, -(-k // 8)), generator=generator, dtype=torch.uint8).to(GPU)
    scale = torch.tensor([0.037]).view(torch.int32).to(GPU)
    names = list(E8PFormat(bits).buffers(n, k))[:-1]
    packed = E8PFormat(bits).prepack({**dict(zip(names, codes.unbind(), strict=True)), "scale": scale}, GPU)
    assert "fragments" in packed
    return codes, packed, tiled_ops.weight_of(codes, scale, k).double()


@pytest.mark.parametrize("op", ["e8p_dequantize_fragments", "e8p_linear_fragments", "e8p_quantized_fragments"])
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


@HALVES
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 64, 300, 512])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_linear(bits: int, tokens: int, dtype: torch.dtype) -> None:
    for i, (n, k) in enumerate(SHAPES):
        _, packed, w = weight(n, k, bits)
        x, bias = random(tokens, k, dtype=dtype, seed=i).to(GPU), None
        if i % 3:
            bias = random(n, dtype=dtype, seed=i).to(GPU)
        form = E8PFormat(bits)
        found = form.linear(x, packed, bias)
        wanted = x.double() @ w.T + (0 if bias is None else bias.double())
        assert error(found, wanted) < (1e-3 if dtype == torch.float16 else 6e-3), (n, k)
        assert torch.equal(found, form.linear(x, packed, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 40, 64, 65, 200])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_quantised_tokens_to_the_bit(bits: int, tokens: int, dtype: torch.dtype) -> None:
    for i, (n, k) in enumerate(SHAPES):
        codes, packed, _ = weight(n, k, bits)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8).to(GPU)
        q_scale, bias = torch.rand(tokens, device=GPU) + 0.1, random(n, seed=i).to(GPU) if i % 3 else None
        found = E8PFormat(bits).linear_quantized(q, q_scale, packed, bias, dtype)
        assert torch.equal(found, tiled_ops.product(q, q_scale, codes, packed["scale"], bias, dtype)), (n, k)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_dequantize_strides_float32_and_gradient(bits: int) -> None:
    n, k = 100, 320
    codes, packed, w = weight(n, k, bits)
    found = torch.ops.ptq.e8p_dequantize_fragments(packed["fragments"], packed["scale"], n, bits, k)
    assert torch.equal(found, tiled_ops.weight_of(codes, packed["scale"], k))
    form, x = E8PFormat(bits), random(4, 6, 640).to(GPU)
    assert error(form.linear(x[..., :k], packed), x[..., :k].double() @ w.T) < 1e-5
    halves = x.half()
    assert error(form.linear(halves[..., 1 : k + 1], packed), halves[..., 1 : k + 1].double() @ w.T) < 1e-3
    assert form.linear(halves[:0, :, :k], packed).shape == (0, 6, n)
    x = x[0, :, :k].clone().requires_grad_()
    form.linear(x, packed).sum().backward()
    assert x.grad is not None and error(x.grad, w.sum(0).expand(6, k)) < 1e-5


def test_stored_parts_come_back_from_the_gpu() -> None:
    for bits in (2, 3, 4):
        codes, packed, _ = weight(70, 608, bits)
        back = E8PFormat(bits).unprepack(packed)
        assert all(torch.equal(part, plane) for part, plane in zip(back.values(), codes, strict=False))


def test_wrong_weights_are_refused() -> None:
    _, packed, _ = weight(32, 64, 2)
    form = E8PFormat(2)
    with pytest.raises(RuntimeError, match="prepack it again"):
        form.linear(torch.zeros(1, 256, device=GPU, dtype=torch.half), packed)
    with pytest.raises(RuntimeError, match="another device"):
        form.linear(torch.zeros(1, 64, device=GPU, dtype=torch.half), {**packed, "scale": packed["scale"].cpu()})
    torch.cuda.synchronize()  # no error sticks


@pytest.mark.parametrize("bits", [2, 4])
def test_a_layer_with_transforms_and_signs_on_both_sides(bits: int) -> None:
    """The same on a GPU and on the CPU, also as a CUDA graph and compiled."""
    n, k = 256, 704
    online = Online(hadamard.construction(k), hadamard.construction(n), True, Activation(8, 1.0))
    layer = QuantLinear(k, n, False, E8PFormat(bits), online)
    generator = torch.Generator().manual_seed(0)
    for name, part in layer.named_parameters():
        if part.dtype == torch.uint8:
            part.copy_(torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8))
        elif name == "weight_scale":
            part.copy_(torch.full(part.shape, 0.01).view(torch.int32))
        else:
            part.copy_((torch.rand(part.shape, generator=generator) + 0.5).half().view(torch.int16))
    x = random(3, k, dtype=torch.bfloat16)
    wanted = layer(x)
    layer.to(GPU).prepack()
    assert "fragments" in layer.parts()
    x = x.to(GPU)
    assert error(layer(x), wanted) < 2e-2
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(random(3, k, dtype=torch.bfloat16, seed=1))
        graph.replay()
        assert torch.equal(y, layer(x))
