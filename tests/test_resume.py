"""A run that is interrupted, at whatever moment, and continued gives the bytes of an undisturbed one."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import save_model

import ptq
from ptq import pipeline, preflight
from ptq.work import UNFINISHED
from quarot.plan import QuarotRecipe

LOG = "ptq_log.jsonl"  # holds seconds, so it is the one file that differs
TINY = dict(hidden_size=16, intermediate_size=24, head_dim=8, num_attention_heads=2, num_key_value_heads=1)
QUIET = ptq.RunOptions(progress=False)
KILLS = 20


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """No measuring of the machine, and no waiting for its disk: neither matters here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_matmul_rate", lambda: 1e9)
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


def recipe(model: Path, **changes: Any) -> QuarotRecipe:
    text = model.parent / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghij klmnop", k=400)))
    return QuarotRecipe(**{**dict(calibration=str(text), samples=4, sequence_length=32, group_size=8), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOG}


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- a crash at every single change of the disk ---------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here."""


class Disk:
    """Counts what changes the disk; from change `last` on nothing is changed any more, as if the process were dead."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int | None) -> None:
        self.changes, self.last = 0, last
        for owner, name in ((os, "replace"), (Path, "touch"), (Path, "mkdir"), (Path, "rmdir"), (Path, "unlink")):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        patch.setattr(shutil, "rmtree", self._rmtree)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.changes == self.last:
                raise Crash
            self.changes += 1
            return function(*args, **kwargs)

        return counted

    def _rmtree(self, folder: Path, ignore_errors: bool = False) -> None:
        """`shutil.rmtree` in steps that a crash can fall between."""
        assert folder.exists() or ignore_errors
        for entry in sorted(folder.iterdir()) if folder.exists() else ():
            self._rmtree(entry) if entry.is_dir() else entry.unlink()
        if folder.exists():
            folder.rmdir()


def run_until(last: int | None, model: Path, out: Path, recipe: QuarotRecipe) -> int:
    """Run, and die before change `last` of the disk. Returns the number of changes."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, last)
        with contextlib.suppress(Crash):
            ptq.quantize(model, out, recipe, QUIET)
        return disk.changes


@pytest.mark.parametrize("rounding", ["gptq", "nearest"])
def test_a_crash_at_any_change_of_the_disk_costs_nothing(rounding: str, model: Path, tmp_path: Path) -> None:
    asked = recipe(model, rounding=rounding)
    changes = run_until(None, model, tmp_path / "out", asked)
    expected = contents(tmp_path / "out")
    assert changes > 30
    shutil.rmtree(tmp_path / "out")
    for last in range(changes):
        assert run_until(last, model, tmp_path / "out", asked) == last
        ptq.quantize(model, tmp_path / "out", asked, QUIET)
        assert contents(tmp_path / "out") == expected, f"crash before change {last}"
        assert os.listdir(tmp_path) == ["out"], f"crash before change {last}"
        shutil.rmtree(tmp_path / "out")


def test_a_full_disk_at_any_file_is_told_and_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file in turn fails to be written, and the same call continues, in one and the same work folder."""
    real, written, failures = os.replace, set(), 0

    def full(source: Any, target: Any) -> None:
        if str(target) not in written:
            written.add(str(target))
            raise OSError(28, "No space left on device")
        real(source, target)

    asked = recipe(model)
    ptq.quantize(model, tmp_path / "expected", asked, QUIET)
    monkeypatch.setattr(os, "replace", full)
    while True:
        try:
            ptq.quantize(model, tmp_path / "out", asked, QUIET)
            break
        except ptq.RunError as error:
            assert "No space left" in str(error)
            assert not (tmp_path / "out").exists()
            assert not list(tmp_path.rglob("*.tmp"))
            failures += 1
            assert failures <= len(written)
    assert failures > 30
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


# --- kill -9 --------------------------------------------------------------------------------------------------------


def child(model: Path, out: Path, recipe: QuarotRecipe) -> None:
    """A run in a process of its own, with one thread."""
    import torch

    torch.set_num_threads(1)
    preflight._matmul_rate = lambda: 1e9
    pipeline.quantize(model, out, recipe, QUIET)


def appeared(folder: Path) -> set[str]:
    """Every path that there is now; folders vanish while they are read."""
    return {os.path.join(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}


def test_kill_and_continue_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # it imports once; its children start in a moment
    context.set_forkserver_preload(["ptq", "quarot.plan", "transformers.models.llama.modeling_llama"])
    asked, chance = recipe(model), random.Random(0)

    def start(out: Path) -> Any:
        process = context.Process(target=child, args=(model, out, asked))
        process.start()
        return process

    undisturbed = start(tmp_path / "expected")
    undisturbed.join()
    assert undisturbed.exitcode == 0
    expected, kills, runs = contents(tmp_path / "expected"), 0, 0
    while kills < KILLS:
        out = tmp_path / f"run{runs}" / "out"
        out.parent.mkdir()
        while not kill_or_finish(start(out), out.parent, chance):
            kills += 1
        runs += 1
        assert contents(out) == expected
        assert os.listdir(out.parent) == ["out"]
    assert kills > 2 * runs, "most runs should be killed several times"


def kill_or_finish(process: Any, folder: Path, chance: random.Random) -> bool:
    """Kill a process after a random number of new files and a random moment; True where it ended before."""
    seen, new = appeared(folder), 0
    moment = chance.randint(0, 12)
    while process.is_alive() and new < moment:
        now = appeared(folder)
        new += len(now - seen)
        seen |= now
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.005)
    process.kill()
    process.join()
    assert process.exitcode in (0, -9)
    return process.exitcode == 0


# --- what is left of another run ------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(model: Path, tmp_path: Path) -> Path:
    """The output folder of a run that was interrupted half-way."""
    run_until(40, model, tmp_path / "out", recipe(model))
    assert (tmp_path / "out.work" / UNFINISHED).exists()
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (dict(weight_bits=3), "weight_bits: 4 -> 3"),
        (dict(seed=1), "seed: 0 -> 1"),
        (dict(skip=("*.down_proj",)), "skip: [] -> ['*.down_proj']"),
        (dict(rounding="nearest"), "rounding: 'gptq' -> 'nearest'"),
        (dict(samples=5), "the calibration data has changed"),
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
        with pytest.raises(ptq.InputError, match="exists and is not empty"):
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
