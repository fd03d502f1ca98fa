"""The two errors that a user may see: one clear sentence each, turned into an exit code by the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Bad input or wrong usage (exit code 2): names the file, tensor or option, what was found, and what to do."""


class RunError(RuntimeError):
    """The run itself failed (exit code 1): a full disk, a lost network, a proof that does not hold."""


@contextmanager
def refused(what: str) -> Iterator[None]:
    """For code in which transformers builds or runs a model with settings from a file: whatever exception it raises, of
    any kind but of these two and a broken pipe, becomes an InputError with `what` and the reason, or a RunError where
    memory does not suffice."""
    try:
        yield
    except (InputError, RunError, BrokenPipeError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in reason):  # torch's, too
            raise RunError(f"{what}: there is not enough memory for it ({reason})") from error
        if isinstance(error, KeyError):  # which says the key alone, as of a table of activation functions
            reason = f"it knows no {reason}"
        raise InputError(f"{what}: {reason}") from error


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """For code that knows the config.json, but not where it lies: its errors name the folder."""
    try:
        yield
    except InputError as error:
        if not str(error).startswith("config.json: "):
            raise
        raise InputError(f"{folder}/{error}") from error
