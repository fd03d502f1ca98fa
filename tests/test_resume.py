"""A run that is interrupted, at whatever moment, and continued gives the bytes of an undisturbed one."""

import multiprocessing
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import (
    QUIET,
    check_all_continue,
    contents,
    crashed,
    fast,
    kill_or_finish,
    model,
    photographed,
    recipe,
)

import ptq
from ptq.pipeline import needs, pipeline, stages
from ptq.recipe import Recipe
from ptq.statistics import chunks
from quip_sharp.plan import QuipSharpRecipe

KILLS = 20

__all__ = ["crashed", "fast", "model"]  # the fixtures


# --- a crash at every single change of the disk ---------------------------------------------------------------------


def test_a_crash_at_any_moment_costs_nothing(crashed: tuple[list[Path], dict[str, bytes]], model: Path) -> None:
    pictures, expected = crashed
    assert len(pictures) > 60
    # Continued in copies: other tests need the pictures.
    copies = [shutil.copytree(picture, picture.with_name(f"{picture.name}.copy")) for picture in pictures]
    check_all_continue(copies, expected, model, recipe(model))


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
