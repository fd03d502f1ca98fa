"""Scripts that other tests do not run: what they refuse, and what they leave behind."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import listing
from typer.testing import CliRunner, Result

from ptq.files.checkpoint import Checkpoint

ROOT = Path(__file__).parents[1]
SIZES = dict(hidden=8, intermediate=16, heads=2, kv_heads=1, blocks=1, vocab=32)


def module_of(script: str) -> Any:
    """scripts/`script`.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{script}_script", ROOT / "scripts" / f"{script}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str | Path) -> Result:
    """Runs scripts/`script`.py in this process: a new one would spend seconds on its imports."""
    app = typer.Typer()
    app.command()(module_of(script).main)
    return CliRunner().invoke(app, [*map(str, arguments)])


def random_model(out: Path, **sizes: int) -> Result:
    given = {**SIZES, **sizes}
    return run("random_model", out, *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(heads=3), "--heads must divide"),
        (dict(heads=4, kv_heads=3), "--kv-heads must divide"),
        (dict(hidden=0), "--hidden"),
        (dict(blocks=0), "--blocks"),
    ],
)
def test_sizes_that_make_no_model(sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    found = random_model(tmp_path / "out", **sizes)
    assert found.exit_code == 2 and message in found.stderr
    assert listing(tmp_path) == {}


def test_a_random_model_is_not_written_over_another(tmp_path: Path) -> None:
    assert random_model(tmp_path / "out").exit_code == 0
    assert len(Checkpoint.open(tmp_path / "out").shards) == 2
    before = listing(tmp_path)
    found = random_model(tmp_path / "out")
    assert found.exit_code == 2 and "exists" in found.stderr
    assert listing(tmp_path) == before


def test_a_quantisation_that_is_clocked(tmp_path: Path) -> None:
    """`bench_quantize.py` puts clocks around functions by their names."""
    recipe = dict(rounding="gptq", samples=2, sequence_length=32)
    found = module_of("bench_quantize").quantize(Path("demo"), tmp_path / "out", 1, **recipe)
    assert {"collect", "linear", "block", "reload"} <= found.phases.keys()
    assert found.peak >= found.baseline > 0 and found.result["nbytes"] > 0


def test_help_of_the_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "scripts" / "quickstart.py"), run_name="__main__")
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "code", "said"),
    [
        (
            "method_table.py",
            ["demo", "--text", "none.txt"],
            1,
            "method_table.py: none.txt: No such file",
        ),
        ("plot_outliers.py", ["none", "a.svg"], 2, "plot_outliers.py: none/report.json: is not the report"),
    ],
)
def test_what_a_script_refuses_is_one_sentence(
    script: str, arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    told = capsys.readouterr().err
    assert ended.value.code == code and told.startswith(said) and told.count("\n") == 1
