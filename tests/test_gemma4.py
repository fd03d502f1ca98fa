"""Gemma 4: blocks with an input of their own for every token, blocks that take keys and values over from earlier ones,
keys that are values too, heads of two sizes, MLPs of two widths, experts beside an MLP. What the tests of all families
ask of the smaller models (`tests/tiny_models.py`) is not asked again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, quantize
from safetensors.torch import load_file, save_file
from tiny_models import decode, save_model, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

import ptq
from fp6.plan import Fp6Recipe
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.linear import QuantLinear
from ptq.models.state import StateLayout
from ptq.pipeline import pipeline, stages
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job
from quarot.plan import QuarotRecipe

IDS = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(0))
QUIET = ptq.RunOptions(progress=False, report=False)
WHOLE: dict[str, Any] = dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0, use_double_wide_mlp=False)
KINDS: dict[str, dict[str, Any]] = {
    "small": {},
    "small, values": dict(attention_k_eq_v=False, num_global_key_value_heads=None),
    "dense": WHOLE,
    "experts": dict(WHOLE, enable_moe_block=True, num_experts=4, top_k_experts=2),
    "everything": dict(enable_moe_block=True, num_experts=4, use_double_wide_mlp=False),
}
METHODS = {
    "quarot": ("--calibration", "TEXT", "--group-size", "0"),
    "quip-sharp": ("--calibration", "TEXT", "--bits", "4", "--activation-bits", "16"),
    "fp6": (),
}
pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of every kind."""
    return save_model(tmp_path / "model", "gemma4_text", **KINDS[request.param])


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def test_parts_that_run_alone_make_the_whole_model(model: Path) -> None:
    recipe = QuarotRecipe(rounding="nearest", weight_bits=16)
    target = pipeline.plan(str(model), recipe)
    job = Job(recipe=recipe, signs={}, device=torch.device("cpu"), **vars(target))
    state = job.embed([plain_matrix(job.tensor(linear.source)) for linear in job.embeddings], IDS, "original")
    layout = StateLayout.of(target.config)
    assert state.shape[-1] == layout.width
    for index in range(target.plan.blocks):
        state = job.original_block(index).run(state)
        assert state.shape[-1] == layout.width - (index + 1) * layout.own
    found = job.logits(
        plain_matrix(job.tensor(job.head.source)),
        {name: job.tensor(name) for name in job.final_tensors},
        state,
        "original",
    )
    assert relative(torch.cat(found), load(model)(IDS).logits) < 5e-6


@torch.no_grad()
def test_rows_enter_as_if_alone(tmp_path: Path) -> None:
    """To the bit: the proof runs one row again. Of this width, the last bits of products depend on the batch."""
    sizes: dict[str, Any] = dict(
        hidden_size=256, num_hidden_layers=3, layer_types=["full_attention"] * 3, num_kv_shared_layers=0
    )
    model = save_model(tmp_path / "model", "gemma4_text", **sizes, hidden_size_per_layer_input=24)
    recipe = QuarotRecipe(rounding="nearest", rotate=False)
    job = Job(recipe=recipe, signs={}, device=torch.device("cpu"), **vars(pipeline.plan(str(model), recipe)))
    matrices = [plain_matrix(job.tensor(linear.source)) for linear in job.embeddings]
    ids = torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(job.embed(matrices, ids)[:1], job.embed(matrices, ids[:1]))


@pytest.mark.parametrize(
    ("model", "method"),
    [*((kind, "quarot") for kind in KINDS), ("small", "fp6"), ("experts", "fp6"), ("everything", "quip-sharp")],
    indirect=["model"],
)
@torch.no_grad()
def test_whole_runs(method: str, model: Path, calibration_text: Path, tmp_path: Path) -> None:
    options = [str(calibration_text) if option == "TEXT" else option for option in METHODS[method]]
    rows = ("--samples", "8", "--sequence-length", "64") if method != "fp6" else ()
    done = quantize(method, model, out := tmp_path / "out", *options, *rows, "--embedding-bits", "8")
    assert done.exit_code == 0, done.output
    assert quantize("verify", out, "--against", model).exit_code == 0
    packed, original = load(out), load(model)
    assert 1e-4 < relative(packed(IDS).logits, original(IDS).logits) < 0.7
    ids = torch.randint(96, (1, 6), generator=torch.Generator().manual_seed(1))  # those of `decode`
    whole = packed(torch.cat([ids, ids[:, :4]], dim=1)).logits
    assert relative(torch.cat(decode(packed), dim=1), whole) < 1e-5
    for last in (1, 3):  # the blocks without keys of their own may leave out all other tokens
        assert relative(packed(IDS, logits_to_keep=last).logits, packed(IDS).logits[:, -last:]) < 1e-5
    linears = [name for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)]
    for name in linears:
        if ".layers." in name and "router" not in name:
            assert isinstance(packed.get_submodule(name), QuantLinear), name


def test_the_table_of_the_blocks_inputs_is_packed_too(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gemma4_text")
    for bits, name in ((16, "plain"), (8, "packed")):
        ptq.quantize(model, tmp_path / name, Fp6Recipe(embedding_bits=bits), QUIET)
    names = {name: set(load_file(tmp_path / name / "model.safetensors")) for name in ("plain", "packed")}
    table = "model.embed_tokens_per_layer.weight"
    assert table in names["plain"] and f"{table}_codes" in names["packed"]
    assert isinstance(load(tmp_path / "packed").model.embed_tokens_per_layer, PackedEmbedding)


def test_files_may_hold_keys_that_no_block_reads(tmp_path: Path) -> None:
    """As the published ones do."""
    model = save_model(tmp_path / "model", "gemma4_text")
    ptq.quantize(model, tmp_path / "clean", QuarotRecipe(rounding="nearest", group_size=0), QUIET)
    tensors = load_file(file := model / "model.safetensors")
    for index in (2, 3):
        for leaf in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{index}.self_attn.{leaf}.weight"] = torch.randn(40, 72)
    save_file(tensors, file, {"format": "pt"})
    ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest", group_size=0), QUIET)
    clean, out = (load_file(tmp_path / name / "model.safetensors") for name in ("clean", "out"))
    assert clean.keys() == out.keys() and all(torch.equal(clean[name], out[name]) for name in clean)


@torch.no_grad()
def test_the_text_model_of_one_that_sees_and_hears(tmp_path: Path) -> None:
    text = tiny_config("gemma4_text")
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision = dict(small, num_key_value_heads=2, head_dim=16, global_head_dim=16)
    config = Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None)
    whole: Any = Gemma4ForConditionalGeneration(config)
    alone = tiny_model(text)
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.save_pretrained(tmp_path / "model")
    done = quantize("fp6", tmp_path / "model", tmp_path / "out", "--element", "e3m3")
    assert done.exit_code == 0 and "the text model alone is taken (gemma4_text)" in done.stderr, done.output
    assert relative(load(tmp_path / "out")(IDS).logits, alone(IDS).logits) < 0.2


def test_experts_that_stay_plain_are_refused(tmp_path: Path) -> None:
    """transformers has no name for them in files."""
    model = save_model(tmp_path / "model", "gemma4_text", **KINDS["experts"])
    message = "the experts of gemma4_text must be quantised"
    check_refused(quantize("fp6", model, tmp_path / "out", "--skip", "*.experts.*"), message)
    assert quantize("fp6", model, tmp_path / "out", "--skip", "*.experts.1.*").exit_code == 0
    assert relative(load(tmp_path / "out")(IDS).logits, load(model)(IDS).logits) < 0.5


def test_what_is_refused(tmp_path: Path, calibration_text: Path) -> None:
    model = save_model(tmp_path / "model", "gemma4_text")
    text = ("--calibration", calibration_text)
    found = quantize("quip-sharp", model, tmp_path / "out", *text, "--finetune", "blocks")
    check_refused(found, "blocks share keys and values or have inputs of their own")
    check_refused(quantize("quarot", model, tmp_path / "out", *text, "--kv-bits", "4"), "KV cache: not all blocks")
    edit_config(num_kv_shared_layers=4)(model)
    check_refused(quantize("fp6", model, tmp_path / "out"), "num_kv_shared_layers 4")
    assert not (tmp_path / "out").exists()


def test_resume_is_byte_identical(tmp_path: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", "gemma4_text", **KINDS["everything"])
    recipe = QuarotRecipe(calibration=str(calibration_text), samples=8, sequence_length=64, group_size=0)
    ptq.quantize(model, tmp_path / "whole", recipe, QUIET)
    rounds = []

    def stop(tasks: Any, index: int, *arguments: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        rounds.append(index)
        original(tasks, index, *arguments)

    original = stages.block
    monkeypatch.setattr(stages, "block", stop)
    with pytest.raises(KeyboardInterrupt):
        ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    monkeypatch.undo()
    ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    assert rounds == [0, 1]
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert first == second and json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gemma4_text"
