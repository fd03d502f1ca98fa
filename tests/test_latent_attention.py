"""Latent attention of decoded tokens goes over the latent vectors themselves: what the models' own code gives, which
makes keys and values of all tokens anew."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import LATENT_ATTENTION, save_model, tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import ptq
from fp6.plan import Fp6Recipe
from ptq.fast import whole_model
from ptq.fast.attention import expansion, latent_attention
from ptq.ops.latent_ops import RopeLayout
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

ROPE_LAYOUTS = dict.fromkeys(LATENT_ATTENTION, RopeLayout.PAIRS) | {
    "minicpm3": RopeLayout.HALVES, "deepseek_v2": RopeLayout.COMPLEX, "kimi_linear": RopeLayout.NONE,
}  # fmt: skip
LEFT_ALONE = ("bailing_hybrid", "axk2", "deepseek_v32", "glm_moe_dsa")
"""Families that have a gate, or choose tokens."""
RECIPES = {
    "W4A16": QuarotRecipe(rounding="nearest"),
    "W4A8": QuarotRecipe(rounding="nearest", activation_bits=8),
    "W6A16": Fp6Recipe(),
    "W2A8": QuipSharpRecipe(rounding="nearest"),
}


class Called(TorchDispatchMode):
    """How often the op runs, alone or in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = self.in_layers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.alone += func is torch.ops.ptq.latent_attention.default
        self.in_layers += len(args[0]) if func is torch.ops.ptq.decode_layers.default else 0
        return func(*args, **(kwargs or {}))


def models(family: str, **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family, **config)).eval()
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    return plain, fast


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if expansion.EXPANSION in module._modules]


@torch.no_grad()
def logits(model: Any, batch: int = 1, tokens: int = 4, prompt: int = 5) -> list[Tensor]:
    """Of tokens one by one, and of three at once, behind a prompt."""
    ids = torch.arange(3, 3 + batch * (prompt + tokens + 3)).reshape(batch, -1) % 90
    cache = DynamicCache(config=model.config)
    found = [model(ids[:, :prompt], past_key_values=cache).logits]
    for i in range(prompt, prompt + tokens):
        found.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    return [*found, model(ids[:, -3:], past_key_values=cache).logits]


@pytest.mark.parametrize("family", LATENT_ATTENTION)
def test_every_family(family: str) -> None:
    plain, fast = models(family)
    kind = ROPE_LAYOUTS[family], family == "mistral4", getattr(plain.config, "rope_interleave", None)
    assert {latent_attention.kind_of(module) for module in attentions(plain)} == {kind}
    for batch in (1, 3):
        with Called() as called:
            found = logits(fast, batch)
        assert called.alone == 5 * len(attentions(fast))
        for a, b in zip(found, logits(plain, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ids = torch.arange(4, 14).reshape(2, 5)
    for more in ({}, {"num_beams": 2}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}):
        assert torch.equal(
            *(m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **more) for m in (fast, plain))
        )


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_what_does_more_is_left_alone(family: str) -> None:
    plain, fast = models(family)
    assert attentions(plain) and not any(map(latent_attention.kind_of, attentions(plain)))
    with Called() as called:
        found = logits(fast)
    assert not called.alone
    for a, b in zip(found, logits(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_only_looks_like_it_is_left_alone() -> None:
    class Scaled(DeepseekV3Attention):
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys, values * 1.01

    config = tiny_config("deepseek_v3")
    config._attn_implementation = "sdpa"
    assert latent_attention.kind_of(DeepseekV3Attention(config, 0)) == (RopeLayout.PAIRS, False, True)
    assert latent_attention.kind_of(Scaled(config, 0)) is None
    assert latent_attention.kind_of(nn.Linear(3, 3)) is None


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A packed model by family and recipe."""
    folder, made = tmp_path_factory.mktemp("packed"), set[str]()

    def load(family: str, recipe: str, dtype: torch.dtype = torch.float32) -> Any:
        name = f"{family} {recipe}"
        if name not in made:
            source = save_model(folder / f"{family} source {recipe}", family)
            ptq.quantize(source, folder / name, RECIPES[recipe], ptq.RunOptions(report=False))
            made.add(name)
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype)

    return load


def own_code(model: Any) -> Any:
    """The same packed model whose attention is transformers' own."""
    model = copy.deepcopy(model)
    for module in model.modules():
        name = type(module).__name__
        if expansion.EXPANSION in module._modules or name.endswith(("DecoderLayer", "Model")):
            vars(module).pop("forward", None)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ("deepseek_v2", "deepseek_v3", "minicpm3"))
def test_packed(family: str, recipe: str, packed: Any) -> None:
    model = packed(family, recipe)
    for module in attentions(model):  # what `kv_b_proj` rounds in prompts is not rounded in decoded tokens
        module.kv_b_proj.online = replace(module.kv_b_proj.online, activation=None)
    with Called() as called:
        found = logits(model, 2)
    calls = (called.alone, called.in_layers)
    assert calls == ((10, 0) if family == "minicpm3" else (0, 10))  # whose residuals are scaled in its layer
    for a, b in zip(found, logits(own_code(model), 2), strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dense_model(recipe: str, dtype: torch.dtype, packed: Any) -> None:
    """Up to rounding; other integers behind those of latent vectors are rounded in another way, too."""
    model = packed("youtu", recipe, dtype)
    for a, b in zip(logits(model, 2), logits(own_code(model), 2), strict=True):
        tolerance = 5e-2 if recipe.endswith("A8") else 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert (a - b).float().norm() < tolerance * b.float().norm()


@pytest.mark.parametrize("how", ("in place", "other memory", "another parameter", "another module", "sign"))
def test_a_matrix_that_was_changed(how: str, packed: Any) -> None:
    model = packed("deepseek_v3", "W2A8" if how == "sign" else "W4A16")
    was = logits(model)[-1]
    for module in attentions(model):
        linear = module.kv_b_proj
        name = "weight_sv" if how == "sign" else "weight_scale"
        x = linear.get_parameter(name)
        new = x ^ -32768 if how == "sign" else x.flip(0)
        if how in ("in place", "sign"):
            x.copy_(new)
        elif how == "other memory":
            x.data = new
        elif how == "another parameter":
            linear.register_parameter(name, nn.Parameter(new, requires_grad=False))
        else:
            module.kv_b_proj = copy.deepcopy(linear)
            module.kv_b_proj.get_parameter(name).copy_(new)
    with Called() as called:
        found = logits(model)[-1]
    assert called.in_layers and not torch.allclose(found, was, atol=1e-4)
    tolerance = 3e-2 if how == "sign" else 1e-5
    wanted = logits(own_code(model))[-1]
    assert (found - wanted).norm() < tolerance * wanted.norm()


def test_the_matrix_is_kept_once_and_goes_with_the_module(packed: Any) -> None:
    model = packed("deepseek_v3", "W4A16")
    logits(model)
    module = attentions(model)[0]
    known = expansion.kept_matrix(module, torch.float32)
    assert known is not None and expansion.kept_matrix(module, torch.float32) is known
    vars(model.model.layers[0])["forward"].on_cpu.forget()
    logits(model)
    assert expansion.kept_matrix(module, torch.float32) is known
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(logits(again), logits(model), strict=True))
    numbers = weakref.ref(known.numbers.keys)
    del known, module, model, again
    gc.collect()
    assert numbers() is None


def test_who_listens_to_the_matrix_is_called(packed: Any) -> None:
    model, heard = packed("deepseek_v3", "W4A16"), []
    wanted = logits(model)
    handles = [m.kv_b_proj.register_forward_hook(lambda *_: heard.append(1)) for m in attentions(model)]
    with Called() as called:
        found = logits(model)
    assert not called.alone and not called.in_layers and len(heard) == 6 * len(attentions(model))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()
    for module in attentions(model):
        module.kv_b_proj.forward = lambda x, own=module.kv_b_proj.forward: own(x) * 2
    found = logits(model)
    assert not torch.allclose(found[-1], wanted[-1], atol=1e-4)


def test_gradients_other_dtypes_and_training() -> None:
    plain, fast = models("deepseek_v3")
    cache = [DynamicCache(config=m.config) for m in (plain, fast)]
    ids = torch.arange(4, 10)[None]
    with torch.no_grad():
        for m, c in zip((plain, fast), cache, strict=True):
            m(ids, past_key_values=c)
    with Called() as called:
        a, b = (m(ids[:, :1], past_key_values=c).logits for m, c in zip((plain, fast), cache, strict=True))
    assert not called.alone and b.requires_grad
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with Called() as called:
        logits(fast.half())
    assert not called.alone
    with Called() as called:
        logits(fast.float().train())
    assert not called.alone
    with Called() as called, torch.autocast("cpu", torch.bfloat16):
        logits(fast.eval())
    assert not called.alone
    with Called() as called:
        logits(fast)
    assert called.alone


def test_what_is_cached_is_what_the_own_code_caches() -> None:
    for family in LATENT_ATTENTION:
        held = []
        for model in models(family):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                for tokens in ([4, 9, 5], [7], [8]):
                    model(torch.tensor([tokens]), past_key_values=cache)
            held.append([(layer.keys, layer.values) for layer in cache.layers if hasattr(layer, "values")])
        assert held[0]
        for a, b in zip(*held, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ("youtu", "deepseek_v3"))
def test_configs_of_one_process_may_differ(family: str) -> None:
    """How numbers are paired is asked of the config with every call."""
    for interleaved in (True, False, True):
        plain, fast = models(family, rope_interleave=interleaved)
        with torch.no_grad():
            for model in (plain, fast):
                for module in attentions(model):
                    module.kv_b_proj.weight.mul_(20)
        for now in (interleaved, not interleaved):
            plain.config.rope_interleave = fast.config.rope_interleave = now
            for a, b in zip(logits(fast), logits(plain), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ("plain", "W4A16"))
def test_writes_that_leave_no_trace_are_seen_behind_the_next_prompt(recipe: str, packed: Any) -> None:
    fast = models("deepseek_v3")[1] if recipe == "plain" else packed("deepseek_v3", recipe)
    was = logits(fast)[-1]
    for module in attentions(fast):
        x = module.kv_b_proj.weight if recipe == "plain" else module.kv_b_proj.weight_scale
        x.data.copy_(x.data.flip(0))
    found = logits(fast)
    assert not torch.allclose(found[-1], was, atol=1e-4)
    for a, b in zip(found, logits(own_code(fast)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        plain, fast = models("deepseek_v3")
        for _ in range(2):
            for a, b in zip(logits(fast), logits(plain), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            for model in (plain, fast):
                for module in attentions(model):
                    module.kv_b_proj.weight.mul_(3)


def test_another_dtype_is_whole_layers_again(packed: Any) -> None:
    model = packed("deepseek_v3", "W4A16")
    logits(model)
    model.bfloat16()
    with Called() as called:
        logits(model)
    assert called.in_layers == 5 * len(attentions(model)) and not called.alone
    _, plain = models("deepseek_v3")
    logits(plain)
    assert all(module in expansion._HELD for module in attentions(plain))
    logits(plain.half())
    assert not any(module in expansion._HELD for module in attentions(plain))


def test_positions_that_scale_queries() -> None:
    """Behind the length that the config names, and of rows at different places."""
    plain, fast = models("mistral4")
    for places in ([3, 3], [40, 41], [15, 17], [500, 3]):
        found = []
        for model in (plain, fast):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(torch.arange(4, 14).reshape(2, 5), past_key_values=cache)
                given = dict(position_ids=torch.tensor(places)[:, None], past_key_values=cache)
                found.append(model(torch.tensor([[7], [9]]), **given).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
