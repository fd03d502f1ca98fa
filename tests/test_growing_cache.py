"""A cache of transformers that grows in place holds the same keys and values as one that copies."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from transformers.cache_utils import DynamicCache, DynamicLayer

from ptq.errors import InputError
from ptq.fast import whole_model
from ptq.kv import growing_cache
from ptq.kv.growing_cache import CHUNK, GrowingLayer, GrowingWindowLayer, growing_layer


def draw(t: int, seed: int, b: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(b, 3, t, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(tokens: int = 5) -> tuple[DynamicCache, DynamicCache]:
    plain, growing = DynamicCache(), DynamicCache()
    for cache in (plain, growing):
        cache.update(draw(tokens, 0), draw(tokens, 1), 0)
    assert isinstance(growing_layer(growing, 0), GrowingLayer) and type(plain.layers[0]) is DynamicLayer
    return plain, growing


def layer_of(cache: DynamicCache) -> Any:
    return cache.layers[0]


def check(plain: DynamicCache, growing: DynamicCache, t: int = 1, seed: int = 2) -> None:
    b = layer_of(plain).keys.shape[0]
    found, wanted = (cache.update(draw(t, seed, b), draw(t, seed + 9, b), 0) for cache in (growing, plain))
    layer = layer_of(growing)
    other = layer_of(plain)
    for a, b in (*zip(found, wanted, strict=True), (layer.keys, other.keys), (layer.values, other.values)):
        assert torch.equal(a, b)
    assert growing.get_seq_length() == plain.get_seq_length()


@torch.no_grad()
def test_a_shallow_copy_goes_on_by_itself() -> None:
    """As of a layer of transformers, which never writes into what it has."""
    _, growing = pair()
    growing.update(draw(1, 2), draw(1, 11), 0)
    kept = copy.copy(layer_of(growing))
    before = kept.keys.clone()
    growing.update(draw(1, 3), draw(1, 12), 0)
    assert kept.get_seq_length() == 6 and layer_of(growing).get_seq_length() == 7
    keys, _ = kept.update(draw(1, 4), draw(1, 13), 0)
    assert torch.equal(keys, torch.cat([before, draw(1, 4)], 2))
    assert torch.equal(layer_of(growing).keys[:, :, 6:], draw(1, 3))


def test_queries_alone_may_want_a_gradient() -> None:
    """Which keep the keys of their own token, and not what is written there later."""
    _, growing = pair()
    q, scores = torch.randn(2, 3, 1, 8, requires_grad=True), []
    for seed in range(3):
        keys, _ = growing.update(draw(1, seed), draw(1, seed + 9), 0)
        scores.append((q @ keys.transpose(2, 3)).sum())
    torch.stack(scores).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@torch.no_grad()
def test_token_by_token_across_chunks_without_copying() -> None:
    plain, growing = pair(CHUNK - 40)
    places = set()
    for seed in range(60):
        check(plain, growing, 1 + seed % 3, seed)
        places.add(layer_of(growing).keys.data_ptr())
    assert len(places) == 2


@pytest.mark.parametrize("change", [
    lambda cache: cache.crop(-2),
    lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    lambda cache: cache.batch_repeat_interleave(2),
    lambda cache: cache.batch_select_indices(torch.tensor([-1])),
])  # fmt: skip
@torch.no_grad()
def test_what_generate_does_to_a_cache(change) -> None:
    plain, growing = pair()
    for _ in range(2):
        check(plain, growing)
        seen = layer_of(growing).keys
        before = seen.clone()
        for cache in (plain, growing):
            change(cache)
        check(plain, growing, 2)
        assert torch.equal(seen, before)  # what was given out stays
    batch = layer_of(plain).keys.shape[0]
    for cache in (plain, growing):
        cache.reset()
    found, wanted = (cache.update(draw(1, 3, batch), draw(1, 4, batch), 0) for cache in (growing, plain))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_copies_gradients_and_inference_mode() -> None:
    plain, growing = pair()
    with torch.inference_mode():
        check(plain, growing)
    with torch.no_grad():
        check(plain, growing)
        again = copy.deepcopy(growing)
        check(plain, growing)
        assert again.get_seq_length() == growing.get_seq_length() - 1
        again.update(draw(1, 50), draw(1, 51), 0)
        assert not torch.equal(layer_of(again).keys, layer_of(growing).keys)
    key = draw(1, 7).requires_grad_()
    keys, _ = growing.update(key, draw(1, 8), 0)
    keys.sum().backward()
    assert key.grad is not None and (key.grad == 1).all()


@pytest.mark.parametrize("used", [False, True], ids=["as it was given", "with room"])
@pytest.mark.parametrize("rows", [(1, 3), (3, 1), (3, 2)])
@torch.no_grad()
def test_another_number_of_rows_is_refused(rows: tuple[int, int], used: bool) -> None:
    """A row would become several, silently."""
    model: Any = tiny_model(tiny_config("llama"))
    whole_model.install(model)
    cache = model(torch.full((rows[0], 4), 5), use_cache=True).past_key_values
    if used:
        model(torch.full((rows[0], 1), 5), past_key_values=cache)
    assert type(cache.layers[0]) is (GrowingLayer if used else DynamicLayer)
    for tokens in (1, 2) if used else (1,):
        with pytest.raises(InputError, match=f"holds {rows[0]} rows, the input has {rows[1]}"):
            model(torch.full((rows[1], tokens), 5), past_key_values=cache)
    found = model(torch.full((rows[0], 1), 5), past_key_values=cache).logits  # it is as it was
    torch.testing.assert_close(found, model(torch.full((rows[0], 6 if used else 5), 5)).logits[:, -1:])


def window_pair(window: int, tokens: int) -> tuple[Any, Any]:
    config = tiny_config("qwen3", use_sliding_window=True, sliding_window=window,
                         max_window_layers=0, num_hidden_layers=1)  # fmt: skip
    caches = DynamicCache(config=config), DynamicCache(config=config)
    for cache in caches:
        cache.update(draw(tokens, 0), draw(tokens, 1), 0)
    return caches


@pytest.mark.parametrize("tokens", [5, 11, 12, 30])
@torch.no_grad()
def test_a_window_goes_through_its_room(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_cache, "CHUNK", 16)
    plain, growing = window_pair(12, tokens)
    for seed in range(40):
        layer = growing_layer(growing, 0)
        assert isinstance(layer, GrowingWindowLayer)
        if seed in (3, 20):  # one in the way of transformers, which goes on behind those in the room
            check(plain, growing, 1, seed)
        else:
            key, value = draw(1, seed), draw(1, seed + 9)
            *rooms, before = layer.reserve(key.shape, value.shape, key)
            for room, new in zip(rooms, (key, value), strict=True):
                room[:, :, before : before + 1] = new
            seen = plain.update(key, value, 0)
            assert all(torch.equal(a[:, :, : before + 1], b) for a, b in zip(rooms, seen, strict=True))
            layer.advance(1)
            assert layer._held["keys"][0].shape[2] <= 32  # it does not grow
        for name in ("keys", "values"):
            assert torch.equal(getattr(layer_of(growing), name), getattr(layer_of(plain), name))
        for cache in (plain, growing):
            assert cache.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)


@torch.no_grad()
def test_a_window_that_remembers_is_left_to_transformers() -> None:
    plain, growing = window_pair(12, 11)
    assert growing_layer(growing, 0) is not None
    for cache in (plain, growing):
        layer_of(cache).activate_past_recording()
    for seed in range(3):
        assert growing_layer(growing, 0) is None
        check(plain, growing, 1, seed)
    for cache in (plain, growing):
        cache.crop(-2)
    check(plain, growing, 2, 5)


@torch.no_grad()
def test_a_window_is_cropped_like_that_of_transformers() -> None:
    plain, growing = window_pair(12, 5)
    assert growing_layer(growing, 0) is not None
    check(plain, growing, 3, 1)
    for cache in (plain, growing):
        cache.crop(-2)
    check(plain, growing, 2, 5)


def test_other_caches_are_left_alone() -> None:
    class Mine(DynamicCache):
        pass

    _, growing = pair()
    assert growing_layer(None, 0) is None and growing_layer(Mine(), 0) is None
    assert growing_layer(growing, 1) is None and growing_layer(growing, -1) is None
