"""What a run does to folders and files that are somebody's: it asks, or leaves them alone."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from conftest import check_refused, edit_config, quantize
from interrupted_runs import QUIET, recipe
from safetensors.torch import load_file

import ptq
from ptq.commands.dequantize import dequantize
from ptq.engine import workers
from ptq.files import companions
from ptq.pipeline import tasks
from ptq.pipeline.work import Record
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")


def stopped(patch: pytest.MonkeyPatch, after: int, *arguments: Any) -> None:
    """A run that ends after so many linears."""
    own, left = tasks.Tasks.linear, [after]

    def linear(*args: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        own(*args)

    with patch.context() as inner:
        inner.setattr(tasks.Tasks, "linear", linear)
        with pytest.raises(KeyboardInterrupt):
            ptq.quantize(*arguments)


def test_a_lock_file_of_somebody_else_stays(tiny: Path, tmp_path: Path) -> None:
    run = ("fp6", tiny, tmp_path / "uv", "--no-report")
    (tmp_path / "uv.lock").write_text("mine")
    assert quantize(*run).exit_code == 0 and quantize(*run).exit_code == 0
    assert (tmp_path / "uv.lock").read_text() == "mine"
    (tmp_path / "new.ptq-lock").write_text("mine, too")
    check_refused(quantize("fp6", tiny, tmp_path / "new", "--no-report"), "is no lock of ptq")
    assert (tmp_path / "new.ptq-lock").read_text() == "mine, too"


def test_two_runs_do_not_write_into_one_result(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose folders of work are two, and whose tensors have the same shapes."""
    made, out = recipe(tiny, rounding="nearest"), tmp_path / "out"
    one, two = (replace(QUIET, work=tmp_path / name) for name in ("one", "two"))
    stopped(monkeypatch, 5, tiny, out, made, one)
    with pytest.raises(ptq.InputError, match=r"ptq-partial: holds the unfinished result of another run"):
        ptq.quantize(tiny, out, replace(made, seed=1), two)
    with pytest.raises(ptq.InputError, match=r"ptq-partial: holds the unfinished result"):
        dequantize(packed(tiny, tmp_path / "packed"), out)
    stopped(monkeypatch, 5, tiny, out, replace(made, seed=1), replace(two, restart=True))
    with pytest.raises(ptq.InputError, match="ptq-partial"):
        ptq.quantize(tiny, out, made, one)
    ptq.quantize(tiny, out, replace(made, seed=1), two)
    ptq.quantize(tiny, tmp_path / "again", replace(made, seed=1), QUIET)
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "again" / "model.safetensors").keys()
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert not (out / ".ptq-run").exists()


def packed(model: Path, out: Path) -> Path:
    ptq.quantize(model, out, QuarotRecipe(rounding="nearest", group_size=8), QUIET)
    return out


def test_work_where_a_disk_is_mounted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which cannot be removed: it is left empty, and the run has succeeded."""
    work, own = tmp_path / "disk", Path.rmdir

    def rmdir(path: Path) -> None:
        if path == work:
            raise OSError(16, "Device or resource busy", str(path))
        own(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    run = ("fp6", tiny, tmp_path / "out", "--no-report", "--work", work)
    assert quantize(*run).exit_code == 0 and quantize(*run).exit_code == 0
    assert work.is_dir() and not os.listdir(work)


def test_places_where_nothing_can_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_refused(quantize("fp6", tiny, "/", "--no-report"), "is no folder that could be made")
    check_refused(quantize("fp6", tiny, tmp_path / "loop", "--no-report"), "loop")
    check_refused(quantize("fp6", tiny, tmp_path / "out", "--work", tmp_path / "loop", "--no-report"), "loop")


def test_links_to_files_of_other_names_are_refused(tiny: Path, tmp_path: Path) -> None:
    """They may be files of this machine; those of the hub's cache, and of a folder of links, are not."""
    model, cache = tmp_path / "model", tmp_path / "hub" / "models--a--b"
    shutil.copytree(tiny, model)
    (tmp_path / "secret").write_text("mine")
    (model / "tokenizer.model").symlink_to(tmp_path / "secret")
    check_refused(quantize("fp6", model, tmp_path / "out", "--no-report"), "is a link to")
    assert not (tmp_path / "out").exists()
    (model / "tokenizer.model").unlink()
    (tmp_path / "elsewhere").mkdir()
    (model / "tokenizer.json").rename(tmp_path / "elsewhere" / "tokenizer.json")
    (model / "tokenizer.json").symlink_to(tmp_path / "elsewhere" / "tokenizer.json")
    assert quantize("fp6", model, tmp_path / "out", "--no-report").exit_code == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "main").mkdir(parents=True)
    (cache / "blobs" / "abc").write_text("{}")
    (cache / "snapshots" / "main" / "tokenizer.json").symlink_to("../../blobs/abc")
    companions.check(cache / "snapshots" / "main")


def test_where_a_text_lay_is_not_told(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("a")
    made = ptq.plan(str(tiny), recipe(tiny))
    record = Record.of(replace(recipe(tiny), calibration="~/text.txt"), made.plan, "", None)
    assert record.recipe["calibration"] == "text.txt"


def test_whole_numbers_are_the_numbers_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for clip in (1, None, "search", 0.5):
        made = QuarotRecipe(rounding="nearest", activation_bits=8, activation_clip=clip, gptaq_alpha=0)
        assert (type(made.activation_clip), made.gptaq_alpha) == (float if clip == 1 else type(clip), 0.0)
        assert type(made.gptaq_alpha) is type(made.damping) is float


def test_a_model_without_a_dtype_in_its_config_keeps_its_own(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    edit_config(dtype=None)(tmp_path / "model")
    dequantize(packed(tmp_path / "model", tmp_path / "packed"), tmp_path / "plain")
    assert {x.dtype for x in load_file(tmp_path / "plain" / "model.safetensors").values()} == {torch.float32}


def test_nothing_is_quantised_where_the_rest_rotates(tiny: Path, tmp_path: Path) -> None:
    """The linears that `--skip` leaves alone still need their online rotation."""
    result = quantize("quarot", tiny, tmp_path / "out", "--skip", "*", "--rounding", "nearest", "--no-report")
    assert result.exit_code == 0 and "nothing is quantised: --skip leaves every linear alone" in result.stderr


def test_a_cache_alone_is_something_that_was_quantised(tiny: Path, tmp_path: Path) -> None:
    options = ("--weight-bits", "16", "--kv-bits", "4", "--no-rotate", "--no-report")
    assert quantize("quarot", tiny, tmp_path / "out", *options).exit_code == 0
    (tmp_path / "out" / "ptq.json").unlink()
    result = quantize("verify", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads(quantize("inspect", tmp_path / "out", "--json").stdout)["kv_cache"]


def test_a_group_of_processes_that_is_there_already_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ptq.InputError, match=r"torch\.distributed is in use here already"), workers():
        pass
