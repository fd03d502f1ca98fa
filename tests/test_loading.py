"""Models that are loaded to be measured: nothing of their files is left out in silence, and every refusal is one
sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from tiny_models import TINY, save_model

import ptq
from fp6.plan import Fp6Recipe
from ptq.errors import InputError
from ptq.hf.loading import load_config, load_model, load_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", **TINY, num_hidden_layers=3)


REFUSED: dict[str, tuple[Any, str]] = {
    "fewer blocks than there are": (edit_config(num_hidden_layers=1), "hold tensor 'model.layers.1.input_layernorm"),
    "fewer blocks, and one for multi-token prediction": (
        edit_config(num_hidden_layers=1, num_nextn_predict_layers=1),
        "hold tensor 'model.layers.2.input_layernorm",
    ),
    "more blocks": (edit_config(num_hidden_layers=4), "16 tensors of the model are not in its files"),
    "blocks without end": (
        edit_config(num_hidden_layers=10**8, model_type="qwen2"),
        "num_hidden_layers 100000000, but",
    ),
    "a bias that nobody reads": (
        edit_config(mlp_bias=False),
        "hold tensor 'model.layers.0.mlp.down_proj.bias', but its config.json does not promise it",
    ),
    "no heads": (edit_config(num_attention_heads=0), " by zero"),
    "a word that is no dtype": (edit_config(dtype="nope"), "nope"),
    "a number that is no activation": (edit_config(hidden_act=5), "hidden_act"),
    "padding outside the vocabulary": (edit_config(pad_token_id=10**6), "could not be loaded: Padding_idx"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_refused(damage: str, model: Path) -> None:
    edit, sentence = REFUSED[damage]
    edit(model)
    with pytest.raises(InputError) as error:
        load_model(model)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_tables_that_old_files_hold_and_other_parts_are_left_out(model: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "mtp.layers.0.norm.weight": torch.ones(16)}
    edit_tensors(lambda tensors: tensors.update(extra))(model)
    load_model(model)


def test_blocks_for_multi_token_prediction_are_left_out(model: Path) -> None:
    edit_config(num_hidden_layers=2, num_nextn_predict_layers=1)(model)
    load_model(model)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_configs_without_end_are_refused_by_every_command(key: str, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    model = save_model(tmp_path / "model", "mixtral", hidden_size=16, intermediate_size=24, head_dim=8)
    assert quantize("fp6", model, packed).exit_code == 0
    (packed / "ptq.json").unlink()
    for folder in (packed, model):
        edit_config(**{key: 10**8})(folder)
    for arguments in (
        ("inspect", packed), ("prepack", packed, out, "--target", "cpu"), ("export", packed, out), ("fp6", model, out),
        ("verify", packed, "--against", model),
    ):  # fmt: skip
        check_refused(quantize(*arguments), " 100000000, but the checkpoint has")


def test_classes_without_end_are_left_out(model: Path, tmp_path: Path) -> None:
    """transformers makes a name of every one, which took minutes and gigabytes."""
    edit_config(num_labels=10**9)(model)
    assert quantize("fp6", model, tmp_path / "out", "--plan").exit_code == 0
    assert quantize("inspect", model).exit_code == 0


def test_blocks_for_multi_token_prediction_without_end(model: Path, tmp_path: Path) -> None:
    edit_config(num_nextn_predict_layers=10**8)(model)
    assert quantize("fp6", model, tmp_path / "out").exit_code == 0


# --- files beside the weights ---------------------------------------------------------------------------------------


def test_named_chat_templates_and_tokenizers_of_any_kind_are_taken_over(model: Path, tmp_path: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    beside = {"additional_chat_templates/tools.jinja": "a", "tekken.json": "{}", "x.tiktoken": "b", "LICENSE": "c"}
    for name, content in beside.items():
        (model / name).write_text(content)
    (model / "additional_chat_templates" / "notes.md").write_text("mine")
    packed, prepacked = tmp_path / "packed", tmp_path / "prepacked"
    assert quantize("fp6", model, packed).exit_code == 0
    assert quantize("prepack", packed, prepacked, "--target", "cpu").exit_code == 0
    for out in (packed, prepacked):
        assert {name: (out / name).read_text() for name in beside} == beside
        assert not (out / "additional_chat_templates" / "notes.md").exists()
        assert quantize("verify", out).exit_code == 0
        template = out / "additional_chat_templates" / "tools.jinja"
        template.write_text("other")
        check_refused(quantize("verify", out), f"{template}: is not the file that was written")
        shutil.rmtree(template.parent)
        check_refused(quantize("verify", out), f"{template}: is missing")


def test_a_folder_without_tokenizer(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(model)
    assert load_config(model).num_hidden_layers == 3


# --- records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["[" * 100_000, '{"recipe": {}, "recipe": {}}', '{"recipe": {"x": NaN}}', "[]"])
def test_records_of_strangers(content: str, model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    ptq.quantize(model, packed, Fp6Recipe(), ptq.RunOptions(progress=False, report=False))
    (packed / "ptq.json").write_text(content)
    check_refused(quantize("verify", packed), "ptq.json: not a record of a ptq run")


def test_a_record_without_a_result(model: Path, tmp_path: Path) -> None:
    packed, options = tmp_path / "packed", ptq.RunOptions(progress=False, report=False)
    ptq.quantize(model, packed, Fp6Recipe(), options)
    record = json.loads((packed / "ptq.json").read_text())
    for wrong in ({name: x for name, x in record.items() if name != "result"}, record | {"result": {"more": 1}}):
        (packed / "ptq.json").write_text(json.dumps(wrong))
        with pytest.raises(ptq.InputError, match="ptq.json: no result of a run is in it; quantise again"):
            ptq.quantize(model, packed, Fp6Recipe(), options)
    assert "fetch the file again" not in quantize("verify", packed).stderr
