"""The CUDA kernels of decoded tokens without a GPU, as in test_cuda_host.py: what stands before attention, and
attention over plain keys and values."""

import ctypes

import pytest
import torch
from test_cuda_host import ELEMENTS, SCHEDULES, check, compiled, pointer, random
from torch import Tensor

from ptq.kv import key_centers
from ptq.ops import hadamard, kv_ops, steps

__all__ = ["compiled"]  # the fixture

PLACE = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def padded(x: Tensor, spread: int) -> Tensor:
    """The same numbers, with NaNs between the tokens."""
    return torch.nn.functional.pad(x, (0, spread), value=torch.nan).contiguous()


def run_input(
    library: ctypes.CDLL, given: list[Tensor], cos_sin: tuple[Tensor, Tensor], cache: list[Tensor], d: int, order: int,
    start: int, bits: tuple[int, int], *, at_device: bool, spread: int, backwards: bool, center: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Queries, rotated; keys, minus `center`, and values of `given` are in the cache."""
    library.test_kv_input.restype = ctypes.c_char_p
    q, k, _ = given
    batch, tokens = q.shape[:2]
    room = cache[0].shape[0] * 256 if bits[0] else cache[0].shape[2]
    wide = [padded(x, spread) for x in given]
    out = torch.empty(batch, q.shape[2] // d, tokens, d, dtype=q.dtype)
    sizes = (ctypes.c_int * 14)(
        batch, tokens, q.shape[2] // d, k.shape[2] // d, d, cos_sin[0].shape[2], order, start, int(at_device), room,
        *bits, spread, cos_sin[0].shape[0],
    )  # fmt: skip
    check(
        library.test_kv_input(
            int(backwards), ELEMENTS[q.dtype], (ctypes.c_void_p * 3)(*(x.data_ptr() for x in wide)),
            pointer(cos_sin[0]), pointer(cos_sin[1]), pointer(center), pointer(out),
            (ctypes.c_void_p * 4)(*(x.data_ptr() for x in cache)), (ctypes.c_float * 2)(*CLIPS), sizes,
        )
    )  # fmt: skip
    return out


CLIPS = 0.95, 0.9
CASES = [  # batch, tokens, query heads, key heads, d, rotary_dim, order
    (1, 1, 3, 1, 64, 64, 64), (2, 3, 2, 2, 128, 128, 128), (1, 2, 2, 1, 256, 256, 256), (1, 1, 4, 2, 96, 96, 32),
    (2, 1, 2, 1, 20, 8, 4), (1, 1, 1, 1, 6, 6, 2), (1, 5, 1, 1, 192, 100, 64), (1, 1, 2, 1, 128, 96, 0),
]  # fmt: skip


@SCHEDULES
@pytest.mark.parametrize("dtype", PLACE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_input(compiled, case: tuple[int, ...], dtype: torch.dtype, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    batch, tokens, q_heads, kv_heads, d, rotary_dim, order = case
    q, k, v = (
        random(batch, tokens, h * d, dtype=dtype, seed=h + i) for i, h in enumerate((q_heads, kv_heads, kv_heads))
    )
    cos_sin = tuple(random(batch if backwards else 1, tokens, rotary_dim, dtype=dtype, seed=seed) for seed in (7, 8))
    heads = [x.unflatten(2, (-1, d)).transpose(1, 2) for x in (q, k, v)]
    rotated_heads = steps.rotary(heads[0], heads[1], *cos_sin)
    factors, _ = hadamard.dense_factors(order or 1, q.device)
    center = None if backwards else random(kv_heads, d, dtype=dtype, seed=11)
    wanted_q, wanted_k = rotated_heads[0], key_centers.without(rotated_heads[1], center)
    if order:
        assert not factors
        wanted_q, wanted_k = (
            hadamard.reference(x.double(), None, factors, order, -1, False) for x in (wanted_q, wanted_k)
        )
    for bits, start, at_device in (((0, 0), 3, False), ((4, 4), 255, True), ((3, 8), 0, False), ((0, 0), 0, True)):
        if bits[0]:
            cache = [y for b in bits for y in kv_ops.empty_chunks(2, batch, kv_heads, d, b, q.device)]
        else:
            cache = [torch.full((batch, kv_heads, start + tokens + 1, d), 9.0, dtype=dtype) for _ in range(2)]
        before = [x.clone() for x in cache]
        out = run_input(
            library,
            [q, k, v],
            cos_sin,
            cache,
            d,
            order,
            start,
            bits,
            at_device=at_device,
            spread=5,
            backwards=backwards,
            center=center,
        )
        assert near(out, wanted_q) and (order or torch.equal(out, wanted_q))
        here = slice(start, start + tokens)
        if not bits[0]:
            assert near(cache[0][:, :, here], wanted_k) and torch.equal(cache[1][:, :, here], heads[2])
            for x, old in zip(cache, before, strict=True):
                x[:, :, here] = old[:, :, here]
                assert torch.equal(x, old)  # nothing beside them
            continue
        # Codes are those of what the keys became, which is what the plain cache holds.
        plain = [torch.empty(batch, kv_heads, tokens, d, dtype=dtype) for _ in range(2)]
        run_input(
            library, [q, k, v], cos_sin, plain, d, order, 0, (0, 0), at_device=False, spread=0, backwards=backwards,
            center=center,
        )  # fmt: skip
        for side in range(2):
            kv_ops.append(
                before[2 * side], before[2 * side + 1], plain[side], start, bits[side], CLIPS[side], side == 1
            )
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(cache, before, strict=True))


def near(found: Tensor, wanted: Tensor) -> bool:
    """Within a place of the type."""
    bound = PLACE[found.dtype] * wanted.double().abs().amax().clamp(min=1)
    return bool(((found.double() - wanted.double()).abs() <= bound).all())


@SCHEDULES
def test_tokens_without_room_are_dropped(compiled, backwards: bool) -> None:
    library = compiled("kv_cache_host")
    given = [random(1, 3, 32, seed=seed) for seed in range(3)]
    cos_sin = random(1, 3, 32, seed=3), random(1, 3, 32, seed=4)
    for bits in ((0, 0), (4, 4)):
        cache = (
            [y for b in bits for y in kv_ops.empty_chunks(1, 1, 1, 32, b, given[0].device)]
            if bits[0]
            else [torch.zeros(1, 1, 256, 32) for _ in range(2)]
        )
        for start in (254, 700, -2):
            run_input(library, given, cos_sin, cache, 32, 0, start, bits, at_device=True, spread=0, backwards=backwards)
        if bits[0]:
            seen = kv_ops.dequantize(cache[2], cache[3], 256, 32, 4, True)
        else:
            seen = cache[1]
        wanted = torch.zeros(256, 32)
        wanted[254:] = given[2][0, :2]
        wanted[0] = given[2][0, 2]
        assert (seen[0, 0] - wanted).abs().max() < (0.3 if bits[0] else 1e-9)


@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_over_plain_keys_and_values(compiled, dtype: torch.dtype, backwards: bool) -> None:
    """Also with more blocks of tokens than warps, shared contexts, rows that do not fill their blocks, and masks that
    hide the middle, or everything."""
    library = compiled("kv_cache_host")
    library.test_plain.restype = ctypes.c_char_p
    cases = [  # batch, heads of keys, groups, tokens, d, length, room, splits
        (1, 2, 1, 1, 64, 1, 3, 0), (1, 1, 4, 1, 128, 777, 777, 2), (2, 1, 5, 2, 80, 300, 310, 1),
        (1, 1, 3, 1, 256, 150, 160, 2), (2, 2, 2, 3, 8, 70, 256, 0), (1, 1, 16, 1, 96, 40, 40, 0),
    ]  # fmt: skip
    for i, (batch, heads, groups, tokens, d, length, room, splits) in enumerate(cases):
        q = random(batch, heads * groups, tokens, d, dtype=dtype, seed=i)
        keys, values = (random(batch, heads, room, d, dtype=dtype, seed=10 * i + seed) for seed in (1, 2))
        keys[:, :, length:] = values[:, :, length:] = torch.nan
        mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(i)) < 0.7
        mask[..., 20:200] = False
        twos = (mask * 2).byte().view(torch.bool)  # a bool that is true need not be 1
        for m, hidden in (
            (None, None),
            (mask[:1], ~mask[:1]),
            (mask, ~mask),
            (twos, ~mask),
            (~mask & mask, mask | True),
        ):
            out = torch.empty(batch, tokens, heads * groups, d, dtype=dtype)
            rows = 0 if m is None else m.shape[0]
            sizes = (ctypes.c_int * 9)(batch, heads, groups, tokens, d, length, room, rows, splits)
            check(
                library.test_plain(
                    int(backwards), ELEMENTS[dtype], pointer(q), pointer(keys), pointer(values),
                    ctypes.c_float(d**-0.5), pointer(m), pointer(out), sizes,
                )
            )  # fmt: skip
            seen = [x[:, :, :length].double().repeat_interleave(groups, 1) for x in (keys, values)]
            score = q.double() @ seen[0].mT * d**-0.5
            score = score if hidden is None else score.masked_fill(hidden, -torch.inf)
            wanted = (score.softmax(-1).nan_to_num(0) @ seen[1]).transpose(1, 2)
            error = (out.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], (cases[i], m is None, error)
