"""A whole decode step under `torch.compile(fullgraph=True)`: ten steps, no new graphs, the numbers of plain PyTorch.

All steps run in one process of their own (`main`): the types in signatures, which tests check, cannot be compiled.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kv_cache import MIXED, model_of, tokens
from tiny_models import TINY, save_model, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

import ptq
from fp6.plan import Fp6Recipe
from ptq.errors import InputError
from ptq.fast import whole_model
from ptq.kv.attention import SETTINGS as SETTINGS_OF_MODEL
from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.packed_cache import PackedCache
from ptq.kv.static_cache import StaticPackedCache
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

RECIPES = {
    "quarot W4A16": QuarotRecipe(rounding="nearest", weight_bits=4),
    "quarot W4A8, 4-bit cache": QuarotRecipe(
        rounding="nearest", weight_bits=4, activation_bits=8, key_bits=4, value_bits=4
    ),
    "quip-sharp": QuipSharpRecipe(rounding="nearest"),
    "fp6": Fp6Recipe(rounding="nearest"),
}


SETTINGS = {"3 and 8 bits, sinks": MIXED, "16 and 4 bits": CacheQuantization(16, 4)}
GENERATE, WHOLE = "generate", ("ministral3", "granitemoehybrid")
"""Families whose queries are scaled behind many tokens, or turned by nothing."""


@torch.no_grad()
def run_steps(model: Any, cache: Any, other: Any, steps: int = 10) -> tuple[int, float]:
    """Decodes greedily with a compiled step over `cache`, and with a plain one over `other`: graphs, difference."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = tokens(1, 10) % model.config.vocab_size
    model(ids, past_key_values=other)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)

    def step(token: Tensor, position: Tensor, cache: Any) -> Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits

    compiled, worst = torch.compile(step, fullgraph=True, backend="eager"), 0.0
    for i in range(steps):
        position = torch.tensor([[10 + i]])
        found, wanted = compiled(token, position, cache), step(token, position, other)
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
        token = found[:, -1:].argmax(-1)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], worst


@torch.no_grad()
def difference_of_generate(model: Any) -> tuple[int, float]:
    """`generate` with a compiled forward, whose sizes are not constants, over the cache that the model makes: the
    graphs do not matter, and how many tokens are others."""
    torch._dynamo.reset()
    ids, options = tokens(1, 10), dict(max_new_tokens=6, do_sample=False)
    wanted = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, dynamic=True, backend="eager")
    return 0, float((model.generate(ids, **options) != wanted).sum())


@torch.no_grad()
def without_breaks(family: str) -> tuple[int, float]:
    """A forward of a model, as loaded models run it, in one graph: graphs, difference."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    whole_model.install(model)
    ids = tokens(1, 10) % model.config.vocab_size
    wanted = model(ids, use_cache=False).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    return 1, float((found - wanted).abs().max())


def main(folder: Path) -> None:
    """Every case; what `run_steps` gives, as JSON."""
    found = {}
    source = save_model(folder / "model", **TINY)
    for name, recipe in RECIPES.items():
        packed = folder / name.replace(" ", "_")
        ptq.quantize(source, packed, recipe, ptq.RunOptions(progress=False))
        model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
        settings = getattr(model.base_model, SETTINGS_OF_MODEL, None)
        cache, other = (StaticCache(config=model.config, max_cache_len=32) for _ in range(2))
        if settings is not None:
            cache, other = StaticPackedCache(model.config, settings, 32), PackedCache(model.config, settings)
        found[name] = run_steps(model, cache, other)
    for name, settings in SETTINGS.items():
        model = model_of(settings)
        caches = StaticPackedCache(model.config, settings, 64), PackedCache(model.config, settings)
        found[name] = run_steps(model, *caches)
    found |= {family: without_breaks(family) for family in WHOLE}
    found[GENERATE] = difference_of_generate(model_of(MIXED))
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float]]:
    folder = tmp_path_factory.mktemp("compile")
    code = f"import pathlib, test_compile; test_compile.main(pathlib.Path({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", [*RECIPES, *SETTINGS, GENERATE, *WHOLE])
def test_a_graph_of_a_decode_step_serves_all_steps(name: str, found: dict[str, tuple[int, float]]) -> None:
    graphs, difference = found[name]
    assert graphs <= 2 and difference < 1e-4  # the second one where plain steps have taught the layers something


@torch.no_grad()
def test_a_cache_of_a_fixed_size_without_a_compiler() -> None:
    model = model_of(MIXED)
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    static, plain = StaticPackedCache(model.config, MIXED, 30), PackedCache(model.config, MIXED)
    for _ in range(2):
        for begin, end in ((0, 9), (9, 10), (10, 13), (13, 24)):
            more = dict(attention_mask=mask[:, :end])
            found, wanted = (
                model(ids[:, begin:end], past_key_values=cache, **more).logits for cache in (static, plain)
            )
            seen = slice(5 - min(begin, 5), None)
            torch.testing.assert_close(found[:, seen], wanted[:, seen], atol=2e-4, rtol=2e-4)
        for cache in (static, plain):
            cache.crop(-4)
            assert cache.get_seq_length() == 20
            cache.reset()
    with pytest.raises(InputError, match="30 tokens"):
        model(tokens(2, 31), past_key_values=static)


def test_rows_that_begin_at_once_are_known_on_the_device_of_the_layer() -> None:
    """Without a mask, too: a copy from the CPU in every step could not be captured as a CUDA graph."""
    cache = StaticPackedCache(model_of(MIXED).config, MIXED, 30)
    assert cache.starts_of(2, torch.device("meta")).is_meta
    assert cache.starts is not None and cache.starts.is_meta
