"""How scripts end that refuse something: with one sentence, as the command does."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer


def run(command: Callable[..., Any]) -> None:
    """Run a Typer app, or a function as one."""
    try:
        command() if isinstance(command, typer.Typer) else typer.run(command)
    except Exception as error:
        from ptq.errors import InputError, RunError  # after --help: it brings in torch

        if isinstance(error, InputError | RunError):
            _end(str(error), 2 if isinstance(error, InputError) else 1)
        if isinstance(error, FileNotFoundError | PermissionError):
            _end(f"{error.filename}: {error.strerror}", 1)
        raise


def _end(sentence: str, code: int) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    sys.exit(code)
