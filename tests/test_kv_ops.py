"""The ops of the packed KV cache: bytes, kernels against the reference, levels, threads."""

from collections.abc import Callable

import pytest
import torch
from conftest import at_level
from torch import Tensor

from ptq.ops import kv_ops, native

OPS = torch.ops.ptq
BITS = (2, 3, 4, 6, 8)


LEVELS = ("portable", "avx2", "avx512", "avx512vnni")


@pytest.fixture(params=("reference", *LEVELS))
def level(request):
    yield from [None] if request.param == "reference" else at_level(request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3


def fill(x: Tensor, bits: int, channel_major: bool, append=None, step: int = 100) -> tuple[Tensor, Tensor]:
    """A side of the cache, filled in steps."""
    batch, heads, length, d = x.shape
    codes, scales = kv_ops.empty_chunks(-(-length // 256), batch, heads, d, bits, x.device)
    for start in range(0, x.shape[2], step):
        piece = x[:, :, start : start + step]
        (append or OPS.kv_append)(codes, scales, piece, start, bits, 0.95, channel_major)
    return codes, scales


def exact(q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """Attention in float64; a query that sees nothing gets zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    score = q.double() @ k.mT * scaling
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return (score.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channel_major", (False, True))
def test_bytes_are_as_documented(bits: int, channel_major: bool) -> None:
    d = 20
    codes = torch.randint(0, 2**bits, (2, 1, 3, 256, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = kv_ops.pack(codes, bits, channel_major).view(torch.int32).view(2, 1, 3, -1)
    count = kv_ops.words(d, bits)
    for token, channel in ((0, 0), (17, 5), (255, 19), (100, 8)):
        found, below, first = 0, 0, 0
        for plane in kv_ops.PLANES[bits]:
            word, field = first + channel * plane // 32, channel * plane % 32
            block, lane = divmod(token, 16)
            at = (word * 16 + block) * 16 + lane if channel_major else (block * count + word) * 16 + lane
            found |= ((words[1, 0, 2, at].item() >> field) & (2**plane - 1)) << below
            below, first = below + plane, first + -(-d * plane // 32)
        assert found == codes[1, 0, 2, token, channel].item()
    assert torch.equal(kv_ops.unpack(kv_ops.pack(codes, bits, channel_major), d, bits, channel_major), codes)


@pytest.mark.parametrize("bits", BITS)
def test_quantize_is_the_definition(bits: int) -> None:
    x = random(40, 20)
    x[0], x[1], x[2] = 0, x[1].abs(), -x[2].abs()
    code, scale, minimum = kv_ops.quantize(x, bits, 0.95)
    for row in range(40):
        low, high = min(0.0, x[row].min().item()) * 0.95, max(0.0, x[row].max().item()) * 0.95
        step = (high - low) / (2**bits - 1) if high > low else 1.0
        assert scale[row].item() == pytest.approx(step, rel=2**-8)
        assert minimum[row].item() == pytest.approx(low, rel=2**-8)
        for value, found in zip(x[row].tolist(), code[row].tolist(), strict=True):
            wanted = (value - minimum[row].item()) / scale[row].item()
            assert abs(found - min(max(wanted, 0), 2**bits - 1)) <= 0.5 + 1e-4


def test_more_bits_are_better_and_two_are_still_something() -> None:
    x = random(1, 2, 300, 64)
    errors = []
    for bits in (*BITS, 16):
        y = x if bits == 16 else OPS.kv_dequantize(*fill(x, bits, True), 300, 64, bits, True)
        errors.append(((y - x).square().mean() / x.square().mean()).item())
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.25 and errors[4] < 1e-3


@pytest.mark.parametrize("heads", (1, 2))
def test_the_reference_appends_inside_a_chunk(heads: int) -> None:
    """One row of one head: there the scales of a chunk are one piece of memory."""
    x = random(1, heads, 40, 8)
    at_once, in_steps = (fill(x, 4, False, kv_ops.append, step) for step in (40, 7))
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_steps, strict=True))


@pytest.mark.parametrize("d", (1, 20, 64, 80, 128))
@pytest.mark.parametrize("bits", BITS)
def test_append_and_dequantize_are_the_reference(level: str | None, d: int, bits: int) -> None:
    for length, step, channel_major in ((1, 1, False), (255, 100, True), (256, 256, False), (257, 7, True)):
        x = random(2, 3, length, d, seed=length)
        x[0, 1, 0] = 0
        x[1, 0, length // 2] = torch.inf
        codes, scales = fill(x, bits, channel_major, kv_ops.append if level is None else None, step)
        wanted_codes, wanted_scales = fill(x, bits, channel_major, kv_ops.append, 300)
        assert torch.equal(codes, wanted_codes)
        assert torch.equal(scales.view(torch.int16), wanted_scales.view(torch.int16))
        y = OPS.kv_dequantize(codes, scales, length, d, bits, channel_major)
        code, scale, minimum = kv_ops.quantize(x, bits, 0.95)
        wanted = code.float() * scale.float()[..., None] + minimum.float()[..., None]
        assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0)) and y[1, 0, length // 2].isnan().all()


CASES = [  # batch, heads, groups, tokens, head_dim, length
    (1, 2, 1, 1, 64, 1), (2, 1, 4, 1, 64, 255), (1, 2, 3, 2, 128, 256), (1, 1, 7, 1, 80, 257), (2, 2, 2, 5, 20, 600),
    (1, 1, 1, 8, 1, 40), (3, 1, 4, 1, 36, 513), (1, 2, 1, 1, 15, 300), (1, 1, 2, 1, 33, 300),
    (1, 1, 9, 1, 1024, 70),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (4, 2), (3, 8)])
def test_attend_against_float64(level: str | None, case: tuple[int, ...], bits: tuple[int, int]) -> None:
    batch, heads, groups, tokens, d, length = case
    k, v, q = (
        random(batch, heads, length, d),
        random(batch, heads, length, d, seed=1),
        random(batch, heads * groups, tokens, d),
    )
    sides = (*fill(k, bits[0], False), *fill(v, bits[1], True))
    seen_k = OPS.kv_dequantize(*sides[:2], length, d, bits[0], False)
    seen_v = OPS.kv_dequantize(*sides[2:], length, d, bits[1], True)
    mask = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, 0, 0], mask[-1, 0, -1, : length // 2] = False, False
    starts = torch.arange(batch) * 3
    sinks = random(batch, heads, 5, d, seed=4), random(batch, heads, 5, d, seed=5)
    op = kv_ops.attend if level is None else OPS.kv_attend
    for used, extra in (
        (None, (None,) * 3),
        (mask, (None,) * 3),
        (mask[:1], (starts, *sinks)),
        (None, (starts, *sinks)),
    ):
        found = op(q, *sides, length, *bits, d**-0.5, used, *extra)
        keys, values = seen_k, seen_v
        if extra[0] is not None:
            keys, values = kv_ops.place_sinks(seen_k, starts, sinks[0]), kv_ops.place_sinks(seen_v, starts, sinks[1])
        assert found.shape == (batch, tokens, heads * groups, d)
        # Kernels round queries and weights to 16 bits, queries beside 8-bit keys of more than 257 channels to fewer.
        wanted = exact(q, keys, values, d**-0.5, used)
        error = (found.double() - wanted).abs() / wanted.square().mean().sqrt().clamp(min=0.1)
        whole, largest = (1e-5, 1e-4) if level is None else (2e-4, 1e-3)
        coarser = max(1, d / 256) if bits[0] == 8 else 1
        assert error.square().mean().sqrt() < whole * coarser and error.max() < largest * coarser


def test_sinks_lie_where_there_are_tokens() -> None:
    """In front of the first and behind the last token there are none."""
    x, sinks, starts = random(5, 2, 7, 4), random(5, 2, 3, 4, seed=1), torch.tensor([0, -2, 5, -3, 9])
    expected = x.clone()
    for row, start in enumerate(starts.tolist()):
        for j in range(3):
            if 0 <= start + j < 7:
                expected[row, :, start + j] = sinks[row, :, j]
    assert torch.equal(kv_ops.place_sinks(x, starts, sinks), expected)


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_many_small_weights_beside_a_large_one_are_not_lost(level: str | None, bits: int) -> None:
    """Each is less than half a step of the integers that the largest weight is rounded to; together they are 0.3 %."""
    d, length = 32, 250
    k, v, q = torch.zeros(1, 1, length, d), (random(1, 1, length, d) - 0.3).sigmoid(), torch.ones(1, 1, 1, d)
    k[0, 0, 17] = 11.3 / 0.95 / d  # the scale is clipped
    sides = (*fill(k, 8, False), *fill(v, bits, True))
    seen_k = OPS.kv_dequantize(*sides[:2], length, d, 8, False)
    seen_v = OPS.kv_dequantize(*sides[2:], length, d, bits, True)
    op = kv_ops.attend if level is None else OPS.kv_attend
    found = op(q, *sides, length, 8, bits, 1.0, None, None, None, None).double()
    wanted, only = exact(q, seen_k, seen_v, 1.0, None), seen_v[:, :, 17].double()
    assert (wanted - only).abs().mean() > 7e-4  # what the others change; their part of the sum is 1.5e-3
    assert (found - wanted).abs().max() < 3e-4


@pytest.mark.parametrize("bits", [(4, 4), (3, 8), (6, 6), (8, 2), (2, 3)])
@pytest.mark.parametrize("d", (64, 20))
def test_levels_and_threads_do_not_change_a_bit(bits: tuple[int, int], d: int, set_level: Callable[..., str]) -> None:
    """Also where many scores lie close to the largest. Fifteen rows: eight, four and three are taken together."""
    if not native.load():
        pytest.skip("native kernels are not built")
    k, v, q = random(1, 2, 1100, d), random(1, 2, 1100, d, seed=1), random(1, 10, 3, d)
    k *= torch.tensor([1.0, 0.1]).view(1, 2, 1, 1)
    sinks = torch.tensor([1]), random(1, 2, 4, d, seed=2), random(1, 2, 4, d, seed=3)
    mask = torch.ones(1, 1, 3, 1100, dtype=torch.bool).tril(1097)
    results = []
    threads = torch.get_num_threads()
    try:
        for name in LEVELS:
            set_level(name)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                sides = (*fill(k, bits[0], False), *fill(v, bits[1], True))
                results.append(OPS.kv_attend(q, *sides, 1100, *bits, 0.1, mask, *sinks))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_largest_integers_and_codes_do_not_overflow(level: str | None) -> None:
    x = torch.where(torch.arange(256) % 2 == 0, 1.0, 0.5)[:, None].expand(1, 1, 256, 1024)
    sides = (*fill(x, 8, False), *fill(x, 8, True))
    seen = OPS.kv_dequantize(*sides[:2], 256, 1024, 8, False)
    q = torch.ones(1, 1, 1, 1024)
    op = kv_ops.attend if level is None else OPS.kv_attend
    out = op(q, *sides, 256, 8, 8, 1 / 512, None, None, None, None)
    torch.testing.assert_close(out.double(), exact(q, seen, seen, 1 / 512, None), rtol=1e-4, atol=0)


def test_no_tokens_give_zeros_and_half_types_are_kept() -> None:
    sides = (
        *kv_ops.empty_chunks(0, 1, 2, 8, 4, torch.device("cpu")),
        *kv_ops.empty_chunks(0, 1, 2, 8, 4, torch.device("cpu")),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op in (OPS.kv_attend, kv_ops.attend):
            out = op(random(1, 4, 1, 8).to(dtype), *sides, 0, 4, 4, 1.0, None, None, None, None)
            assert out.dtype == dtype and torch.equal(out, torch.zeros(1, 1, 4, 8, dtype=dtype))


def test_a_token_that_is_not_finite_shows_unless_it_is_masked(level: str | None) -> None:
    k, v, q = random(1, 1, 20, 16), random(1, 1, 20, 16, seed=1), random(1, 1, 1, 16)
    v[0, 0, 3, 2] = torch.nan
    sides = (*fill(k, 4, False), *fill(v, 4, True))
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    op = kv_ops.attend if level is None else OPS.kv_attend
    assert op(q, *sides, 20, 4, 4, 1.0, mask, None, None, None).isnan().all()
    mask[..., 3] = False
    assert op(q, *sides, 20, 4, 4, 1.0, mask, None, None, None).isfinite().all()


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_a_query_that_is_not_finite_shows_and_no_other(level: str | None, bad: float) -> None:
    sides = (*fill(random(1, 1, 20, 16), 4, False), *fill(random(1, 1, 20, 16, seed=1), 4, True))
    q = random(1, 3, 1, 16)
    q[0, 1, 0, 5] = bad
    op = kv_ops.attend if level is None else OPS.kv_attend
    out = op(q, *sides, 20, 4, 4, 1.0, None, None, None, None)
    assert out[0, 0, 1].isnan().all() and out[0, 0, 0].isfinite().all() and out[0, 0, 2].isfinite().all()


def test_opcheck() -> None:
    x = random(1, 2, 30, 20)
    sides = (*fill(x, 4, False), *fill(x, 4, True))
    torch.library.opcheck(OPS.kv_append.default, (*sides[:2], x, 5, 4, 0.95, False))
    torch.library.opcheck(OPS.kv_dequantize.default, (*sides[:2], 30, 20, 4, False))
    q = random(1, 4, 2, 20)
    mask = torch.ones(1, 1, 2, 30, dtype=torch.bool)
    torch.library.opcheck(OPS.kv_attend.default, (q, *sides, 30, 4, 4, 0.2, mask, None, None, None))


@pytest.mark.parametrize("change", ["length", "bits", "mask", "heads", "swapped", "scales", "sinks"])
def test_what_does_not_fit_is_refused(change: str) -> None:
    if not native.load():
        pytest.skip("native kernels are not built")
    x, q = random(1, 2, 30, 20), random(1, 4, 1, 20)
    sides = [*fill(x, 4, False), *fill(x, 4, True)]
    mask = torch.ones(1, 1, 1, 29 if change == "mask" else 30, dtype=torch.bool)
    if change == "heads":
        q = random(1, 5, 1, 20)
    if change == "scales":
        sides[1] = sides[1].float()
    if change == "swapped":  # batch and heads of the values
        sides[2:] = [x.transpose(1, 2).contiguous() for x in sides[2:]]
    starts = torch.zeros(1, dtype=torch.long) if change == "sinks" else None
    length, bits = 300 if change == "length" else 30, 5 if change == "bits" else 4
    with pytest.raises(RuntimeError, match="kv_"):
        OPS.kv_attend(q, *sides, length, bits, bits, 0.2, mask, starts, None, None)


@pytest.mark.parametrize("start", [227, -1, 2**63 - 1, -(2**63)])
def test_a_place_without_room_is_refused(start: int) -> None:
    if not native.load():
        pytest.skip("native kernels are not built")
    x = random(1, 2, 30, 20)
    codes, scales = fill(x, 4, False)
    stored = codes.clone()
    with pytest.raises(RuntimeError, match="30 tokens behind .* in room for 256"):
        OPS.kv_append(codes, scales, x, start, 4, 0.95, False)
    assert torch.equal(codes, stored)
