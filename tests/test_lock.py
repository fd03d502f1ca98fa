"""One run at a time on a folder."""

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

import ptq
from ptq.lock import exclusive, release


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
        assert os.listdir(tmp_path) == ["out.lock"]  # the lock of `other` is gone, that of the other process is not
    finally:
        process.kill()
        process.join()
    with exclusive(folder):
        pass
    assert not os.listdir(tmp_path)


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out"):
        release(tmp_path / "out")
        with exclusive(tmp_path / "out"):
            assert (tmp_path / "out.lock").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ptq.RunError, match=r"out\.lock: cannot be made"), exclusive(tmp_path / "file" / "out"):
        pass
