"""Blocks that mix tokens in another way than plain attention: linear attention, state spaces, convolutions, attention
with a gate or over a latent vector. What the families' own tests ask of every row is not asked again."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from test_expert_runs import METHODS
from tiny_models import DISTINCT, decode, save_model, tiny_config
from transformers import AutoModelForCausalLM

import ptq
from ptq.hf.blocks import PartialModel
from ptq.layers.linear import QuantLinear
from ptq.models import family_parts
from ptq.models.families import FAMILIES
from ptq.models.family import Mixer
from ptq.ops.hadamard import largest_block
from ptq.pipeline import pipeline
from ptq.planning.plan import LinearPlan
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

MIXED = [name for name in DISTINCT if FAMILIES[name].mixers]
QUIET = ptq.RunOptions(progress=False, report=False)
pytestmark = pytest.mark.usefixtures("fast")


def planned(folder: Path, block: int, **changes: Any) -> dict[str, LinearPlan]:
    """What happens to the linears of a block, by their names in it."""
    plan = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest", activation_bits=8, **changes)).plan
    return {linear.name.removeprefix(f"{plan.layers}.{block}."): linear for linear in plan.block(block)}


def mixer_of(linears: dict[str, LinearPlan], model_type: str) -> Mixer | None:
    return next((mixer for mixer in FAMILIES[model_type].mixers if mixer.readers[0] in linears), None)


ONE_KIND = ("axk1", "bamba", "deepseek_v3", "diffllama", "gpt_neox", "granitemoehybrid")


@pytest.mark.parametrize("model_type", MIXED)
def test_what_reads_the_stream_and_what_writes_it(model_type: str, tmp_path: Path) -> None:
    folder, seen = save_model(tmp_path / "model", model_type), []
    for index in range(2):
        linears = planned(folder, index)
        mixer = mixer_of(linears, model_type)
        if mixer is None:
            assert "self_attn.o_proj" in linears  # of Granite 4, the plain attention
            continue
        seen.append(mixer)
        stream, norm = linears[mixer.output].output, None
        if FAMILIES[model_type].rotate_residual:
            norm = f"model.layers.{index}.{FAMILIES[model_type].attention_norm}.weight"
            assert stream is not None and stream.signs == "R1"
        assert all((linears[name].input, linears[name].norm) == (stream, norm) for name in mixer.readers + mixer.gates)
        assert {linears[name].statistics for name in mixer.readers} == {linears[mixer.readers[0]].name}
        for name in mixer.inside:
            assert (linears[name].input, linears[name].statistics) == (None, linears[name].name)
        last = linears[mixer.output]
        assert last.online == last.input and last.online is not None
        assert (last.online.order, last.online.signs) == (largest_block(last.k), None)
        assert all(linears[name].format is None and not linears[name].acts_online for name in mixer.gates)
        rounded = {*mixer.readers, *mixer.inside, mixer.output}
        assert all(linears[name].format and linears[name].activation for name in rounded)
    assert len(set(seen)) == (1 if model_type in ONE_KIND else 2)


def test_latent_attention_with_queries_of_full_rank(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "deepseek_v3", q_lora_rank=None)
    linears = planned(folder, 0)
    assert mixer_of(linears, "deepseek_v3") == family_parts.MLA[1] and "self_attn.q_b_proj" not in linears
    assert ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET).rotation_error < 1e-5


@pytest.mark.parametrize(("model_type", "count"), [("falcon_h1", 2 * 9), ("jamba", 3 + 3 + 4 + 4 * 3)])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_through_the_command(method: str, model_type: str, count: int, calibration_text: Path, tmp_path: Path) -> None:
    """Attention and a state space in one block; Mamba with norms, in front of an MLP, and attention before experts."""
    folder, out = save_model(tmp_path / "model", model_type), tmp_path / "out"
    text = ("--calibration", calibration_text, "--samples", 4, "--sequence-length", 32)
    made = quantize(*METHODS[method], folder, out, *text)
    assert made.exit_code == 0, made.output
    assert quantize("verify", out).exit_code == 0
    loaded, original = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for source in (out, folder))
    linears = {
        name: x for name, x in loaded.model.layers.named_modules() if isinstance(x, (torch.nn.Linear, QuantLinear))
    }
    plain = [linears.pop("0.mamba.dt_proj")] if model_type == "jamba" else []
    assert len(linears) == count and all(isinstance(linear, QuantLinear) for linear in linears.values())
    assert not any(isinstance(linear, QuantLinear) for linear in plain)
    ids = torch.arange(3, 60).reshape(3, 19)
    found, wanted = loaded(ids).logits, original(ids).logits
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.6
    generated = loaded.generate(ids[:1, :7], max_new_tokens=5, do_sample=False)
    for length in range(7, generated.shape[1]):  # greedy over full forwards
        assert torch.equal(loaded(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])


def test_what_a_block_with_attention_and_a_mixer_is_rotated_by(tmp_path: Path) -> None:
    linears = planned(save_model(tmp_path / "model", "falcon_h1"), 1)
    llama = planned(save_model(tmp_path / "llama", "llama"), 1)
    for name in (*family_parts.QKV, "self_attn.o_proj"):
        found, wanted = linears[name], llama[name]
        assert (found.input, found.output, found.online) == (wanted.input, wanted.output, wanted.online)
        assert (found.statistics, found.norm) == (wanted.statistics, wanted.norm)
    reader, writer = linears["mamba.in_proj"], linears["mamba.out_proj"]
    assert reader.input == writer.output == linears["self_attn.q_proj"].input and reader.output is None
    assert reader.statistics == reader.name and reader.norm == linears["self_attn.q_proj"].norm
    assert writer.online is not None and writer.online.signs is None


def test_jamba_without_experts(tmp_path: Path) -> None:
    """As Jamba Reasoning 3B is published: of one expert, two are chosen."""
    folder = save_model(tmp_path / "model", "jamba", torch.bfloat16, num_local_experts=1)
    assert ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET).rotation_error < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # For which Jamba would add the bias of dt_proj and take it off again.
    assert hasattr(loaded.config, "_is_quantized")
    assert not hasattr(loaded.model.layers[0].mamba.config, "_is_quantized")
    linears = planned(folder, 1)
    assert "feed_forward.down_proj" in linears and not any("experts" in name for name in linears)


def test_what_is_special_about_falcon_h1(tmp_path: Path) -> None:
    """Its multipliers are computed by the model, not by the block that holds them; some have no norm in the mixer."""
    folder = save_model(tmp_path / "model", "falcon_h1", mamba_rms_norm=False)
    assert ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET).rotation_error < 1e-5
    config = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).config
    for layer in (0, 1):
        with patch.object(torch, "full_like", wraps=torch.full_like) as made:
            part = PartialModel(config, FAMILIES["falcon_h1"], layer, torch.device("cpu"))
        assert made.call_count == 1  # of the other block none
        vector = part.block.get_submodule("mamba").mup_vector
        assert vector.flatten()[[0, 150, -1]].tolist() == pytest.approx([0.7, 1.3, 1.1])
    notes = pipeline.plan(str(folder), QuipSharpRecipe(rounding="nearest")).plan.notes
    assert sum(note.startswith("in_proj outputs 356: no Hadamard matrix") for note in notes) == 1
    check_refused(quantize("quarot", folder, tmp_path / "kv", "--kv-bits", 4), "not all blocks of falcon_h1 have plain")


def test_without_online_rotations(tmp_path: Path) -> None:
    linears = planned(save_model(tmp_path / "model", "qwen3_5_text"), 0, online=False)
    assert linears["linear_attn.out_proj"].input is linears["linear_attn.out_proj"].online is None


@pytest.mark.parametrize("model_type", MIXED)
@torch.no_grad()
def test_decoded_tokens_are_those_of_whole_passes(model_type: str, tmp_path: Path) -> None:
    """Over the cache that transformers makes, with states of its own, and in 4 bits with inputs in 8."""
    folder = save_model(tmp_path / "model", model_type)
    recipe = QuarotRecipe(rounding="nearest", weight_bits=4, activation_bits=8)
    ptq.quantize(folder, tmp_path / "out", recipe, QUIET)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(model.config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(1))
    whole = model(torch.cat([ids, ids[:, :4]], 1)).logits
    apart = torch.cat(decode(model), 1)
    assert (apart - whole).norm() / whole.norm() < 0.03  # a number between two of the 8-bit grid may go either way
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert found.shape[1] > ids.shape[1] and torch.equal(found[:, :6], ids)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_5_text")
    leaves = ("in_proj_qkv.weight", "A_log", "in_proj_z.weight", "out_proj.weight")  # the first one tells the mixer
    for name in (f"linear_attn.{leaf}" for leaf in leaves):
        edit_tensors(lambda tensors, name=name: tensors.pop(f"model.layers.0.{name}"))(folder)
        check_refused(quantize("fp6", folder, tmp_path / "out"), f"no tensor 'model.layers.0.{name}', ")
        folder = save_model(tmp_path / name, "qwen3_5_text")


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "changes", "tensor"),
    [
        ("qwen3_5_text", dict(layer_types=[FULL, FULL]), "0.self_attn.q_proj.weight"),
        ("qwen3_5_moe_text", dict(layer_types=[FULL, LINEAR]), "0.self_attn.q_proj.weight"),
        ("granitemoehybrid", dict(layer_types=[LINEAR, LINEAR]), "1.mamba.dt_bias"),
        ("lfm2", dict(layer_types=[FULL, "conv"]), "0.self_attn.q_proj.weight"),
        ("deepseek_v3", dict(q_lora_rank=None), "0.self_attn.q_proj.weight"),
    ],
)
def test_files_with_other_mixers_than_the_config_says(
    model_type: str, changes: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", model_type)
    edit_config(**changes)(folder)
    check_refused(quantize("fp6", folder, tmp_path / "out"), f"no tensor 'model.layers.{tensor}', but its config.json")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("model_type", "changes"), [("lfm2", dict(conv_bias=True)), ("granitemoehybrid", dict(mamba_conv_bias=False))]
)
def test_convolutions_with_and_without_biases(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type, **changes)
    assert ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET).rotation_error < 1e-5


def test_blocks_of_one_thing_alone_none_of_which_is_an_mlp(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    folder = save_model(tmp_path / "model", "nemotron_h", layer_types=kinds, num_hidden_layers=2)
    done = quantize("fp6", folder, tmp_path / "out")
    assert done.exit_code == 0, done.output
    linears = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["linears"]
    found = {linear.partition(".mixer.")[2] for linear in linears}
    assert found == {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}


def test_experts_where_the_row_knows_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "lfm2")
    edit_config(num_local_experts=4, num_experts_per_tok=2)(folder)
    refused = quantize("fp6", folder, tmp_path / "out")
    check_refused(refused, "4 experts in a block: lfm2 is supported without experts alone")


def test_a_mixer_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_5_text")
    name = "model.layers.0.linear_attn.out_proj.weight"
    edit_tensors(lambda tensors: tensors.update({name: tensors[name][:, :8].contiguous()}))(folder)
    check_refused(quantize("fp6", folder, tmp_path / "out"), f"tensor {name!r} has shape [72, 8], but config.json says")
    edit_tensors(lambda tensors: tensors.update({name: tensors[name][0].contiguous()}))(folder)
    for command in ("fp6", "quarot"):
        refused = quantize(command, folder, tmp_path / "out", "--rounding", "nearest")
        check_refused(refused, f"tensor {name!r} has shape [8], but it is the matrix of a linear layer")


def test_infinity_in_a_config_as_transformers_writes_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "granitemoehybrid")
    assert '"__float__": "Infinity"' in (folder / "config.json").read_text()
    found = [pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).config.time_step_limit]
    text = (folder / "config.json").read_text()
    plain = re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", text)  # as before version 5: Nemotron Nano's
    assert plain != text
    (folder / "config.json").write_text(plain)
    found.append(pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).config.time_step_limit)
    assert [list(limit) for limit in found] == 2 * [list(tiny_config("granitemoehybrid").time_step_limit)]
    assert quantize("fp6", folder, tmp_path / "out").exit_code == 0
    assert "Infinity" in AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.to_json_string()


@torch.no_grad()
def test_a_model_that_asks_for_its_attention_by_name(tmp_path: Path) -> None:
    """DeepSeek V3.2 attends to the tokens that its indexer chooses, but only where it knows its attention's name."""
    folder = save_model(tmp_path / "model", "deepseek_v32", index_topk=4)
    ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest", group_size=0), QUIET)
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation=name)
        for name in ("sdpa", "eager")
    ]
    found, expected = (model(torch.arange(3, 60).reshape(1, -1)).logits for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
