"""Tools that know nothing of this package, in a process where transformers loads packed checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest

from ptq.run import main

TOOL = """
import sys
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.down_proj).__name__, sys.argv[2:])
sys.exit(5)
"""


def run(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ptq.run", *map(str, arguments)], cwd=folder, capture_output=True, text=True
    )


def test_a_module_loads_a_packed_checkpoint(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    alone = subprocess.run([sys.executable, "tool.py", packed], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 1  # it knows nothing of this package
    for name in ("tool", "tool.py"):
        found = run(name, packed, "--x", folder=tmp_path)
        assert (found.returncode, found.stdout) == (5, "QuantLinear ['--x']\n"), found.stderr


def test_an_installed_command() -> None:
    found = run("transformers", "version")
    assert found.returncode == 0 and found.stdout.strip()


@pytest.mark.parametrize("arguments", [[], ["--version"]])
def test_without_a_tool(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m ptq.run TOOL|FILE.py")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m ptq.run TOOL|FILE.py")


@pytest.mark.parametrize("name", ["no_such_tool", "../tool", "no_such.tool", "", "ptq..run", "json.nothing", "quarot"])
def test_what_is_no_tool(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert main([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = f"{name!r} is no command or module that is installed here, and no FILE.py"
    assert line == f"ptq.run: {found}; install its package, or check the name"
