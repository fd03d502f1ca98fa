"""The end of a run: folders that may be used, what is copied, hashes, the rename."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import check_refused, quantize
from safetensors.torch import load_file
from tiny_models import save_model

import ptq
from ptq.pipeline import writer
from ptq.pipeline.job import Job
from quarot.plan import QuarotRecipe

RECIPE = QuarotRecipe(rounding="nearest")


def job(model: Path, recipe: QuarotRecipe = RECIPE) -> Job:
    return Job(recipe=recipe, signs={}, device=torch.device("cpu"), **vars(ptq.plan(str(model), recipe)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("writer") / "model")


def completed(job: Job, folder: Path) -> Path:
    shards = writer.shards_of(job, folder)
    shards.begin()
    writer.complete(job, shards)
    return folder


def test_folders_that_may_be_used(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    writer.check_folders(tmp_path / "new", tmp_path / "new.work", model)
    writer.check_folders(tmp_path / "empty", tmp_path / "empty.work", model)
    writer.check_folders(tmp_path / "deep" / "new", tmp_path / "deep" / "work", model)
    writer.check_folders(model / "quantised", model / "quantised.work", model)


@pytest.mark.parametrize(
    ("out", "work"),
    [
        ("same", "same"),
        ("out", "out/work"),
        ("out", "out.ptq-partial"),
        ("out", "out.ptq-partial/work"),
        ("work/out", "work"),
        ("out", "link"),
        ("out", "."),
        ("out", "../{name}/model"),
    ],
)
def test_folders_that_would_be_lost(out: str, work: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    place = tmp_path / work.format(name=tmp_path.name)
    with pytest.raises(ptq.InputError, match="--work"):
        writer.check_folders(tmp_path / out, place, tmp_path / "model")


def test_what_a_folder_cannot_be_renamed_to(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the work, not after it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for link in ("link", "dangling"):
        with pytest.raises(
            ptq.InputError, match="is a link, and a folder takes its place at the end; name .*/(empty|none)"
        ):
            writer.check_out(tmp_path / link)
        check_refused(quantize("quarot", model, tmp_path / link, "--rounding", "nearest"), "is a link")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    with pytest.raises(ptq.InputError, match="is where a disk is mounted"):
        writer.check_out(tmp_path / "empty")
    writer.check_out(tmp_path / "empty" / "new")


def test_what_is_completed(model: Path, tmp_path: Path) -> None:
    completed(job(model), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["quantization_config"]["quant_method"] == "ptq"
    fused = dataclasses.replace(RECIPE, online=False)
    completed(job(model, fused), tmp_path / "fused")
    assert json.loads((tmp_path / "fused" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_tensors_of_a_result_are_known_from_the_plan(model: Path, tmp_path: Path) -> None:
    ptq.quantize(model, tmp_path / "out", RECIPE, ptq.RunOptions(progress=False))
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    assert writer.written_tensors(job(model)) == expected


def test_code_weights_and_folders_of_the_source_are_not_copied(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    for name in ("modeling_llama.py", "pytorch_model.bin", "README.md", "notes.txt"):
        (source / name).write_text("stays")
    (source / "tokenizer").mkdir()
    (source / "LICENSE").write_text("comes along")
    completed(job(source), tmp_path / "out")
    assert set(os.listdir(tmp_path / "out")) & set(os.listdir(source)) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "LICENSE",
    }  # fmt: skip


def test_a_plain_result_keeps_its_config(model: Path, tmp_path: Path) -> None:
    plain = QuarotRecipe(rounding="nearest", weight_bits=16, rotate=False)
    completed(job(model, plain), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((model / "config.json").read_text())


def test_hashes_cover_what_a_model_is_loaded_from(tmp_path: Path) -> None:
    loaded = {
        "model-00001-of-00001.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
        "generation_config.json", "chat_template.jinja",
    }  # fmt: skip
    for name in (*loaded, "report.html", "ptq_log.jsonl"):
        (tmp_path / name).write_text(name)
    found = writer.file_hashes(tmp_path)
    assert set(found) == loaded
    assert found["config.json"] == hashlib.sha256(b"config.json").hexdigest()


@pytest.mark.parametrize("exists", [False, True])
def test_put_in_place(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "out.ptq-partial").mkdir()
    (tmp_path / "out.ptq-partial" / "config.json").write_text("{}")
    if exists:
        (tmp_path / "out").mkdir()
    assert writer.partial_folder(tmp_path / "out") == tmp_path / "out.ptq-partial"
    writer.put_in_place(tmp_path / "out.ptq-partial", tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["config.json"]


def test_a_place_that_was_taken_meanwhile(tmp_path: Path) -> None:
    """Hours may have passed since the check at the start: nothing of either is lost."""
    for folder in ("out", "out.ptq-partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(folder)
    with pytest.raises(ptq.RunError, match=r"it is complete in .*out\.ptq-partial"):
        writer.put_in_place(tmp_path / "out.ptq-partial", tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "out"
    assert (tmp_path / "out.ptq-partial" / "file").read_text() == "out.ptq-partial"
