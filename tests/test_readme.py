"""Every command of the README is one that the package understands."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import quantize
from tiny_models import plain_gguf, save_model

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def readme_commands() -> list[str]:
    """Every `quantize ...` of a block or between backticks that names what it works on."""
    blocks = re.findall(r"^(?:\.venv/bin/)?quantize +([^#\n]+)", README, re.MULTILINE)
    return [line.strip() for line in (*blocks, *re.findall(r"`quantize ([^`]* OUT[^`]*)`", README))]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Words of those commands. The model has widths that groups of 128 divide."""
    folder = tmp_path_factory.mktemp("readme")
    save_model(folder / "model", hidden_size=128, intermediate_size=256, head_dim=64, num_attention_heads=2)
    exported = ("--element", "e2m1", "--scale", "e8m0")  # in every way
    assert quantize("fp6", folder / "model", folder / "packed", *exported).exit_code == 0
    plain_gguf(folder / "model", folder / "model.gguf")
    (folder / "text.txt").write_text("a text " * 100)
    text = str(folder / "text.txt")
    return {
        "MODEL": str(folder / "model"), "MODEL.gguf": str(folder / "model.gguf"), "OUT": str(folder / "packed"),
        "wikitext2": text, "FILE.txt": text,
    }  # fmt: skip


@pytest.mark.parametrize("command", readme_commands())
def test_the_commands_of_the_readme_are_understood(command: str, places: dict[str, str], tmp_path: Path):
    name, *rest = shlex.split(command)
    places = {**places, "OUT2": str(tmp_path / "out2"), "OUT.gguf": str(tmp_path / "out.gguf")}
    options = []
    if name in ("quarot", "quip-sharp", "fp6", "rotate"):
        places["OUT"] = str(tmp_path / "out")
        options = ["--plan"]
    if name == "perplexity":
        places["--dataset"] = "--text"
    if name == "compare":
        places["OUT2"] = places["OUT"]
    result = quantize(name, *(places.get(word, word) for word in rest), *options)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out").exists()


def test_there_are_commands_in_the_readme():
    found = readme_commands()
    assert {command.split()[0] for command in found} == {
        "fp6", "quarot", "quip-sharp", "rotate", "export", "dequantize", "prepack", "inspect", "verify", "generate",
        "perplexity", "compare",
    }  # fmt: skip
    assert len(found) >= 10
