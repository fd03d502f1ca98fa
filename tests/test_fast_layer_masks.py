"""What decoder layers in one call make of rows behind padding, of several tokens of a row, and of masks."""

import copy
from typing import Any

import pytest
import torch
from test_fast_layer import RECIPES, counted_layers, fast_decode_is_off, without
from test_fast_layer import packed as _packed
from tiny_models import decode, tiny_config
from transformers import AutoModelForCausalLM

from ptq.fast import whole_model

packed = _packed


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_behind_padding_are_one_call(recipe: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed(recipe), counted_layers(monkeypatch)
    found = decode(model, 9, padded=True)
    assert calls == [2] * 4
    single = without(copy.deepcopy(model), "DecoderLayer")
    assert all(torch.equal(a, b) for a, b in zip(found, decode(single, 9, padded=True), strict=True))
    if recipe in ("W4A16", "W6A16", "W4A16 on the lattice"):  # 8-bit inputs would turn a last bit into a step
        fast_decode_is_off(single)
        for a, b in zip(found, decode(single, 9, padded=True), strict=True):
            seen = slice(None) if a.shape[1] == 1 else slice(5, None)  # what padding gives is nobody's concern
            torch.testing.assert_close(a[:, seen], b[:, seen], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[-1][1:], decode(model, 9)[-1][1:], atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_several_tokens_are_one_call(recipe: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those that assisted generation has guessed; also behind padding."""
    model, calls = packed(recipe), counted_layers(monkeypatch)
    single = without(copy.deepcopy(model), "DecoderLayer")
    ids = torch.randint(model.config.vocab_size, (3, 60), generator=torch.Generator().manual_seed(1))
    most = 8 if recipe == "W4A4KV4" else 16
    for padding in (0, 2):
        seen = (torch.arange(60) >= torch.arange(3)[:, None] * padding).long()
        logits: dict[Any, list[torch.Tensor]] = {}
        for each in (model, single):
            cache, at = None, 0
            for tokens in (6, 2, 1, most, most + 1, 5):
                calls.clear()
                given = {"attention_mask": seen[:, : at + tokens]} if padding else {}
                out = each(ids[:, at : at + tokens], past_key_values=cache, use_cache=True, **given)
                assert calls == ([2] if each is model and 0 < at and tokens <= most else [])
                logits.setdefault(each, []).append(out.logits)
                cache, at = out.past_key_values, at + tokens
        assert all(torch.equal(a, b) for a, b in zip(logits[model], logits[single], strict=True))
    if recipe not in ("W4A16", "W6A16", "W4A16 on the lattice"):
        return
    fast_decode_is_off(single)
    wanted = single(ids[:, :at], attention_mask=seen[:, :at]).logits[:, 8:]
    torch.testing.assert_close(torch.cat(logits[model], 1)[:, 8:], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ["W4A16", "W4A4KV4"])
@torch.no_grad()
def test_tokens_that_see_each_other(recipe: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each sees is for the mask to say, whatever comes after it."""
    model, calls = packed(recipe), counted_layers(monkeypatch)
    plain = without(copy.deepcopy(model), "DecoderLayer", "Attention")
    ids, logits = torch.arange(4, 22).reshape(2, 9), []
    for each in (model, plain):
        cache = each(ids[:, :6], use_cache=True).past_key_values
        calls.clear()
        mask = torch.ones(2, 1, 3, 9, dtype=torch.bool)
        mask[1, ..., :2] = False
        logits.append(each(ids[:, 6:], past_key_values=cache, attention_mask=mask).logits)
        assert calls == ([2] if each is model else [])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4 if recipe == "W4A16" else 0.5)


@torch.no_grad()
def test_gemma_whose_tokens_see_each_other() -> None:
    plain: Any = AutoModelForCausalLM.from_config(tiny_config("gemma3_text", use_bidirectional_attention=True)).eval()
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    ids, logits = torch.arange(4, 16)[None], []
    for each in (fast, plain):
        cache = each(ids[:, :5], use_cache=True).past_key_values
        for first, last in ((5, 8), (8, 9), (9, 12)):
            logits.append(each(ids[:, first:last], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(logits[:3], logits[3:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_masks_of_other_kinds_go_the_own_way(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed("W4A16"), counted_layers(monkeypatch)
    ids = torch.arange(4, 16).reshape(2, 6)
    seen = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    seen[1, ..., :3] = False
    wanted, added = None, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for masks, known in (
        ((seen, seen[1:]), True),
        ((added, added[1:]), False),
        ((seen.expand(2, 4, 1, 7),) * 2, False),
    ):
        logits = []
        for mask in (masks[0], masks[1].expand(2, *masks[1].shape[1:])):
            cache = model(ids, use_cache=True).past_key_values
            calls.clear()
            logits.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
            assert calls == [2] * known
        wanted = logits[0] if wanted is None else wanted
        torch.testing.assert_close(logits[0], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[1][1], wanted[1], rtol=1e-4, atol=1e-4)
