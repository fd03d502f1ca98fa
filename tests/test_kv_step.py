"""`ptq::kv_decode_attention`: the bits of the single ops, and a packed cache that decodes through it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import at_level
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import ptq
from ptq.kv.packed_layer import PackedLayer
from ptq.ops import hadamard, kv_ops, kv_step
from quarot.plan import QuarotRecipe


@pytest.fixture(params=("portable", "avx2", "avx512"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(
    batch: int, heads: int, groups: int, d: int, before: int, bits: tuple[int, int], dtype: torch.dtype,
    part: float = 1, t: int = 1,
) -> list[Any]:  # fmt: skip
    """Those of the op, with `before` tokens in the cache and queries that are a slice of something longer."""
    q = draw(batch, t, heads * groups * d + 8, dtype=dtype)[:, :, 3:-5]
    k, v = (draw(batch, t, heads * d, dtype=dtype, seed=seed) for seed in (1, 2))
    cos, sin = (draw(1, t, int(d * part) // 2 * 2, dtype=dtype, seed=seed) for seed in (3, 4))
    sides = []
    for width, channel_major in zip(bits, (False, True), strict=True):
        codes, scales = kv_ops.empty_chunks((before + t - 1) // 256 + 1, batch, heads, d, width, q.device)
        x = draw(batch, heads, before, d, dtype=torch.float32, seed=5 + channel_major)
        kv_ops.append(codes, scales, x, 0, width, 0.95, channel_major)
        sides.extend((codes, scales))
    factors, order = hadamard.dense_factors(d, q.device) if d % 4 == 0 else ([], 0)
    return [q, k, v, cos, sin, *sides, before, *bits, [0.95, 0.9], factors, order, d**-0.5, None, None, None]


CASES = [  # batch, heads, groups, head_dim, tokens before
    (1, 2, 1, 64, 1), (3, 1, 4, 64, 255), (1, 2, 3, 128, 256), (2, 1, 7, 80, 300), (1, 1, 2, 20, 15), (1, 2, 2, 6, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("part", [1, 0.75, 0.4])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_single_ops(case: tuple[int, ...], part: float, dtype: torch.dtype, level: str) -> None:
    batch, before = case[0], case[-1]
    padding = torch.arange(before + 1)[None] >= torch.arange(batch)[:, None] * before // 3
    center = draw(case[1], case[3], dtype=dtype, seed=9)
    for bits, *more in (((4, 4), None), ((3, 8), None, center), ((4, 3), padding[:, None, None], center.float() / 3)):
        mine, theirs = ([*arguments(*case, bits, dtype, part), *more] for _ in range(2))
        found = torch.ops.ptq.kv_decode_attention(*mine)
        wanted = kv_step.decode_attention(*theirs)
        assert found.dtype == dtype and torch.equal(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(mine[5:9], theirs[5:9], strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("t", (2, 5))
@pytest.mark.parametrize("case", CASES)
def test_several_tokens(case: tuple[int, ...], t: int, dtype: torch.dtype, level: str) -> None:
    """The bits of single ops, and of the tokens one by one."""
    batch, before = case[0], case[-1]
    seen = torch.ones(t, before + t, dtype=torch.bool).tril(before)
    padding = torch.arange(before + t)[None] >= torch.arange(batch)[:, None]
    mask = seen & padding[:, None, None]
    mine, theirs, apart = (arguments(*case, (4, 3), dtype, 1, t) for _ in range(3))
    center = draw(case[1], case[3], dtype=dtype, seed=9)
    found = torch.ops.ptq.kv_decode_attention(*mine, mask, center)
    assert torch.equal(found, kv_step.decode_attention(*theirs, mask, center))
    for i in range(t):
        one = [x[:, i : i + 1] for x in apart[:5]] + apart[5:9] + [before + i] + apart[10:]
        y = torch.ops.ptq.kv_decode_attention(*one, padding[:, None, None, : before + i + 1], center)
        assert torch.equal(y, found[:, i : i + 1])
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(mine[5:9], theirs[5:9], apart[5:9], strict=True)
    )
    stored = [x.clone() for x in mine[5:9]]
    with pytest.raises(RuntimeError, match="several tokens need a mask"):
        torch.ops.ptq.kv_decode_attention(*mine)
    with pytest.raises(RuntimeError, match="tokens behind"):
        torch.ops.ptq.kv_decode_attention(*mine[:9], 512 - t + 1, *mine[10:], mask)
    assert all(torch.equal(a, b) for a, b in zip(mine[5:9], stored, strict=True))


@pytest.mark.parametrize("before", [1, 5, 255, 256, 257, 768])
def test_a_key_that_is_not_a_number_shows(before: int, level: str) -> None:
    given = arguments(2, 3, 2, 32, before, (4, 4), torch.float32)
    given[1][1, 0, 64:] = torch.nan
    found = torch.ops.ptq.kv_decode_attention(*given).view(2, 3, 2, 32)
    assert found[1, 2].isnan().all() and found.isnan().sum() == 64


def test_opcheck_and_refusals() -> None:
    given = arguments(1, 2, 2, 8, 20, (4, 4), torch.float32)
    torch.library.opcheck(torch.ops.ptq.kv_decode_attention.default, given)
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="mask"):
        torch.ops.ptq.kv_decode_attention(*given, mask)
    stored = [x.clone() for x in given[5:9]]
    shapes = [(0, given[0][..., :-1]), (1, given[1][..., :-1]), (2, given[2][:, :0])]
    for index, wrong in (*shapes, (9, 256), (9, -1), (9, 2**63 - 1), (10, 5), (11, 5)):
        with pytest.raises((RuntimeError, TypeError)):
            torch.ops.ptq.kv_decode_attention(*given[:index], wrong, *given[index + 1 :])
    for wrong in (torch.zeros(2, 4), torch.zeros(1, 8), torch.zeros(16)):
        with pytest.raises(RuntimeError, match=r"key_center must be \[2, 8\]"):
            torch.ops.ptq.kv_decode_attention(*given, None, wrong)
    assert torch.equal(given[5], stored[0])


@pytest.mark.parametrize("sinks", (0, 3))
@pytest.mark.parametrize("batch", (1, 3))
def test_a_model_decodes_through_it(batch: int, sinks: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = QuarotRecipe(rounding="nearest", activation_bits=4, key_bits=4, value_bits=3, cache_sinks=sinks)
    ptq.quantize(save_model(tmp_path / "source"), tmp_path / "packed", recipe, ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    ids = torch.randint(model.config.vocab_size, (batch, 12), generator=torch.Generator().manual_seed(1))
    calls, own = [], PackedLayer.room
    monkeypatch.setattr(PackedLayer, "room", lambda layer, tokens: calls.append(1) or own(layer, tokens))

    @torch.no_grad()
    def logits() -> list[Tensor]:
        out = model(ids[:, :2], use_cache=True)
        found = [out.logits]
        for at in range(2, 12):
            out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
        return found

    found = logits()
    steps = 9 if sinks else 10  # the third token is a sink
    assert len(calls) == steps * model.config.num_hidden_layers
    monkeypatch.setattr(PackedLayer, "decodes", False)
    assert all(torch.equal(a, b) for a, b in zip(found, logits(), strict=True))
    assert len(calls) == steps * model.config.num_hidden_layers
