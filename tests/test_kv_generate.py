"""`generate` with the packed KV cache: beams, left padding, static, chunked, continued."""

import copy
from typing import Any

import pytest
import torch
from test_kv_cache import FOUR, GENERATE, MIXED, close, in_steps, logits, model_of, tokens
from tiny_models import CACHED
from torch import Tensor
from transformers import DynamicCache

from ptq.errors import InputError
from ptq.fast import whole_model
from ptq.kv.attention import CACHE
from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.packed_cache import PackedCache
from ptq.kv.static_cache import StaticPackedCache


@torch.no_grad()
def greedy(model: Any, ids: Tensor, count: int) -> Tensor:
    """By full forwards, without any cache."""
    for _ in range(count):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("model_type", CACHED)
def test_generate_is_greedy_over_full_forwards(model_type: str) -> None:
    model = model_of(MIXED, model_type)
    model.generation_config.eos_token_id = None
    ids = tokens(1, 9)
    result = model.generate(ids, **GENERATE, return_dict_in_generate=True)
    assert isinstance(result.past_key_values, PackedCache)
    assert torch.equal(result.sequences, greedy(model, ids, 12))


@pytest.mark.filterwarnings("error")
def test_no_name_of_ours_is_an_old_one() -> None:
    """transformers 5.24 calls `past_key_values` `cache`, and warns."""
    model, ids = model_of(MIXED), tokens(1, 9)
    whole_model.install(model)
    for options in ({}, {"cache_implementation": "static"}):
        assert model.generate(ids, **GENERATE, **options).shape == (1, 21)
    with torch.no_grad():
        model(ids[:, 1:2], **{CACHE: model(ids)[CACHE]})


@pytest.mark.filterwarnings("ignore:ptq. this cache, a")
def test_static_and_chunked_generate_the_same() -> None:
    model = model_of(MIXED)
    ids = tokens(2, 20)
    wanted = model.generate(ids, **GENERATE)
    static = model.generate(ids, **GENERATE, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(static.sequences, wanted)
    assert isinstance(static.past_key_values, PackedCache) and static.past_key_values.max_length == 31
    assert torch.equal(model.generate(ids, **GENERATE, prefill_chunk_size=6), wanted)
    assert torch.equal(model.generate(ids, **GENERATE, past_key_values=DynamicCache(config=model.config)), wanted)
    assert torch.equal(model.generate(ids, **GENERATE, use_cache=False), wanted)
    assert torch.equal(model.generate(ids[:1], **GENERATE, prompt_lookup_num_tokens=3), wanted[:1])


def test_a_static_cache_is_not_as_short_as_the_window() -> None:
    model = model_of(FOUR, "mistral", sliding_window=8)
    ids = tokens(2, 20)
    static = model.generate(ids, **GENERATE, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(static.sequences, model.generate(ids, **GENERATE))
    assert static.past_key_values.max_length == 31


@pytest.mark.parametrize("model_type", ("llama", "qwen3"))
def test_generate_over_a_cache_of_fixed_size(model_type: str) -> None:
    """For which `generate` makes masks beforehand, one or one for each kind of attention; with sinks behind padding."""
    model = model_of(MIXED, model_type)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    wanted = model.generate(ids, **GENERATE, attention_mask=mask)
    cache = StaticPackedCache(model.config, MIXED, 40)
    assert torch.equal(model.generate(ids, **GENERATE, attention_mask=mask, past_key_values=cache), wanted)


def test_masks_of_four_axes() -> None:
    model = model_of(MIXED)
    ids = tokens(2, 30)
    mask = torch.ones(2, 1, 30, 30, dtype=torch.bool).tril()
    mask[0, :, :, :4] = False
    wanted = logits(model, ids, attention_mask=mask)
    padded = logits(model, ids, attention_mask=mask[:, 0, -1].long(), position_ids=torch.arange(30)[None])
    close(padded[0, 4:], wanted[0, 4:])
    close(padded[1], wanted[1])
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    close(logits(model, ids, attention_mask=added)[:, 4:], wanted[:, 4:])
    for used in (mask, added):
        cache, parts = None, []
        for begin, end in ((0, 10), (10, 11), (11, 30)):
            with torch.no_grad():
                out = model(ids[:, begin:end], attention_mask=used[:, :, begin:end, :end], past_key_values=cache)
            cache = out.past_key_values
            parts.append(out.logits)
        close(torch.cat(parts, 1)[:, 4:], wanted[:, 4:])


@pytest.mark.parametrize("settings", (FOUR, MIXED))
@pytest.mark.parametrize("beams", (1, 3))
def test_left_padded_rows_are_as_if_alone(settings: CacheQuantization, beams: int) -> None:
    model = model_of(settings)
    rows = [tokens(1, length, seed=length) for length in (5, 14, 9)]
    ids = torch.cat([torch.nn.functional.pad(row, (14 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (14 - row.shape[1], 0)) for row in rows])
    for extra in ({}, {"prefill_chunk_size": 3}):
        together = model.generate(ids, attention_mask=mask, num_beams=beams, **GENERATE, **extra)
        for row, found in zip(rows, together, strict=True):
            alone = model.generate(row, num_beams=beams, **GENERATE)[0]
            assert torch.equal(found[14:], alone[row.shape[1] :])


def test_beams_with_and_without_the_cache_agree() -> None:
    model = model_of(MIXED)
    ids = tokens(2, 10)
    options = dict(**GENERATE, num_beams=4, num_return_sequences=2)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_continuing_cropping_and_copying() -> None:
    model = model_of(MIXED)
    ids = tokens(2, 40)
    wanted = logits(model, ids)
    _, cache = in_steps(model, ids[:, :30], [30])
    twin = copy.deepcopy(cache)
    in_steps(model, tokens(2, 10, seed=7), [10], cache)
    cache.crop(-20)
    for each, start in ((cache, 20), (twin, 30)):
        close(in_steps(model, ids[:, start:], [5, 35 - start], each)[0], wanted[:, start:])
    with pytest.raises(InputError, match="crop"):
        cache.crop(-1000)
    cache.reset()
    close(in_steps(model, ids, [40], cache)[0], wanted)


def test_rows_are_repeated_and_picked() -> None:
    model = model_of(MIXED)
    ids = tokens(3, 30)
    wanted = logits(model, ids)
    _, cache = in_steps(model, ids[:, :20], [20])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 0]))
    close(in_steps(model, ids[[2, 0], 20:], [10], cache)[0], wanted[[2, 0], 20:])


@pytest.mark.parametrize(
    "settings", (CacheQuantization(4, 16), CacheQuantization(16, 4), CacheQuantization(8, 8, sinks=4))
)
def test_begun_in_inference_mode_and_continued_outside(settings: CacheQuantization) -> None:
    """Two tokens are fewer than the sinks, so that these are still to be written to."""
    model, ids = model_of(settings), tokens(1, 9)
    wanted = logits(model, ids)
    with torch.inference_mode():
        cache = model(ids[:, :2], use_cache=True)[CACHE]
    found = []
    for place in range(2, 9):
        with torch.no_grad():
            found.append(model(ids[:, place : place + 1], **{CACHE: cache}).logits)
    close(torch.cat(found, 1), wanted[:, 2:])
