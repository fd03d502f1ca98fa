"""Attention of decoded tokens on a GPU, over plain and over packed keys and values, against the references."""

import pytest
import torch
from test_ops import GPU, error, poison, random
from test_packed_cache import TOLERANCE, filled, numbers
from torch import Tensor

from ptq.ops import kv_ops, kv_step, steps

__all__ = ["poison"]  # the fixture

OPS = torch.ops.ptq


@pytest.mark.parametrize(
    "op", ["decode_attention", "decode_attention_at", "kv_decode_attention", "kv_decode_attention_at"]
)
def test_kernels_override_the_reference(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CUDA")


def rows(batch: int, t: int, heads: tuple[int, int], d: int, rotary_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as slices of merged rows, cos and sin."""
    widths = heads[0] * d, heads[1] * d, heads[1] * d
    merged = random(batch, t, sum(widths), seed=1).to(dtype)
    return [*merged.split(widths, -1), *(random(1, t, rotary_dim, seed=seed).to(dtype) for seed in (2, 3))]


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    merged = torch.cat(tensors[:3], -1).to(GPU)
    return [*merged.split([x.shape[2] for x in tensors[:3]], -1), *(x.to(GPU) for x in tensors[3:])]


def mask_of(batch: int, t: int, before: int, length: int) -> Tensor:
    seen = torch.arange(length) <= before + torch.arange(t)[:, None]
    padding = torch.arange(length)[None] >= torch.arange(batch)[:, None]
    return seen[None, None] & padding[:, None, None]


CASES = [  # batch, heads of keys, groups, tokens, head_dim, rotary_dim, tokens before, room
    (1, 8, 4, 1, 128, 128, 4000, 4352), (2, 2, 3, 1, 64, 64, 255, 300), (1, 1, 4, 3, 96, 48, 600, 768),
    (3, 1, 7, 5, 256, 256, 40, 64), (1, 2, 1, 1, 8, 8, 0, 256), (2, 4, 2, 16, 80, 80, 17, 512),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_keys_and_values(case: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, groups, t, d, rotary_dim, before, room = case
    given = rows(batch, t, (heads * groups, heads), d, rotary_dim, dtype)
    held = [random(batch, heads, room, d, seed=seed).to(dtype) for seed in (4, 5)]
    mask, scaling, after = mask_of(batch, t, before, room), d**-0.5, before + t
    mine = [x.to(GPU) for x in held]
    wanted = steps.decode_attention(*given, *held, before, scaling, mask[..., :after])
    for _ in range(2):  # the same again: nothing is left of the first call
        found = OPS.decode_attention(*on_gpu(given), *mine, before, scaling, mask[..., :after].to(GPU))
        assert found.dtype == dtype and error(found, wanted) < TOLERANCE[dtype]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, held, strict=True))
    start = torch.tensor(before, device=GPU)
    also = OPS.decode_attention_at(*on_gpu(given), *mine, start, scaling, mask.to(GPU))
    assert error(also, wanted) < TOLERANCE[dtype] and int(start) == after
    if t == 1 and batch == 1:
        assert error(OPS.decode_attention(*on_gpu(given), *mine, before, scaling, None), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # what the CPU's ops take
@pytest.mark.parametrize("bits", [(4, 4), (3, 8), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_keys_and_values(case: tuple[int, ...], bits: tuple[int, int], dtype: torch.dtype) -> None:
    batch, heads, groups, t, d, rotary_dim, before, _ = case
    given, order = rows(batch, t, (heads * groups, heads), d, rotary_dim, dtype), d & -d
    length = before + t
    room = [numbers(batch, heads, -(-length // 256) * 256, d, seed=seed) for seed in (4, 5)]
    sides = [*filled(room[0], bits[0], False), *filled(room[1], bits[1], True)]
    mine, mask = [x.to(GPU) for x in sides], mask_of(batch, t, before, length)
    rest, none = (*bits, [0.95, 0.9], [], order, d**-0.5), (None, None, None)
    center = numbers(heads, d, seed=6).to(dtype) if bits[0] == 3 else None
    on_device = None if center is None else center.to(GPU)
    wanted = kv_step.decode_attention(*given, *sides, before, *rest, *none, mask, center)
    found = OPS.kv_decode_attention(*on_gpu(given), *mine, before, *rest, *none, mask.to(GPU), on_device)
    # Sums of R3 are added in another order: a code of a key may be the next one.
    assert found.dtype == dtype and error(found, wanted) < max(TOLERANCE[dtype], 5e-3)
    for side, codes in enumerate((sides[:2], sides[2:])):
        x, y = (
            kv_ops.dequantize(c.cpu(), s.cpu(), length, d, bits[side], side == 1)
            for c, s in (codes, mine[2 * side : 2 * side + 2])
        )
        assert torch.equal(x[:, :, :before], y[:, :, :before])
        assert (x - y).norm() < 0.02 * x.norm() and (side == 0 or torch.equal(x, y))
    start = torch.tensor(before, device=GPU)
    again = OPS.kv_decode_attention_at(*on_gpu(given), *mine, start, *rest, mask.to(GPU), on_device)
    assert torch.equal(again, found) and int(start) == length


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, cos, sin = on_gpu(rows(1, 1, (4, 2), 64, 64, torch.bfloat16))
    keys, values = (torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device=GPU) for _ in range(2))
    with pytest.raises(RuntimeError, match="1 tokens behind 8 in room for 8"):
        OPS.decode_attention(q, k, v, cos, sin, keys, values, 8, 0.1, None)
    with pytest.raises(RuntimeError, match="dtype"):
        OPS.decode_attention(q, k, v.half(), cos, sin, keys, values, 3, 0.1, None)
    with pytest.raises(RuntimeError, match="mask"):
        OPS.decode_attention(q, k, v, cos, sin, keys, values, 3, 0.1, torch.ones(1, 1, 1, 5, device=GPU).bool())
    with pytest.raises(RuntimeError, match="begin at a multiple"):
        OPS.decode_attention(q, k, v, cos, sin, keys.float(), values, 3, 0.1, None)
    wide = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16, device=GPU)
    for mine, others in ((wide[:, :2], wide[:, :1]), (keys[:, :1].expand(1, 2, 8, 64), values)):
        with pytest.raises(RuntimeError, match="of one shape"):
            OPS.decode_attention(q, k, v, cos, sin, mine, others, 3, 0.1, None)
    codes, scales = kv_ops.empty_chunks(1, 1, 2, 64, 4, GPU)
    side = (codes, scales, codes.clone(), scales.clone())
    factor = torch.zeros(2, 1, 12, device=GPU, dtype=torch.uint8)
    for order, factors, message in ((12, [], "power of two"), (64, [factor], "no dense factors")):
        with pytest.raises(RuntimeError, match=message):
            OPS.kv_decode_attention(
                q, k, v, cos, sin, *side, 3, 4, 4, [1.0, 1.0], factors, order, 0.1, None, None, None, None
            )
    torch.cuda.synchronize()  # no error sticks


@pytest.mark.parametrize("room", [256, 4352])  # by one block of threads; by several, and merged
def test_a_graph_serves_every_step(room: int) -> None:
    """What is decoded by one captured step, and step by step."""
    d = 64
    given = on_gpu(rows(1, 1, (4, 2), d, d, torch.bfloat16))
    held = [[torch.zeros(1, 2, room, d, dtype=torch.bfloat16, device=GPU) for _ in range(2)] for _ in range(2)]
    at = torch.zeros((), dtype=torch.long, device=GPU)
    columns = torch.arange(room, device=GPU)

    def step() -> Tensor:
        return OPS.decode_attention_at(*given, *held[0], at, 0.125, (columns <= at)[None, None, None])

    step()
    at.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    at.zero_()
    for i in range(5):
        given[0].copy_(random(1, 1, 4 * d, seed=i).to(torch.bfloat16))
        given[2].copy_(random(1, 1, 2 * d, seed=10 + i).to(torch.bfloat16))
        graph.replay()
        found = y.clone()
        wanted = OPS.decode_attention(*given, *held[1], i, 0.125, None)
        assert error(found, wanted) < TOLERANCE[torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
