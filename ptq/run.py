"""Another tool, in a process where transformers loads packed checkpoints: `python -m ptq.run TOOL [ARGUMENTS]`.

TOOL is a command that was installed with a Python package (`lm_eval`, `transformers`), a FILE.py or a module. It need
not know of this package: that this module is in it has made the package known to transformers.
"""

import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

USAGE = "usage: python -m ptq.run TOOL|FILE.py [ARGUMENTS], such as: python -m ptq.run transformers serve OUT"


def main(arguments: list[str]) -> int | str | None:
    """Run the tool that the first argument names with the others; gives what is to be the exit status."""
    if arguments[:1] == ["--help"]:
        print(USAGE)
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    name = arguments[0]
    sys.argv = [*arguments]
    if name.endswith(".py") and Path(name).is_file():
        sys.path.insert(0, str(Path(name).parent.absolute()))  # as Python does it
        runpy.run_path(name, run_name="__main__")
        return 0
    for command in entry_points(group="console_scripts", name=name):
        return command.load()()
    if not _runs(name):
        found = f"{name!r} is no command or module that is installed here, and no FILE.py"
        print(f"ptq.run: {found}; install its package, or check the name", file=sys.stderr)
        return 2
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _runs(name: str) -> bool:
    """Whether this is the name of a module, or of a package with a `__main__`."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        found = find_spec(name)
        whole = found is not None and found.submodule_search_locations is not None
        return found is not None and (not whole or find_spec(f"{name}.__main__") is not None)
    except (ImportError, ValueError):  # of a package in front
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
