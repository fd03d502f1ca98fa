"""QuIP#'s plan: transforms on both sides of every linear leave every family's function as it was, through packing,
saving and loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, quantize
from safetensors.torch import load_file
from test_families import IDS, InFloat64, exact, relative, rewritten
from tiny_models import DISTINCT, TINY, save_model, stored, tiny_config, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ptq
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, loaded_signs
from ptq.models.families import FAMILIES, family_or_default
from ptq.models.model_shape import shape_of
from ptq.ops import hadamard
from ptq.pipeline import pipeline, rewrite
from ptq.planning.plan import LinearPlan, Plan, check_claims
from quip_sharp.plan import QuipSharpRecipe, plan

NEAREST = QuipSharpRecipe(rounding="nearest")
QUIET = ptq.RunOptions(progress=False, report=False)


def make(config: Any, recipe: QuipSharpRecipe = NEAREST) -> Plan:
    return plan(shape_of(config), FAMILIES[config.model_type], recipe, stored(tiny_model(config)))


def add_online(model: nn.Module, made: Plan) -> None:
    """Both transforms of every linear, as hooks around a plain one."""
    signs = {name: rewrite.draw_signs(name, length, 0) for name, length in made.signs.items()}

    def wrap(module: nn.Module, linear: LinearPlan) -> None:
        assert linear.online is not None and linear.online_output is not None
        into, out = linear.online, linear.online_output
        su, sv = rewrite.signs_of(into, signs), rewrite.signs_of(out, signs)

        def after(module: nn.Module, _: Any, y: Tensor) -> Tensor:
            bias = 0 if module.bias is None else module.bias
            return hadamard.apply(y - bias, sv, out.order, transpose=True) + bias

        module.register_forward_pre_hook(lambda _, inputs: (hadamard.apply(inputs[0], su, into.order),))
        module.register_forward_hook(after)

    for linear in made.packed_linears():
        wrap(model.get_submodule(family_or_default(model.config).module_name(linear.name)), linear)


@pytest.mark.parametrize("model_type", DISTINCT)
@torch.no_grad()
def test_transforms_keep_the_function_in_float64(model_type: str) -> None:
    config = tiny_config(model_type)
    model, family = tiny_model(config), FAMILIES[model_type]
    source, made = stored(model), make(config)
    check_claims(made, {name: tuple(tensor.shape) for name, tensor in source.items()})
    embedding = f"{family.embedding}.weight"
    original = exact(config, {**model.state_dict(), "lm_head.weight": source[embedding]})
    tensors = rewritten(made, source)
    assert all(relative(tensors[linear.source], source[linear.source]) > 0.5 for linear in made.packed_linears())
    turned = exact(config, {"lm_head.weight": tensors[embedding], **tensors}, family)
    add_online(turned, made)
    with InFloat64():
        assert relative(turned(IDS).logits, original(IDS).logits) < 1e-9


@pytest.mark.parametrize("model_type", DISTINCT)
@torch.no_grad()
def test_every_family_is_packed_and_loaded(model_type: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    result = ptq.quantize(model, tmp_path / "out", QuipSharpRecipe(rounding="nearest", bits=4), QUIET)
    assert result.rotation_error < 1e-5
    original, packed = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "out"))
    assert 1e-4 < relative(packed(IDS).logits, original(IDS).logits) < 0.5
    assert packed.config.tie_word_embeddings  # nothing has to be untied: the residual stream is not rotated
    packed.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_linears_that_share_an_input_share_its_signs(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    ptq.quantize(model, tmp_path / "out", NEAREST, QUIET)
    attention = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[1].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert all(isinstance(layer, QuantLinear) for layer in layers)
    su = [loaded_signs(layer.get_parameter(INPUT_SIGNS)) for layer in layers]
    assert torch.equal(su[0], su[1]) and torch.equal(su[0], su[2]) and set(su[0].tolist()) == {1.0, -1.0}
    k, v = (loaded_signs(layer.get_parameter(OUTPUT_SIGNS)) for layer in layers[1:])
    assert not torch.equal(k, v)


def test_rows_of_any_size_are_rounded_as_well(tmp_path: Path) -> None:
    """Rows are made of one size in front of the transform, which spreads the error over all of them."""
    model = save_model(tmp_path / "model", **TINY)
    name = "model.layers.1.mlp.up_proj"
    edit_tensors(lambda content: content[f"{name}.weight"].mul_(torch.logspace(-2, 1, 24)[:, None]))(model)
    recipe = QuipSharpRecipe(rounding="nearest", bits=4, activation_bits=16)
    ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    w = load_file(model / "model.safetensors")[f"{name}.weight"]
    layer = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_submodule(name)
    with torch.no_grad():
        found = (layer(torch.eye(16)) - layer(torch.zeros(16))).T
    assert ((found - w).norm(dim=1) / w.norm(dim=1)).max() < 0.25


def test_a_skipped_linear_stays_and_the_others_do_not_use_its_statistics() -> None:
    made = make(tiny_config("llama"), QuipSharpRecipe(rounding="nearest", skip=("*.q_proj",)))
    found = {linear.role: linear for linear in made.block(0)}
    query, key, value = (found[role] for role in ("query", "key", "value"))
    assert (query.format, query.online, query.statistics) == (None, None, None)
    assert key.statistics == value.statistics == key.name
    assert key.input == value.input


def test_no_rotate_leaves_the_weights_where_they_are() -> None:
    made = make(tiny_config("llama"), QuipSharpRecipe(rounding="nearest", rotate=False))
    assert not made.signs and not any(linear.input or linear.output for linear in made.linears)


@pytest.mark.parametrize("wrong", [dict(bits=5), dict(activation_bits=4)])
def test_recipes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ptq.InputError):
        QuipSharpRecipe(**wrong)


def test_the_plan_needs_no_weight(tmp_path: Path) -> None:
    made = pipeline.plan(str(save_model(tmp_path / "model", "llama")), NEAREST).plan
    linears = list(made.packed_linears())
    assert len(made.signs) == len(linears) * 11 // 7  # one of an output each, four inputs to seven linears


def test_nothing_left_to_train_is_refused(tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model", **TINY), tmp_path / "text.txt"
    text.touch()
    options = ("--finetune", "full", "--skip", "*.layers.*", "--calibration", text, "--plan")
    check_refused(quantize("quip-sharp", model, tmp_path / "out", *options), "--skip or 16 bits leave none")
