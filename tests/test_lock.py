"""One run at a time on a folder."""

import multiprocessing
import os
import shutil
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from conftest import listing, quantize

import ptq
from ptq.files.lock import exclusive, lock_file


def hold(folder: Path, held: Event) -> None:
    with exclusive(folder):
        held.set()
        signal.pause()


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    context, folder, other = multiprocessing.get_context("spawn"), tmp_path / "out", tmp_path / "work"
    held = context.Event()
    process = context.Process(target=hold, args=(folder, held))
    process.start()
    try:
        assert held.wait(60)
        with pytest.raises(ptq.InputError, match=r"out: another run is at work on it"), exclusive(other, folder):
            pass
        assert os.listdir(tmp_path) == ["out.ptq-lock"]  # the lock of `other` is gone, that of the other process is not
    finally:
        process.kill()
        process.join()
    with exclusive(folder):
        pass
    assert not os.listdir(tmp_path)


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out"):
        lock_file(tmp_path / "out").unlink()
        with exclusive(tmp_path / "out"):
            assert (tmp_path / "out.ptq-lock").exists()


def test_a_file_that_its_holder_removes_at_this_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the file that was opened and that at the one that has its name."""
    fstat, path, seen = os.fstat, lock_file(tmp_path / "out"), list[int]()

    def removed_after(handle: int) -> os.stat_result:
        seen.append(handle)
        if len(seen) == 2:  # the first call asks for the size
            path.unlink()
        return fstat(handle)

    monkeypatch.setattr(os, "fstat", removed_after)
    with exclusive(tmp_path / "out"):
        assert path.exists() and len(seen) == 4


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ptq.InputError, match=r"file/out: lies below a file"), exclusive(tmp_path / "file" / "out"):
        pass

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ptq.RunError, match=r"out\.ptq-lock: cannot be made \(Permission"), exclusive(tmp_path / "out"):
        pass


def test_a_finished_run_leaves_the_work_of_another_one_alone(tiny: Path, tmp_path: Path) -> None:
    run = ("quarot", tiny, tmp_path / "out", "--rounding", "nearest", "--no-report", "--work", tmp_path / "work")
    assert quantize(*run).exit_code == 0
    other = quantize("quarot", tiny, tmp_path / "other", *run[3:])
    assert other.exit_code == 0
    shutil.copytree(tmp_path / "other", tmp_path / "work")  # anything
    shutil.copy(tmp_path / "out" / "ptq.json", tmp_path / "work" / "work.json")
    with exclusive(tmp_path / "work"):
        before = listing(tmp_path)
        assert quantize(*run).exit_code == 0
        assert listing(tmp_path) == before
    assert quantize(*run).exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
