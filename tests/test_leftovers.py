"""What lies there when a run begins: unfinished work, damaged or of another run, and results."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import QUIET, contents, crashed, fast, listing, model, recipe

import ptq
from ptq.pipeline import pipeline
from ptq.pipeline.work import UNFINISHED

__all__ = ["crashed", "fast", "model"]  # the fixtures


# --- damaged work ----------------------------------------------------------------------------------------------------


def check_needs_restart(folder: Path, model: Path, path: Path) -> None:
    """The same call refuses what is damaged, by its name; with --restart it begins again."""
    with pytest.raises(ptq.InputError, match=f"{path}: this file of unfinished work is damaged .*; pass --restart"):
        ptq.quantize(model, folder / "out", recipe(model), QUIET)
    ptq.quantize(model, folder / "out", recipe(model), ptq.RunOptions(progress=False, restart=True))


def moment(crashed: tuple[list[Path], dict[str, bytes]], folder: Path, there: str, not_there: str) -> Path:
    """A copy of the first picture with one file in its work folder, and without another."""
    found = (p for p in crashed[0] if (p / "out.work" / there).exists() and not (p / "out.work" / not_there).exists())
    return shutil.copytree(next(found), folder / "moment")


def test_a_lost_chunk_is_missed(crashed: tuple[list[Path], dict[str, bytes]], model: Path, tmp_path: Path) -> None:
    """Else a block would be calibrated on fewer rows, and nobody would know."""
    folder = moment(crashed, tmp_path, "hidden/0/complete", "hidden/1")
    (folder / "out.work/hidden/0/00001.safetensors").unlink()
    check_needs_restart(folder, model, folder / "out.work/hidden/0/complete")
    assert contents(folder / "out") == crashed[1]


@pytest.mark.parametrize("content", [b"", b"null", b"\xff\xfe", b'{"error": '], ids=repr)
@pytest.mark.parametrize(
    ("name", "there", "not_there"),
    [
        ("hidden/0/00000.safetensors", "hidden/0/complete", "hidden/1"),
        ("linears/model.embed_tokens.json", "linears/model.embed_tokens.json", "hidden/1"),
        ("probe/0.safetensors", "probe/0.safetensors", "probe/1.safetensors"),
        ("outliers/0.safetensors", "probe/1.safetensors", "probe/2.safetensors"),
    ],
)
def test_damaged_work_is_refused(
    name: str,
    there: str,
    not_there: str,
    content: bytes,
    crashed: tuple[list[Path], dict[str, bytes]],
    model: Path,
    tmp_path: Path,
) -> None:
    folder = moment(crashed, tmp_path, there, not_there)
    (folder / "out.work" / name).write_bytes(content)
    check_needs_restart(folder, model, folder / "out.work" / name)


@pytest.mark.parametrize(
    ("name", "there", "not_there"),
    [
        ("hidden/0/00000.safetensors", "hidden/0/complete", "hidden/1"),
        ("hessians/0.safetensors", "hessians/0.safetensors", "linears/model.layers.0.self_attn.q_proj.json"),
        ("probe/0.safetensors", "probe/0.safetensors", "probe/1.safetensors"),
    ],
)
def test_one_wrong_number_is_seen(
    name: str, there: str, not_there: str, crashed: tuple[list[Path], dict[str, bytes]], model: Path, tmp_path: Path
) -> None:
    """Else it would go into the result, and nobody would know."""
    folder = moment(crashed, tmp_path, there, not_there)
    path = folder / "out.work" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 64
    path.write_bytes(data)
    check_needs_restart(folder, model, path)
    assert contents(folder / "out") == crashed[1]


def test_work_without_its_record(crashed: tuple[list[Path], dict[str, bytes]], model: Path, tmp_path: Path) -> None:
    folder = moment(crashed, tmp_path, "hidden/0/complete", "hidden/1")
    (folder / "out.work/work.json").unlink()
    for restart in (False, True):
        with pytest.raises(ptq.InputError, match="out.work: is unfinished work that has lost its work.json, .*remove"):
            ptq.quantize(model, folder / "out", recipe(model), ptq.RunOptions(progress=False, restart=restart))


# --- what is left of another run ------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(crashed: tuple[list[Path], dict[str, bytes]], tmp_path: Path) -> Path:
    """The output folder of a run that was interrupted half-way."""
    shutil.copytree(crashed[0][len(crashed[0]) // 2], tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "out.work" / UNFINISHED).exists()
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (dict(weight_bits=3), "weight_bits: 4 -> 3"),
        (dict(seed=1), "seed: 0 -> 1"),
        (dict(skip=("*.down_proj",)), "skip: [] -> ['*.down_proj']"),
        (dict(rounding="nearest"), "rounding: 'gptq' -> 'nearest'"),
        (dict(samples=5), "samples: 4 -> 5"),
    ],
)
def test_a_changed_recipe_is_refused_with_the_difference(
    change: dict[str, Any], difference: str, model: Path, unfinished: Path
) -> None:
    before = listing(unfinished.parent)
    with pytest.raises(ptq.InputError, match="--restart") as error:
        ptq.quantize(model, unfinished, recipe(model, **change), QUIET)
    assert difference in str(error.value)
    assert listing(unfinished.parent) == before


def test_a_changed_model_is_refused(model: Path, unfinished: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with pytest.raises(ptq.InputError, match="the model has changed"):
        ptq.quantize(other, unfinished, recipe(model), QUIET)


def test_restart_throws_unfinished_work_away(model: Path, unfinished: Path) -> None:
    asked = recipe(model, weight_bits=3)
    ptq.quantize(model, unfinished, asked, ptq.RunOptions(progress=False, restart=True))
    fresh = unfinished.with_name("fresh")
    ptq.quantize(model, fresh, asked, QUIET)
    assert contents(unfinished) == contents(fresh)


def test_an_edited_or_damaged_record_is_refused(model: Path, unfinished: Path) -> None:
    record = unfinished.with_name("out.work") / UNFINISHED
    stored = json.loads(record.read_text())
    record.write_text(json.dumps({**stored, "fingerprint": "0"}))
    with pytest.raises(ptq.InputError, match="has been edited"):
        ptq.quantize(model, unfinished, recipe(model), QUIET)
    record.write_text('{"recipe": ')
    with pytest.raises(ptq.InputError, match="not a record"):
        ptq.quantize(model, unfinished, recipe(model), QUIET)


# --- a result that is there already ---------------------------------------------------------------------------------


def test_a_finished_result_returns_at_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(model, rounding="nearest")
    first = ptq.quantize(model, tmp_path / "out", asked, QUIET)
    before = listing(tmp_path)
    monkeypatch.setattr(pipeline, "_run", lambda *args: pytest.fail("nothing is left to do"))
    assert ptq.quantize(model, tmp_path / "out", asked, QUIET) == first
    assert listing(tmp_path) == before


def test_a_finished_result_of_another_recipe_is_left_alone(model: Path, tmp_path: Path) -> None:
    ptq.quantize(model, tmp_path / "out", recipe(model, rounding="nearest"), QUIET)
    before = listing(tmp_path)
    for restart in (False, True):
        with pytest.raises(ptq.InputError, match=r"holds the result of another run \(seed: 0 -> 1\)"):
            options = ptq.RunOptions(progress=False, restart=restart)
            ptq.quantize(model, tmp_path / "out", recipe(model, rounding="nearest", seed=1), options)
    assert listing(tmp_path) == before


def test_folders_that_would_be_lost_with_the_work_are_refused(model: Path, tmp_path: Path) -> None:
    asked = recipe(model, rounding="nearest")
    ptq.quantize(model, tmp_path / "done", asked, QUIET)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.tmp").write_text("kept")
    before = listing(tmp_path)
    out = tmp_path / "out"
    for work in (out, out / "work", tmp_path / "done", tmp_path / "mine", tmp_path, model, model.parent):
        for restart in (False, True):
            with pytest.raises(ptq.InputError, match="--work"):
                ptq.quantize(model, out, asked, ptq.RunOptions(progress=False, work=work, restart=restart))
    with pytest.raises(ptq.InputError, match="cannot be in it"):
        ptq.quantize(model, tmp_path / "scratch" / "out", asked, ptq.RunOptions(work=tmp_path / "scratch"))
    assert listing(tmp_path) == before
