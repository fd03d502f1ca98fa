"""One run at a time on a folder: a lock that ends with its process, however that ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ptq.errors import InputError, RunError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None


@contextmanager
def exclusive(*folders: Path) -> Iterator[None]:
    """Hold the locks of folders, which need not exist, while the block runs: `<folder>.ptq-lock` beside each.

    The lock file of a process that was killed stays, but is free. Raises InputError where another process holds one,
    RunError where one cannot be made.
    """
    handles = []
    try:
        for folder in folders:
            handles.append(_locked(folder))
        yield
    finally:
        for folder, handle in zip(folders, handles, strict=False):
            lock_file(folder).unlink(missing_ok=True)
            os.close(handle)


def lock_file(folder: Path) -> Path:
    """Where the lock of a folder lies."""
    return folder.with_name(f"{folder.name}.ptq-lock")


def _locked(folder: Path) -> int:
    """The handle of the lock file of a folder, locked."""
    path = lock_file(folder)
    while True:
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except (NotADirectoryError, FileExistsError) as error:
            raise InputError(f"{folder}: lies below a file; name another folder") from error
        except OSError as error:
            raise RunError(f"{path}: cannot be made ({error.strerror}); name a folder that can be written") from error
        if os.fstat(handle).st_size:
            os.close(handle)
            raise InputError(f"{path}: is no lock of ptq, which would remove it; move it, or name another folder")
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                f"{folder}: another run is at work on it; wait for its end, or name another folder"
            ) from None
        except OSError:  # a file system without locks
            return handle
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # its holder has just removed the file
