"""Experts as linears of their own: against transformers' own modules, and whole runs of models that have some."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    DISTINCT,
    TINY,
    check_refused,
    edit_config,
    edit_tensors,
    quantize,
    save_model,
    separated,
    tiny_config,
)
from conftest import tiny_model as random_model
from safetensors.torch import load_file
from test_engine import finish, start
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import ptq
from ptq import console_tables, experts, hessian, pipeline, preflight, rewrite, rounding
from ptq.experts import Experts
from ptq.families import FAMILIES
from ptq.hf import PtqConfig
from ptq.job import Job
from ptq.linear import QuantLinear
from ptq.model_shape import shape_of
from ptq.writer import LOG
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

IDS = torch.arange(3, 60).reshape(3, 19)
QUIET = ptq.RunOptions(progress=False)
SPARSE = {name: FAMILIES[name] for name in DISTINCT if FAMILIES[name].experts}
SMALL = {**TINY, "moe_intermediate_size": 24}
pytestmark = pytest.mark.usefixtures("fast")


def of_text(text: Path, **changes: Any) -> QuarotRecipe:
    return QuarotRecipe(**{**dict(calibration=str(text), samples=8, sequence_length=64, group_size=8), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOG}


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return ((found - wanted).norm() / wanted.norm()).item() < tolerance


# --- the module -----------------------------------------------------------------------------------------------------


def pair(model_type: str, dtype: torch.dtype) -> tuple[Any, Experts]:
    """The fused experts of a model, and ours with the same weights."""
    config = tiny_config(model_type)
    models = [AutoModelForCausalLM.from_config(config, experts_implementation="eager") for _ in range(2)]
    for model in models:
        model.load_state_dict(random_model(config).state_dict())
    family = FAMILIES[model_type]
    assert family.experts is not None
    separated(models[1], family.experts.linears)
    first, second = (model.to(dtype).model.layers[1].mlp.experts for model in models)
    assert isinstance(second, Experts) and not isinstance(first, Experts)
    return first, second


@pytest.mark.parametrize("chosen", [[[0, 1], [1, 3], [3, 0], [3, 1], [1, 0]], [[2, 0]], [[0, 1]] * 9], ids=str)
@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_experts_are_those_of_transformers(model_type: str, chosen: list[list[int]]) -> None:
    """Also those that no token wants."""
    generator, index = torch.Generator().manual_seed(0), torch.tensor(chosen)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        fused, ours = pair(model_type, dtype)
        x = torch.randn(len(index), fused.hidden_dim, generator=generator).to(dtype)
        shares = torch.rand(index.shape, generator=generator).to(dtype)
        found = ours(x, index, shares)
        assert found.dtype == dtype and close(found.double(), fused(x, index, shares).double(), tolerance)


@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_whole_models_in_float64(model_type: str) -> None:
    """Three rows at once; and a padded one."""
    config, family = tiny_config(model_type), FAMILIES[model_type]
    models = [AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval() for _ in range(2)]
    for model in models:
        model.load_state_dict(random_model(config).state_dict())
        model.double()
    assert family.experts is not None
    separated(models[1], family.experts.linears)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    for options in ({}, {"attention_mask": mask}):
        found, wanted = (model(IDS, **options).logits for model in reversed(models))
        assert close(found, wanted, 1e-6)  # norms and routers are float32


def test_gradients_pass() -> None:
    fused, ours = pair("qwen3_moe", torch.float64)
    x, index = torch.randn(5, 72).double(), torch.tensor([[0, 1], [1, 3], [3, 0], [3, 1], [1, 0]])
    shares = torch.rand(5, 2).double()
    gradients = []
    for module in (fused, ours):
        seen = [tensor.clone().requires_grad_() for tensor in (x, shares)]
        module(seen[0], index, seen[1]).square().sum().backward()
        gradients.append([tensor.grad for tensor in seen])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


class Clamped(nn.Module):
    """Fused experts with something more in them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 8, 4)), nn.Parameter(torch.ones(2, 4, 4))
        self.act_fn, self.num_experts = nn.SiLU(), 2

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in range(self.num_experts):
            tokens, places = torch.where(chosen == number)
            gate, up = (x[tokens] @ self.gate_up_proj[number].T).chunk(2, dim=-1)
            product = (self.act_fn(gate) * up.clamp(-1, 1)) @ self.down_proj[number].T
            y.index_add_(0, tokens, product * shares[tokens, places, None])
        return y


def test_experts_of_another_kind_are_refused() -> None:
    with pytest.raises(ptq.InputError, match="1: Clamped are experts of a kind that ptq does not know"):
        experts.separate(nn.Sequential(nn.Linear(2, 2), Clamped()), experts.NAMES[0])


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, [1]),
        (dict(mlp_only_layers=[]), [0, 1]),
        (dict(mlp_only_layers=[], decoder_sparse_step=2), [1]),
        (dict(mlp_only_layers=[1], decoder_sparse_step=2), []),
        (dict(mlp_only_layers=[0, 1]), []),
    ],
    ids=str,
)
@torch.no_grad()
def test_blocks_with_and_without_experts(changes: dict[str, Any], blocks: list[int], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", **changes)
    target = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest"))
    found = {int(linear.name.split(".")[2]) for linear in target.plan.linears if linear.expert is not None}
    assert sorted(found) == blocks == [i for i in range(2) if shape_of(target.config).has_experts(i)]
    job = Job(recipe=QuarotRecipe(), signs={}, device=torch.device("cpu"), **vars(target))
    hidden = job.embed(job.tensor(job.embedding.source), IDS)
    for index in range(2):
        hidden = job.original_block(index).run(hidden)
    wanted = load(folder).model(IDS, output_hidden_states=True)
    job_norm = job.logits(job.tensor(job.head.source), job.tensor(job.final_norm), hidden)
    assert close(torch.cat(job_norm), load(folder).lm_head(wanted.last_hidden_state), 1e-5)


def test_one_row_for_all_experts_and_a_share_of_the_tokens(tmp_path: Path, calibration_text: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[])
    target = pipeline.plan(str(folder), of_text(calibration_text))
    table = console_tables.plan_table(target.plan)
    assert table.count(".experts.") == 3
    row = next(line for line in table.splitlines() if "model.layers.*.mlp.experts.*.down_proj" in line)
    assert " 0-1 " in row and "R4.*" in row
    shape = shape_of(target.config)
    rows = torch.zeros(10, 70, dtype=torch.long)
    said = list(preflight.warnings(target.plan, shape, of_text(calibration_text), rows))
    assert said == ["warning: about 350 calibration tokens an expert for layers of up to 72 input channels are few; "
                    "10 per channel give steady statistics: raise --samples"]  # fmt: skip
    assert not list(preflight.warnings(target.plan, shape, of_text(calibration_text), torch.zeros(30, 70).long()))


def test_the_shared_mlp_is_a_linear_like_any_other(tmp_path: Path) -> None:
    """With a rotation of its own width; what weighs it stays as it is stored."""
    folder = save_model(tmp_path / "model", "qwen2_moe")
    plan = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).plan
    shared = {x.role: x for x in plan.block(1) if "shared_expert." in x.name}
    assert shared.keys() == {"gate", "up", "down"} and all(x.format is not None for x in shared.values())
    down, (gate,) = shared["down"], [x for x in plan.block(1) if x.role == "shared_gate"]
    assert down.input is not None and down.input.signs == "R4.1.shared" and plan.signs["R4.1.shared"] == down.k == 56
    assert plan.signs["R4.1"] == 40 and plan.signs["R4.0"] == 152
    assert gate.format is None and gate.norm == shared["up"].norm and gate.input == shared["up"].input
    assert shared["up"].statistics == shared["gate"].name != down.statistics


def test_blocks_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "glm4_moe")
    edit_tensors(lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(3, 3)}))(folder)
    said = quantize("quarot", folder, tmp_path / "out", "--rounding", "nearest", "--plan")
    assert said.exit_code == 0 and "1 tensors for multi-token prediction are left out" in said.output
    assert quantize("rotate", folder, tmp_path / "rotated").exit_code == 0
    assert json.loads((tmp_path / "rotated" / "config.json").read_bytes())["num_nextn_predict_layers"] == 0
    edit_config(num_nextn_predict_layers=0)(folder)
    edit_tensors(lambda t: t.update({"mtp.layers.0.norm.weight": torch.ones(3)}))(folder)
    check_refused(quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest"), "claims tensor")


def test_prediction_blocks_in_a_place_of_their_own_are_left_out(tmp_path: Path) -> None:
    """The config need not speak of them."""
    folder = save_model(tmp_path / "model", "mellum")
    edit_tensors(lambda t: t.update({"mtp.layers.0.norm.weight": torch.ones(3)}))(folder)
    said = quantize("quarot", folder, tmp_path / "out", "--rounding", "nearest", "--plan")
    assert said.exit_code == 0 and "1 tensors for multi-token prediction are left out" in said.output


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group 3 and topk_group 1 do not fit 4 experts"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3 do not fit 4 experts"),
        ("glm4_moe", {"n_group": 4}, "of two experts at least"),
        ("glm4_moe", {"num_nextn_predict_layers": "1"}, "num_mtp_layers must be a positive whole number, found '1'"),
        ("glm4_moe", {"num_nextn_predict_layers": -2}, "num_mtp_layers must be a positive whole number, found -2"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(model_type: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type)
    edit_config(**changes)(folder)
    check_refused(quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest"), said)


def test_a_config_that_transformers_builds_nothing_of(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "glm4_moe", head_dim=18)
    edit_config(head_dim=None)(folder)
    found = quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest")
    check_refused(found, "config.json: transformers makes no model of it")


def test_norms_that_a_setting_turns_off(tmp_path: Path) -> None:
    """Keys are then balanced, as those of other models."""
    folder = save_model(tmp_path / "model", "glm4_moe", use_qk_norm=False)
    recipe = QuarotRecipe(rounding="nearest", key_bits=4)
    plan = pipeline.plan(str(folder), recipe).plan
    assert not any("q_norm" in name for name in plan.kept)
    assert all(x.balance is not None for x in plan.linears if x.role in ("query", "key"))
    assert ptq.quantize(folder, tmp_path / "out", recipe, QUIET).rotation_error < 1e-5


def test_names_of_files_and_of_modules() -> None:
    assert experts.module_name("model.layers.0.block_sparse_moe.experts.3.w1") == "model.layers.0.mlp.experts.3.w1"
    assert experts.module_name("model.layers.0.mlp.gate_proj") == "model.layers.0.mlp.gate_proj"
    assert experts.names_in(["lm_head", "a.mlp.gate_proj"]) is None
    assert experts.names_in(["a.mlp.gate_proj", "a.experts.12.w2"]) == ("w1", "w3", "w2")
    assert experts.names_in(["a.experts.12.up_proj"]) == ("gate_proj", "up_proj", "down_proj")


# --- whole runs -----------------------------------------------------------------------------------------------------

METHODS = {
    "quarot": ("quarot", "--group-size", 8, "--activation-bits", 8, "--kv-bits", 4),
    "quip-sharp": ("quip-sharp", "--bits", 4),
    "fp6": ("fp6", "--rounding", "gptq"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_through_the_command(model_type: str, method: str, calibration_text: Path, tmp_path: Path) -> None:
    """Also of a model that was saved as it was trained, with a loss over its routers."""
    model, out = save_model(tmp_path / "model", model_type), tmp_path / "out"
    edit_config(output_router_logits=True)(model)
    command, *options = METHODS[method]
    text = ("--calibration", calibration_text, "--samples", 8, "--sequence-length", 64)
    result = quantize(command, model, out, *options, *text)
    assert result.exit_code == 0, result.output
    packed, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    family = SPARSE[model_type].experts
    assert family is not None
    apart = packed.model.layers[1].mlp.experts
    assert isinstance(apart, Experts) and apart.names == family.linears
    linears = [module for name, module in apart.named_modules() if name.rpartition(".")[2] in family.linears]
    assert len(linears) == 12 and all(isinstance(linear, QuantLinear) for linear in linears)
    assert close(packed(IDS).logits, load(model)(IDS).logits, 0.6)
    generated = packed.generate(IDS[:, :7], max_new_tokens=5, do_sample=False)
    for length in range(7, 12):  # greedy over full forwards
        assert torch.equal(packed(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])
    assert quantize("verify", out, "--against", model).exit_code == 0
    assert quantize("inspect", out).exit_code == 0
    page = (out / "report.html").read_text()
    assert f".experts.*.{family.down} (4)" in page and ".experts.2." not in page
    packed.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert quantize("verify", tmp_path / "again").exit_code == 0
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(out / "model.safetensors"))
    source = {name.removesuffix(".weight") for name in load_file(model / "model.safetensors")}
    assert set(PtqConfig.parse(json.loads((out / "config.json").read_text())).linears) < source  # type: ignore[union-attr]


LOAD = """
import sys, torch, ptq
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    torch.save(model(torch.arange(3, 60).reshape(3, 19)).logits, sys.argv[2])
"""


@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_a_fresh_process_loads_it(model_type: str, tmp_path: Path) -> None:
    """Which has tried no experts yet; and once more from files with the names of the model, where the source has other
    ones."""
    model, out, again = save_model(tmp_path / "model", model_type), tmp_path / "out", tmp_path / "again"
    ptq.quantize(model, out, QuarotRecipe(rounding="nearest", group_size=8), QUIET)
    packed = load(out)
    packed.save_pretrained(again, save_original_format=False)
    for folder in (out, again):
        subprocess.run([sys.executable, "-c", LOAD, str(folder), str(tmp_path / "logits")], check=True)
        assert torch.equal(torch.load(tmp_path / "logits"), packed(IDS).logits)


@pytest.mark.parametrize("model_type", SPARSE)
def test_loaded_logits_are_those_of_the_run(model_type: str, tmp_path: Path) -> None:
    """And of a model without head, and of one that is loaded in shards."""
    model, out = save_model(tmp_path / "model", model_type), tmp_path / "out"
    recipe = QuarotRecipe(rounding="nearest")
    ptq.quantize(model, out, recipe, QUIET)
    target = pipeline.plan(str(model), recipe)
    job = Job(recipe=recipe, signs={}, device=torch.device("cpu"), **vars(target))
    tensors = load_file(out / "model.safetensors")
    hidden = job.embed(tensors["model.embed_tokens.weight"], IDS)
    for index in range(2):
        inside = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{index}.")}
        hidden = job.packed_block(index, inside).run(hidden)
    with torch.no_grad():
        packed = load(out)
        assert torch.equal(torch.cat(job.logits(tensors["lm_head.weight"], tensors["model.norm.weight"], hidden)),
                           torch.cat([packed(row).logits for row in IDS.split(3)]))  # fmt: skip
        headless = AutoModel.from_pretrained(out, dtype=torch.float32)
        assert torch.equal(headless(IDS).last_hidden_state, packed.model(IDS).last_hidden_state)
        packed.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
        assert torch.equal(load(tmp_path / "shards")(IDS).logits, packed(IDS).logits)


@pytest.mark.parametrize("pattern", ["*experts*", "model.layers.1.*experts.2.*", "*layers.1*"])
def test_experts_that_are_left_out(pattern: str, tmp_path: Path) -> None:
    """All of them: transformers holds them together, as ever. One: reports keep it apart from the others."""
    model, out = save_model(tmp_path / "model", "mixtral"), tmp_path / "out"
    recipe = QuarotRecipe(rounding="nearest", weight_bits=8, online=False, skip=(pattern,))
    ptq.quantize(model, out, recipe, QUIET)
    page, table = (out / "report.html").read_text(), console_tables.plan_table(pipeline.plan(str(model), recipe).plan)
    assert ("layers.1.block_sparse_moe.experts.*.w1 (3)" in page) == ("experts.2" in pattern)
    assert ("experts.*.w1 (2)" in table) == ("experts.2" in pattern)
    packed = load(out)
    with torch.no_grad():
        assert close(packed(IDS).logits, load(model)(IDS).logits, 0.15)
    assert isinstance(packed.model.layers[1].mlp.experts, Experts) == (pattern != "*experts*")
    packed.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_stopped_and_continued(calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = save_model(tmp_path / "model", "mixtral", **SMALL), of_text(calibration_text)
    ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    real, left = rounding.ldlq, 0

    def stopping(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(rounding, "ldlq", stopping)
    stops = 0
    while not (tmp_path / "again").exists():
        left, stops = 7, stops + 1
        try:
            ptq.quantize(model, tmp_path / "again", recipe, QUIET)
        except KeyboardInterrupt:
            continue
    assert stops == 5 and contents(tmp_path / "again") == contents(tmp_path / "out")


def test_two_processes_make_the_same_bytes(tmp_path: Path, calibration_text: Path) -> None:
    model, recipe = save_model(tmp_path / "model", "qwen3_moe", **SMALL), of_text(calibration_text, samples=20)
    for count in (1, 2):
        assert finish(start(count, model, tmp_path / str(count), recipe)) == [0] * count
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_prepacked(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral", hidden_size=64, intermediate_size=128, head_dim=16)
    ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    assert quantize("prepack", tmp_path / "out", tmp_path / "tiled", "--target", "cpu").exit_code == 0
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "tiled")(IDS).logits, load(tmp_path / "out")(IDS).logits)


@pytest.mark.parametrize("model_type", SPARSE)
def test_files_with_fused_tensors(model_type: str, tmp_path: Path) -> None:
    """The same weights in other files give the same result."""
    folder = save_model(tmp_path / "model", model_type, torch.bfloat16)
    load(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names and not any("experts.0" in name for name in names)
    for source in ("model", "fused"):
        ptq.quantize(tmp_path / source, tmp_path / f"{source}.out", QuarotRecipe(rounding="nearest"), QUIET)
    written = [(tmp_path / f"{source}.out" / "model.safetensors").read_bytes() for source in ("model", "fused")]
    assert written[0] == written[1]


# --- few tokens, and none -------------------------------------------------------------------------------------------


def never_chosen(tensors: dict[str, Tensor]) -> None:
    """Of expert 1 and its opposite one always has the larger share: expert 3, of share zero, gets no token."""
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name][1], tensors[name][3] = -tensors[name][0], 0


@pytest.mark.parametrize("kind", [of_text, QuipSharpRecipe], ids=["gptq", "ldlq"])
def test_an_expert_without_tokens(kind: Any, calibration_text: Path, tmp_path: Path, capsys: Any) -> None:
    model = save_model(tmp_path / "model", "olmoe", num_experts_per_tok=1)
    edit_tensors(never_chosen)(model)
    text = dict(calibration=str(calibration_text), samples=8, sequence_length=64)
    recipe = of_text(calibration_text) if kind is of_text else QuipSharpRecipe(bits=2, **text)
    ptq.quantize(model, tmp_path / "out", recipe)
    assert "block 1: 1 of 4 experts were given no calibration token" in capsys.readouterr().err
    lines = json.loads((tmp_path / "out" / "ptq.json").read_text())["linears"]
    for index in range(2):
        lines_of = {n: lines[f"model.layers.{index}.mlp.experts.{n}.down_proj"] for n in range(4)}
        assert [line["tokens"] == 0 for line in lines_of.values()] == [False, False, False, True]
        assert lines_of[3]["solver"] == "nearest" and lines_of[3]["note"] == hessian.NO_TOKEN
        assert all("note" not in lines_of[n] and lines_of[n]["shrinkage"] < 1 for n in (0, 1))
        up = lines[f"model.layers.{index}.mlp.experts.3.up_proj"]
        assert up["tokens"] == 0 and up["shrinkage"] == 1 and up["solver"] == "ldlq" and up["loss"] > 0
        assert sum(lines[f"model.layers.{index}.mlp.experts.{n}.gate_proj"]["tokens"] for n in range(4)) == 512
    with torch.no_grad():
        assert load(tmp_path / "out")(IDS).logits.isfinite().all()
    assert quantize("verify", tmp_path / "out").exit_code == 0


# --- the proof ------------------------------------------------------------------------------------------------------


def almost_equal(tensors: dict[str, Tensor]) -> None:
    """Two experts whose routers differ in the last bits: which of the two is chosen is chance."""
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        noise = torch.randn(tensors[name][1].shape, generator=torch.Generator().manual_seed(0))
        tensors[name][1] = tensors[name][0] * (1 + 2e-7 * noise)


def test_experts_that_change_places_are_no_error(tmp_path: Path, calibration_text: Path) -> None:
    model = save_model(tmp_path / "model", "olmoe", num_experts_per_tok=1)
    edit_tensors(almost_equal)(model)
    recipe = of_text(calibration_text, rounding="nearest")  # the text makes the probe longer
    assert ptq.quantize(model, tmp_path / "out", recipe, QUIET).rotation_error < 1e-5


def test_a_wrong_router_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers, that is: what it chooses is the original's."""
    real = rewrite.weight

    def broken(linear: Any, *rest: Any) -> Tensor:
        return real(linear, *rest) * (1.01 if linear.role == "router" else 1)

    model = save_model(tmp_path / "model", "mixtral", **SMALL)
    monkeypatch.setattr(rewrite, "weight", broken)
    with pytest.raises(ptq.RunError, match="block 0: the rotated block differs from the original by 1"):
        ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_options_and_configs(tmp_path: Path, calibration_text: Path) -> None:
    model, out = save_model(tmp_path / "model", "olmoe", **SMALL), tmp_path / "out"
    text = ("--calibration", calibration_text)
    tuned = quantize("quip-sharp", model, out, "--finetune", "blocks", *text)
    check_refused(tuned, "--finetune is not made for models with experts")
    for change, message in (
        (dict(clip_qkv=8.0), "clip_qkv 8.0: models that clip their values are not supported"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok must be a positive whole number, found 0"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9, but there are only 4 experts"),
        (dict(num_experts=10**6), "1000000 experts in a block, but the checkpoint has"),
        (dict(hidden_act="nosuch"), "config.json: transformers makes no model of it: it knows no 'nosuch'"),
        (dict(num_experts=5), "'model.layers.0.mlp.gate.weight' has shape [4, 16], but config.json says [5, 16]"),
    ):
        changed = shutil.copytree(model, tmp_path / "changed")
        edit_config(**change)(changed)
        check_refused(quantize("fp6", changed, out), message)
        shutil.rmtree(changed)


def test_an_expert_that_the_model_does_not_have(tmp_path: Path) -> None:
    inside = "model.layers.0.mlp.experts"
    for model_type, name in (
        ("olmoe", f"{inside}.9.up_proj"), ("olmoe", f"{inside}.1.w2"), ("llama", f"{inside}.1.up_proj")
    ):  # fmt: skip
        model, out = save_model(tmp_path / "model", model_type, **SMALL), tmp_path / "out"
        ptq.quantize(model, out, QuarotRecipe(rounding="nearest"), QUIET)
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["linears"][name] = "scheme0"
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(ptq.InputError, match=f"names {name}, which the model does not have"):
            load(out)
        for folder in (model, out):
            shutil.rmtree(folder)


@pytest.mark.parametrize("skip", [(), ("*self_attn*",)], ids=["all", "experts alone"])
def test_without_this_package_nothing_loads(skip: tuple[str, ...], tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model", "mixtral", **SMALL), tmp_path / "out"
    ptq.quantize(model, out, QuarotRecipe(rounding="nearest", skip=skip), QUIET)
    code = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode != 0 and "Error" in result.stderr


def test_a_rotated_checkpoint_needs_no_package(tmp_path: Path) -> None:
    """Its tensors have the names of the source, so that transformers, and others, find them."""
    for model_type in SPARSE:
        model, out = save_model(tmp_path / model_type, model_type), tmp_path / f"{model_type}.out"
        assert quantize("rotate", model, out).exit_code == 0
        assert (
            load_file(out / "model.safetensors").keys() - {"lm_head.weight"}
            == load_file(model / "model.safetensors").keys()
        )
        code = "import sys, torch; from transformers import AutoModelForCausalLM as M\nfor f in sys.argv[1:]: " \
               "print(M.from_pretrained(f)(torch.arange(3, 60)[None]).logits.norm(dim=-1).tolist())"  # fmt: skip
        command = [sys.executable, "-c", code, str(model), str(out)]
        lines = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
        assert close(*(torch.tensor(json.loads(line)) for line in reversed(lines)), 1e-5)
