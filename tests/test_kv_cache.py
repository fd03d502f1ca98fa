"""The packed KV cache in a model: what is measured without a cache is what `generate` sees."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CACHED, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from ptq.errors import InputError
from ptq.kv import key_centers
from ptq.kv.attention import CACHE, attach, body_of
from ptq.kv.kv_cache import CacheQuantization, key_rotation
from ptq.kv.packed_cache import PackedCache
from ptq.kv.packed_layer import PackedLayer
from ptq.models.families import family_or_default

FOUR = CacheQuantization(4, 4, hadamard=key_rotation(20))
MIXED = CacheQuantization(3, 8, 0.9, 0.95, sinks=3, hadamard=key_rotation(20), centered=True)
SETTINGS = {"4": FOUR, "k3v8 sinks": MIXED, "k16v2": CacheQuantization(16, 2, sinks=2), "6": CacheQuantization(6, 6)}


def model_of(settings: CacheQuantization | None, model_type: str = "llama", **changes: Any) -> Any:
    model = tiny_model(tiny_config(model_type, **changes))
    if settings is not None:
        give_centers(model)
        attach(model, settings)
    return model


def give_centers(model: Any) -> None:
    """Random centres of keys, for settings that ask for some."""
    blocks = key_centers.blocks_of(body_of(model), model.config)
    key_centers.add_places(blocks, model.config)
    for index, block in enumerate(blocks):
        attention = block.get_submodule(key_centers.attention_name(family_or_default(model.config)))
        center = key_centers.center_of(attention)
        center.copy_(torch.randn(center.shape, generator=torch.Generator().manual_seed(index)) / 2)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def in_steps(model: Any, ids: Tensor, steps: list[int], cache: Any = None) -> tuple[Tensor, Any]:
    """Logits with a cache, so many tokens at a time."""
    parts = []
    for piece in ids.split(steps, 1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, 1), cache


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal but for rounding: for decoded tokens queries and weights are rounded to 16 bits, for prompts they are not,
    and a code of the second block may flip where the first block's sums end otherwise, or two experts change places. (A
    token too many or too few is more than ten times as much.)"""
    error = (found - wanted).norm() / wanted.norm()
    assert error < 1e-2, error


GENERATE: dict[str, Any] = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)


# --- fake = real -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", CACHED)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_cache_own_cache_and_any_steps_agree(model_type: str, name: str) -> None:
    model = model_of(SETTINGS[name], model_type)
    ids = tokens(2, 40)
    wanted = logits(model, ids)
    plain = logits(model_of(None, model_type), ids)
    assert (wanted - plain).abs().max() > 1e-3  # it does something
    for steps in ([40], [1] * 40, [10, 1, 1, 12, 8, 8], [2, 38]):
        found, cache = in_steps(model, ids, steps)
        assert isinstance(cache, PackedCache) and cache.get_seq_length() == 40
        close(found, wanted)
    with pytest.warns(UserWarning, match="a DynamicCache, holds keys and values as numbers"):
        close(in_steps(model, ids, [10, 1, 29], DynamicCache(config=model.config))[0], wanted)
    close(in_steps(model, ids, [10, 1, 29], PackedCache(model.config, SETTINGS[name], 40))[0], wanted)


def test_codes_are_the_same_bit_for_bit() -> None:
    """The codes of the first block depend on nothing before: any way of filling the cache gives the same bytes."""
    model = model_of(FOUR, num_hidden_layers=1)
    ids = tokens(2, 50)
    sides = [in_steps(model, ids, steps)[1].layers[0] for steps in ([50], [7, 1, 1, 41], [1] * 50)]
    fixed = in_steps(model, ids, [30, 20], PackedCache(model.config, FOUR, 50))[1].layers[0]
    for layer in (*sides[1:], fixed):
        for side in ("key", "value"):
            wanted = getattr(sides[0], side).tensors
            assert all(torch.equal(a, b) for a, b in zip(getattr(layer, side).tensors, wanted, strict=True))


@pytest.mark.parametrize("head_dim", (20, 80, 96, 14))
def test_rotation_alone_changes_nothing(head_dim: int) -> None:
    ids = tokens(2, 30)
    model = model_of(None, head_dim=head_dim).double()
    wanted = logits(model, ids)
    attach(model, CacheQuantization(16, 16, sinks=2, hadamard=key_rotation(head_dim)))
    torch.testing.assert_close(logits(model, ids), wanted)
    torch.testing.assert_close(in_steps(model, ids, [10, 1, 19])[0], wanted)


def test_more_bits_are_closer_and_sinks_help() -> None:
    ids = tokens(2, 60)
    plain = logits(model_of(None), ids)
    errors = [(logits(model_of(CacheQuantization(b, b)), ids) - plain).square().mean().item() for b in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    all_sinks = logits(model_of(CacheQuantization(2, 2, sinks=60)), ids)
    torch.testing.assert_close(all_sinks, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("model_type", ("mistral", "gemma3_text"))
@pytest.mark.parametrize("window", (5, 16, 64))
def test_sliding_windows(model_type: str, window: int) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    model = model_of(FOUR, model_type, sliding_window=window, **kinds)
    ids = tokens(2, 40)
    wanted = logits(model, ids)
    wide = logits(model_of(FOUR, model_type, sliding_window=128, **kinds), ids)
    assert (wanted - wide).abs().max() > 1e-3 or window == 64
    close(in_steps(model, ids, [10, 1, 1, 20, 8])[0], wanted)
    with pytest.warns(UserWarning, match="a DynamicCache, holds keys and values as numbers"):
        close(in_steps(model, ids, [10, 1, 1, 20, 8], DynamicCache(config=model.config))[0], wanted)


def test_bfloat16() -> None:
    model = tiny_model(tiny_config("llama"), torch.bfloat16)
    attach(model, MIXED)
    with pytest.raises(InputError, match="the model has no centres of keys"):
        logits(model, tokens(1, 3))
    give_centers(model)
    ids = tokens(2, 40)
    wanted = logits(model, ids).float()
    found = in_steps(model, ids, [30, 1, 1, 8])[0].float()
    assert (found - wanted).norm() / wanted.norm() < 0.05


# --- memory and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", (0, 1, 255, 256, 257, 600))
def test_growing(length: int) -> None:
    model = model_of(FOUR, max_position_embeddings=1024)
    ids = tokens(1, length + 3)
    steps = [length, 1, 1, 1] if length else [1, 1, 1]
    found, cache = in_steps(model, ids, steps)
    close(found, logits(model, ids))
    assert all(len(layer.key.tensors[0]) == -(-(length + 3) // 256) for layer in cache.layers)


@pytest.mark.parametrize("bits, share", [(4, 0.3), (6, 0.44)])
def test_memory_at_4096_tokens_as_a_share_of_bfloat16(bits: int, share: float) -> None:
    config = tiny_config("llama", head_dim=64, num_key_value_heads=2, max_position_embeddings=8192)
    for length in (4096, 4097):
        cache = PackedCache(config, CacheQuantization(bits, bits))
        x = torch.ones(1, 2, length, 64, dtype=torch.bfloat16)
        for layer in range(2):
            cache.update(x, x, layer)
        assert 0 < cache.memory() <= share * 2 * 2 * x.numel() * 2


def test_more_tokens_than_the_model_was_made_for() -> None:
    """transformers goes on, and `generate` warns: a text that is nearly done is not thrown away."""
    model = model_of(FOUR)
    assert model.config.max_position_embeddings == 128
    ids = tokens(1, 132)
    close(in_steps(model, ids, [100, 30, 1, 1])[0], logits(model, ids))


def test_a_table_of_positions_ends() -> None:
    cache = PackedCache(tiny_config("gpt2"), FOUR)
    cache.check_room(128)
    with pytest.raises(InputError, match="129 tokens of context: the model has positions for 128"):
        cache.check_room(129)


def test_too_many_tokens_are_refused() -> None:
    model = model_of(FOUR)
    with pytest.raises(InputError, match="made for 20 tokens, 21 are needed"):
        in_steps(model, tokens(1, 21), [20, 1], PackedCache(model.config, FOUR, 20))


def test_keys_and_values_are_not_given_out() -> None:
    """Another cache would be made of nothing, and the context be lost without a word."""
    model = model_of(FOUR)
    cache = model(torch.arange(5)[None], use_cache=True).past_key_values
    for taken in (lambda: DynamicCache(cache), lambda: DynamicCache([(x.keys, x.values) for x in cache.layers])):
        with pytest.raises(InputError, match="holds codes, and no keys and values"):
            taken()
    again = copy.deepcopy(cache)
    assert torch.equal(again.layers[0].read()[0], cache.layers[0].read()[0])


def test_caches_of_other_models_are_refused() -> None:
    model = model_of(FOUR)
    other = tiny_config("llama", num_key_value_heads=4)
    for cache in (
        PackedCache(other, FOUR),
        PackedCache(model.config, MIXED),
        PackedCache(model.config, replace(FOUR, key_clip=0.9)),
    ):
        for _ in range(2):  # also after one that fits
            with pytest.raises(InputError, match="made for another model"):
                in_steps(model, tokens(1, 5), [5], cache)
            in_steps(model, tokens(1, 5), [5], PackedCache(model.config, FOUR))
    before = PackedCache(model.config, FOUR)
    attach(model, MIXED)
    with pytest.raises(InputError, match="made for another model"):
        in_steps(model, tokens(1, 5), [5], before)
    attach(model, FOUR)
    _, cache = in_steps(model, tokens(2, 5), [5])
    with pytest.raises(InputError, match="holds 2 rows, the input has 1"):
        in_steps(model, tokens(1, 5), [5], cache)
    for implementation in ("sdpa", "eager"):
        plain = model_of(None)
        plain.set_attn_implementation(implementation)
        with pytest.raises(InputError, match="without a quantised KV cache"):
            in_steps(plain, tokens(1, 5), [5], PackedCache(plain.config, FOUR))
    with pytest.raises(InputError, match="leave out cache_implementation"):
        model.generate(tokens(1, 5), **GENERATE, cache_implementation="quantized")
    for output_attentions, options in ((model, {}), (model.generate, GENERATE)):
        with pytest.raises(InputError, match="output_attentions: attention over a KV cache of few bits"):
            output_attentions(tokens(1, 5), output_attentions=True, **options)
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match=rf"attention implementation was changed .*set_attn_implementation\('{own}'\)"):
        logits(model, tokens(1, 5))
    model.set_attn_implementation(own)
    logits(model, tokens(1, 5))


def test_continuous_batching_is_refused() -> None:
    model = model_of(FOUR)
    with pytest.raises(InputError, match="continuous batching has a KV cache of its own"):
        model.generate_batch([[5, 6, 7]], warmup=False)


# --- the model object ------------------------------------------------------------------------------------------------


def test_attaching_again_copying_and_saving(tmp_path: Any) -> None:
    model = model_of(None)
    ids = tokens(1, 20)
    plain = logits(model, ids)
    attach(model, FOUR)
    wanted = logits(model, ids)
    give_centers(model)
    attach(model, MIXED)
    mixed = logits(model, ids)
    assert not torch.equal(mixed, wanted)
    twin = copy.deepcopy(model)
    attach(twin, FOUR)
    assert torch.equal(logits(twin, ids), wanted) and torch.equal(logits(model, ids), mixed)
    assert isinstance(twin.generate(ids, **GENERATE, return_dict_in_generate=True).past_key_values, PackedCache)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa" and torch.equal(logits(loaded, ids), plain)


ELSEWHERE = """
import pickle, sys
from pathlib import Path
import torch
model, ids = pickle.loads(Path(sys.argv[1]).read_bytes())
with torch.no_grad():
    torch.save([model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)], sys.argv[2])
"""


def test_a_pickled_model_in_another_process(tmp_path: Path) -> None:
    model, ids = model_of(MIXED), tokens(1, 20)
    (tmp_path / "model").write_bytes(pickle.dumps((model, ids)))
    subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path / "model", tmp_path / "found"], check=True)
    found, generated = torch.load(tmp_path / "found")
    close(found, logits(model, ids))
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))


def test_a_cache_for_the_base_model_by_place_and_by_its_older_name() -> None:
    model = model_of(FOUR)
    ids = tokens(1, 12)
    by_place, by_name = (PackedCache(model.config, FOUR) for _ in range(2))
    with torch.no_grad():
        first = model.model(ids[:, :8], None, None, by_place).last_hidden_state
        again = model.model(ids[:, :8], past_key_values=by_name).last_hidden_state
        wanted = model.model(ids, use_cache=False).last_hidden_state
        assert by_place.get_seq_length() == by_name.get_seq_length() == 8
        close(first, wanted[:, :8])
        assert torch.equal(first, again)
        other = PackedCache(tiny_config("llama", num_hidden_layers=3), FOUR)
        with pytest.raises(InputError, match="was made for another model"):
            model.model(ids, **{"past_key_values": None, CACHE: other})
        assert isinstance(model.model(ids).past_key_values, PackedCache)


def test_layers_are_those_of_the_cache_class() -> None:
    cache = PackedCache(tiny_config("llama"), FOUR)
    assert all(isinstance(layer, PackedLayer) for layer in cache.layers) and not cache.is_compileable
    assert "0 tokens" in repr(cache) and cache.memory() == 0
    with pytest.raises(InputError, match="cannot be offloaded"):
        cache.layers[0].offload()


@pytest.mark.filterwarnings("ignore:ptq. this cache, a")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_gradient_is_refused_not_forgotten() -> None:
    """Without keys and values it would be wrong; forward passes alone are as without gradients, and can be copied."""
    model, ids = model_of(MIXED), tokens(1, 12)
    for options in ({"use_cache": False}, {"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
        found = model(ids, **options)
        close(found.logits, logits(model, ids))
        with pytest.raises(RuntimeError, match="no gradient through a quantised KV cache"):
            found.logits.sum().backward()
    cache = copy.deepcopy(model(ids[:, :9]).past_key_values)
    close(model(ids[:, 9:], past_key_values=cache).logits, logits(model, ids)[:, 9:])
    model.requires_grad_(False)
    model.model.layers[1].self_attn.k_proj.weight.requires_grad_()  # the queries have no gradient then
    for use_cache in (False, True):
        with pytest.raises(RuntimeError, match="no gradient through a quantised KV cache"):
            model(ids, use_cache=use_cache).logits.sum().backward()
    model, embed = model_of(SETTINGS["6"]), model.get_input_embeddings()(ids[:, :1])
    with torch.no_grad(), pytest.raises(RuntimeError, match="no forward derivatives"):
        torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (embed,), (embed,))
