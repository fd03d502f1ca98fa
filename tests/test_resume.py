"""A run that is interrupted, at whatever moment, and continued gives the bytes of an undisturbed one."""

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
from tiny_models import TINY, save_model

import ptq
from ptq.pipeline import needs, pipeline, stages
from ptq.pipeline.work import UNFINISHED
from ptq.recipe import Recipe
from ptq.statistics import chunks
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

LOG = "ptq_log.jsonl"  # holds seconds, so it is the one file that differs
QUIET = ptq.RunOptions(progress=False)
KILLS = 20


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """No measuring of the machine, no waiting for its disk: neither matters here. Small chunks: more files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 64)
        patch.setattr(needs, "_matmul_rate", lambda bfloat16=False: 1e9)
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
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


# --- a crash at every single change of the disk ---------------------------------------------------------------------


class Camera:
    """Copies a folder before every change that a run makes to the disk: what a crash at that moment would leave."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, album: Path) -> None:
        self.folder, self.album, self.pictures, self.busy = folder, album, 0, False
        self.copy, self.remove = shutil.copytree, shutil.rmtree
        for owner, name in ((os, "replace"), (Path, "touch"), (Path, "mkdir"), (Path, "rmdir"), (Path, "unlink")):
            patch.setattr(owner, name, self._watched(getattr(owner, name), name))
        patch.setattr(shutil, "rmtree", self._rmtree)

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.busy and (name != "mkdir") == os.path.exists(path):  # else nothing would change
                self.busy = True
                self.copy(self.folder, self.album / str(self.pictures))
                self.busy = False
                self.pictures += 1
            return function(path, *args, **kwargs)

        return watched

    def _rmtree(self, folder: Path, ignore_errors: bool = False) -> None:
        """`shutil.rmtree` in steps that a picture can be taken between."""
        assert folder.exists() or ignore_errors
        for entry in sorted(folder.iterdir()) if folder.exists() else ():
            self._rmtree(entry) if entry.is_dir() else entry.unlink()
        if folder.exists():
            folder.rmdir()


def photographed(model: Path, folder: Path, recipe: Recipe) -> tuple[list[Path], dict[str, bytes]]:
    """What a crash before each change of the disk leaves, and the result of the run that did not crash."""
    (folder / "run").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        camera = Camera(patch, folder / "run", folder / "album")
        ptq.quantize(model, folder / "run" / "out", recipe, QUIET)
    return [folder / "album" / str(i) for i in range(camera.pictures)], contents(folder / "run" / "out")


@pytest.fixture(scope="module")
def crashed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], dict[str, bytes]]:
    """Every moment of a GPTQ run, and its result."""
    return photographed(model, tmp_path_factory.mktemp("gptq"), recipe(model))


def check_all_continue(pictures: list[Path], expected: dict[str, bytes], model: Path, recipe: Recipe) -> None:
    for picture in pictures:
        ptq.quantize(model, picture / "out", recipe, QUIET)
        assert contents(picture / "out") == expected, picture
        assert os.listdir(picture) == ["out"], picture


def test_a_crash_at_any_moment_costs_nothing(crashed: tuple[list[Path], dict[str, bytes]], model: Path) -> None:
    pictures, expected = crashed
    assert len(pictures) > 60
    # Continued in copies: other tests need the pictures.
    copies = [shutil.copytree(picture, picture.with_name(f"{picture.name}.copy")) for picture in pictures]
    check_all_continue(copies, expected, model, recipe(model))


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


def test_work_without_its_record(crashed: tuple[list[Path], dict[str, bytes]], model: Path, tmp_path: Path) -> None:
    folder = moment(crashed, tmp_path, "hidden/0/complete", "hidden/1")
    (folder / "out.work/work.json").unlink()
    for restart in (False, True):
        with pytest.raises(ptq.InputError, match="out.work: is unfinished work that has lost its work.json, .*remove"):
            ptq.quantize(model, folder / "out", recipe(model), ptq.RunOptions(progress=False, restart=restart))


def test_a_crash_without_calibration_costs_nothing(model: Path, tmp_path: Path) -> None:
    asked = recipe(model, rounding="nearest")
    pictures, expected = photographed(model, tmp_path, asked)
    check_all_continue(pictures[::3], expected, model, asked)


def test_a_crash_while_clips_are_searched_costs_nothing(model: Path, tmp_path: Path) -> None:
    asked = recipe(model, activation_bits=4, activation_clip="search")
    pictures, expected = photographed(model, tmp_path, asked)

    def between(picture: Path, index: int) -> bool:
        """Some clips of a block are found, and none of its linears is rounded."""
        found, rounded = (list((picture / "out.work" / name).glob(f"model.layers.{index}.*.json"))
                          for name in ("clips", "linears"))  # fmt: skip
        return bool(found) and not rounded

    moments = [[picture for picture in pictures if between(picture, index)] for index in (0, 1)]
    assert all(len(some) > 5 for some in moments)
    check_all_continue([*moments[0], *moments[1]], expected, model, asked)


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


@pytest.mark.parametrize("rounding", ["gptq", "nearest"])
def test_blocks_that_are_done_are_not_looked_at_again(
    rounding: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of a large model: a run that stops while it completes the result goes on there."""
    asked = recipe(model, rounding=rounding)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_finish", lambda *_: (_ for _ in ()).throw(ptq.RunError("stopped")))
        with pytest.raises(ptq.RunError, match="stopped"):
            ptq.quantize(model, tmp_path / "out", asked, QUIET)
    monkeypatch.setattr(stages, "block", lambda *_: pytest.fail("a block that is done was begun again"))
    ptq.quantize(model, tmp_path / "out", asked, QUIET)


def test_a_result_that_is_lost_is_begun_again(crashed: tuple[list[Path], dict[str, bytes]], model: Path) -> None:
    """The work folder says what is done in shards that lie beside it: without them, or with others, nothing is."""
    pictures, expected = crashed
    for change in (shutil.rmtree, lambda folder: (folder / "model.safetensors").write_bytes(b"damaged")):
        picture = shutil.copytree(
            pictures[len(pictures) // 2], pictures[0].with_name(f"lost.{len(os.listdir(pictures[0].parent))}")
        )
        change(picture / "out.ptq-partial")
        check_all_continue([picture], expected, model, recipe(model))


# --- kill -9 --------------------------------------------------------------------------------------------------------


def child(model: Path, out: Path, recipe: Recipe) -> None:
    """A run in a process of its own, with one thread."""
    import torch

    torch.set_num_threads(1)
    needs._matmul_rate = lambda bfloat16=False: 1e9
    chunks.CHUNK_TOKENS = 32  # more files, so more moments to be killed between
    pipeline.quantize(model, out, recipe, QUIET)


def appeared(folder: Path) -> set[str]:
    """Every path that there is now; folders vanish while they are read."""
    return {os.path.join(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}


@pytest.mark.parametrize("tuned", [False, True], ids=["GPTQ", "fine-tuned"])
def test_kill_and_continue_gives_the_same_bytes(tuned: bool, model: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # it imports once; its children start in a moment
    context.set_forkserver_preload(["ptq", "quarot.plan", "transformers.models.llama.modeling_llama"])
    chance, most = random.Random(0), KILLS // 4 if tuned else KILLS
    asked: Recipe = recipe(model)
    if tuned:
        asked = QuipSharpRecipe(
            calibration=asked.calibration, samples=8, sequence_length=16, finetune="full", finetune_epochs=2
        )

    def start(out: Path) -> Any:
        process = context.Process(target=child, args=(model, out, asked))
        process.start()
        return process

    undisturbed = start(tmp_path / "expected")
    undisturbed.join()
    assert undisturbed.exitcode == 0
    expected, kills, runs = contents(tmp_path / "expected"), 0, 0
    while kills < most:
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
