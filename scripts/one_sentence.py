"""How scripts end that refuse something: with one sentence, as the command does."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ptq.errors import InputError, RunError


def run(command: Callable[..., Any]) -> None:
    """Run a Typer app, or a function as one."""
    try:
        command() if isinstance(command, typer.Typer) else typer.run(command)
    except (InputError, RunError) as error:
        _end(str(error), 2 if isinstance(error, InputError) else 1)
    except OSError as error:
        _end(str(error) if error.filename is None else f"{error.filename}: {error.strerror}", 1)


def _end(sentence: str, code: int) -> None:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    sys.exit(code)
