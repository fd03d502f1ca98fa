"""The CUDA kernels of the steps between products on a GPU, against the references; a model with and without them."""

import sys
from pathlib import Path

import pytest
import torch
from test_ops import GPU, TOLERANCE, error, poison, random, same
from torch import Tensor

from ptq.fast.layers import gpu_layer
from ptq.ops import activations, hadamard, matmul, steps

__all__ = ["poison"]  # the fixture

OPS = torch.ops.ptq
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.mark.parametrize("op", ["rms_norm", "silu_mul", "rotary", "norm_input", "gate_input", "hadamard_to"])
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


@DTYPES
@pytest.mark.parametrize("k", [1, 37, 64, 128, 4096, 14336, 70001])
def test_norm(k: int, dtype: torch.dtype) -> None:
    gain = random(k, dtype=dtype, seed=1)
    for x in (random(5, k, dtype=dtype), random(2, 3, 2 * k, dtype=dtype)[..., 1 : k + 1]):
        for kind in ((1e-6, 0.0, True), (0.5, 0.0, False), (1e-5, 1.0, False)):
            found = OPS.rms_norm(x.to(GPU), gain.to(GPU), *kind)
            assert error(found, steps.rms_norm(x, gain, *kind)) < TOLERANCE[dtype]
    # Sums of squares of small integers are exact: then so is the rest, on a CPU; torch's rsqrt on a GPU is not.
    x, added = (random(7, k, seed=seed).mul(4).round().to(dtype).to(GPU) for seed in (2, 3))
    total, found = OPS.norm_input(x, added, gain.to(GPU), 1e-5, 0.0, True, None, [], 0, 0, 1.0)
    assert torch.equal(total, x + added)
    if k < 10000:
        assert torch.equal(found.cpu(), steps.rms_norm(total.cpu(), gain, 1e-5, 0.0, True))


@DTYPES
def test_gate(dtype: torch.dtype) -> None:
    for shape in ((3, 70), (1, 1, 4096), (0, 5), (600, 14336)):
        gate, up = 10 * random(*shape, dtype=dtype).to(GPU), random(*shape, dtype=dtype, seed=1).to(GPU)
        found = OPS.silu_mul(gate, up)
        wanted = torch.nn.functional.silu(gate.double()) * up.double()
        assert found.shape == shape and error(found, wanted) < TOLERANCE[dtype]
    assert OPS.silu_mul(torch.full((4,), torch.nan, device=GPU), torch.ones(4, device=GPU)).isnan().all()


@DTYPES
@pytest.mark.parametrize("d", [2, 24, 64, 128, 256])
def test_rotary_to_the_bit(d: int, dtype: torch.dtype) -> None:
    for rows, batch, tokens, spread in ((1, 2, 3, 0), (2, 2, 1, 8), (1, 1, 700, 3)):
        q, k = (random(batch, tokens, n * d + spread, dtype=dtype, seed=n).to(GPU) for n in (6, 2))
        q, k = (x[..., : n * d].unflatten(2, (n, d)).transpose(1, 2) for x, n in ((q, 6), (k, 2)))
        cos, sin = (random(rows, tokens, d, dtype=dtype, seed=seed).to(GPU) for seed in (3, 4))
        for found, wanted in zip(OPS.rotary(q, k, cos, sin), steps.rotary(q, k, cos, sin), strict=True):
            assert torch.equal(found, wanted) and found.is_contiguous()


@DTYPES
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("order, blocks", [(0, 4096), (0, 77), (64, 3), (128, 32), (4096, 1), (14336, 1), (65536, 1)])
def test_treated_inputs(order: int, blocks: int, bits: int, dtype: torch.dtype) -> None:
    """In one launch, and one op after the other: both norms add up in the same order."""
    k = blocks * (order or 1)
    x, other = (random(9, k, dtype=dtype, seed=seed).to(GPU) for seed in (1, 2))
    gain, signs = random(k, dtype=dtype, seed=3).to(GPU), random(k, seed=4).sign().to(GPU) if order else None
    factors, _ = hadamard.dense_factors(order, GPU) if order else ([], 0)
    treatment = signs, factors, order, bits, 0.9
    total, *normed = OPS.norm_input(x, other, gain, 1e-5, 0.0, True, *treatment)
    assert torch.equal(total, x + other)
    pairs = ((normed, OPS.rms_norm(total, gain, 1e-5, 0.0, True)),
             (OPS.gate_input(x, other, *treatment), OPS.silu_mul(x, other)))  # fmt: skip
    for found, y in pairs:
        if not bits:
            wanted = hadamard.apply(y, signs, order) if order else y
            assert error(found[0], wanted) < TOLERANCE[dtype]
        elif order:
            q, scale = OPS.hadamard_quantize(y, *treatment)
            assert error(activations.dequantize(*found), activations.dequantize(q, scale)) < 2e-3
        else:
            assert same((found[0], found[1]), activations.reference(y.cpu(), bits, 0.9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order, blocks", [(8192, 1), (14336, 1), (28672, 1), (8192, 2), (4096, 1)])
def test_gates_and_their_transforms(order: int, blocks: int, dtype: torch.dtype) -> None:
    """Of few long tokens in launches of their own: the numbers of both ops, to the bit."""
    factors, _ = hadamard.dense_factors(order, GPU)
    for tokens in (1, 8, 9):
        gate, up = (random(tokens, blocks * order, dtype=dtype, seed=seed).to(GPU) for seed in (1, 2))
        (found,) = OPS.gate_input(gate, up, None, factors, order, 0, 1.0)
        assert torch.equal(found, hadamard.apply(OPS.silu_mul(gate, up), None, order))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [64, 4096, 14336, 65536])
def test_transform_back_to_another_type(order: int, dtype: torch.dtype) -> None:
    x, signs = random(5, order).to(GPU), random(order, seed=1).sign().to(GPU)
    factors, _ = hadamard.dense_factors(order, GPU)
    found = OPS.hadamard_to(x, signs, factors, order, True, dtype)
    assert torch.equal(found, hadamard.apply(x, signs, order, transpose=True).to(dtype))


def test_what_does_not_fit_is_refused() -> None:
    x, gain = torch.ones(2, 64, device=GPU), torch.ones(64, device=GPU)
    with pytest.raises(RuntimeError, match="another device"):
        OPS.norm_input(x, x.cpu(), gain, 1e-5, 0.0, True, None, [], 0, 0, 1.0)
    with pytest.raises(RuntimeError, match="the gain must be"):
        OPS.rms_norm(x, gain[:5], 1e-5, 0.0, True)
    with pytest.raises(RuntimeError, match="dtype"):
        OPS.silu_mul(x, x.half())
    with pytest.raises(RuntimeError, match="bits must be 2 to 8"):
        OPS.gate_input(x, x, None, [], 0, 9, 1.0)
    torch.cuda.synchronize()  # no error sticks


@pytest.mark.parametrize("name", ["INT4 W4A16", "INT4 W4A8", "INT4 W4A4, 4-bit cache", "FP6 W6A16", "E8P W2A8"])
@torch.no_grad()
def test_a_model_with_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a decoded token, then that token in a CUDA graph."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import count_launches  # pyright: ignore[reportMissingImports]

    packed = count_launches.packed
    model = packed.build(count_launches.VARIANTS[name], packed.config_of("tiny"), GPU, torch.bfloat16)
    ids, at = torch.arange(3, 40, device=GPU)[None], torch.tensor([[37]], device=GPU)
    mask = torch.arange(64, device=GPU) <= at[:, None, :, None]

    def logits(cache: object) -> Tensor:
        return model(ids[:, :1], position_ids=at, attention_mask=mask, past_key_values=cache).logits

    results = []
    for ours in (True, False):
        with monkeypatch.context() as patched:
            if not ours:
                patched.setattr(matmul, "gpu_ops_serve", lambda *tensors: False)
                patched.setattr(gpu_layer, "run", lambda *given: None)
            caches = [packed.cache_of(model, 64) for _ in range(2)]
            prompts = [model(ids, past_key_values=cache).logits for cache in caches]
            assert torch.equal(*prompts)
            found = logits(caches[0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = logits(caches[1])
            graph.replay()
            assert torch.equal(again, found)
            results.append(torch.cat([prompts[0], found], 1))
    assert error(results[0], results[1]) < (0.5 if "W4A4" in name else 0.1)
    sys.modules.pop("count_launches", None)
