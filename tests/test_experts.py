"""Experts as linears of their own: the module, against transformers' own, and the plan."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from tiny_models import DISTINCT, SPARSE_FAMILIES, WEIGHTS_ON_INPUT, experts_of, save_model, separated, tiny_config
from tiny_models import tiny_model as random_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import ptq
from ptq.hf import experts, fused
from ptq.hf.blocks import PartialModel
from ptq.hf.experts import Experts
from ptq.models.families import FAMILIES
from ptq.models.family import Family
from ptq.models.model_shape import shape_of
from ptq.pipeline import pipeline, preflight
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job
from ptq.reporting import console_tables
from quarot.plan import QuarotRecipe

IDS = torch.arange(3, 60).reshape(3, 19)
QUIET = ptq.RunOptions(progress=False)
SPARSE = {name: FAMILIES[name] for name in DISTINCT if name in SPARSE_FAMILIES}
pytestmark = pytest.mark.usefixtures("fast")


def of_text(text: Path, **changes: Any) -> QuarotRecipe:
    return QuarotRecipe(**{**dict(calibration=str(text), samples=8, sequence_length=64, group_size=8), **changes})


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
    first, second = (experts_of(model.to(dtype)) for model in models)
    assert isinstance(second, Experts) and not isinstance(first, Experts)
    return first, second


@pytest.mark.parametrize("chosen", [[[0, 1], [1, 3], [3, 0], [3, 1], [1, 0]], [[2, 0]], [[0, 1]] * 9], ids=str)
@pytest.mark.parametrize("model_type", SPARSE)
@torch.no_grad()
def test_experts_are_those_of_transformers(model_type: str, chosen: list[list[int]]) -> None:
    """Also those that no token wants."""
    generator, index = torch.Generator().manual_seed(0), torch.tensor(chosen)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        theirs, ours = pair(model_type, dtype)
        x = torch.randn(len(index), tiny_config(model_type).hidden_size, generator=generator).to(dtype)
        given = x, index, torch.rand(index.shape, generator=generator).to(dtype)
        if model_type in WEIGHTS_ON_INPUT:
            weights = torch.zeros(len(x), 4, dtype=dtype).scatter_(1, index, given[2])
            given = ((weights.T[..., None] * x).flatten(0, 1),)
        found = ours(*given)
        assert found.dtype == dtype and close(found.double(), theirs(*given).double(), tolerance)


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
    theirs, ours = pair("qwen3_moe", torch.float64)
    x, index = torch.randn(5, 72).double(), torch.tensor([[0, 1], [1, 3], [3, 0], [3, 1], [1, 0]])
    shares = torch.rand(5, 2).double()
    gradients = []
    for module in (theirs, ours):
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


class InTurn(nn.Module):
    """Fused experts whose channels of gate and up take turns, with a gate of their own, taken apart in some way."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(2, 4, 12, generator=generator))
        self.down_proj = nn.Parameter(torch.randn(2, 6, 4, generator=generator))
        self.num_experts = 2

    def _apply_gate(self, both: Tensor) -> Tensor:
        return both[..., ::2].sigmoid() * both[..., 1::2].clamp(-0.5, 0.5)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in range(self.num_experts):
            tokens, places = torch.where(chosen == number)
            product = self._apply_gate(x[tokens] @ self.gate_up_proj[number]) @ self.down_proj[number]
            y.index_add_(0, tokens, product * shares[tokens, places, None])
        return y


class Unflattened(InTurn):
    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        return gate.sigmoid() * up.clamp(-0.5, 0.5)


class Mixed(InTurn):
    def _apply_gate(self, both: Tensor) -> Tensor:
        return both[..., ::2].softmax(-1) * both[..., 1::2]


@pytest.mark.parametrize("kind", [InTurn, Unflattened])
@torch.no_grad()
def test_a_gate_of_the_class_itself(kind: type[InTurn]) -> None:
    """Which row is one of gate is not what the sums tell: they are the same for any order."""
    theirs, x = kind(), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(copy.deepcopy(theirs))
    assert experts.separate(model, experts.NAMES[0])
    apart = fused.take_apart(dict(theirs.named_parameters()), fused.FusedLayout(True, True), experts.NAMES[0])
    model[0].load_state_dict(apart, assign=True)
    for ours in (model[0], copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        for tokens in (1, 5):
            given = x[:tokens], torch.tensor([[0, 1]] * tokens), torch.tensor([[0.3, 0.9]] * tokens)
            torch.testing.assert_close(ours(*given), theirs(*given))


def test_a_gate_that_mixes_channels_is_refused() -> None:
    with pytest.raises(ptq.InputError, match="0: Mixed are experts of a kind that ptq does not know"):
        experts.separate(nn.Sequential(Mixed()), experts.NAMES[0])


def test_a_limit_that_lets_nothing_through_says_nothing_of_others() -> None:
    for limit in (0.0, 0.7, 7.0):
        model = nn.Sequential(GptOssExperts(tiny_config("gpt_oss", swiglu_limit=limit)))
        if limit:
            assert experts.separate(model, experts.NAMES[0])
            continue
        with pytest.raises(ptq.InputError, match="GptOssExperts are experts of a kind that ptq does not know"):
            experts.separate(model, experts.NAMES[0])


@pytest.mark.parametrize("flag", ["transposed", "interleaved"])
def test_a_row_with_another_layout_is_refused(flag: str, tmp_path: Path) -> None:
    """Files would be read as other weights, by the original as by the rotated model."""
    target = pipeline.plan(str(save_model(tmp_path / "model", "gpt_oss")), QuarotRecipe(rounding="nearest"))
    assert target.family.experts is not None
    wrong = replace(target.family, experts=replace(target.family.experts, **{flag: False}))
    with pytest.raises(ptq.InputError, match="GptOssExperts holds its experts as .*, but the family's row says"):
        PartialModel(target.config, wrong, 0, torch.device("cpu"))


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
    hidden = job.embed([plain_matrix(job.tensor(linear.source)) for linear in job.embeddings], IDS, "original")
    for index in range(2):
        hidden = job.original_block(index).run(hidden)
    wanted = load(folder).model(IDS, output_hidden_states=True)
    job_norm = job.logits(
        plain_matrix(job.tensor(job.head.source)),
        {name: job.tensor(name) for name in job.final_tensors},
        hidden,
        "original",
    )
    assert close(torch.cat(job_norm), load(folder).lm_head(wanted.last_hidden_state), 1e-5)


def test_one_row_for_all_experts_and_a_share_of_the_tokens(tmp_path: Path, calibration_text: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[])
    target = pipeline.plan(str(folder), of_text(calibration_text))
    table = console_tables.plan_table(target.plan)
    assert table.count(".experts.") == 3
    row = next(line for line in table.splitlines() if "model.layers.*.mlp.experts.*.down_proj" in line)
    assert " 0-1 " in row and "R4.*" in row
    shape = shape_of(target.config)
    rows = torch.arange(30 * 70).view(30, 70)
    said = list(preflight.warnings(target.plan, shape, of_text(calibration_text), rows[:10], rows[10:]))
    assert said == ["warning: about 350 calibration tokens an expert for layers of up to 72 input channels are few; "
                    "10 per channel give steady statistics: --samples 21"]  # fmt: skip
    assert not list(preflight.warnings(target.plan, shape, of_text(calibration_text), rows, rows[:1] + 1))


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


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v32"])
def test_blocks_for_multi_token_prediction_are_left_out(model_type: str, tmp_path: Path) -> None:
    """transformers knows the setting of the first by another name, that of the second not at all."""
    folder = save_model(tmp_path / "model", model_type)
    edit_config(num_nextn_predict_layers=1)(folder)
    edit_tensors(lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(3, 3)}))(folder)
    said = quantize("quarot", folder, tmp_path / "out", "--rounding", "nearest", "--plan")
    assert said.exit_code == 0 and "1 tensors for multi-token prediction are left out" in said.output
    assert quantize("rotate", folder, tmp_path / "rotated").exit_code == 0
    assert json.loads((tmp_path / "rotated" / "config.json").read_bytes())["num_nextn_predict_layers"] == 0
    edit_config(num_nextn_predict_layers=0)(folder)
    edit_tensors(lambda t: t.update({"mtp.layers.0.norm.weight": torch.ones(3)}))(folder)
    check_refused(
        quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest"), "promises 2 blocks, 0 to 1"
    )


def test_sizes_that_are_said_for_every_block(tmp_path: Path) -> None:
    """As Hunyuan A13B is published."""
    folder = save_model(tmp_path / "model", "hunyuan_v1_moe")
    plan = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).plan
    edit_config(moe_topk=[2, 2], moe_intermediate_size=[152, 152])(folder)
    assert pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).plan == plan
    edit_config(moe_intermediate_size=[152, 80])(folder)
    refused = quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest")
    check_refused(refused, "moe_intermediate_size must be a positive whole number, found [152, 80]")


@pytest.mark.parametrize("name", ["mtp.layers.0.norm.weight", "model.mtp_block.0.norm.weight"])
def test_prediction_blocks_in_a_place_of_their_own_are_left_out(name: str, tmp_path: Path) -> None:
    """The config need not speak of them."""
    folder = save_model(tmp_path / "model", "mellum")
    edit_tensors(lambda t: t.update({name: torch.ones(3)}))(folder)
    said = quantize("quarot", folder, tmp_path / "out", "--rounding", "nearest", "--plan")
    assert said.exit_code == 0 and "1 tensors for multi-token prediction are left out" in said.output


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group 3 and topk_group 1 do not fit 4 experts"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3 do not fit 4 experts"),
        ("glm4_moe", {"n_group": 4}, "of two experts at least"),
        (
            "glm4_moe",
            {"num_nextn_predict_layers": "1"},
            "num_nextn_predict_layers must be a positive whole number, found '1'",
        ),
        (
            "glm4_moe",
            {"num_nextn_predict_layers": -2},
            "num_nextn_predict_layers must be a positive whole number, found -2",
        ),
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
    mixtral, block = FAMILIES["mixtral"], "model.layers.0"
    for in_files, in_model in (
        (f"{block}.block_sparse_moe.experts.3.w1", f"{block}.mlp.experts.3.w1"),
        ("model.norm", "model.norm"),
    ):
        assert mixtral.module_name(in_files) == mixtral.module_name(in_model) == in_model
        assert mixtral.file_name(in_files) == mixtral.file_name(in_model) == in_files
    for same in (f"{block}.mlp.gate_proj", f"{block}.block_sparse_moe.gate", f"{block}.not_block_sparse_moe.gate"):
        assert FAMILIES["llama"].module_name(same) == FAMILIES["llama"].file_name(same) == same
    longer = Family("", renamed=(("router.layer", "router"),), published=(("backbone", "model"),))
    assert longer.file_name("backbone.0.router.weight") == longer.file_name("model.0.router.layer.weight")
    inside, norm = FAMILIES["axk1"], f"{block}.post_mlp_layernorm"
    for name in (norm, f"{block}.mlp.post_mlp_layernorm"):
        assert (inside.file_name(name), inside.module_name(name)) == (norm, f"{block}.mlp.post_mlp_layernorm")
    assert experts.names_in(["lm_head", "a.mlp.gate_proj"]) is None
    assert experts.names_in(["a.mlp.gate_proj", "a.experts.12.w2"]) == ("w1", "w3", "w2")
    assert experts.names_in(["a.experts.12.up_proj"]) == ("gate_proj", "up_proj", "down_proj")
