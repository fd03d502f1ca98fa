"""Fine-tuning in whole runs: what moves, what does not, and that nothing is lost when a run is interrupted."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, quantize
from interrupted_runs import QUIET, check_all_continue, contents, photographed
from safetensors.torch import load_file
from test_engine import finish, start
from tiny_models import DISTINCT, TINY, save_model
from transformers import AutoModelForCausalLM

import ptq
from ptq.demo import demo_path
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, loaded_signs
from ptq.models.families import FAMILIES
from ptq.pipeline import finetune_blocks, needs, pipeline, preflight
from ptq.reporting import report_schema
from ptq.statistics import chunks
from quip_sharp.plan import QuipSharpRecipe

NOISE = {"apertus", "nemotron"}
"""Whose tiny models have a loss that training hardly changes."""
TRAINED = [
    name for name in DISTINCT if name not in NOISE and not (FAMILIES[name].experts or FAMILIES[name].layer_inputs)
]


@pytest.fixture(scope="module", autouse=True)
def quick(fast: None) -> Iterator[None]:
    """One row in a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 32)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


def recipe(model: Path, **changes: Any) -> QuipSharpRecipe:
    text = model.parent / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghij klmnop", k=800)))
    asked = dict(calibration=str(text), samples=8, sequence_length=32, finetune="full", finetune_epochs=2)
    return QuipSharpRecipe(**{**asked, **changes})


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Results without fine-tuning, by blocks and in full."""
    folder, kinds = tmp_path_factory.mktemp("results"), ("none", "blocks", "full")
    for kind in kinds:
        ptq.quantize(model, folder / kind, recipe(model, finetune=kind), QUIET)
    return {kind: folder / kind for kind in kinds}


ROLES = ("query", "attention_output", "gate", "down")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def differing(one: Path, other: Path) -> set[str]:
    """The last two parts of the names of tensors that differ."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return {".".join(name.split(".")[-2:]) for name in ours if not torch.equal(ours[name], theirs[name])}


def losses(folder: Path) -> dict[str, list[float]]:
    return json.loads((folder / "ptq.json").read_text())["finetuning"]


def check_losses(results: dict[str, Path], falling: int) -> None:
    """That no loss ends above its start, that the whole falls, and so many turns of the two blocks."""
    found = losses(results["full"])
    turns = [f"block {index} after {role}" for index in (0, 1) for role in ROLES]
    assert found.keys() == {*turns, "whole model"}
    assert all(min(curve) <= curve[0] for curve in found.values())
    assert min(found["whole model"]) < 0.97 * found["whole model"][0]
    assert sum(min(found[turn]) < found[turn][0] for turn in turns) >= falling
    assert losses(results["blocks"]) == {turn: found[turn] for turn in turns}


def test_no_loss_ends_above_its_start_and_the_whole_falls(results: dict[str, Path]) -> None:
    check_losses(results, 6)
    assert "finetuning" not in json.loads((results["none"] / "ptq.json").read_text())


def test_the_second_stage_changes_no_code(results: dict[str, Path]) -> None:
    """But sign vectors, biases, norms, and the head, which is the embedding here."""
    vectors = {f"{linear}_proj.{leaf}" for leaf in (INPUT_SIGNS, OUTPUT_SIGNS, "bias")
               for linear in ("q", "k", "v", "o", "gate", "up", "down")}  # fmt: skip
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
    assert differing(results["blocks"], results["full"]) == vectors | norms | {"embed_tokens.weight"}


def test_what_is_rounded_first_has_the_codes_of_a_run_without(results: dict[str, Path]) -> None:
    plain, tuned = tensors(results["none"]), tensors(results["blocks"])
    names = [
        name for name in plain if ".0.self_attn." in name and name.rpartition(".")[2] in ("weight_abs", "weight_signs")
    ]
    same = {name for name in names if torch.equal(plain[name], tuned[name])}
    assert same == {name for name in names if "o_proj" not in name}


def test_linears_with_one_input_share_its_vector(results: dict[str, Path]) -> None:
    for kind in ("blocks", "full"):
        found, moved = tensors(results[kind]), 0
        for index in (0, 1):
            for group in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
                first, *others = (found[f"model.layers.{index}.{name}_proj.{INPUT_SIGNS}"] for name in group)
                assert all(torch.equal(first, other) for other in others)
                moved += loaded_signs(first).abs().unique().numel() > 1
        assert moved >= 3


def test_a_loaded_model_gives_the_logits_of_the_run_and_saves_its_file(
    results: dict[str, Path], tmp_path: Path
) -> None:
    """The run itself has compared its logits with those of the written files, to the bit; here transformers loads."""
    loaded = AutoModelForCausalLM.from_pretrained(results["full"], dtype=torch.float32)
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (results["full"] / "model.safetensors").read_bytes()


def test_the_report_shows_losses_before_and_after(results: dict[str, Path]) -> None:
    found = report_schema.read(results["full"] / report_schema.JSON)
    assert [training.name for training in found.trainings[:4]] == [f"block 0 after {role}" for role in ROLES]
    assert {training.name: list(training.losses) for training in found.trainings} == losses(results["full"])
    assert "<h2>Fine-tuning</h2>" in (results["full"] / "report.html").read_text()
    assert "<h2>Fine-tuning</h2>" not in (results["none"] / "report.html").read_text()


@pytest.mark.parametrize("model_type", TRAINED)
def test_every_family_with_biases_and_a_head_of_its_own(model_type: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", model_type, **TINY, tie_word_embeddings=False, num_hidden_layers=1)
    names = FAMILIES[model_type]
    skipped = names.gate or names.up
    bits = 4 if names.mixers else 2  # at 2, states of random models are noise: training finds nothing
    asked = recipe(source, skip=(f"*.{skipped}",), rounding="nearest", sequence_length=16, bits=bits)
    ptq.quantize(source, tmp_path / "out", asked, QUIET)
    found, original = tensors(tmp_path / "out"), load_file(source / "model.safetensors")
    for name in (f"{names.head}.weight", *([f"{names.final_norm}.weight"] if names.norm_tensors else [])):
        assert not torch.equal(found[name], original[name])
    assert torch.equal(found[f"{names.embedding}.weight"], original[f"{names.embedding}.weight"])
    plain = original[f"{names.layers}.0.{skipped}.weight"]
    assert torch.equal(found[f"{names.layers}.0.{skipped}.weight"], plain.T if names.transposed else plain)
    biases = [name for name in original if name.endswith(".bias") and skipped not in name]
    assert all(not torch.equal(found[name], original[name]) for name in biases)


def test_turns_of_linears_with_one_role_keep_their_losses(tmp_path: Path) -> None:
    """Latent attention has two linears with inputs of their own."""
    source = save_model(tmp_path / "model", "youtu", num_hidden_layers=1)
    ptq.quantize(source, tmp_path / "out", recipe(source, finetune="blocks", sequence_length=16, bits=4), QUIET)
    turns = {"mixer_input", "self_attn.q_b_proj", "self_attn.kv_b_proj", "mixer_output", "gate", "down"}
    assert losses(tmp_path / "out").keys() == {f"block 0 after {turn}" for turn in turns}


# --- interrupted, repeated, shared ----------------------------------------------------------------------------------


def test_a_crash_at_any_moment_costs_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", **TINY, num_hidden_layers=1)
    pictures, expected = photographed(model, tmp_path, recipe(model, sequence_length=16))
    changes = [{str(path.relative_to(picture / "out.work")) for path in (picture / "out.work").rglob("tuned/*")}
               for picture in pictures]  # fmt: skip
    moments = [index for index in range(1, len(pictures)) if changes[index] != changes[index - 1]]
    assert len(moments) > 12
    some = [pictures[index] for index in moments[::3]]
    check_all_continue(some, expected, model, recipe(model, sequence_length=16))


def test_a_run_goes_on_with_the_turn_that_it_was_at(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, own, taken = recipe(model, finetune="blocks"), finetune_blocks._run_turn, list[str]()

    def take(turn: Any, *others: Any) -> None:
        if taken.count("stop") < 1 and turn.key == "1-2":
            taken.append("stop")
            raise KeyboardInterrupt
        taken.append(turn.key)
        own(turn, *others)

    monkeypatch.setattr(finetune_blocks, "_run_turn", take)
    with pytest.raises(KeyboardInterrupt):
        ptq.quantize(model, tmp_path / "out", made, QUIET)
    assert sorted(os.listdir(tmp_path / "out.work" / "tuned")) == ["0.json", "1-1.safetensors"]
    ptq.quantize(model, tmp_path / "out", made, QUIET)
    assert taken == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1", "stop", "1-2", "1-3"]


def test_twice_the_same_bytes(results: dict[str, Path], model: Path, tmp_path: Path) -> None:
    ptq.quantize(model, tmp_path / "again", recipe(model), QUIET)
    assert contents(tmp_path / "again") == contents(results["full"])


def test_two_processes_give_the_bytes_of_one(model: Path, tmp_path: Path) -> None:
    asked = recipe(model, sequence_length=16)
    for count in (1, 2):
        assert finish(start(count, model, tmp_path / str(count), asked)) == [0] * count
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "7"], "needs at least 8 calibration rows"),
        (["--samples", "800"], "lower --samples"),
        (["--rounding", "nearest", "--calibration", "none.txt"], "none.txt"),
    ],
)
def test_too_little_text_is_refused(options: list[str], message: str, model: Path, tmp_path: Path) -> None:
    given = ["--calibration", recipe(model).calibration, "--sequence-length", 32, "--finetune", "blocks"]
    check_refused(quantize("quip-sharp", model, tmp_path / "out", *given, *options), message)
    assert not list(tmp_path.iterdir())


def test_no_text_at_all_is_refused(model: Path, tmp_path: Path) -> None:
    result = quantize("quip-sharp", model, tmp_path / "out", "--finetune", "blocks", "--rounding", "nearest")
    check_refused(result, "fine-tuning needs text")


def test_memory_is_asked_for_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed(kind: Any, vocab: int) -> needs.Estimate:
        asked = recipe(model, finetune=kind, samples=16, sequence_length=2048)
        target = pipeline.plan(str(model), asked)
        large = replace(pipeline.shape_of(target.config), vocab=vocab, hidden=4096)
        sizes = {name: info.nbytes for name, info in target.checkpoint.tensors.items()}
        return needs.estimate(target.plan, large, asked, sizes)

    for less, more, vocab in (("none", "blocks", 1 << 8), ("blocks", "full", 1 << 18)):
        assert needed(less, vocab).memory < needed(more, vocab).memory
        assert needed(less, vocab).work < needed(more, vocab).work
        assert needed(less, vocab).seconds < needed(more, vocab).seconds
    monkeypatch.setattr(preflight.free_memory.psutil, "virtual_memory", lambda: type("M", (), {"available": 1 << 20}))
    with pytest.raises(ptq.InputError, match="fine-tune less"):
        ptq.quantize(model, tmp_path / "out", recipe(model), QUIET)
    assert not list(tmp_path.iterdir())


# --- a real model ---------------------------------------------------------------------------------------------------


def test_the_demo_comes_closer_to_its_original_on_text_that_it_was_not_tuned_on(tmp_path: Path) -> None:
    """The probe's rows belong to no set of calibration rows; one epoch each, 8192 tokens."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 1024)
        for kind in ("none", "full"):
            asked = QuipSharpRecipe(
                finetune=kind,
                finetune_epochs=1,
                samples=32,
                sequence_length=256,
                calibration=str(demo_path() / "calibration.txt"),
            )
            found[kind] = ptq.quantize(demo_path(), tmp_path / kind, asked, QUIET).kl
    assert found["full"] < 0.9 * found["none"]
