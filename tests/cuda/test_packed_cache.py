"""The CUDA kernels of the packed KV cache on a GPU, against the references on the CPU."""

import pytest
import torch
from test_ops import GPU, error, poison, random
from torch import Tensor

from ptq.ops import kv_ops

__all__ = ["poison"]  # the fixture

OPS = torch.ops.ptq
BITS = (2, 3, 4, 6, 8)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed) * 2 + 0.3


def filled(x: Tensor, bits: int, channel_major: bool) -> tuple[Tensor, Tensor]:
    """A side of the cache, filled by the reference on the CPU."""
    batch, heads, length, d = x.shape
    codes, scales = kv_ops.empty_chunks(-(-length // 256), batch, heads, d, bits, x.device)
    kv_ops.append(codes, scales, x, 0, bits, 0.95, channel_major)
    return codes, scales


@pytest.mark.parametrize("op", ["kv_append", "kv_dequantize", "kv_attend"])
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("d", [1, 20, 64, 96, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_append_and_dequantize_to_the_bit(bits: int, d: int, dtype: torch.dtype) -> None:
    for length, step, channel_major in ((1, 1, False), (255, 100, True), (257, 7, False), (600, 600, True)):
        x = numbers(2, 3, length, d, seed=length).to(dtype)
        x[0, 1, 0] = 0
        x[1, 0, length // 2] = torch.inf
        wanted = filled(x, bits, channel_major)
        codes, scales = kv_ops.empty_chunks(-(-length // 256), 2, 3, d, bits, GPU)
        gpu = x.to(GPU).transpose(1, 2).contiguous().transpose(1, 2)  # as a model gives it
        for start in range(0, length, step):
            OPS.kv_append(codes, scales, gpu[:, :, start : start + step], start, bits, 0.95, channel_major)
        assert torch.equal(codes.cpu(), wanted[0])
        assert torch.equal(scales.cpu().view(torch.int16), wanted[1].view(torch.int16))
        y = OPS.kv_dequantize(codes, scales, length, d, bits, channel_major)
        expected = kv_ops.dequantize(*wanted, length, d, bits, channel_major)
        assert torch.equal(y.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


CASES = [  # batch, heads, groups, tokens, head_dim, length
    (1, 2, 1, 1, 64, 1), (2, 1, 4, 1, 64, 255), (1, 2, 3, 2, 128, 256), (1, 1, 7, 1, 96, 257), (2, 2, 2, 5, 20, 600),
    (1, 1, 1, 8, 1, 40), (3, 1, 4, 1, 256, 513), (1, 8, 4, 1, 128, 5000), (1, 1, 1, 1, 300, 17),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("k_bits, v_bits", [(b, b) for b in BITS] + [(2, 8), (6, 2), (8, 6)])
def test_attend(k_bits: int, v_bits: int, dtype: torch.dtype) -> None:
    for i, (batch, heads, groups, tokens, d, length) in enumerate(CASES):
        q = random(batch, heads * groups, tokens, d, seed=i).to(dtype)
        sides = (
            *filled(numbers(batch, heads, length, d, seed=10 + i), k_bits, False),
            *filled(numbers(batch, heads, length, d, seed=20 + i), v_bits, True),
        )
        mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(i)) < 0.7
        starts = torch.arange(batch) * 3
        sinks = (starts, random(batch, heads, 4, d, seed=5), random(batch, heads, 4, d, seed=6))
        for m, s in ((None, (None,) * 3), (mask, sinks), (mask[:1], (None,) * 3)):
            wanted = kv_ops.attend(q.float(), *sides, length, k_bits, v_bits, d**-0.5, m, *s)
            arguments = [part.to(GPU) for part in (q, *sides)]
            rest = [part if part is None else part.to(GPU) for part in (m, *s)]
            found = OPS.kv_attend(*arguments, length, k_bits, v_bits, d**-0.5, *rest)
            assert found.dtype == dtype and error(found, wanted) < TOLERANCE[dtype], (CASES[i], m is None)
            assert torch.equal(found, OPS.kv_attend(*arguments, length, k_bits, v_bits, d**-0.5, *rest))


def test_what_does_not_fit_is_refused() -> None:
    codes, scales = kv_ops.empty_chunks(1, 1, 2, 64, 4, GPU)
    with pytest.raises(RuntimeError, match="3 tokens behind 254 in room for 256"):
        OPS.kv_append(codes, scales, torch.zeros(1, 2, 3, 64, device=GPU), 254, 4, 0.95, False)
    with pytest.raises(RuntimeError, match="another device"):
        OPS.kv_append(codes, scales, torch.zeros(1, 2, 3, 64), 0, 4, 0.95, False)
    with pytest.raises(RuntimeError, match="wrong shape"):
        OPS.kv_dequantize(codes, scales, 4, 64, 8, False)
    torch.cuda.synchronize()  # no error sticks


def test_graphs() -> None:
    """Append and attend at a fixed length, captured once and replayed on other tokens."""
    codes, scales = kv_ops.empty_chunks(2, 1, 2, 64, 4, GPU)
    values, value_scales = kv_ops.empty_chunks(2, 1, 2, 64, 4, GPU)
    x, q = (random(1, h, 1, 64, seed=h).to(GPU) for h in (2, 8))

    def step() -> Tensor:
        OPS.kv_append(codes, scales, x, 300, 4, 0.95, False)
        OPS.kv_append(values, value_scales, x, 300, 4, 0.95, True)
        return OPS.kv_attend(q, codes, scales, values, value_scales, 301, 4, 4, 0.125, None, None, None, None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(random(1, 2, 1, 64, seed=9))
    graph.replay()
    found = y.clone()
    assert torch.equal(found, step())
