"""The CUDA kernels without a GPU: g++ compiles the same sources, and every thread runs as a fiber (csrc/cuda/device.h).

Forwards and backwards, with late and with early copies: a missing barrier shows in one of them. Buffers are poisoned
and guarded. What a GPU adds (timing, real tensor cores) is left to tests/cuda.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ptq.ops import activations, hadamard

ROOT = Path(__file__).resolve().parents[1]
ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
SCHEDULES = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])


def agrees(found: Tensor, wanted: Tensor, k: int, group_size: int) -> bool:
    """To the bit where a row has one scale; the float32 sums of several groups may be added in another order."""
    if group_size in (0, k):
        return torch.equal(found, wanted)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    return bool((found.double() - wanted.double()).norm() < bound * wanted.double().norm())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """tests/cuda/host/NAME.cpp as a library."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the CUDA kernels cannot be compiled for the CPU")
    folder = tmp_path_factory.mktemp("cuda_host")

    def build(name: str) -> ctypes.CDLL:
        source, library = ROOT / "tests/cuda/host" / f"{name}.cpp", folder / f"{name}.so"
        if not library.exists():
            include = [f"-I{ROOT / 'csrc'}", f"-I{source.parent}"]
            subprocess.run(["g++", *FLAGS, *include, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    return build


@SCHEDULES
def test_the_emulation_reports_what_a_gpu_would_not(compiled, backwards: bool) -> None:
    """Memory that an earlier kernel may still write, touched before that is waited for."""
    test = compiled("emulation_host").test_emulation
    test.restype = ctypes.c_char_p
    said = [(test(fault, int(backwards)) or b"").decode() for fault in range(6)]
    early = "ahead of follow_previous"
    assert said[0] == "" and early in said[1] and early in said[2] and (early in said[3]) == backwards  # late copies
    assert said[4].startswith("a thread has not waited")
    assert said[5].startswith("access beyond the end of a buffer (")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def check(error: bytes | None) -> None:
    assert error is None, error.decode()


def quantizer(bits: int, clip: float) -> Tensor:
    middle = 2 ** (bits - 1)
    return torch.tensor([-middle, middle - 1, clip / (middle - 1)], dtype=torch.float32)


# --- Hadamard -------------------------------------------------------------------------------------------------------

FAST, GENERAL, QUANTISE, QUANTISE_GENERAL = range(4)


def run_hadamard(
    library: ctypes.CDLL, mode: int, x: Tensor, order: int, signs: Tensor | None = None, transpose: bool = False,
    dim: int = -1, backwards: bool = False, bits: int = 8, clip: float = 1.0, processors: int = 2,
    misalign: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel makes of x, and the scales of its tokens where it quantises."""
    library.test_hadamard.restype = ctypes.c_char_p
    dim %= x.dim()
    factors, _ = hadamard.dense_factors(order, x.device)
    orders = [f.shape[2] for f in factors]
    doublings = order
    for k in orders:
        doublings //= k
    outer, inner = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
    sizes = torch.tensor([outer, x.shape[dim] // order, order, inner])
    codes = (ctypes.c_void_p * 8)(*(f[int(transpose)].data_ptr() for f in factors))
    out = torch.empty_like(x, dtype=torch.int8 if mode >= QUANTISE else x.dtype)
    scale = torch.full(x.shape[:-1], -7.0)
    grid, factor_orders = quantizer(bits, clip), torch.tensor(orders or [0])
    check(
        library.test_hadamard(
            mode, int(backwards), pointer(x), pointer(out), pointer(scale), ELEMENTS[x.dtype], pointer(sizes),
            pointer(signs), int(transpose), len(factors), pointer(factor_orders), codes,
            ctypes.c_int64(doublings), ctypes.c_double(order**-0.5), pointer(grid), processors, int(misalign),
        )
    )  # fmt: skip
    return out, scale


def expected(x: Tensor, order: int, signs: Tensor | None, transpose: bool, dim: int = -1) -> Tensor:
    factors, _ = hadamard.dense_factors(order, x.device)
    signs = None if signs is None else signs.double()
    return hadamard.reference(x.double(), signs, factors, order, dim, transpose)


def close(found: Tensor, wanted: Tensor) -> bool:
    tolerance = {torch.float64: 1e-14, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    error = (found.double() - wanted).abs().amax() if wanted.numel() else torch.tensor(0.0)
    return bool(error <= tolerance * wanted.abs().amax().clamp(min=1)) if wanted.numel() else True


@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "order",
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096, 12, 20, 40, 100, 144, 444, 448, 688, 704, 896, 1728, 7168],
)
def test_hadamard_fast(compiled, order: int, dtype: torch.dtype, backwards: bool) -> None:
    library = compiled("hadamard_host")
    blocks, tokens = (3, 5) if order < 300 else (1, 2)
    if order >= 2048 and dtype == torch.float16:
        pytest.skip("covered by bfloat16")
    x = random(tokens, blocks * order, dtype=dtype, seed=order)
    signs = random(blocks * order, seed=1).float()
    found, _ = run_hadamard(library, FAST, x, order, signs, backwards=backwards)
    assert close(found, expected(x, order, signs, False))
    found, _ = run_hadamard(library, FAST, x, order, signs, transpose=True, backwards=backwards, misalign=True)
    assert close(found, expected(x, order, signs, True))


@pytest.mark.parametrize("order", [28, 60, 108, 140, 300])
def test_sums_of_dense_factors_are_as_exact_as_float32_additions(compiled, order: int) -> None:
    """Of positive numbers: what tensor cores cut off the first of all sums goes the same way."""
    x = random(16, order, seed=order).abs().float() + 1
    found, _ = run_hadamard(compiled("hadamard_host"), FAST, x, order)
    wanted = expected(x, order, None, False)
    assert (found.double() - wanted).square().mean().sqrt() < 2**-26 * wanted.abs().max()


@pytest.mark.parametrize("order", [8192, 11008, 14336, 16384, 28672, 32768])
def test_hadamard_long_vectors_are_fetched_ahead(compiled, order: int) -> None:
    x = random(3, order, dtype=torch.bfloat16, seed=order)
    found, _ = run_hadamard(compiled("hadamard_host"), FAST, x, order, processors=1)
    factors, _ = hadamard.dense_factors(order, x.device)
    assert close(found, torch.ops.ptq.hadamard(x.double(), None, factors, order, -1, False))


# What split.cuh takes: powers of two, 12, 20 and 28 rows, every number of steps between lanes, several vectors.
SPLIT = [(1024, 3), (2048, 1), (4096, 2), (8192, 1), (16384, 1), (3072, 2), (6144, 1), (12288, 1), (5120, 2),
         (7168, 1), (10240, 1), (14336, 2), (28672, 1)]  # fmt: skip


@pytest.mark.parametrize("order, blocks", SPLIT)
def test_common_orders_sum_alike_whatever_the_types(compiled, order: int, blocks: int) -> None:
    """Of bfloat16 numbers as they are, as float32, times signs, not aligned, quantised: from the same float32 numbers.
    One processor: numbers are fetched ahead, and shared memory is used again."""
    library, k = compiled("hadamard_host"), blocks * order
    x = random(12 if k < 4096 else 4, k, dtype=torch.bfloat16, seed=k)
    signs = random(k, seed=1).sign().float()
    y, _ = run_hadamard(library, FAST, x.float(), order, signs, processors=1, backwards=True)
    assert close(y, expected(x, order, signs, False))
    turned = (x * signs).to(torch.bfloat16)
    for numbers, s, misalign in ((x, signs, False), (turned, None, False), (turned, None, True)):
        found, _ = run_hadamard(library, FAST, numbers, order, s, processors=1, misalign=misalign)
        assert torch.equal(found, y.to(torch.bfloat16))
    last, _ = run_hadamard(library, FAST, turned, order, signs, transpose=True, processors=1)
    assert close(last, expected(turned, order, signs, True))
    assert same(run_hadamard(library, QUANTISE, turned, order, processors=1), activations.reference(y, 8, 1.0))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("order, dim", [(1, 0), (12, 0), (128, 1), (24, -1), (240, 0), (444, 1), (1024, -1)])
def test_hadamard_general(compiled, order: int, dim: int, dtype: torch.dtype) -> None:
    shape = [2, 2, 2]
    shape[dim] = 2 * order
    x = random(*shape, dtype=dtype, seed=order)
    signs = random(2 * order, seed=1).to(hadamard.compute_dtype(dtype))
    for transpose in (False, True):
        found, _ = run_hadamard(compiled("hadamard_host"), GENERAL, x, order, signs, transpose, dim)
        assert close(found, expected(x, order, signs, transpose, dim))


# --- quantised tokens -----------------------------------------------------------------------------------------------


def damage(x: Tensor) -> Tensor:
    """A token of zeros, one with a NaN, one with an infinity, a tiny one, one with halves."""
    x[1] = 0
    x[2, -1] = torch.nan
    x[3, 0] = -torch.inf
    x[4] *= 1e-38
    x[5, :4] = torch.tensor([4.0, 0.5, -1.5, -4.0])
    x[5, 4:] = 0
    return x


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    scales = [torch.where(scale.isnan(), -1.0, scale) for scale in (found[1], wanted[1])]
    return torch.equal(found[0], wanted[0]) and torch.equal(*scales)


@SCHEDULES
@pytest.mark.parametrize("bits, clip", [(8, 1.0), (4, 0.9), (3, 1.0), (2, 0.3), (6, 1e-3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantize_tokens_to_the_bit(compiled, dtype: torch.dtype, bits: int, clip: float, backwards: bool) -> None:
    library = compiled("hadamard_host")
    library.test_quantize.restype = ctypes.c_char_p
    for k, misalign in ((5, False), (37, False), (64, True), (512, False), (4104, False), (16400, False), (0, False)):
        x = random(7, k, dtype=dtype, seed=k)
        x = damage(x) if k else x
        q, scale = torch.empty_like(x, dtype=torch.int8), torch.full((7,), -7.0)
        grid = quantizer(bits, clip)
        arguments = (ctypes.c_int64(7), k, pointer(grid), int(misalign))
        check(
            library.test_quantize(int(backwards), pointer(x), pointer(q), pointer(scale), ELEMENTS[x.dtype], *arguments)
        )
        assert same((q, scale), activations.reference(x, bits, clip))


@SCHEDULES
@pytest.mark.parametrize("mode", [QUANTISE, QUANTISE_GENERAL], ids=["fast", "general"])
@pytest.mark.parametrize("order, blocks", [(1, 5), (1, 32), (64, 1), (12, 3), (256, 2), (448, 1), (2048, 2)])
def test_hadamard_quantize(compiled, order: int, blocks: int, mode: int, backwards: bool) -> None:
    """Powers of four have exact scales and sums of small integers are exact: then the integers must be the same."""
    library = compiled("hadamard_host")
    x = random(6, blocks * order, seed=order).mul(8).round().to(torch.bfloat16)
    signs = random(blocks * order, seed=1).sign().float()
    q, scale = run_hadamard(library, mode, x, order, signs, backwards=backwards, bits=4, clip=0.9)
    y = expected(x, order, signs, False).float()
    wanted, wanted_scale = activations.reference(y, 4, 0.9)
    if order in (1, 64, 256):
        assert same((q, scale), (wanted, wanted_scale))
    assert torch.allclose(scale, wanted_scale, rtol=1e-5)
    assert (q - wanted).abs().max() <= 1 and (q != wanted).float().mean() < 0.01
