"""The products for compute capability 9.0 without a GPU: bulk copies, barriers and wgmma are emulated, and land as late
or as early as they may (csrc/cuda/wgmma_host.h), as in test_cuda_host.py."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_cuda_host_integer as integer_host
import test_cuda_host_minifloat as minifloat_host
import torch
from test_cuda_host import ELEMENTS as TYPES
from test_cuda_host import FLAGS, ROOT, SCHEDULES, check, compiled, pointer, random
from test_minifloat import CUDA
from torch import Tensor

import fp6.tiled_ops
import quarot.tiled_ops
from fp6.element import ELEMENTS, Element, decode

__all__ = ["compiled"]  # the fixture

X_TYPES = TYPES | {torch.int8: 1}
# n, k, group size: one token tile and one row tile, none of them whole; more stages than there are places for; groups
# that begin within a stage and span several; an odd number of blocks.
SHAPES = [(130, 192, 64), (33, 704, 0), (70, 256, 128), (17, 37, 0), (16, 64, 0)]


def run(
    library: ctypes.CDLL, x: Tensor, w: dict[str, Any], weight: int | Element, dtype: torch.dtype,
    token_scale: Tensor | None = None, bias: Tensor | None = None, tiles: int = 1, splits: int = 1,
    backwards: bool = False, misalign: bool = False,
) -> Tensor:  # fmt: skip
    library.test_wgmma.restype = ctypes.c_char_p
    (n, k), groups, tokens = w["codes"].shape, w["flat_scale"].shape[1], x.shape[0]
    bits, element = (weight, (0, 0)) if isinstance(weight, int) else (weight.bits, (weight.exponent, weight.mantissa))
    out = torch.full((tokens, n), -7.0, dtype=dtype)
    check(
        library.test_wgmma(
            X_TYPES[x.dtype], int(backwards), TYPES[dtype], pointer(x), pointer(token_scale), pointer(w["fragments"]),
            pointer(w["scale"]), pointer(w.get("zero")), pointer(bias), pointer(out), tokens, n, k, bits, *element,
            groups, tiles, splits, int(misalign),
        )
    )  # fmt: skip
    return out


def wide(w: dict[str, Any], bits: int) -> int:
    """Two row tiles for a warp, where there is one group, of codes that have that shape."""
    return 2 if w["flat_scale"].shape[1] == 1 and bits in (4, 6) else 1


@SCHEDULES
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantised_tokens_to_the_bit(compiled, bits: int, backwards: bool) -> None:
    library, dtype = compiled("wgmma_products"), (torch.float32, torch.float16, torch.bfloat16)[bits % 3]
    for i, (n, k, group_size) in enumerate(SHAPES if bits in (4, 8) else SHAPES[:2]):
        w = integer_host.weight(n, k, bits, group_size, symmetric=bits == 8 or i % 2 == 1, seed=bits)
        tokens = (5, 130, 128, 3, 1)[i]
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale, bias = torch.rand(tokens) + 0.1, random(n, seed=i) if i % 3 else None
        found = run(library, q, w, bits, dtype, q_scale, bias, wide(w, bits), 1, backwards, misalign=i == 2)
        arguments = (w["codes"], w["flat_scale"], w["flat_zero"], bias, bits, group_size, dtype)
        assert torch.equal(found, quarot.tiled_ops.product(q, q_scale, *arguments)), (n, k, group_size)


@SCHEDULES
@pytest.mark.parametrize("name", ["e2m3", "e2m2", "e2m1"])
def test_quantised_tokens_times_small_floats_to_the_bit(compiled, name: str, backwards: bool) -> None:
    element, tokens = ELEMENTS[name], 9
    for i, (n, k, group_size) in enumerate(SHAPES[:2]):
        w = minifloat_host.weight(n, k, element, group_size, seed=i)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale = torch.rand(tokens) + 0.1
        found = run(
            compiled("wgmma_products"), q, w, element, torch.float32, q_scale, None, wide(w, element.bits), 1, backwards
        )
        wanted = fp6.tiled_ops.product(q, q_scale, w["codes"], w["flat_scale"], None, element, group_size, found.dtype)
        assert torch.equal(found, wanted), (n, k, group_size)


def check_linear(
    library: ctypes.CDLL, w: dict[str, Any], exact: Tensor, weight: int | Element, tokens: int, dtype: torch.dtype,
    **options: Any,
) -> None:  # fmt: skip
    n, k = w["codes"].shape
    x, bias, token_scale = random(tokens, k, dtype=dtype, seed=k), random(n), torch.rand(tokens) + 0.1
    found = run(library, x, w, weight, torch.float32, token_scale, bias, **options)
    wanted = (x.double() @ exact.T) * token_scale[:, None].double() + bias.double()
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 3e-6, (n, k, error)


@SCHEDULES
@pytest.mark.parametrize("bits, dtype", [(b, (torch.float16, torch.bfloat16)[b % 2]) for b in range(2, 9)])
def test_linear(compiled, bits: int, dtype: torch.dtype, backwards: bool) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES[:4] if bits == 4 else SHAPES[:2]):
        w = integer_host.weight(n, k, bits, group_size, symmetric=i % 2 == 1, seed=bits)
        scale, zeros = w["flat_scale"].view(torch.bfloat16).double(), w["flat_zero"]
        zero = 2 ** (bits - 1) if zeros is None else zeros[..., None].double()
        exact = ((w["codes"].double().view(*scale.shape, -1) - zero) * scale[..., None]).view(n, k)
        options = {"tiles": wide(w, bits), "backwards": backwards, "misalign": i == 2}
        check_linear(compiled("wgmma_products"), w, exact, bits, (3, 129, 16, 2)[i], dtype, **options)


@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_linear_of_small_floats(compiled, element: Element, dtype: torch.dtype, backwards: bool) -> None:
    for i, (n, k, group_size) in enumerate([(130, 192, 32), (33, 704, 0)]):  # groups of half a block
        w = minifloat_host.weight(n, k, element, group_size, seed=i)
        scale = w["flat_scale"].view(torch.bfloat16).double()
        exact = (decode(w["codes"], element).double().view(*scale.shape, -1) * scale[..., None]).view(n, k)
        options = {"tiles": wide(w, element.bits), "splits": 2 - i, "backwards": backwards}
        check_linear(compiled("wgmma_products"), w, exact, element, 7, dtype, **options)


def test_half_a_block_in_a_group_of_bytes_is_refused(compiled) -> None:
    w = integer_host.weight(16, 96, 4, 32, symmetric=True)
    with pytest.raises(AssertionError, match="does not suit"):
        run(compiled("wgmma_products"), torch.zeros(1, 96, dtype=torch.int8), w, 4, torch.float32, torch.ones(1))


def test_plans_fill_the_device(compiled) -> None:
    def plan(n: int, tokens: int, groups: int = 1, most_splits: int = 8) -> tuple[int, int]:
        found = (ctypes.c_int * 2)()
        compiled("wgmma_products").test_wgmma_plan(n, 4096, groups, tokens, 132, most_splits, found)
        return found[0], found[1]

    assert plan(4096, 1024) == (2, 1)  # 128 blocks of threads for 132 processors
    assert plan(4096, 256) == (1, 2)  # 64 would leave half of them idle
    assert plan(4096, 256, most_splits=1) == (1, 1)
    assert plan(8192, 2048, groups=32) == (1, 1)  # totals of groups need the registers


def test_layouts_are_those_of_cutlass(tmp_path: Path) -> None:
    """Registers, swizzle and descriptor, which the emulation and the kernels both take for granted."""
    folder = next((folder for folder in CUDA if (folder / "cccl").is_dir()), None)
    cutlass = importlib.util.find_spec("cutlass_library")
    if shutil.which("g++") is None or folder is None or cutlass is None or cutlass.origin is None:
        pytest.skip("no g++, CUDA headers (13 or later) or CUTLASS headers (pip install --no-deps nvidia-cutlass)")
    headers = [folder, folder / "cccl", Path(cutlass.origin).parent / "source/include", ROOT / "csrc"]
    library = tmp_path / "wgmma_layouts.so"
    source = ROOT / "tests/cuda/host/wgmma_layouts.cpp"
    include = [f"-I{header}" for header in headers]
    subprocess.run(["g++", "-w", *FLAGS, *include, str(source), "-o", str(library)], check=True)
    assert ctypes.CDLL(str(library)).test_wgmma_layouts() == 0
