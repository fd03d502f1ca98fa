"""How the command starts: at once, with one line where it is interrupted before there is anything to lose, and without
taking processors from others.

torch and transformers take seconds to import. `import ptq` needs both, since it registers the plug-in of transformers;
`quantize --help` needs neither. So the package asks here which of the two it is imported for.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

DISTRIBUTION = "ptq-toolkit"
"""What this package is installed as."""
INTERRUPTED = 130
"""Exit code of a process that was interrupted: 128 + SIGINT, as a shell gives it."""


def is_command() -> bool:
    """Whether this process is `quantize` or `python -m ptq`, and not a program that uses the package.

    `quantize` is known by its name and its place beside the interpreter. A copy of it elsewhere is taken for such a
    program: it starts slowly, and does the same.
    """
    if not sys.argv:  # in a program that embeds Python
        return False
    if sys.argv[0] == "-m":  # what it is while Python looks for the module
        return sys.orig_argv[-len(sys.argv)] == "ptq"
    folder, name = os.path.split(os.path.realpath(sys.argv[0]))
    return name == "quantize" and folder == os.path.realpath(os.path.dirname(sys.executable))


def share_processors() -> None:
    """Let threads of OpenMP that wait fall asleep sooner than by its default, unless the environment says something:
    where another program runs, too, they would keep it from what they wait for. To be called before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def quit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once: an exception in the midst of an import would become a traceback, or
    whatever the module that is imported makes of it. Where Ctrl-C is ignored (`nohup`), it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def process_of_run() -> tuple[int, int]:
    """Which process of those that torchrun has started this one is, and how many there are; 0, 1 where it was started
    by itself: some schedulers set RANK alone."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Stopped(KeyboardInterrupt):
    """A signal has asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it Ctrl-C is a KeyboardInterrupt again, and SIGTERM (of a container or a scheduler) and SIGHUP are
    `Stopped`: there are files to put in order. Processes of torchrun end at once, as it expects."""
    stops = (signal.SIGTERM, signal.SIGHUP) if is_command() and process_of_run()[1] == 1 else ()
    wanted = {signal.SIGINT: signal.default_int_handler} if signal.getsignal(signal.SIGINT) is _quit else {}
    wanted |= {number: _stop for number in stops if signal.getsignal(number) is signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:  # the end of a process is no better a place for an exception than its beginning
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _quit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"quantize: interrupted\n")
    os._exit(INTERRUPTED)
