"""Runs that are interrupted: what a crash at any moment leaves on the disk."""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY, save_model

import ptq
from ptq.pipeline import needs
from ptq.recipe import Recipe
from ptq.statistics import chunks
from quarot.plan import QuarotRecipe

LOG = "ptq_log.jsonl"  # holds seconds, so it is the one file that differs
QUIET = ptq.RunOptions(progress=False)


@contextmanager
def quick() -> Iterator[None]:
    """No measuring of the machine, no waiting for its disk: neither matters here. Small chunks: more files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 64)
        patch.setattr(needs, "_matmul_rate", lambda bfloat16=False: 1e9)
        patch.setattr(os, "fsync", lambda handle: None)
        yield


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
        if path.is_file() and path.suffix != ".ptq-lock"
    }


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


def check_all_continue(pictures: list[Path], expected: dict[str, bytes], model: Path, recipe: Recipe) -> None:
    for picture in pictures:
        ptq.quantize(model, picture / "out", recipe, QUIET)
        assert contents(picture / "out") == expected, picture
        assert os.listdir(picture) == ["out"], picture


def appeared(folder: Path) -> set[str]:
    """Every path that there is now; folders vanish while they are read."""
    return {os.path.join(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}


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


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


@pytest.fixture(scope="module")
def crashed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], dict[str, bytes]]:
    """Every moment of a GPTQ run, and its result."""
    return photographed(model, tmp_path_factory.mktemp("gptq"), recipe(model))
