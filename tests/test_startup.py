"""How the command starts: what it imports before it answers, and what Ctrl-C does until there is something to lose."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import quantize

from fp6.element import ELEMENTS
from ptq import cli, startup

ROOT = Path(__file__).resolve().parents[1]
MISTYPED = ["no such folder", "out"]
NO_TEXT = ("--text", "no text")

CONSOLE_SCRIPT = "import sys; sys.argv[0] = sys.argv.pop(1); from ptq.cli import app; app(prog_name='quantize')"
"""What pip puts beside the interpreter as `quantize`, given its place as the first argument."""


def start(*arguments: str, way: tuple[str, ...] = ("-m", "ptq")) -> subprocess.Popen[str]:
    """The command in a process of its own, which names every module that it imports on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-X", "importtime", *way, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def imported(stderr: str) -> set[str]:
    """The packages that a process has named."""
    return set(re.findall(r"^import time:.*\| +(\w+)", stderr, re.MULTILINE))


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["quarot", "--help"], ["quip-sharp", "--help"], ["fp6", "--help"], ["verify", "--help"]),
        *(["fp6", "demo", "out", "--no-such-option"], ["quarot", "demo"], ["no-such-command"]),
        *(["fp6", *MISTYPED], ["inspect", MISTYPED[0]], ["verify", MISTYPED[0]], ["prepack", *MISTYPED]),
        *(["perplexity", "demo", *NO_TEXT], ["verify", "demo", "--against", "demo", *NO_TEXT]),
        *(["fp6", "demo", "out", "--device", "gpu"], ["generate", "demo", "text", "--device", "gpu"]),
    ],
    ids=" ".join,
)
def test_help_and_wrong_usage_are_answered_without_torch(arguments: list[str]) -> None:
    process = start(*arguments)
    out, messages = process.communicate(timeout=60)
    assert process.returncode == (0 if "--help" in arguments else 2), messages[-500:]
    mistyped = "quantize: 'no such folder': no such folder" in messages or "no text: cannot be read" in messages
    mistyped |= "--device must be auto, cpu or cuda" in messages
    assert "Usage: " in out or mistyped or "--help`)" in messages
    assert {"ptq", "typer"} <= imported(messages)
    assert not {"torch", "transformers", "numpy", "datasets", "accelerate"} & imported(messages)


@pytest.mark.parametrize("place", [Path(sys.executable).with_name("quantize"), Path("quantize"), ROOT / "quantize"])
def test_the_installed_script_is_known_by_its_place(place: Path) -> None:
    """Elsewhere a program of that name is one that uses the package: it is given the plug-in."""
    process = start(str(place), "--help", way=("-c", CONSOLE_SCRIPT))
    out, messages = process.communicate(timeout=60)
    assert process.returncode == 0 and "Usage: quantize" in out
    assert ("transformers" in imported(messages)) == (place != Path(sys.executable).with_name("quantize"))


@pytest.mark.parametrize("code", [
    "import ptq", "import ptq.errors", "from quarot.plan import QuarotRecipe", "import sys; sys.argv = []; import ptq"
])  # fmt: skip
def test_every_other_import_registers_the_plug_in(code: str) -> None:
    look = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known"
    process = start(way=("-c", f"{code}; {look}; assert 'ptq' in known"))
    messages = process.communicate(timeout=60)[1]
    assert process.returncode == 0, messages[-500:]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts heed Ctrl-C, also where the tests themselves run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("module", ["ptq.cli", "torch"])
def test_an_interrupt_is_one_line(module: str, interruptible: None) -> None:
    """While the command starts, and while torch is imported."""
    process = start("inspect", "demo")
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if re.search(rf"\| +{re.escape(module)}(\.|$)", line):
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert [line for line in (said + rest).splitlines() if not line.startswith("import time:")] == [
        "quantize: interrupted"
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_time_to_put_files_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "is_command", lambda: True)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(startup.Stopped) as found, startup.interruptible():
            os.kill(os.getpid(), number)
            time.sleep(60)
        assert cli._exit_code(found.value) == 128 + number
        assert "goes on where it was" in cli._sentence(found.value, goes_on=True)
        assert cli._sentence(found.value, goes_on=False) == "interrupted"  # of a command that begins anew
        assert signal.getsignal(number) is signal.SIG_DFL
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with startup.interruptible():  # torchrun expects its processes to end at once
            assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("given, spins", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)
])  # fmt: skip
def test_threads_that_wait_leave_the_processors_to_others(given: dict[str, str], spins: str | None) -> None:
    """The command alone says so, and only where nobody has said anything else."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    as_command = "import sys; sys.argv, sys.orig_argv = ['-m'], ['ptq']"
    for first, wanted in ((as_command, spins), ("pass", given.get("GOMP_SPINCOUNT"))):
        code = f"{first}\nimport os, ptq\nprint(os.environ.get('GOMP_SPINCOUNT'))"
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert found.stdout == f"{wanted}\n", found.stderr[-500:]


def test_help_names_every_element() -> None:
    """It is spelled there, for the table of elements would bring in torch."""
    text = " ".join(quantize("fp6", "--help").stdout.replace("│", " ").split())
    assert f"{', '.join(ELEMENTS)}; or auto" in text
