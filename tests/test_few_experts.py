"""Experts of a model in one call, their routers, and what becomes of both when something changes."""

import copy
import functools
import gc
import inspect
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import SPARSE_FAMILIES, WEIGHTS_ON_INPUT, decode, save_model, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

import ptq
from fp6.minifloat import MinifloatFormat
from fp6.plan import Fp6Recipe
from ptq.fast import module_forwards
from ptq.fast.experts.few_token_experts import MOST_TOKENS
from ptq.fast.layers import decoder_layer
from ptq.fast.steps import dense_products
from ptq.hf.experts import Experts
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.ops.activations import Activation
from ptq.ops.expert_ops import ExpertRows
from ptq.ops.matmul import few_tokens_linear
from quarot.integer import IntegerFormat
from quarot.plan import QuarotRecipe
from quip_sharp.e8p_format import E8PFormat
from quip_sharp.plan import QuipSharpRecipe

INT4 = QuarotRecipe(rounding="nearest")
RECIPES = {
    "W4A16": INT4,
    "W4A8": replace(INT4, activation_bits=8),
    "W3, asymmetric": replace(INT4, weight_bits=3, symmetric=False),
    "offline": replace(INT4, online=False, activation_bits=4),
    "W6A16": Fp6Recipe(),
    "W6A8": Fp6Recipe(activation_bits=8),
    "W2A8": QuipSharpRecipe(rounding="nearest"),
    "W4A16, lattice": QuipSharpRecipe(rounding="nearest", bits=4, activation_bits=16),
}


def packed(folder: Path, model_type: str = "qwen3_moe", recipe: Any = INT4, dtype: torch.dtype = torch.float32) -> Any:
    source = save_model(folder / "source", model_type)
    ptq.quantize(source, folder / "packed", recipe, ptq.RunOptions(report=False))
    return AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=dtype)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each expert, call by call."""
    counts: list[list[int]] = []

    def experts(own: Any, self: Any, x: Any, rows: ExpertRows, *rest: Any) -> Any:
        counts.append(rows[1])
        return own(self, x, rows, *rest)

    for cls in (IntegerFormat, MinifloatFormat, E8PFormat):
        monkeypatch.setattr(cls, "experts", functools.partialmethod(functools.partial(experts, cls.experts)))
    return counts


def one_by_one(model: Any) -> Any:
    """The same model without the call."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Experts):
            module.few_tokens = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    return model


def in_layers(model: Any) -> int:
    """Blocks of experts that are a part of their layer's call."""
    held = (layer.forward.on_cpu.found for layer in model.modules() if decoder_layer.is_fast(layer))
    return sum(one is not None and one.moe is not None for one in held)


IN_LAYERS = {
    "qwen3_moe", "olmoe", "mellum", "mixtral", "flex_olmo", "qwen2_moe", "glm4_moe", "sarvam_moe", "dots1",
    "solar_open", "minimax_m2", "hy_v3", "qwen3_next", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3",
    "glm4_moe_lite", "sarvam_mla", "kimi_linear", "gpt_oss", "flint", "mistral4",
}  # fmt: skip
"""Families whose experts are a part of their layer's call."""
OTHER_ROUTERS = {"llama4_text", "cohere2_moe", "phimoe", "axk1", "axk2", "laguna"}
"""Families whose routers run by themselves, and the chosen experts in one call."""
WITH_GATES = [name for name in SPARSE_FAMILIES if (names := FAMILIES[name].experts) and names.gate]
WHOLE = ("qwen3_moe", "gpt_oss", "deepseek_v3", "cohere2_moe")


def recipes_of(model_type: str) -> list[str]:
    """Four families meet every recipe, the others one."""
    return [*RECIPES] if model_type in WHOLE else ["W4A8"]


@pytest.mark.parametrize("model_type, recipe", [(name, recipe) for name in WITH_GATES for recipe in recipes_of(name)])
def test_few_tokens(model_type: str, recipe: str, tmp_path: Path, seen: list[list[int]]) -> None:
    model = packed(tmp_path, model_type, RECIPES[recipe])
    blocks = sum(isinstance(module, Experts) for module in model.modules())
    for dtype in (torch.float32, torch.bfloat16):
        own, model = one_by_one(model.to(dtype)), model.to(dtype)
        for batch in (1, 3, 24):
            seen.clear()
            found = decode(model, batch)
            rows = batch * (2 if model_type in WEIGHTS_ON_INPUT else 1)  # rows of experts are counted there
            prompt, alone = 6 * rows <= MOST_TOKENS, blocks if model_type in OTHER_ROUTERS else 0
            assert in_layers(model) == (blocks if model_type in IN_LAYERS else 0)
            assert len(seen) == (4 + prompt) * alone
            assert all(sum(counts) == 2 * batch for counts in seen[prompt * blocks :])
            for a, b in zip(found, decode(own, batch), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    "model_type", ("qwen3_moe", "ernie4_5_moe", "cohere2_moe"), ids=("in their layer", "with their router", "alone")
)
def test_experts_that_were_changed_or_are_listened_to(model_type: str, tmp_path: Path, seen: list[list[int]]) -> None:
    model = packed(tmp_path, model_type)
    seen.clear()
    wanted = decode(model)
    calls = len(seen)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(decode(again), wanted, strict=True))
    assert len(seen) == 3 * calls and bool(seen) == (model_type == "cohere2_moe")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    down = experts.names[-1]
    linears = [expert.get_submodule(down) for expert in experts.children() if isinstance(expert, nn.ModuleDict)]
    for linear in linears:  # an expert's scale
        old = linear.get_parameter("weight_scale")
        linear.register_parameter("weight_scale", nn.Parameter(torch.zeros_like(old), requires_grad=False))
    changed = decode(model)
    assert not torch.equal(changed[-1], wanted[-1]) and torch.equal(changed[-1], decode(one_by_one(model))[-1])
    heard: list[Any] = []
    seen.clear()
    handles = [linear.register_forward_hook(lambda *_: heard.append(1)) for linear in linears]
    assert torch.equal(decode(model)[-1], changed[-1]) and len(heard) >= 8 and not seen
    for handle in handles:
        handle.remove()
    called: list[Any] = []
    for linear in linears:

        def forward(x: torch.Tensor, own: Any = linear.forward) -> torch.Tensor:
            called.append(x)
            return own(x)

        linear.forward = forward
    assert torch.equal(decode(model)[-1], changed[-1]) and len(called) >= 8 and not seen


@torch.no_grad()
def test_a_bias_that_is_gone(tmp_path: Path, seen: list[list[int]]) -> None:
    model = packed(tmp_path, "gpt_oss")
    experts = model.model.layers[1].mlp.experts
    given = torch.randn(2, 72), torch.tensor([[0, 1]] * 2), torch.rand(2, 2)
    before = experts(*given)
    assert seen
    experts.get_submodule("1").get_submodule("up_proj").bias = None
    after, single = experts(*given), one_by_one(model).model.layers[1].mlp.experts(*given)
    assert not torch.equal(after, before) and torch.equal(after, single)


@torch.no_grad()
def test_choices_of_any_kind(tmp_path: Path, seen: list[list[int]]) -> None:
    model = packed(tmp_path)
    experts, single = (
        next(module for module in each.modules() if isinstance(module, Experts)) for each in (model, one_by_one(model))
    )
    seen.clear()
    for chosen, called in (([[0, 1], [1, 0]], 1), ([[2, 2]], 0), ([[0, 1], [3, 3]], 0), ([[], []], 0), ([[3], [3]], 1)):
        index = torch.tensor(chosen, dtype=torch.long)
        x, shares = torch.randn(len(chosen), 72), torch.rand(index.shape)
        assert torch.equal(experts(x, index, shares), single(x, index, shares)), chosen
        assert len(seen) == called
        seen.clear()


@torch.no_grad()
def test_what_is_done_to_inputs_is_seen_and_old_weights_go(tmp_path: Path) -> None:
    model = packed(tmp_path, recipe=RECIPES["W4A8"])
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    x, index, shares = torch.randn(1, 72), torch.tensor([[0, 1]]), torch.rand(1, 2)
    before = experts(x, index, shares)
    linears = [module for module in experts.modules() if isinstance(module, QuantLinear)]
    for linear in linears:
        linear.online = replace(linear.online, activation=Activation(8, 0.3))
    after = experts(x, index, shares)
    assert not torch.equal(after, before)
    assert torch.equal(after, next(m for m in one_by_one(model).modules() if isinstance(m, Experts))(x, index, shares))
    old = [weakref.ref(parameter) for parameter in linears[0].parameters()]
    model.to("meta")
    gc.collect()
    assert not any(one() is not None for one in old)


def test_gradients_go_the_own_way(tmp_path: Path, seen: list[list[int]]) -> None:
    model = packed(tmp_path)
    cache = model(torch.full((1, 5), 5), use_cache=True).past_key_values
    seen.clear()
    router = next(p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")).requires_grad_()
    model(torch.tensor([[3]]), past_key_values=cache).logits.sum().backward()
    assert router.grad is not None and router.grad.abs().sum() > 0 and not seen


def test_a_bias_that_learns_goes_the_own_way(tmp_path: Path, seen: list[list[int]]) -> None:
    experts = packed(tmp_path, "gpt_oss").requires_grad_(False).model.layers[1].mlp.experts
    given = torch.randn(2, 72), torch.tensor([[0, 1]] * 2), torch.rand(2, 2)
    seen.clear()
    assert not experts(*given).requires_grad and len(seen) == 1
    for name in ("gate_proj", "up_proj", "down_proj"):
        bias = experts.get_submodule("1").get_submodule(name).bias.requires_grad_()
        experts(*given).sum().backward()
        assert bias.grad is not None and bias.grad.abs().sum() > 0
        bias.requires_grad_(False)


# --- the router -----------------------------------------------------------------------------------------------------

OWN_ROUTERS = {"hunyuan_v1_moe", "afmoe", "phimoe", "laguna"}


@pytest.mark.parametrize("model_type", [name for name in SPARSE_FAMILIES if name not in OWN_ROUTERS])
@torch.no_grad()
def test_routers_multiply_few_tokens_by_the_faster_op(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    family = FAMILIES[model_type]
    names = family.experts
    assert names is not None
    router = model.model.layers[1].get_submodule(family.module_name(names.router))
    for parameter in router.parameters():
        parameter.normal_()
    assert dense_products.is_router(router) and not any(
        dense_products.is_router(module) for module in model.modules() if type(module) is not type(router)
    )
    plain, more = copy.deepcopy(router), len(inspect.signature(type(router).forward).parameters) - 2
    module_forwards.install(model)
    calls: list[Any] = []

    def linear(*given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        return few_tokens_linear(*given)

    monkeypatch.setattr(dense_products._Functional, "linear", staticmethod(linear))
    monkeypatch.setattr(dense_products, "few_tokens_linear", linear)  # what a router that is a linear calls
    for tokens in (5, 4, 1):
        x = torch.randn(tokens, router.weight.shape[1])
        given = x, *[torch.rand(4)] * more  # a correction, that the block has
        for found, wanted in zip(router(*given), plain(*given), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert [len(x) for x, *_ in calls] == [5, 4, 1]
    router.weight = plain.weight = nn.Parameter(2 * router.weight)
    torch.testing.assert_close(router(*given)[0], plain(*given)[0], rtol=1e-5, atol=1e-5)


def test_what_is_no_router() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) * self.scale

    assert not dense_products.is_router(Two()) and not dense_products.is_router(nn.Linear(4, 3, bias=False))
    assert not dense_products.is_router(nn.Embedding(4, 3))
