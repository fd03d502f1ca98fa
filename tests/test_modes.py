"""What modes of torch leave behind: tensors that are kept for later calls are made for all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY, save_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM

import ptq
from fp6.plan import Fp6Recipe
from ptq.fast.steps import gated_mlp
from ptq.ops import hadamard
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp import e8p, tiled_ops
from quip_sharp.plan import QuipSharpRecipe

QUIET = ptq.RunOptions(progress=False)
IDS = torch.arange(3, 15)[None]
CACHES = hadamard._cached_factors, e8p.table, e8p.residual_table, tiled_ops._tile_signs, tiled_ops._tile_residual
RECIPES: dict[str, Recipe] = {
    "W4A16": QuarotRecipe(rounding="nearest", group_size=16),
    "W4A16KV4": QuarotRecipe(rounding="nearest", key_bits=4, value_bits=4, cache_sinks=2),
    "W2A16": QuipSharpRecipe(rounding="nearest", activation_bits=16),
    "FP6": Fp6Recipe(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("modes")
    source = save_model(folder / "model", **{**TINY, "intermediate_size": 96})  # with a dense factor
    for name, recipe in RECIPES.items():
        ptq.quantize(source, folder / name, recipe, QUIET)
    return {name: folder / name for name in ("model", *RECIPES)}


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    """Nothing is kept of calls before, or for those after."""
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_forward_behind_inference_mode_has_gradients(name: str, folders: dict[str, Path]) -> None:
    model = load(folders[name])
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
    for cached in CACHES:
        cached.cache_clear()
    model = load(folders[name])
    with torch.inference_mode():
        model.generate(IDS, max_new_tokens=3)
    for other in (model, load(folders[name])):
        embedded = other.get_input_embeddings()(IDS).detach().requires_grad_()
        if RECIPES[name].rounds and "KV4" not in name:  # a cache of few bits has no gradient
            logits = other(inputs_embeds=embedded, use_cache=False).logits
            logits.sum().backward()
            assert embedded.grad is not None and embedded.grad.norm() > 0
        logits = other(IDS, use_cache=False).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_that_was_loaded_in_inference_mode(name: str, folders: dict[str, Path]) -> None:
    with torch.inference_mode():
        model = load(folders[name])
    assert model(IDS, use_cache=False).logits.isfinite().all()


def test_a_model_that_was_traced_first(folders: dict[str, Path]) -> None:
    model = load(folders["W4A16"])
    with torch.no_grad():
        torch.export.export(model, (IDS,), kwargs={"use_cache": False}, strict=False)
        assert not isinstance(model(IDS).logits, FakeTensor)
        assert not isinstance(load(folders["W4A16"])(IDS).logits, FakeTensor)


@pytest.mark.parametrize("name", ["W4A16", "FP6"])
@torch.no_grad()
def test_an_activation_is_asked_where_somebody_listens_or_it_is_another(name: str, folders: dict[str, Path]) -> None:
    heard: list[torch.Size] = []

    def hook(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
        heard.append(result.shape)
        return torch.zeros_like(result)

    model = load(folders[name])
    wanted = model(IDS).logits
    mlp = model.model.layers[0].mlp
    for ids in (IDS, IDS[:, :1]):
        heard.clear()
        handle = mlp.act_fn.register_forward_hook(hook)
        found = model(ids).logits
        handle.remove()
        assert heard == [torch.Size((*ids.shape, 96))]
        assert (found - model(ids).logits).abs().max() > 1e-3
    mlp.act_fn = nn.ReLU()
    assert (model(IDS).logits - wanted).abs().max() > 1e-3
    assert gated_mlp.gate_of(mlp) is None


def test_a_trial_is_heard_by_nobody(folders: dict[str, Path]) -> None:
    mlp = AutoModelForCausalLM.from_pretrained(folders["model"]).model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda *given: pytest.fail("the trial was heard"))
    assert gated_mlp.gate_of(mlp) == gated_mlp.SILU


def test_stored_tensors_share_no_memory(folders: dict[str, Path]) -> None:
    """Who saves a model by other means leaves out what seems to be there twice."""
    for name in RECIPES:
        state = load(folders[name]).state_dict()
        tied = {"lm_head.weight"}
        places = [tensor.untyped_storage().data_ptr() for key, tensor in state.items() if key not in tied]
        assert len(places) == len(set(places)), name


@torch.no_grad()
def test_autocast_and_another_default_dtype_change_no_cache(folders: dict[str, Path]) -> None:
    model = load(folders["W4A16KV4"])
    wanted = model.generate(IDS, max_new_tokens=4, do_sample=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        cache = model(IDS, use_cache=True).past_key_values
    finally:
        torch.set_default_dtype(before)
    assert cache.layers[0].key_sinks.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == wanted.shape
