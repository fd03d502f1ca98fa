"""Whole runs on tiny models: what comes out, that it is proven, and that it is the same every time."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import edit_tensors
from safetensors.torch import load_file
from tiny_models import DISTINCT, TINY, save_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import ptq
from ptq.commands.verify import verify
from ptq.hf.loading import load_tokenizer
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.ops import hadamard
from ptq.pipeline import pipeline, rewrite
from ptq.pipeline.writer import LOG, file_hashes
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

IDS = torch.arange(3, 40).reshape(1, -1)
QUIET = ptq.RunOptions(progress=False, report=False)
pytestmark = pytest.mark.usefixtures("fast")


def gptq(text: Path, **changes: Any) -> QuarotRecipe:
    return QuarotRecipe(**{**dict(calibration=str(text), samples=8, sequence_length=64, group_size=8), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOG}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL divergence of logits, nats per token."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", DISTINCT)
def test_gptq_and_nearest_on_every_family(model_type: str, calibration_text: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    result = ptq.quantize(model, tmp_path / "gptq", gptq(calibration_text), QUIET)
    nearest = ptq.quantize(model, tmp_path / "nearest", gptq(calibration_text, rounding="nearest"), QUIET)
    assert result.rotation_error < (1e-4 if FAMILIES[model_type].mixers else 1e-5) and result.kl < nearest.kl
    original = logits(model)
    for out in (tmp_path / "gptq", tmp_path / "nearest"):
        loaded = logits(out)
        assert 0 < divergence(original, loaded) < 0.5 * divergence(original, loaded.roll(1, dims=1))
    record = json.loads((tmp_path / "gptq" / "ptq.json").read_text())
    rounded = {name: line for name, line in record["linears"].items() if line}
    assert rounded.keys() == {linear.name for linear in pipeline.plan(str(model), QuarotRecipe()).plan.packed_linears()}
    for name, line in rounded.items():
        assert 0 < line["loss"] <= line["nearest_loss"], name
    assert os.listdir(tmp_path).count("gptq.work") == 0


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_the_token_of_padding_is_behind_the_rows_in_use(model_type: str, tmp_path: Path) -> None:
    """Where a run reads few rows of the embedding: torch refuses an embedding with fewer than that token's number."""
    models = {
        pad: save_model(tmp_path / f"{pad}", model_type, pad_token_id=pad, tie_word_embeddings=False) for pad in (0, 95)
    }
    results = {
        pad: ptq.quantize(model, tmp_path / f"{pad}-out", QuarotRecipe(rounding="nearest"), QUIET)
        for pad, model in models.items()
    }
    assert results[95].kl == results[0].kl > 0
    assert torch.equal(logits(tmp_path / "95-out"), logits(tmp_path / "0-out"))


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_whose_embedding_is_zeros(tied: bool, tmp_path: Path) -> None:
    """As the first of a row, without biases, zeros are what leaves every block: equal to themselves."""
    settings = dict(attention_bias=False, mlp_bias=False, tie_word_embeddings=tied)
    model = save_model(tmp_path / "model", "llama", **{**TINY, **settings})
    edit_tensors(lambda content: content["model.embed_tokens.weight"][::2].zero_())(model)
    result = ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest", weight_bits=8), QUIET)
    assert 0 < result.rotation_error < 1e-4 and 0 < result.kl < 0.02


def test_twice_the_same_bytes(tiny: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = gptq(calibration_text)
    for out in ("first", "second"):
        ptq.quantize(tiny, tmp_path / out, recipe, QUIET)
        torch.rand(3)  # the global state is another one the second time
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    ptq.quantize(tiny, tmp_path / "third", gptq(calibration_text, seed=1), QUIET)
    name = "model.safetensors"
    assert (tmp_path / "third" / name).read_bytes() != (tmp_path / "first" / name).read_bytes()


def test_random_states_and_settings_of_the_caller_are_left_alone(
    tiny: Path, calibration_text: Path, tmp_path: Path
) -> None:
    def states() -> tuple[Any, ...]:  # not Python's own: the type checker that is on in tests draws from it
        return numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    ptq.quantize(tiny, tmp_path / "out", gptq(calibration_text), QUIET)
    assert states() == before
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize("method", ["quarot", "quip-sharp"])
def test_a_caller_with_other_defaults(method: str, tiny: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe: Any = gptq(calibration_text)
    if method == "quip-sharp":
        recipe = QuipSharpRecipe(calibration=str(calibration_text), samples=2, sequence_length=32)
    ptq.quantize(tiny, tmp_path / "plain", recipe, QUIET)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ptq.quantize(tiny, tmp_path / "autocast", recipe, QUIET)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            ptq.quantize(tiny, tmp_path / "bfloat16 on meta", recipe, QUIET)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    first, *others = (path.read_bytes() for path in tmp_path.glob("*/model.safetensors"))
    assert [first, first] == others


def test_a_wrong_rotation_is_found_before_anything_is_rounded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of principle 9: turn one side of the residual stream only."""
    real = rewrite.weight

    def broken(linear: Any, *rest: Any) -> torch.Tensor:
        return real(linear, *rest) * (-1 if linear.name.endswith("layers.1.self_attn.v_proj") else 1)

    monkeypatch.setattr(rewrite, "weight", broken)
    with pytest.raises(ptq.RunError, match="block 1: the rotated block differs"):
        ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.work/linears/model.layers.1.*"))


# --- plain checkpoints ----------------------------------------------------------------------------------------------


def test_plain_checkpoints_load_without_this_package(tiny: Path, tmp_path: Path) -> None:
    whole = QuarotRecipe(rounding="nearest", weight_bits=16, online=False)
    ptq.quantize(tiny, tmp_path / "rotated", whole, QUIET)
    ptq.quantize(tiny, tmp_path / "copied", QuarotRecipe(rounding="nearest", weight_bits=16, rotate=False), QUIET)
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    print(model(torch.arange(3, 40).reshape(1, -1)).logits.double().sum(-1).tolist())
assert "ptq" not in sys.modules
"""
    command = [sys.executable, "-c", code, str(tmp_path / "rotated"), str(tmp_path / "copied")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        torch.testing.assert_close(
            torch.tensor(json.loads(line)), logits(tiny).double().sum(-1).float(), rtol=0, atol=1e-3
        )
    for out in ("rotated", "copied"):
        assert "quantization_config" not in json.loads((tmp_path / out / "config.json").read_text())
    rotated, source = load_file(tmp_path / "rotated" / "model.safetensors"), load_file(tiny / "model.safetensors")
    assert not torch.equal(rotated["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    copied = load_file(tmp_path / "copied" / "model.safetensors")
    assert copied.keys() == source.keys() and all(torch.equal(copied[name], source[name]) for name in source)


def test_offline_rounding_needs_no_transform_at_run_time(tiny: Path, tmp_path: Path) -> None:
    ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest", online=False), QUIET)
    schemes = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["schemes"]
    assert [scheme.get("hadamard") for scheme in schemes.values()] == [None]


# --- skip -----------------------------------------------------------------------------------------------------------


def test_skipped_linears(calibration_text: Path, tmp_path: Path) -> None:
    """They stay in the checkpoint's own dtype; down_proj keeps its online rotation in the dense format."""
    model = save_model(tmp_path / "model", dtype=torch.bfloat16, **TINY)
    recipe = gptq(calibration_text, skip=("*.down_proj", "model.layers.0.self_attn.*"))
    result = ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    assert 0.01 < result.kl < 0.06
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.mlp.down_proj.weight_dense"].dtype == torch.bfloat16
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (1,), "the guard"
    assert "model.layers.0.mlp.up_proj.weight_codes" in found
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded.get_submodule("model.layers.0.self_attn.q_proj"), torch.nn.Linear)
    down = loaded.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, QuantLinear) and down.online.input == hadamard.construction(24)


# --- the record and the log -----------------------------------------------------------------------------------------


def test_the_record(tiny: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = gptq(calibration_text, seed=3)
    result = ptq.quantize(tiny, tmp_path / "out", recipe, QUIET)
    record = json.loads((tmp_path / "out" / "ptq.json").read_text())
    assert record["recipe"] == {**recipe.as_dict(), "calibration": calibration_text.name, "skip": []}
    assert record["source"] == ptq.plan(str(tiny), recipe).checkpoint.identity()
    assert len(record["fingerprint"]) == len(record["calibration"]) == 64
    assert {name: 4 * len(text) for name, text in record["signs"].items()} == {
        "R1": 16, "R2.0": 8, "R2.1": 8, "R4.0": 24, "R4.1": 24,
    }  # fmt: skip
    assert record["files"] == file_hashes(tmp_path / "out")
    assert record["result"] == {key: value for key, value in vars(result).items() if key != "out"}
    assert result.out == tmp_path / "out" and result.bits_per_weight and 4 < result.bits_per_weight < 7
    assert result.nbytes == sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())


def test_a_line_of_json_for_every_layer(tiny: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = gptq(calibration_text)
    ptq.quantize(tiny, tmp_path / "out", recipe, QUIET)
    lines = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    assert [line["name"] for line in lines] == [linear.name for linear in ptq.plan(str(tiny), recipe).plan.linears]
    for line in lines:
        assert line["seconds"] >= 0
        if "layers" in line["name"]:
            assert {"error", "loss", "nearest_loss", "damping"} <= line.keys()


def test_tokenizer_and_generation_config_come_along(tiny: Path, tmp_path: Path) -> None:
    ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny / name).read_bytes()


def test_progress_counts_to_the_end(tiny: Path, calibration_text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The time left is only right if all steps add up to the total."""
    made: list[Any] = []
    real = pipeline.Progress

    def watched(*arguments: Any) -> Any:
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(pipeline, "Progress", watched)
    ptq.quantize(tiny, tmp_path / "gptq", gptq(calibration_text), QUIET)
    ptq.quantize(tiny, tmp_path / "nearest", gptq(calibration_text, rounding="nearest"), QUIET)
    # Linears that are not rounded are rotated all the same; the ends are packed once, and pass through no block.
    some = QuarotRecipe(rounding="nearest", online=False, skip=("*.down_proj",), embedding_bits=8)
    ptq.quantize(tiny, tmp_path / "some", some, QUIET)
    for progress in made:
        task = progress.bar.tasks[0]
        assert task.completed == pytest.approx(task.total)


def test_runs_are_silent_about_kernels_that_are_not_here(tmp_path: Path) -> None:
    """transformers tells once for every kernel of a process."""
    heard, model = [], save_model(tmp_path / "model", "qwen3_next")
    logger = logging.getLogger("transformers")
    (catch := logging.Handler()).emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(catch)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    try:
        transformers_logging.warning_once.cache_clear()
        AutoModelForCausalLM.from_pretrained(model)(IDS)
        assert any("is falling back to its reference" in message for message in heard)
        heard.clear()
        transformers_logging.warning_once.cache_clear()
        ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
        verify(str(tmp_path / "out"), str(model))
    finally:
        logger.removeHandler(catch)
        transformers_logging.set_verbosity(verbosity)
    assert not heard


def test_a_tied_head_with_other_numbers_is_refused(tmp_path: Path) -> None:
    """transformers then uses both tensors, whatever the config says; dropping one would be another model."""
    folder = save_model(tmp_path / "model", **{**TINY, "tie_word_embeddings": True})
    head = torch.randn_like(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    edit_tensors(lambda content: content.update({"lm_head.weight": head}))(folder)
    with pytest.raises(ptq.InputError, match="'lm_head.weight' differs from the embedding"):
        ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    same = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(lambda content: content.update({"lm_head.weight": same}))(folder)
    ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)


def test_a_finished_result_that_lost_its_tensors_is_no_result(tiny: Path, tmp_path: Path) -> None:
    ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    weights = tmp_path / "out" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ptq.InputError, match="model.safetensors: is not as it was written"):
        ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    weights.unlink()
    with pytest.raises(ptq.InputError, match="model.safetensors"):
        ptq.quantize(tiny, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)


def test_code_of_a_checkpoint_is_never_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ptq.InputError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
