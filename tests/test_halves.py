"""Models whose blocks are one thing alone (Nemotron-H): attention, a state space, an MLP, or experts without gates,
which may work on a latent space."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from safetensors.torch import load_file, save_file
from test_expert_runs import METHODS
from tiny_models import apart, save_model, separated, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from ptq.files.checkpoint import Checkpoint
from ptq.hf import fused
from ptq.hf.experts import Experts
from ptq.hf.meta_model import transformers_config
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.pipeline import pipeline
from ptq.planning.plan import Plan
from quarot.plan import QuarotRecipe

IDS = torch.arange(3, 60).reshape(3, 19)
FAMILY = FAMILIES["nemotron_h"]
NAMES = FAMILY.experts
assert NAMES is not None
WITHOUT_EXPERTS = dict(layer_types=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"])
VARIANTS: dict[str, dict[str, Any]] = {
    "latent": {},
    "experts on hidden states": dict(moe_latent_size=None),
    "no experts": WITHOUT_EXPERTS,
}
pytestmark = pytest.mark.usefixtures("fast")


def plan(folder: Path, recipe: QuarotRecipe | None = None) -> Plan:
    return pipeline.plan(str(folder), recipe or QuarotRecipe(rounding="nearest")).plan


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_through_the_command(method: str, variant: str, calibration_text: Path, tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model", "nemotron_h", **VARIANTS[variant]), tmp_path / "out"
    command, *options = METHODS[method]
    text = ("--calibration", calibration_text, "--samples", 8, "--sequence-length", 64)
    result = quantize(command, model, out, *options, *text)
    assert result.exit_code == 0, result.output
    packed, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found, wanted = packed(IDS).logits, load(model)(IDS).logits
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.6
    linears = [module for module in packed.model.layers.modules() if isinstance(module, (torch.nn.Linear, QuantLinear))]
    assert all(isinstance(linear, QuantLinear) for linear in linears)
    if variant != "no experts":
        experts = packed.model.layers[1].mixer.experts
        assert isinstance(experts, Experts) and experts.names == ("up_proj", "down_proj")
        assert len([module for module in experts.modules() if isinstance(module, QuantLinear)]) == 8
    generated = packed.generate(IDS[:1, :7], max_new_tokens=5, do_sample=False)
    for length in range(7, 12):  # greedy over full forwards
        assert torch.equal(packed(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])
    assert quantize("verify", out, "--against", model).exit_code == 0
    packed.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again(IDS).logits, packed(IDS).logits)


@pytest.mark.parametrize("shared", [136, 0])
@torch.no_grad()
def test_granite_with_experts_beside_state_spaces(shared: int, calibration_text: Path, tmp_path: Path) -> None:
    """Granite 4: beside the experts an MLP with names of its own, whose gate and up are fused; it may be missing."""
    if not shared:
        model = save_model(tmp_path / "model", "granitemoeshared", shared_intermediate_size=0)
    else:
        model = save_model(tmp_path / "model", "granitemoehybrid", num_local_experts=4, shared_intermediate_size=shared)
    out, original = tmp_path / "out", load(model)
    options = ("--samples", 8, "--sequence-length", 64, "--group-size", 8, "--activation-bits", 8)
    result = quantize("quarot", model, out, "--calibration", calibration_text, *options)
    assert result.exit_code == 0, result.output
    packed = load(out)
    found, wanted = packed(IDS).logits, original(IDS).logits
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.6
    roles = {linear.name.partition(".1.")[2]: linear for linear in plan(model).block(1)}
    assert ("shared_mlp.input_linear" in roles) == bool(shared)
    if shared:
        both = roles["shared_mlp.input_linear"]
        assert (both.role, both.n, len(both.parts)) == ("gate+up", 2 * shared, 2)
        assert roles["shared_mlp.output_linear"].input.signs == "R4.1.shared"
    assert roles["block_sparse_moe.experts.3.down_proj"].input.signs == "R4.1"
    assert isinstance(packed.model.layers[1].block_sparse_moe.experts, Experts)
    assert quantize("verify", out, "--against", model).exit_code == 0


@pytest.mark.parametrize("chosen", [[[0, 1], [1, 3], [3, 0], [3, 1], [1, 0]], [[2, 0]]], ids=str)
@torch.no_grad()
def test_experts_are_those_of_transformers(chosen: list[list[int]]) -> None:
    config = tiny_config("nemotron_h")
    models = [AutoModelForCausalLM.from_config(config, experts_implementation="eager") for _ in range(2)]
    for model in models:
        model.load_state_dict(tiny_model(config).state_dict())
    assert NAMES is not None
    separated(models[1], NAMES.linears)
    theirs, ours = (model.double().model.layers[1].mixer.experts for model in models)
    assert isinstance(ours, Experts) and not isinstance(theirs, Experts)
    x, index = torch.randn(len(chosen), config.moe_latent_size).double(), torch.tensor(chosen)
    shares = torch.rand(index.shape).double()
    torch.testing.assert_close(ours(x, index, shares), theirs(x, index, shares))


@torch.no_grad()
def test_what_happens_to_every_part(tmp_path: Path) -> None:
    """The residual stream is turned outside the latent space, not in it."""
    folder = save_model(tmp_path / "model", "nemotron_h")
    for index, roles in enumerate((
        {"mixer_input", "mixer_output"},
        {"router", "latent_input", "up", "down", "latent_output"},
        {"query", "key", "value", "attention_output"},
        {"up", "down"},
        {"router", "latent_input", "up", "down", "latent_output"},
    )):  # fmt: skip
        block = list(plan(folder).block(index))
        assert {linear.role for linear in block} == roles
        for linear in block:
            inside = linear.expert is not None
            reads = linear.role in ("mixer_input", "router", "latent_input", "query", "key", "value", "up")
            writes = linear.role in ("mixer_output", "attention_output", "latent_output", "down")
            assert (linear.input is not None and linear.input.signs == "R1") == (reads and not inside), linear.name
            assert (linear.norm == f"model.layers.{index}.norm.weight") == (reads and not inside), linear.name
            assert (linear.output is not None and linear.output.signs == "R1") == (writes and not inside), linear.name
            turned = linear.role in ("down", "mixer_output")
            assert (linear.online is not None and linear.online.signs is None) == turned, linear.name
            assert (linear.format is None) == (linear.role == "router")


@torch.no_grad()
def test_files_with_other_names(tmp_path: Path) -> None:
    """As published; as transformers calls tensors, experts in one: the same result, to the byte."""
    folder = save_model(tmp_path / "published", "nemotron_h")
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith(("backbone.", "lm_head.")) for name in tensors)
    again = save_model(tmp_path / "transformers", "nemotron_h")
    state = tiny_model(tiny_config("nemotron_h")).state_dict()
    assert "model.layers.1.mixer.experts.up_proj" in state
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, again / "model.safetensors")
    for source in (folder, again):
        assert quantize("fp6", source, tmp_path / f"{source.name} packed").exit_code == 0
    found = [(tmp_path / f"{source.name} packed" / "model.safetensors").read_bytes() for source in (folder, again)]
    assert found[0] == found[1]
    both = {**tensors, "model.norm_f.weight": tensors["backbone.norm_f.weight"].clone()}
    save_file(both, folder / "model.safetensors")
    check_refused(quantize("fp6", folder, tmp_path / "out"), "tensor 'backbone.norm_f")


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "phimoe")
    one = "model.layers.1.block_sparse_moe.{}.weight"
    edit_tensors(lambda t: t.update({one.format("router"): t.pop(one.format("gate")).clone()}))(folder)
    assert quantize("fp6", folder, tmp_path / "out").exit_code == 0  # the name in the model, but for the last step
    edit_tensors(lambda t: t.update({"model.layers.1.mlp.router.weight": t[one.format("router")].clone()}))(folder)
    check_refused(quantize("fp6", folder, tmp_path / "other"), "are two names of one tensor")


def test_more_experts_in_one_tensor_than_there_are_tensors(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gpt_oss", num_hidden_layers=1, num_experts=30)
    assert len(load_file(folder / "model.safetensors")) < 30
    assert transformers_config(Checkpoint.open(folder)).num_local_experts == 30


def test_taken_apart_by_hand() -> None:
    assert NAMES is not None
    up, down = torch.randn(3, 6, 4), torch.randn(3, 4, 6)
    owner = "model.layers.1.mixer.experts"
    found = apart({f"{owner}.up_proj": up, f"{owner}.down_proj": down}, NAMES)
    assert len(found) == 6 and torch.equal(found[f"{owner}.2.up_proj.weight"], up[2])
    assert torch.equal(found[f"{owner}.0.down_proj.weight"], down[0])
    assert fused.is_fused_parameter(f"{owner}.up_proj") and not fused.is_fused_parameter(f"{owner}.0.up_proj.weight")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (edit_config(moe_latent_size=24), "fc1_latent_proj.weight' has shape [40, 72], but config.json says [24, 72]"),
        (edit_config(moe_latent_size=0), "moe_latent_size must be a positive whole number, found 0"),
        (edit_config(moe_shared_expert_intermediate_size=8), "but config.json says [8, 72]"),
        (edit_config(n_routed_experts=10**7), "num_local_experts 10000000, but the checkpoint has"),
        (edit_config(layers_block_type=["mlp"] * 10**4), "num_hidden_layers 10000, but the checkpoint has"),
        (edit_config(chunk_size=20_000), "chunk_size must be 4096 at most, found 20000"),
        (edit_config(n_routed_experts=6), "gate.weight' has shape [4, 72], but config.json says [6, 72]"),
        (
            edit_tensors(lambda tensors: tensors.pop("backbone.layers.1.mixer.experts.2.up_proj.weight")),
            "no tensor 'model.layers.1.mixer.experts.2.up_proj.weight'",
        ),
        (
            edit_tensors(lambda tensors: tensors.pop("backbone.layers.3.norm.weight")),
            "no tensor 'model.layers.3.norm.weight'",
        ),
        (
            edit_config(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "moe"]),
            "no tensor 'model.layers.1.mixer.up_proj.weight'",
        ),
    ],
)
def test_refused(damage: Any, sentence: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "nemotron_h")
    damage(folder)
    check_refused(quantize("fp6", folder, tmp_path / "out"), sentence)
    assert not (tmp_path / "out").exists()


def test_a_pattern_in_the_place_of_a_list(tmp_path: Path) -> None:
    """As the published configs have it, with dense models that speak of experts all the same."""
    folder = save_model(tmp_path / "model", "nemotron_h", **WITHOUT_EXPERTS)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("layers_block_type", None)
    config.pop("layer_types", None)
    path.write_text(json.dumps({**config, "hybrid_override_pattern": "M-M*-", "n_routed_experts": 8}))
    assert [linear.role for linear in plan(folder).block(1)] == ["up", "down"]
    assert quantize("fp6", folder, tmp_path / "out").exit_code == 0
    check_refused(quantize("quarot", folder, tmp_path / "other", "--kv-bits", 4, "--rounding", "nearest"), "--kv-bits")
