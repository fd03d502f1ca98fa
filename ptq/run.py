"""Another tool, in a process where transformers loads packed checkpoints: `python -m ptq.run TOOL [ARGUMENTS]`.

TOOL is a command that was installed with a Python package (`lm_eval`, `transformers`), or a module. It need not know of
this package: that this module is in it has made the package known to transformers.
"""

import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

USAGE = "usage: python -m ptq.run TOOL [ARGUMENTS], such as: python -m ptq.run transformers serve OUT"


def main(arguments: list[str]) -> int | str | None:
    """Run the tool that the first argument names with the others; gives what is to be the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    name = arguments[0]
    sys.argv = [*arguments]
    for command in entry_points(group="console_scripts", name=name):
        return command.load()()
    if not all(part.isidentifier() for part in name.split(".")) or find_spec(name.partition(".")[0]) is None:
        print(f"ptq.run: neither a command nor a module {name!r} is installed here: pip install it", file=sys.stderr)
        return 2
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
