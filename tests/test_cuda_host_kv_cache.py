"""The CUDA kernels of the packed KV cache without a GPU, as in test_cuda_host.py."""

import ctypes

import pytest
import torch
from test_cuda_host import ELEMENTS, SCHEDULES, check, compiled, pointer, random
from torch import Tensor

from ptq.ops import kv_ops

__all__ = ["compiled"]  # the fixture

BITS = (2, 3, 4, 6, 8)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed) * 2 + 0.3


def append(
    library: ctypes.CDLL, codes: Tensor, scales: Tensor, x: Tensor, start: int, bits: int, channel_major: bool,
    backwards: bool, spread: int = 0, at_device: bool = False,
) -> None:  # fmt: skip
    """`kv_ops.append` by the kernel; `spread` numbers lie between the tokens of x."""
    library.test_append.restype = ctypes.c_char_p
    d = x.shape[3]
    wide = torch.nn.functional.pad(x, (0, spread), value=torch.nan).contiguous()
    check(
        library.test_append(
            int(backwards), ELEMENTS[x.dtype], pointer(wide), pointer(codes), pointer(scales), codes.shape[0],
            x.shape[0] * x.shape[1], d, bits, int(channel_major), start, x.shape[2], ctypes.c_float(0.95), d + spread,
            int(at_device),
        )
    )  # fmt: skip


def filled(x: Tensor, bits: int, channel_major: bool) -> tuple[Tensor, Tensor]:
    """A side of the cache, filled by the reference; what is not in use is full of ones."""
    batch, heads, length, d = x.shape
    codes, scales = kv_ops.empty_chunks(-(-length // 256), batch, heads, d, bits, x.device)
    codes.fill_(255)
    scales.fill_(torch.nan)
    kv_ops.append(codes, scales, x, 0, bits, 0.95, channel_major)
    return codes, scales


@SCHEDULES
@pytest.mark.parametrize("d", [1, 20, 64, 128, 260])
@pytest.mark.parametrize("bits", BITS)
def test_append_and_dequantize_to_the_bit(compiled, bits: int, d: int, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    library.test_kv_dequantize.restype = ctypes.c_char_p
    for length, step, channel_major in ((1, 1, False), (255, 100, True), (258, 256, backwards)):
        x = numbers(1, 3, length, d, seed=length)
        x[0, 1, 0] = 0
        x[0, 0, length // 2, 0], x[0, 2, length // 3, d - 1] = torch.inf, torch.nan
        x = x.to((torch.float32, torch.float16, torch.bfloat16)[bits % 3])
        found = kv_ops.empty_chunks(-(-length // 256), 1, 3, d, bits, x.device)
        wanted = kv_ops.empty_chunks(-(-length // 256), 1, 3, d, bits, x.device)
        for start in range(0, length, step):
            piece = x[:, :, start : start + step]
            append(library, *found, piece, start, bits, channel_major, backwards, length % 3, start % 2 == 0)
            kv_ops.append(*wanted, piece, start, bits, 0.95, channel_major)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1].view(torch.int16), wanted[1].view(torch.int16))
        y = torch.empty(1, 3, length, d)
        check(
            library.test_kv_dequantize(
                int(backwards), pointer(found[0]), pointer(found[1]), pointer(y), found[0].shape[0], 3, d, bits,
                int(channel_major), length,
            )
        )  # fmt: skip
        expected = kv_ops.dequantize(*wanted, length, d, bits, channel_major)
        assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0)) and y[0, 0, length // 2].isnan().all()


def attend(
    library: ctypes.CDLL, q: Tensor, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], length: int, k_bits: int,
    v_bits: int, mask: Tensor | None = None, sinks: tuple[Tensor, Tensor, Tensor] | None = None,
    backwards: bool = False, splits: int = 0,
) -> Tensor:  # fmt: skip
    library.test_attend.restype = ctypes.c_char_p
    batch, q_heads, tokens, d = q.shape
    kv_heads = k[0].shape[2]
    out = torch.empty(batch, tokens, q_heads, d, dtype=q.dtype)
    starts, keys, values = sinks or (None, None, None)
    sizes = (ctypes.c_int * 10)(
        batch, kv_heads, q_heads // kv_heads, tokens, d, length, k[0].shape[0], 0 if keys is None else keys.shape[2],
        0 if mask is None else mask.shape[0], splits,
    )  # fmt: skip
    check(
        library.test_attend(
            int(backwards), ELEMENTS[q.dtype], pointer(q), pointer(k[0]), pointer(k[1]), pointer(v[0]), pointer(v[1]),
            k_bits, v_bits, ctypes.c_float(d**-0.5), pointer(mask), pointer(starts), pointer(keys), pointer(values),
            pointer(out), sizes,
        )
    )  # fmt: skip
    return out


def wanted(q: Tensor, k, v, length: int, k_bits: int, v_bits: int, mask=None, sinks=None) -> Tensor:
    scaling = q.shape[-1] ** -0.5
    starts, keys, values = sinks or (None, None, None)
    q = q.float()
    return kv_ops.attend(q, k[0], k[1], v[0], v[1], length, k_bits, v_bits, scaling, mask, starts, keys, values)


CASES = [  # batch, heads, groups, tokens, head_dim, length
    (1, 2, 1, 1, 64, 1), (1, 1, 4, 1, 128, 300), (1, 1, 3, 2, 96, 256), (1, 1, 5, 2, 36, 265), (1, 1, 1, 1, 256, 40),
    (2, 1, 1, 3, 1, 20), (1, 1, 1, 1, 300, 17),
]  # fmt: skip


@SCHEDULES
@pytest.mark.parametrize("k_bits, v_bits", [(2, 8), (3, 3), (4, 4), (6, 2), (8, 6)])
def test_attend(compiled, k_bits: int, v_bits: int, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    for i, (batch, heads, groups, tokens, d, length) in enumerate(CASES):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(i + k_bits) % 3]
        q = random(batch, heads * groups, tokens, d, seed=i).to(dtype)
        k = filled(numbers(batch, heads, length, d, seed=10 + i), k_bits, False)
        v = filled(numbers(batch, heads, length, d, seed=20 + i), v_bits, True)
        found = attend(library, q, k, v, length, k_bits, v_bits, backwards=backwards)
        right = wanted(q, k, v, length, k_bits, v_bits)
        error = (found.float() - right).norm() / right.norm()
        assert error < TOLERANCE[dtype], (CASES[i], dtype, error)


@SCHEDULES
@pytest.mark.parametrize("bits", BITS)
def test_attend_with_the_same_bits(compiled, bits: int, backwards: bool) -> None:
    """Also with more stages than are on their way at once, and rows that do not fill their blocks."""
    library = compiled("kv_cache_host")
    cases = [(1, 1, 5, 2, 80, 300, 1), (2, 1, 2, 1, 256, 150, 2), (1, 1, 4, 1, 128, 777, 2), (1, 2, 1, 3, 16, 70, 0)]
    for i, (batch, heads, groups, tokens, d, length, splits) in enumerate(cases):
        dtype = (torch.bfloat16, torch.float16)[(i + bits) % 2]
        q = random(batch, heads * groups, tokens, d, seed=i).to(dtype)
        k = filled(numbers(batch, heads, length, d, seed=10 + i), bits, False)
        v = filled(numbers(batch, heads, length, d, seed=20 + i), bits, True)
        mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(i)) < 0.7
        mask[..., 20:200] = False
        for m in (None, mask[:1]):
            found = attend(library, q, k, v, length, bits, bits, m, None, backwards, splits)
            right = wanted(q, k, v, length, bits, bits, m)
            error = (found.float() - right).norm() / right.norm()
            assert error < TOLERANCE[dtype], (cases[i], dtype, m is None, error)


@SCHEDULES
def test_many_splits_are_merged(compiled, backwards: bool) -> None:
    """Two rounds of loads of either kind, and rows of numbers that fill no vector."""
    for k_bits, d, length, splits in ((4, 16, 4500, 71), (4, 16, 1300, 0), (2, 20, 600, 0)):
        q = random(1, 3, 1, d, seed=1)
        q = q if splits == 0 else q.to(torch.bfloat16)
        k = filled(numbers(1, 1, length, d, seed=2), k_bits, False)
        v = filled(numbers(1, 1, length, d, seed=3), 4, True)
        found = attend(compiled("kv_cache_host"), q, k, v, length, k_bits, 4, None, None, backwards, splits)
        right = wanted(q, k, v, length, k_bits, 4)
        assert (found.float() - right).norm() / right.norm() < TOLERANCE[q.dtype], (length, splits)


def test_a_long_split_does_not_drift(compiled) -> None:
    """Tensor cores cut off what they add up."""
    d, length = 16, 6000
    q = random(1, 4, 1, d, seed=1).half()
    k = filled(numbers(1, 1, length, d, seed=2), 6, False)
    v = filled(numbers(1, 1, length, d, seed=3), 6, True)
    right = wanted(q, k, v, length, 6, 6)
    error = (attend(compiled("kv_cache_host"), q, k, v, length, 6, 6, splits=1).float() - right).norm()
    assert error < 1.05 * (right.half().float() - right).norm()


@SCHEDULES
@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_not_finite_shows_only_where_it_is_seen(compiled, splits: int, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    batch, heads, groups, tokens, d, length = 2, 1, 2, 3, 32, 270
    q = random(batch, heads * groups, tokens, d, seed=1).to(torch.float16)
    x, y = (numbers(batch, heads, length, d, seed=s) for s in (2, 3))
    x[0, 0, 5], y[1, 0, 7], y[0, 0, 260] = torch.nan, torch.inf, torch.nan
    finite = filled(x.nan_to_num(posinf=0), 4, False), filled(y.nan_to_num(posinf=0), 4, True)
    k, v = filled(x, 4, False), filled(y, 4, True)
    mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., 5] = mask[..., 7] = mask[..., 260] = False
    mask[1, 0, 1] = False  # sees nothing
    mask[0, 0, 2, 260] = True
    found = attend(library, q, k, v, length, 4, 4, mask, None, backwards, splits)
    right = wanted(q, *finite, length, 4, 4, mask)
    assert wanted(q, k, v, length, 4, 4, mask)[0, 2].isnan().all()
    right[0, 2] = torch.nan
    assert torch.allclose(found.float(), right, atol=2e-3, rtol=2e-3, equal_nan=True)
    assert (found[1, 1] == 0).all()
    mask[0, 0, 0, 5] = True
    assert attend(library, q, k, v, length, 4, 4, mask, None, backwards, splits)[0, 0].isnan().all()


def test_the_context_is_split_by_the_shape(compiled) -> None:
    splits = compiled("kv_cache_host").test_attend_splits
    assert splits(4, 8, 4, 1) == 1 and splits(4, 8, 4, 256) == 1  # without a merge
    assert splits(4, 8, 4, 1024) == 16 and splits(4, 8, 4, 32768) == 47
    assert splits(4, 8, 12, 32768) == 24 and splits(4, 1000, 4, 32768) == 1


@SCHEDULES
def test_masks_sinks_and_tokens_that_are_not_finite(compiled, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    batch, heads, groups, tokens, d, length = 2, 1, 2, 2, 40, 270
    q = random(batch, heads * groups, tokens, d, seed=1)
    x, y = (numbers(batch, heads, length, d, seed=s) for s in (2, 3))
    x[0, 0, 5], y[1, 0, 7] = torch.nan, torch.inf
    k, v = filled(x, 4, False), filled(y, 3, True)
    mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., 5] = mask[..., 7] = False  # what is not finite is not seen, and does not show
    mask[1, 0, 1] = False  # sees nothing
    starts = torch.tensor([3, 254])  # the sinks of the second row lie in two chunks
    sinks = (starts, random(batch, heads, 4, d, seed=5), random(batch, heads, 4, d, seed=6))
    for m, s in ((mask, None), (mask, sinks), (mask[:1], None)):
        found = attend(library, q, k, v, length, 4, 3, m, s, backwards)
        right = wanted(q, k, v, length, 4, 3, m, s)
        assert torch.allclose(found, right, atol=1e-4, rtol=1e-4) and found.isfinite().all()
    assert found.shape == (batch, tokens, heads * groups, d)
    assert attend(library, q, k, v, length, 4, 3)[0].isnan().all()  # and where it is seen, it does


def test_tokens_without_room_are_dropped_where_a_graph_reads_the_start(compiled) -> None:
    x = numbers(1, 2, 9, 20)
    found, wanted = (kv_ops.empty_chunks(1, 1, 2, 20, 4, x.device) for _ in range(2))
    append(compiled("kv_cache_host"), *found, x, 250, 4, False, False, at_device=True)
    kv_ops.append(*wanted, x[:, :, :6], 250, 4, 0.95, False)
    assert torch.equal(found[0], wanted[0])
    again = [part.clone() for part in found]
    append(compiled("kv_cache_host"), *found, x, 256, 4, False, False, at_device=True)
    assert torch.equal(found[0], again[0])


def test_chunks_that_nobody_sees_are_skipped(compiled) -> None:
    q, length = random(1, 4, 2, 64), 700
    k, v = filled(numbers(1, 2, length, 64, seed=1), 4, False), filled(numbers(1, 2, length, 64, seed=2), 4, True)
    mask = torch.zeros(1, 1, 2, length, dtype=torch.bool)
    mask[..., 20:100] = True
    mask[:, :, 1, 520:530] = True
    found = attend(compiled("kv_cache_host"), q, k, v, length, 4, 4, mask)
    assert torch.allclose(found, wanted(q, k, v, length, 4, 4, mask), atol=1e-4, rtol=1e-4)


def test_shared_memory_fits_every_device(compiled) -> None:
    library = compiled("kv_cache_host")
    sizes = [library.test_attend_shared(3, d, k, v) for d in (64, 256, 1024) for k in BITS for v in BITS]
    assert max(sizes) <= 99 * 1024 and library.test_attend_shared(1, 128, 4, 4) <= 40 * 1024
