"""The CUDA kernels of integer weights without a GPU, as in test_cuda_host.py."""

import ctypes
from typing import Any

import pytest
import torch
from test_cuda_host import ELEMENTS, SCHEDULES, agrees, check, compiled, pointer, random
from torch import Tensor

from ptq.ops import fragments, tiles
from ptq.ops.op_declarations import REFERENCES
from quarot import fragment_ops, tiled_ops

__all__ = ["compiled"]  # the fixture

LINEAR, QUANTISED, DEQUANTISE, NARROW = range(4)


def weight(n: int, k: int, bits: int, group_size: int, symmetric: bool, seed: int = 0) -> dict[str, Any]:
    """Random codes, scales and zeros, plain and in fragments."""
    g = k // group_size if group_size else 1
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, g, generator=generator).add(0.5).bfloat16().view(torch.int16)
    zero = None if symmetric else torch.randint(0, 2**bits, (n, g), generator=generator, dtype=torch.uint8)
    tiled = None if zero is None else tiles.tile_scales(zero)
    return {
        "codes": codes, "flat_scale": scale, "flat_zero": zero, "fragments": fragments.pack(codes, bits),
        "scale": tiles.tile_scales(scale), "zero": tiled,
    }  # fmt: skip


def run_integer(
    library: ctypes.CDLL, mode: int, x: Tensor, w: dict[str, Any], bits: int, dtype: torch.dtype,
    q_scale: Tensor | None = None, bias: Tensor | None = None, splits: int = 1, backwards: bool = False,
    misalign: bool = False,
) -> Tensor:  # fmt: skip
    library.test_integer.restype = ctypes.c_char_p
    (n, k), groups, tokens = w["codes"].shape, w["flat_scale"].shape[1], x.shape[0]
    out = torch.empty((n, k) if mode == DEQUANTISE else (tokens, n), dtype=dtype)
    check(
        library.test_integer(
            mode, int(backwards), ELEMENTS[dtype], pointer(x), pointer(q_scale), pointer(w["fragments"]),
            pointer(w["scale"]), pointer(w["zero"]), pointer(bias), pointer(out), tokens, n, k, bits, groups, splits,
            int(misalign),
        )
    )  # fmt: skip
    return out


SHAPES = [(16, 64, 0), (33, 128, 128), (70, 608, 32), (5, 96, 96), (48, 1344, 0), (130, 2112, 64), (17, 37, 0)]


@SCHEDULES
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    "tokens, dtype, splits", [(1, torch.bfloat16, 1), (7, torch.float16, 3), (19, torch.bfloat16, 2)]
)
def test_linear(compiled, tokens: int, dtype: torch.dtype, splits: int, bits: int, backwards: bool) -> None:
    library = compiled("integer_host")
    for i, (n, k, group_size) in enumerate(SHAPES):
        w = weight(n, k, bits, group_size, symmetric=i % 2 == 0, seed=bits)
        x, bias = random(tokens, k, dtype=dtype, seed=i), random(n, seed=i) if i % 3 else None
        found = run_integer(library, LINEAR, x, w, bits, dtype, None, bias, splits, backwards, misalign=i == 3)
        scale, flat_zero = w["flat_scale"].view(torch.bfloat16).double(), w["flat_zero"]
        zero = 2 ** (bits - 1) if flat_zero is None else flat_zero[..., None].double()
        exact = (w["codes"].double().view(*scale.shape, -1) - zero) * scale[..., None]
        wanted = x.double() @ exact.view(n, k).T + (0 if bias is None else bias.double())
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < (4e-4 if dtype == torch.float16 else 3e-3), (n, k, group_size, error)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("bits", [4, 7, 8])
def test_linear_for_every_number_of_tokens(compiled, bits: int, tokens: int) -> None:
    n, k, group_size = 150, 448, 64
    w = weight(n, k, bits, group_size, symmetric=False, seed=tokens)
    x = random(tokens, k, dtype=torch.float16, seed=tokens)
    found = run_integer(compiled("integer_host"), LINEAR, x, w, bits, torch.float16)
    wanted = REFERENCES["integer_linear_fragments"](x, w["fragments"], w["scale"], w["zero"], None, n, bits, group_size)
    assert torch.allclose(found, wanted, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("bits", [4, 6])
def test_more_columns_than_tokens_stay_for(compiled, bits: int, tokens: int) -> None:
    """A block of threads that goes on with other rows fetches its tokens again where they have no room."""
    n, k, library = 140, 10304, compiled("integer_host")
    w = weight(n, k, bits, 64, symmetric=True)
    x, arguments = random(tokens, k, dtype=torch.bfloat16), (w["codes"], w["flat_scale"], None)
    found = run_integer(library, LINEAR, x, w, bits, torch.bfloat16, backwards=True)
    wanted = REFERENCES["integer_linear_fragments"](x.float(), w["fragments"], w["scale"], None, None, n, bits, 64)
    assert (found.double() - wanted.double()).norm() < 3e-3 * wanted.double().norm()
    q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    q_scale = torch.rand(tokens)
    found = run_integer(library, QUANTISED, q, w, bits, torch.float32, q_scale, backwards=True)
    assert agrees(found, tiled_ops.product(q, q_scale, *arguments, None, bits, 64, torch.float32), k, 64)


@SCHEDULES
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    "tokens, dtype", [(1, torch.float32), (8, torch.bfloat16), (13, torch.float16), (65, torch.float32)]
)
def test_quantised_tokens(compiled, tokens: int, dtype: torch.dtype, bits: int, backwards: bool) -> None:
    library = compiled("integer_host")
    for i, (n, k, group_size) in enumerate(SHAPES if tokens < 65 else SHAPES[2:4]):
        w = weight(n, k, bits, group_size, symmetric=i % 2 == 1, seed=bits)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale = 0.01 * torch.rand(tokens) + 0.001  # float16 ends at 65504
        bias = random(n, seed=i) if i % 3 else None
        found = run_integer(library, QUANTISED, q, w, bits, dtype, q_scale, bias, 1, backwards, misalign=i == 2)
        arguments = (w["codes"], w["flat_scale"], w["flat_zero"], bias, bits, group_size, dtype)
        assert agrees(found, tiled_ops.product(q, q_scale, *arguments), k, group_size), (n, k, group_size)


@SCHEDULES
@pytest.mark.parametrize("tokens", [1, 63, 65, 130])
def test_tokens_of_four_bits_to_the_bit(compiled, tokens: int, backwards: bool) -> None:
    """On the tensor cores for four bits."""
    library = compiled("integer_host")
    dtype = (torch.float32, torch.float16, torch.bfloat16)[tokens % 3]
    for i, (n, k, group_size) in enumerate([(16, 64, 0), (150, 640, 128), (130, 448, 64), (48, 1344, 0), (17, 37, 0)]):
        w = weight(n, k, 4, group_size, symmetric=True, seed=i)
        q = torch.randint(-8, 8, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale, bias = torch.rand(tokens) + 0.1, random(n, seed=i) if i % 3 else None
        found = run_integer(library, NARROW, q, w, 4, dtype, q_scale, bias, 1, backwards, misalign=i == 2)
        wanted = tiled_ops.product(q, q_scale, w["codes"], w["flat_scale"], None, bias, 4, group_size, dtype)
        assert torch.equal(found, wanted), (n, k, group_size)
    for n, k, group_size, symmetric in ((16, 96, 32, True), (16, 128, 64, False), (16, 0, 0, True)):
        w = weight(n, k, 4, group_size, symmetric)
        with pytest.raises(AssertionError, match="not narrow"):
            run_integer(library, NARROW, torch.zeros(1, k, dtype=torch.int8), w, 4, dtype, torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_dequantise(compiled, bits: int, dtype: torch.dtype) -> None:
    for i, (n, k, group_size) in enumerate(SHAPES):
        w = weight(n, k, bits, group_size, symmetric=i % 2 == 0, seed=bits)
        found = run_integer(compiled("integer_host"), DEQUANTISE, torch.empty(0, k), w, bits, dtype)
        wanted = fragment_ops.dequantize(w["fragments"], w["scale"], w["zero"], n, bits, group_size, k)
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("n, k", [(1_048_561, 64), (2**27 - 1, 480), (1, 2**20 - 1)])
def test_large_weights_are_launched(compiled, n: int, k: int) -> None:
    library = compiled("integer_host")
    library.test_integer_size.restype = ctypes.c_char_p
    check(library.test_integer_size(n, k, 4))


def test_splits_fill_the_device(compiled) -> None:
    library = compiled("integer_host")
    assert library.test_splits(1, 512, 28672, 4, 132) > 1
    assert library.test_splits(1, 4096, 4096, 4, 132) == 1  # 32 rows for each processor
    assert library.test_splits(64, 4096, 4096, 4, 132) > 1
    assert library.test_splits(1, 128256, 4096, 4, 132) == 1
    assert library.test_splits(1, 64, 64, 4, 132) == 1  # one chunk of columns is not split
