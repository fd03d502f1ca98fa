"""The CUDA kernels of E8P weights without a GPU, as in test_cuda_host.py."""

import ctypes
from typing import Any

import pytest
import torch
from test_cuda_host import ELEMENTS, SCHEDULES, check, compiled, pointer, random
from torch import Tensor

from ptq.weights import formats
from quip_sharp import e8p, fragment_ops, tiled_ops
from quip_sharp.e8p_format import E8PFormat

__all__ = ["compiled"]  # the fixture

LINEAR, QUANTISED, WEIGHT, POINTS, SCALE = range(5)
HOPPER, ADA = 227 * 1024, 99 * 1024
"""Shared memory that a block of threads can have."""


def weight(n: int, k: int, bits: int, seed: int = 0) -> dict[str, Any]:
    """Random codes and scales, plain and in fragments."""
    codes = torch.randint(
        0, 256, (bits, n, -(-k // 8)), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    scale = torch.tensor([0.037]).view(torch.int32)
    return {"codes": codes, "scale": scale, "fragments": fragment_ops.pack(codes), "n": n, "k": k, "bits": bits}


def run_e8p(
    library: ctypes.CDLL, mode: int, x: Tensor | None, w: dict[str, Any], dtype: torch.dtype,
    q_scale: Tensor | None = None, bias: Tensor | None = None, backwards: bool = False,
    processors: int = 2, shared: int = HOPPER, misalign: bool = False,
) -> Tensor:  # fmt: skip
    library.test_e8p.restype = ctypes.c_char_p
    alone, tokens = mode in (WEIGHT, POINTS), 0 if x is None else x.shape[-2]
    out = torch.empty((w["n"], w["k"]) if alone else (tokens, w["n"]), dtype=torch.int8 if mode == POINTS else dtype)
    check(
        library.test_e8p(
            mode, int(backwards), ELEMENTS[dtype], pointer(x), pointer(q_scale), pointer(w["fragments"]),
            pointer(w["scale"]), pointer(bias), pointer(out), tokens, w["n"], w["k"], w["bits"], processors, shared,
            int(misalign),
        )
    )  # fmt: skip
    return out


SHAPES = [(33, 256), (5, 96), (70, 608), (17, 37), (40, 4224)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_bit_is_where_the_layout_says(bits: int) -> None:
    n, k = 35, 272
    w = weight(n, k, bits)
    size = w["fragments"].shape[2]
    assert w["fragments"].shape == (3, 3, 256 * bits)
    for row, code in [(0, 0), (34, 33), (9, 5), (15, 18), (16, 15), (24, 31)]:
        u, t = code % 16 // 4, code % 4
        lane, byte = row % 8 * 4 + t, 2 * u + row % 16 // 8
        block = w["fragments"][row // 16, code // 16]
        for plane in range(bits):
            at = 16 * lane + 8 * plane if plane < 2 else 512 + (size - 512) // 32 * lane + 8 * (plane - 2)
            assert block[at + byte] == w["codes"][plane, row, code]
    assert torch.equal(fragment_ops.unpack(w["fragments"], n, bits, k), w["codes"])


def test_every_code_is_its_point(compiled) -> None:
    """All 65536 codes of E8P, in either stage, and all of the residual book; in every type."""
    library = compiled("e8p_host")
    every = torch.arange(65536).view(256, 256)
    for bits in (2, 3, 4):
        planes = [every >> 8, every & 255, every & 255, every >> 8][:bits]
        codes = torch.stack(planes).to(torch.uint8)
        w = {**weight(256, 2048, bits), "codes": codes, "fragments": fragment_ops.pack(codes)}
        assert torch.equal(run_e8p(library, POINTS, None, w, torch.float32), tiled_ops.points(codes, 2048))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            wanted = tiled_ops.weight_of(codes, w["scale"], 2048).to(dtype)
            assert torch.equal(run_e8p(library, WEIGHT, None, w, dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_operands_of_every_code(compiled, bits: int, dtype: torch.dtype) -> None:
    """Unit vectors as tokens read single points out of the product: 8 coordinates of all codes of a column."""
    library = compiled("e8p_host")
    entries = torch.arange(4096).view(512, 8)
    codes = torch.stack([entries >> 4, entries * 37 & 255, entries & 255, entries * 11 & 255][:bits]).to(torch.uint8)
    w = {**weight(512, 64, bits), "codes": codes, "fragments": fragment_ops.pack(codes)}
    x = torch.eye(64, dtype=dtype)
    found = torch.cat([run_e8p(library, LINEAR, x[i : i + 8], w, dtype, processors=9) for i in range(0, 64, 8)])
    wanted = tiled_ops.weight_of(codes, w["scale"], 64)
    assert torch.equal(found.T, wanted.to(dtype))


@SCHEDULES
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens, dtype", [(1, torch.bfloat16), (7, torch.float16), (13, torch.bfloat16)])
def test_linear(compiled, tokens: int, dtype: torch.dtype, bits: int, backwards: bool) -> None:
    library = compiled("e8p_host")
    for i, (n, k) in enumerate(SHAPES):
        w = weight(n, k, bits, seed=i)
        x, bias = random(tokens, k, dtype=dtype, seed=i), random(n, seed=i) if i % 3 else None
        shared = ADA if i < 2 else HOPPER
        found = run_e8p(library, LINEAR, x, w, dtype, None, bias, backwards, shared=shared, misalign=i == 2)
        exact = tiled_ops.weight_of(w["codes"], w["scale"], k).double()
        wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < (4e-4 if dtype == torch.float16 else 3e-3), (n, k, error)


@SCHEDULES
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    "tokens, dtype", [(1, torch.float32), (8, torch.bfloat16), (13, torch.float16), (40, torch.float32)]
)
def test_quantised_tokens_to_the_bit(compiled, tokens: int, dtype: torch.dtype, bits: int, backwards: bool) -> None:
    library = compiled("e8p_host")
    for i, (n, k) in enumerate(SHAPES if tokens < 40 else SHAPES[:3]):
        w = weight(n, k, bits, seed=i)
        q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(i), dtype=torch.int8)
        q_scale, bias = torch.rand(tokens) + 0.1, random(n, seed=i) if i % 3 else None
        shared = ADA if i < 2 else HOPPER
        found = run_e8p(library, QUANTISED, q, w, dtype, q_scale, bias, backwards, shared=shared, misalign=i == 2)
        assert torch.equal(found, tiled_ops.product(q, q_scale, w["codes"], w["scale"], bias, dtype)), (n, k)


@SCHEDULES
@pytest.mark.parametrize("tokens", [5, 13, 20, 40])
def test_a_block_of_threads_goes_on_with_other_rows(compiled, tokens: int, backwards: bool) -> None:
    for bits in (2, 3, 4):
        w = weight(700, 304, bits)
        q = torch.randint(-128, 128, (tokens, 304), generator=torch.Generator().manual_seed(bits), dtype=torch.int8)
        q_scale = torch.rand(tokens) + 0.1
        found = run_e8p(compiled("e8p_host"), QUANTISED, q, w, torch.float32, q_scale, None, backwards, processors=1)
        assert torch.equal(found, tiled_ops.product(q, q_scale, w["codes"], w["scale"], None, torch.float32)), bits


def test_the_longest_rows_do_not_overflow(compiled) -> None:
    """All sums as large as they can be: 65536 columns."""
    k = 65536
    for bits in (2, 4):
        codes = torch.zeros(bits, 16, k // 8, dtype=torch.uint8)
        codes[::2] = e8p.table().sum(1).argmax()
        w = {**weight(16, k, bits), "codes": codes, "fragments": fragment_ops.pack(codes)}
        q = torch.full((1, k), -128, dtype=torch.int8)
        found = run_e8p(compiled("e8p_host"), QUANTISED, q, w, torch.float32, torch.ones(1))
        assert torch.equal(found, tiled_ops.product(q, torch.ones(1), codes, w["scale"], None, torch.float32))


@pytest.mark.parametrize("bits", [2, 4])
def test_what_follows_a_plain_product_of_points(compiled, bits: int) -> None:
    tokens, n, k = 70, 40, 64
    w = weight(n, k, bits)
    q = torch.randint(-128, 128, (tokens, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    q_scale, bias = torch.rand(tokens) + 0.1, random(n)
    sums = q.int() @ tiled_ops.points(w["codes"], k).int().T
    found = run_e8p(compiled("e8p_host"), SCALE, sums, w, torch.bfloat16, q_scale, bias)
    assert torch.equal(found, tiled_ops.product(q, q_scale, w["codes"], w["scale"], bias, torch.bfloat16))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("halves", [0, 1])
def test_plans_fit_every_device(compiled, halves: int, bits: int) -> None:
    library = compiled("e8p_host")
    for shared in (HOPPER, 163 * 1024, ADA):
        for tokens in range(1, 17):
            plan = (ctypes.c_int * 3)()
            used = library.test_plan(halves, tokens, 4096, 4096, bits, 132, shared, plan)
            grid, rows, log_copies = plan
            if tokens <= 8:
                assert 0 < used <= shared and 0 < grid <= 132 and 0 < rows <= tokens
                assert log_copies == 5 or shared < HOPPER or tokens > 1
            assert used <= shared


def test_format_lays_out_by_device_and_back() -> None:
    for bits in (2, 3, 4):
        form = E8PFormat(bits)
        w = weight(70, 300, bits)
        names = list(form.buffers(70, 300))[:-1]
        parts = {**dict(zip(names, w["codes"].unbind(), strict=True)), "scale": w["scale"]}
        packed = form.lay_out(parts, "fragments")
        assert {name: tuple(t.shape) for name, t in packed.items()} == {
            "fragments": (5, 3, 256 * bits), "scale": w["scale"].shape, "shape": (70, 304, 0),
        }  # fmt: skip
        of = {"format": form.name, "version": 1, **form.options()}
        stored = formats.get("prepacked", target="sm_90", layout=1, of=of).buffers(70, 304)
        assert {name: shape for name, (shape, _) in stored.items()} == {n: tuple(t.shape) for n, t in packed.items()}
        back = form.unprepack(packed)
        assert all(torch.equal(back[part], parts[part]) for part in parts)
        assert torch.equal(form.dequantize(packed, 70, 304), form.dequantize(parts, 70, 304))
        tiles = form.prepack(packed, "cpu")
        assert "tiles" in tiles
        x = random(3, 304)
        assert torch.allclose(form.linear(x, packed), form.linear(x, tiles), atol=1e-4)
        q, q_scale = x.mul(30).to(torch.int8), torch.rand(3)
        found = form.linear_quantized(q, q_scale, packed, None, torch.float32)
        assert torch.equal(found, form.linear_quantized(q, q_scale, tiles, None, torch.float32))


@pytest.mark.parametrize("n, k", [(2**20 - 1, 64), (1, 65536)])
def test_large_weights_are_launched(compiled, n: int, k: int) -> None:
    library = compiled("e8p_host")
    library.test_e8p_size.restype = ctypes.c_char_p
    check(library.test_e8p_size(n, k, 3))


def test_opcheck() -> None:
    w = weight(18, 40, 3)
    x = random(2, 40).requires_grad_()
    arguments = (w["fragments"], w["scale"], random(18), 18, 3)
    torch.library.opcheck(torch.ops.ptq.e8p_dequantize_fragments.default, (w["fragments"], w["scale"], 18, 3, 40))
    torch.library.opcheck(torch.ops.ptq.e8p_linear_fragments.default, (x, *arguments))
    q = torch.ones(2, 40, dtype=torch.int8)
    torch.library.opcheck(torch.ops.ptq.e8p_quantized_fragments.default, (q, torch.ones(2), *arguments, torch.float16))
