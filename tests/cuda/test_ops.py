"""The CUDA kernels on a GPU, against the references on the CPU: odd shapes, strides, dtypes, poisoned memory."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ptq  # noqa: F401 (the ops)
from ptq.ops import activations, bitstream, hadamard, native
from ptq.ops.activations import Activation
from quarot import tiled_ops
from quarot.integer import IntegerFormat

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
if not native.has_cuda():
    pytest.skip("the CUDA kernels are not built (scripts/gpu_check.sh builds them)", allow_module_level=True)

GPU = torch.device("cuda")
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poison():
    """Memory that the allocator hands out next is full of NaNs: what a kernel forgets to write shows."""
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), torch.nan, device=GPU)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    """Of the result relative to the reference; infinite for NaNs."""
    wanted = wanted.double().to(found.device)
    difference = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def agrees(found: Tensor, wanted: Tensor, k: int, group_size: int) -> bool:
    """To the bit where a row has one scale; the float32 sums of several groups may be added in another order."""
    exact = group_size in (0, k)
    return torch.equal(found, wanted) if exact else error(found, wanted) < TOLERANCE[found.dtype]


@pytest.mark.parametrize("op", ["hadamard", "hadamard_", "hadamard_quantize", "quantize_tokens",
                                "integer_linear_fragments", "integer_quantized_fragments"])  # fmt: skip
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


# --- Hadamard -------------------------------------------------------------------------------------------------------

ORDERS = [1, 2, 8, 12, 64, 100, 128, 256, 448, 704, 1024, 4096, 8192, 11008, 13824, 14336, 16384, 28672, 32768, 65536]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_hadamard(order: int, dtype: torch.dtype) -> None:
    blocks = 3 if order < 1000 else 1
    x, signs = random(5, blocks * order, dtype=dtype, seed=order), random(blocks * order, seed=1)
    signs = signs.to(hadamard.compute_dtype(dtype))
    for transpose in (False, True):
        wanted = hadamard.apply(x.double(), signs.double(), order, transpose)
        found = hadamard.apply(x.to(GPU), signs, order, transpose)
        assert error(found, wanted) < TOLERANCE[dtype]
        inplace = x.to(GPU)
        hadamard.apply(inplace, signs, order, transpose, inplace=True)
        assert torch.equal(inplace, found)


@pytest.mark.parametrize("order", [16, 44, 1024])
def test_hadamard_of_strides_and_columns(order: int) -> None:
    x = random(order, 7, 2 * order)
    for view in (x.transpose(0, 2), x[:, ::2], x[:, :, order:], x.flatten()[1 : 1 + 6 * order].view(6, order)):
        wanted = hadamard.apply(view.double(), None, order) if view.shape[-1] % order == 0 else None
        gpu = x.to(GPU).as_strided(view.shape, view.stride(), view.storage_offset())
        assert wanted is not None and error(hadamard.apply(gpu, None, order), wanted) < 3e-6
    w = random(2 * order, 5)
    assert error(hadamard.apply_columns(w.to(GPU), None, order), hadamard.apply_columns(w.double(), None, order)) < 3e-6


def test_hadamard_of_nothing_and_wrong_arguments() -> None:
    assert hadamard.apply(torch.empty(0, 64, device=GPU), None, 64).shape == (0, 64)
    with pytest.raises(RuntimeError, match="not a multiple of the order"):
        torch.ops.ptq.hadamard(torch.empty(3, 60, device=GPU), None, [], 64, -1, False)
    with pytest.raises(RuntimeError, match="another device"):
        torch.ops.ptq.hadamard(torch.empty(3, 64, device=GPU), torch.ones(64), [], 64, -1, False)


# --- quantised tokens -----------------------------------------------------------------------------------------------


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    scales = [torch.where(scale.isnan(), -1.0, scale) for scale in (found[1].cpu(), wanted[1])]
    return torch.equal(found[0].cpu(), wanted[0]) and torch.equal(*scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 1, 37, 64, 4096, 28672, 100003])
@pytest.mark.parametrize("bits, clip", [(8, 1.0), (4, 0.9), (2, 1e-3)])
def test_quantize_tokens_to_the_bit(bits: int, clip: float, k: int, dtype: torch.dtype) -> None:
    x = random(5, k, dtype=dtype, seed=k)
    if k > 1:
        x[1], x[2, -1], x[3, 0] = 0, torch.nan, torch.inf
    assert same(torch.ops.ptq.quantize_tokens(x.to(GPU), bits, clip), activations.reference(x, bits, clip))


@pytest.mark.parametrize("order, blocks", [(64, 1), (128, 32), (4096, 1), (28672, 1), (14336, 2), (11008, 1), (1, 77)])
def test_hadamard_quantize_is_the_transform_and_the_grid(order: int, blocks: int) -> None:
    """The integers are those of the float32 numbers that the same transform gives."""
    x, construction = random(9, blocks * order, dtype=torch.bfloat16, seed=order).to(GPU), hadamard.construction(order)
    found = Activation(8, 1.0).quantize(x, construction)
    wanted = activations.reference(hadamard.apply(x.float(), None, order).cpu(), 8, 1.0)
    assert same(found, wanted)


# --- integer weights ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def weight(n: int, k: int, form: IntegerFormat) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Stored parts of a random weight, on the GPU; fragments; the float64 weight."""
    generator = torch.Generator().manual_seed(n + k)
    g = form.codebook.groups(k)
    codes = torch.randint(0, 2**form.bits, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, g, generator=generator).add(0.5).mul(0.02).bfloat16().view(torch.int16)
    parts = {"codes": bitstream.pack(codes.to(GPU), form.bits), "scale": scale.to(GPU)}
    if not form.symmetric:
        parts["zero"] = torch.randint(0, 2**form.bits, (n, g), generator=generator, dtype=torch.uint8).to(GPU)
    packed = form.prepack(parts, GPU)
    assert "fragments" in packed
    return parts, packed, form.dequantize(parts, n, k).double()


SHAPES = [(16, 64, 0), (33, 128, 128), (70, 608, 32), (5, 96, 96), (4096, 4096, 128), (1000, 11008, 0), (17, 37, 0),
          (28672, 512, 128), (9000, 8320, 0)]  # fmt: skip


@HALVES
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 300])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_linear(bits: int, tokens: int, dtype: torch.dtype) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES):
        form = IntegerFormat(bits, group_size, symmetric=i % 2 == 0)
        _, packed, w = weight(n, k, form)
        x, bias = random(tokens, k, dtype=dtype, seed=i).to(GPU), None
        if i % 3:
            bias = random(n, dtype=dtype, seed=i).to(GPU)
        found = form.linear(x, packed, bias)
        wanted = x.double() @ w.T + (0 if bias is None else bias.double())
        assert error(found, wanted) < (1e-3 if dtype == torch.float16 else 6e-3), (n, k, group_size)
        assert torch.equal(found, form.linear(x, packed, bias))


def test_linear_of_float32_and_strides() -> None:
    form = IntegerFormat(4, 64, False)
    _, packed, w = weight(100, 320, form)
    x = random(4, 6, 640).to(GPU)
    assert error(form.linear(x[..., :320], packed), x[..., :320].double() @ w.T) < 1e-5
    halves = x.half()
    assert error(form.linear(halves[..., 1:321], packed), halves[..., 1:321].double() @ w.T) < 1e-3
    assert form.linear(halves[:0, :, :320], packed).shape == (0, 6, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantised_tokens(bits: int, tokens: int, dtype: torch.dtype) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES):
        form = IntegerFormat(bits, group_size, symmetric=i % 2 == 1)
        parts, packed, _ = weight(n, k, form)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8).to(GPU)
        q_scale = 0.01 * torch.rand(tokens, device=GPU) + 0.001  # float16 ends at 65504
        bias = random(n, seed=i).to(GPU) if i % 3 else None
        found = form.linear_quantized(q, q_scale, packed, bias, dtype)
        codes = bitstream.unpack(parts["codes"], bits, k)
        rest = (parts["scale"], parts.get("zero"), bias, bits, group_size, dtype)
        wanted = tiled_ops.product(q, q_scale, codes, *rest)
        assert agrees(found, wanted, k, group_size), (n, k, group_size)


@HALVES
@pytest.mark.parametrize("tokens", [1, 32, 33, 65, 200])
def test_tokens_of_four_bits(tokens: int, dtype: torch.dtype) -> None:
    """On GPUs before Hopper, on the tensor cores for four bits."""
    for i, (n, k, group_size) in enumerate(SHAPES):
        form = IntegerFormat(4, group_size, symmetric=i != 3)
        parts, packed, _ = weight(n, k, form)
        q = torch.randint(-8, 8, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8).to(GPU)
        q_scale = 0.01 * torch.rand(tokens, device=GPU) + 0.001  # float16 ends at 65504
        bias = random(n, seed=i).to(GPU) if i % 3 else None
        found = form.linear_quantized(q, q_scale, packed, bias, dtype, 4)
        wanted = form.linear_quantized(q, q_scale, packed, bias, dtype)
        assert agrees(found, wanted, k, group_size), (n, k, group_size)


def test_stored_parts_come_back_from_the_gpu() -> None:
    form = IntegerFormat(3, 32, False)
    parts, packed, _ = weight(70, 640, form)
    back = form.unprepack(packed)
    assert all(torch.equal(back[part], parts[part]) for part in parts)


def test_wrong_weights_are_refused() -> None:
    form = IntegerFormat(4, 32, True)
    _, packed, _ = weight(32, 64, form)
    with pytest.raises(RuntimeError, match="prepack it again"):
        form.linear(torch.zeros(1, 128, device=GPU, dtype=torch.half), packed)
    with pytest.raises(RuntimeError, match="another device"):
        form.linear(torch.zeros(1, 64, device=GPU, dtype=torch.half), {**packed, "scale": packed["scale"].cpu()})
    torch.cuda.synchronize()  # no error sticks


def check_graphs_and_compile(form: Any, packed: dict[str, Tensor]) -> None:
    """Hadamard, quantisation and both products of a weight [512, 1024], captured once and replayed on other tokens; and
    in one graph."""
    construction = hadamard.construction(1024)
    x = random(4, 1024, dtype=torch.bfloat16).to(GPU)

    def layer(x: Tensor) -> Tensor:
        q, scale = Activation(8, 1.0).quantize(x, construction)
        return form.linear(x, packed) + form.linear_quantized(q, scale, packed, None, x.dtype)

    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for seed in (1, 2):
        x.copy_(random(4, 1024, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        assert torch.equal(y, layer(x))
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_graphs_and_compile() -> None:
    form = IntegerFormat(4, 128, True)
    check_graphs_and_compile(form, weight(512, 1024, form)[1])
