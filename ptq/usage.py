"""Wrong usage of a command, answered as its other errors are: in one sentence on stderr, where Typer draws a box."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__
"""What Typer raises for wrong usage; it has no public name for it, and its own class or click's, as its version is."""


class Commands(TyperGroup):
    """A program of several commands. Without one it shows its help, and that is wrong usage."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        args = sys.argv[1:] if args is None else args
        code = _exit_code(super().main, args or ["--help"], *rest, **settings)
        sys.exit(code if args else 2)


def _exit_code(main: Callable[..., Any], *args: Any, **settings: Any) -> int:
    """Run a program up to its exit code, which is 2 after wrong usage."""
    try:
        return main(*args, **{**settings, "standalone_mode": False}) or 0
    except UsageError as error:
        program = settings.get("prog_name") or Path(sys.argv[0]).name
        path = program if error.ctx is None else error.ctx.command_path  # None: an option without its value
        message = error.format_message().replace(": Value error, ", ": ").rstrip(".")
        print(f"{program}: {message[:1].lower()}{message[1:]}{_hint(message)} (see `{path} --help`)", file=sys.stderr)
        return 2


def _hint(message: str) -> str:
    """What is meant, most likely, by a text that was taken for arguments or for an option."""
    if message.startswith("Got unexpected extra argument"):
        return "; a text of several words needs quotes, and an option its name"
    if re.match(r"No such option: -\d", message):  # no option is a number
        return "; put -- in front of a text that begins with a dash"
    return ""
