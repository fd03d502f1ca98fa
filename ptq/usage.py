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

MOST_OWNERS = 3
"""Commands with an option that are named to one who gave it to another."""


class Commands(TyperGroup):
    """A program of several commands. Without one it shows its help, and that is wrong usage."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, each with the whole first line of its help."""
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        args = sys.argv[1:] if args is None else args
        named = [name for name in args[:1] if name in self.commands]
        code = _exit_code(super().main, named, args or ["--help"], *rest, **settings)
        sys.exit(code if args else 2)


def _exit_code(main: Callable[..., Any], named: list[str], *args: Any, **settings: Any) -> int:
    """Run a program up to its exit code, which is 2 after wrong usage. `named`: the command, if one was."""
    try:
        return main(*args, **{**settings, "standalone_mode": False}) or 0
    except UsageError as error:
        program = settings.get("prog_name") or Path(sys.argv[0]).name
        path = " ".join([program, *named]) if error.ctx is None else error.ctx.command_path  # None: a value is missing
        message = error.format_message().replace(": Value error, ", ": ").rstrip(".")
        hint = _hint(message, path) or _owners(message, error.ctx)
        sentence = f"{message[:1].lower()}{message[1:]}{hint}"
        print(f"{program}: {sentence} (see `{path} --help`)", file=sys.stderr)
        return 2


def _hint(message: str, command: str) -> str:
    """What is meant, most likely, by a text that was taken for arguments or an option, or by the name that another
    command has for an option."""
    if message.startswith("Got unexpected extra argument"):
        return "; a text of several words needs quotes, and an option its name"
    if re.match(r"No such option: -\d", message):  # no option is a number
        return "; put -- in front of a text that begins with a dash"
    if re.match(r"No such option: --(weight-)?bits( |$)", message) and command.endswith(" fp6"):
        return "; --element says how many: 7 in e4m2 and e3m3, 6 in e3m2 and e2m3, 5 in e2m2 and e3m1, 4 in e2m1"
    return ""


def _owners(message: str, ctx: Any) -> str:
    """Which commands have an option that this one does not have, where they are few."""
    option = re.match(r"No such option: (--[\w-]+)", message)
    if option is None or ctx is None or ctx.parent is None:
        return ""
    commands = getattr(ctx.parent.command, "commands", {})
    owners = [name for name, command in commands.items() if any(option[1] in x.opts for x in command.params)]
    have = "have" if owners[1:] else "has"
    return f"; `{'`, `'.join(owners)}` {have} {option[1]}" if 0 < len(owners) <= MOST_OWNERS else ""
