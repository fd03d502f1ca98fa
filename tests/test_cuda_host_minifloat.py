"""The CUDA kernels of small floats without a GPU, as in test_cuda_host.py."""

import ctypes
from typing import Any

import pytest
import torch
from test_cuda_host import ELEMENTS as TYPES
from test_cuda_host import SCHEDULES, agrees, check, compiled, pointer, random
from torch import Tensor

from fp6 import fragment_ops, fragments, tiled_ops
from fp6.element import ELEMENTS, Element, decode
from ptq.ops import tiles
from ptq.ops.op_declarations import REFERENCES

__all__ = ["compiled"]  # the fixture

LINEAR, QUANTISED, DEQUANTISE = range(3)
ADA, HOPPER = 99 * 1024, 227 * 1024  # bytes of shared memory of a block
EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))


def weight(n: int, k: int, element: Element, group_size: int, seed: int = 0) -> dict[str, Any]:
    """Random codes and scales, plain and in fragments."""
    g = k // group_size if group_size else 1
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**element.bits, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, g, generator=generator).add(0.5).bfloat16().view(torch.int16)
    packed = fragments.pack(codes, element)
    return {"codes": codes, "flat_scale": scale, "fragments": packed, "scale": tiles.tile_scales(scale)}


def run_minifloat(
    library: ctypes.CDLL, mode: int, x: Tensor, w: dict[str, Any], element: Element, dtype: torch.dtype,
    token_scale: Tensor | None = None, bias: Tensor | None = None, splits: int = 1, backwards: bool = False,
    misalign: bool = False, shared: int = ADA,
) -> Tensor:  # fmt: skip
    library.test_minifloat.restype = ctypes.c_char_p
    (n, k), groups, tokens = w["codes"].shape, w["flat_scale"].shape[1], x.shape[0]
    out = torch.empty((n, k) if mode == DEQUANTISE else (tokens, n), dtype=dtype)
    check(
        library.test_minifloat(
            mode, int(backwards), TYPES[dtype], pointer(x), pointer(token_scale), pointer(w["fragments"]),
            pointer(w["scale"]), pointer(bias), pointer(out), tokens, n, k, element.exponent, element.mantissa, groups,
            splits, int(misalign), shared,
        )
    )  # fmt: skip
    return out


@EVERY
def test_every_code_becomes_its_number(compiled, element: Element) -> None:
    """Through the tensor cores with one token for each column, in both types, and decoded into memory in all three."""
    library, n = compiled("minifloat_host"), 32
    codes = torch.arange(n * 64, dtype=torch.int32).mul(7).view(n, 64) % 2**element.bits
    w = weight(n, 64, element, 0) | {"codes": codes.to(torch.uint8)}
    w["fragments"] = fragments.pack(w["codes"], element)
    value = decode(w["codes"], element)
    assert value.unique().numel() == 2**element.bits - 1  # -0 is 0
    number = value * w["flat_scale"].view(torch.bfloat16).float()
    for dtype in (torch.float16, torch.bfloat16):
        found = run_minifloat(library, LINEAR, torch.eye(64, dtype=dtype), w, element, dtype)
        assert torch.equal(found.t(), number.to(dtype))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = run_minifloat(library, DEQUANTISE, torch.empty(0, 64), w, element, dtype)
        assert torch.equal(found, number.to(dtype))


SHAPES = [(16, 64, 0), (33, 128, 128), (70, 608, 32), (5, 96, 96), (48, 1344, 0), (130, 2112, 64), (17, 37, 0)]


@SCHEDULES
@EVERY
@pytest.mark.parametrize(
    "tokens, dtype, splits", [(1, torch.bfloat16, 1), (7, torch.float16, 3), (19, torch.bfloat16, 2)]
)
def test_linear(compiled, tokens: int, dtype: torch.dtype, splits: int, element: Element, backwards: bool) -> None:
    library = compiled("minifloat_host")
    for i, (n, k, group_size) in enumerate(SHAPES):
        if element.bits != 6 and i not in (1, 2, 6):
            continue
        w = weight(n, k, element, group_size, seed=i)
        x, bias = random(tokens, k, dtype=dtype, seed=i), random(n, seed=i) if i % 3 else None
        found = run_minifloat(library, LINEAR, x, w, element, dtype, None, bias, splits, backwards, misalign=i == 3)
        exact = fragment_ops.dequantize(
            w["fragments"], w["scale"], n, element.exponent, element.mantissa, group_size, k
        ).double()
        wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < (4e-4 if dtype == torch.float16 else 3e-3), (n, k, group_size, error)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 8, 9, 16, 17, 33, 64, 65, 130])
@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m2", "e4m2"])
@pytest.mark.parametrize("shared", [ADA, HOPPER])
def test_linear_for_every_number_of_tokens(compiled, shared: int, name: str, tokens: int) -> None:
    """Also where a block may have little shared memory."""
    n, k, group_size, element = 150, 448, 64, ELEMENTS[name]
    w = weight(n, k, element, group_size, seed=tokens)
    x = random(tokens, k, dtype=torch.bfloat16, seed=tokens)
    token_scale = torch.rand(tokens) + 0.1
    found = run_minifloat(
        compiled("minifloat_host"), LINEAR, x, w, element, torch.float32, token_scale, splits=2, shared=shared
    )
    bits = (element.exponent, element.mantissa)
    wanted = REFERENCES["minifloat_linear_fragments"](
        x.float() * token_scale[:, None], w["fragments"], w["scale"], None, n, *bits, 64
    )
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-2)


@SCHEDULES
@pytest.mark.parametrize("name", ["e2m3", "e2m2", "e2m1"])
@pytest.mark.parametrize(
    "tokens, dtype", [(1, torch.float32), (8, torch.bfloat16), (13, torch.float16), (65, torch.float32)]
)
def test_quantised_tokens(compiled, tokens: int, dtype: torch.dtype, name: str, backwards: bool) -> None:
    library, element = compiled("minifloat_host"), ELEMENTS[name]
    for i, (n, k, group_size) in enumerate(SHAPES if tokens < 65 else SHAPES[2:4]):
        w = weight(n, k, element, group_size, seed=i)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale = 0.01 * torch.rand(tokens) + 0.001  # float16 ends at 65504
        bias = random(n, seed=i) if i % 3 else None
        found = run_minifloat(library, QUANTISED, q, w, element, dtype, q_scale, bias, 1, backwards, misalign=i == 2)
        wanted = tiled_ops.product(q, q_scale, w["codes"], w["flat_scale"], bias, element, group_size, dtype)
        assert agrees(found, wanted, k, group_size), (n, k, group_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@EVERY
def test_dequantise(compiled, element: Element, dtype: torch.dtype) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES):
        w = weight(n, k, element, group_size, seed=i)
        found = run_minifloat(compiled("minifloat_host"), DEQUANTISE, torch.empty(0, k), w, element, dtype)
        bits = (element.exponent, element.mantissa)
        assert torch.equal(
            found, fragment_ops.dequantize(w["fragments"], w["scale"], n, *bits, group_size, k).to(dtype)
        )


def test_splits_fill_the_device(compiled) -> None:
    library = compiled("minifloat_host")
    assert library.test_splits(1, 512, 28672, 2, 3, 132) > 1
    assert library.test_splits(1, 4096, 4096, 2, 3, 132) == 1
    assert library.test_splits(16, 4096, 4096, 2, 3, 132) == 2
    assert library.test_splits(1, 14336, 4096, 3, 2, 132) == 1
    assert library.test_splits(1, 128256, 4096, 3, 2, 132) == 1
    assert library.test_splits(1, 64, 64, 2, 1, 132) == 1  # one chunk of columns is not split
