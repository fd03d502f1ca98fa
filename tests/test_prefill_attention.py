"""Attention of prompts: the op against float64 at every level, and the attention function that goes through it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ptq.ops import prefill_attention

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scaling: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result in float64, and the same of |values|: how large a sum is that rounding can disturb."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (keys, values))
    score = q.double() @ keys.mT * scaling
    if seen is not None:
        score = score.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.double()[:, None, None].expand(*score.shape[:3], 1)), -1)
    weight = score.softmax(-1).nan_to_num(0.0)[..., : keys.shape[2]]
    return (weight @ values).transpose(1, 2), (weight @ values.abs()).transpose(1, 2)


def check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    sinks: Tensor | None = None,
) -> None:
    found = torch.ops.ptq.prefill_attention(q, keys, values, mask, causal, scaling, sinks)
    seen = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril() if causal else None
    if mask is not None:
        seen = mask if seen is None else mask & seen
    wanted, size = exact(q, keys, values, seen, scaling, sinks)
    place = 2**-7 if q.dtype == torch.bfloat16 else 2**-17
    assert found.dtype == q.dtype and found.is_contiguous() and found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= place * size + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b, h, groups, t, s, d, value_d", [
    (1, 1, 1, 1, 1, 1, 1), (2, 2, 3, 5, 5, 24, 24), (1, 2, 4, 12, 130, 64, 64), (1, 1, 8, 7, 127, 80, 80),
    (2, 1, 1, 129, 300, 15, 17), (1, 3, 1, 49, 257, 96, 64), (1, 1, 2, 33, 128, 192, 128), (3, 1, 1, 2, 96, 130, 31),
    (1, 1, 7, 48, 129, 256, 1),
])  # fmt: skip
def test_against_float64(
    b: int, h: int, groups: int, t: int, s: int, d: int, value_d: int, dtype: torch.dtype, level: str
) -> None:
    q, keys = draw(b, h * groups, t, d, dtype=dtype), draw(b, h, s, d, dtype=dtype, seed=1)
    values = draw(b, h, s, value_d, dtype=dtype, seed=2)
    check(q, keys, values, None, False, d**-0.5)
    check(q, keys, values, None, True, 3 * d**-0.5)
    mask = draw(b, 1, t, s, seed=3) > 0
    mask[0, 0, t // 2] = False  # a token that sees nothing
    mask[:, :, :, s // 3 : s // 3 + 140] = False  # a chunk that nobody sees
    check(q, keys, values, mask, False, d**-0.5)
    check(q, keys, values, mask[:1], True, d**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", (-200.0, 0.0, 30.0, 1e6))
def test_sinks(shift: float, dtype: torch.dtype, level: str) -> None:
    """Far below all scores, among them, above, and so high that nothing is left."""
    q, keys, values = draw(2, 6, 70, 24, dtype=dtype), *(draw(2, 3, 200, 24, dtype=dtype, seed=i) for i in (1, 2))
    mask = draw(2, 1, 70, 200, seed=3) > 0
    mask[0, 0, 9] = False
    for sinks in (draw(6) + shift, (draw(6) + shift).to(dtype)):
        check(q, keys, values, mask, False, 1.0, sinks)
        check(q, keys, values, None, False, 1.0, sinks)
        check(q, keys[:, :, :70], values[:, :, :70], None, True, 1.0, sinks)
    if shift == 1e6:
        assert not torch.ops.ptq.prefill_attention(q, keys, values, None, False, 1.0, sinks).any()
    for wrong in (sinks[:5], sinks.half(), sinks[None]):
        with pytest.raises(RuntimeError, match=r"prefill_attention: sinks must be \[6\]"):
            torch.ops.ptq.prefill_attention(q, keys, values, None, False, 1.0, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype, level: str) -> None:
    """Heads as views of tokens, keys in the room of a cache, every other number, an expanded mask, a sliding window."""
    q = draw(2, 70, 6, 40, dtype=dtype).transpose(1, 2)
    keys, values = (draw(2, 3, 200, 40, dtype=dtype, seed=seed)[:, :, 10:80] for seed in (1, 2))
    window = torch.ones(70, 70, dtype=torch.bool).tril().triu(-9)[None, None].expand(2, 1, 70, 70)
    check(q, keys, values, window, False, 0.2)
    check(draw(2, 6, 70, 80, dtype=dtype)[..., ::2], keys.mT.contiguous().mT, values, None, True, 0.2)
    wide = torch.ones(2, 1, 70, 90, dtype=torch.bool)[..., 20:]
    check(q, keys, values, wide, True, 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: torch.dtype, level: str) -> None:
    """The largest score comes late, early, or far below all others: no sum overflows, none is lost."""
    values = draw(1, 1, 400, 32, dtype=dtype)
    for ramp in (torch.linspace(0, 3000, 400), torch.linspace(3000, 0, 400), torch.linspace(-3000, -2000, 400)):
        keys = torch.zeros(1, 1, 400, 32, dtype=dtype)
        keys[0, 0, :, 3] = ramp.to(dtype)
        q = torch.zeros(1, 1, 9, 32, dtype=dtype)
        q[..., 3] = 1
        check(q, keys, values, None, False, 1.0)
        check(q, keys, values, None, True, 1.0)


def test_any_number_of_threads_and_heads_at_a_time(level: str) -> None:
    """The same bits; panels hold some of the heads only."""
    q, keys, values = draw(2, 18, 5, 64), draw(2, 9, 2100, 64, seed=1), draw(2, 9, 2100, 64, seed=2)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(torch.ops.ptq.prefill_attention(q, keys, values, None, False, 0.1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    for i in (0, 1):
        for head in (0, 8):
            one = q[i : i + 1, 2 * head : 2 * head + 2], *(x[i : i + 1, head : head + 1] for x in (keys, values))
            alone = torch.ops.ptq.prefill_attention(*one, None, False, 0.1)
            assert torch.equal(results[0][i : i + 1, :, 2 * head : 2 * head + 2], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_shows_where_it_is_seen(dtype: torch.dtype, level: str) -> None:
    q, keys, values = (draw(1, 2, 200, 32, dtype=dtype, seed=seed) for seed in range(3))
    keys[0, 1, 150] = torch.nan
    found = torch.ops.ptq.prefill_attention(q, keys, values, None, True, 0.2)
    assert found[0, 150:, 1].isnan().all() and not found[0, :150].isnan().any() and not found[0, :, 0].isnan().any()


def test_a_bool_that_is_true_need_not_be_1(level: str) -> None:
    q, keys, values = (draw(1, 2, 40, 32, seed=seed) for seed in range(3))
    mask = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    found = [torch.ops.ptq.prefill_attention(q, keys, values, (mask * number).byte().view(torch.bool), False, 0.2)
             for number in (1, 2, 128)]  # fmt: skip
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_empty_inputs_and_the_op(level: str) -> None:
    q, keys = draw(2, 4, 3, 8), draw(2, 2, 5, 8)
    op = torch.ops.ptq.prefill_attention
    assert op(q[:, :, :0], keys, keys, None, True, 0.3).shape == (2, 0, 4, 8)
    assert op(q[:0], keys[:0], keys[:0], None, True, 0.3).shape == (0, 3, 4, 8)
    assert op(q, keys[:, :, :0], keys[:, :, :0], None, False, 0.3).eq(0).all()
    torch.library.opcheck(op.default, (q, keys, keys.clone(), torch.ones(2, 1, 3, 5, dtype=torch.bool), False, 0.3))


HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("ptq::prefill_attention", "CPU")


@pytest.mark.skipif(not HAS_KERNEL, reason="below AVX2 torch's own attention serves prompts")
def test_refusals() -> None:
    q, keys, mask = draw(2, 4, 3, 8), draw(2, 2, 5, 8), torch.ones(2, 1, 3, 5, dtype=torch.bool)
    for bad in (
        (q.double(), keys.double(), keys.double(), None, True, 0.3),
        (q, keys.bfloat16(), keys, None, True, 0.3),
        (q, keys[:1], keys, None, True, 0.3),
        (q[:, :3], keys, keys, None, True, 0.3),
        (q, keys[..., :7], keys, None, True, 0.3),
        (q, keys, keys[:, :, :4], None, True, 0.3),
        (q, keys, keys, None, True, 0.0),
        (q, keys, keys, None, True, torch.nan),
        (q, keys, keys, mask.float(), False, 0.3),
        (q, keys, keys, mask[:, :, :2], False, 0.3),
        (q, keys, keys, mask.mT.contiguous().mT, False, 0.3),
    ):
        with pytest.raises(RuntimeError, match="prefill_attention"):
            torch.ops.ptq.prefill_attention(*bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_function(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what transformers' gives, and goes through the op where that serves it."""
    module: Any = nn.Module()
    object.__setattr__(module, "num_key_value_groups", 2)
    q, keys, values = draw(2, 4, 9, 16, dtype=dtype), *(draw(2, 2, 9, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    roomy = [torch.cat((x, 9 * x[:, :, :4]), 2) for x in (keys, values)]
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[1, :, 4:, :3] = False
    calls = []
    own = torch.ops.ptq.prefill_attention.default
    monkeypatch.setattr(torch.ops.ptq.prefill_attention, "default", lambda *args: calls.append(1) or own(*args))
    bias, one = draw(1, 4, 9, 9, dtype=dtype), dict(dtype=torch.bool)
    monkeypatch.setattr(prefill_attention, "FEW_ROWS", 3)
    for through, given, more in (
        (True, (q, keys, values, None), {}),
        (True, (q, keys, values, None), {"is_causal": False, "scaling": 0.1}),
        (True, (q, keys, values, mask), {}),
        (dtype == torch.bfloat16, (q[:, :, :1], keys, values, None), {}),  # two rows: in float32 torch's is faster
        (True, (q[:, :, :2], keys, values, torch.ones(1, 1, 2, 9, **one)), {}),
        (False, (q, keys, values, torch.ones(2, 1, 1, 9, **one)), {}),  # masks that broadcast
        (False, (q, keys, values, torch.ones(2, 1, 9, 1, **one)), {}),
        (False, (q, keys[:1], values[:1], mask), {}),
        (True, (q, *roomy, None), {}),
        (False, (q, keys, values, draw(1, 1, 9, 9, dtype=dtype)), {}),
        (False, (q, keys, values, mask.expand(2, 4, 9, 9)), {}),
        (False, (q, keys, values, None), {"position_bias": bias}),
        (False, (q.clone().requires_grad_(), keys, values, None), {}),
        (False, (q.double(), keys.double(), values.double(), None), {}),
    ):
        calls.clear()
        found, nothing = prefill_attention.forward(module, *given, **more)
        wanted, _ = sdpa_attention_forward(module, *given, **more)
        assert len(calls) == through and nothing is None and found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, **({"rtol": 0.02, "atol": 0.02} if dtype != torch.float32 else {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_derivatives_are_left_to_torch() -> None:
    """An op of ours would drop the tangent."""
    q, keys, values = draw(1, 2, 40, 16), draw(1, 2, 40, 16, seed=1), draw(1, 2, 40, 16, seed=2)
    module = nn.Module()

    def attend(x: Tensor) -> Tensor:
        return prefill_attention.forward(module, x, keys, values, None)[0]

    with torch.no_grad(), pytest.raises(NotImplementedError):  # torch has none for it on a CPU
        torch.func.jvp(attend, (q,), (keys,))
