"""The model card of a result: what the hub reads of it, and that it tells the truth."""

import shlex
from pathlib import Path

import pytest
import torch
from conftest import quantize
from huggingface_hub import metadata_load
from tiny_models import save_model
from transformers import PreTrainedModel

from ptq.files.checkpoint import Checkpoint
from ptq.pipeline.result import read_result
from ptq.reporting import model_card, report_schema
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")

RECIPE = QuarotRecipe(rounding="nearest", skip=("*.up_proj",), online=False)


def card(packed: Path, original: Path, model: str, with_report: bool = True) -> tuple[dict, str]:
    """What a card says in its head, and all of its text."""
    found = report_schema.read(packed / "report.json")
    model_card.write(found, RECIPE, model, original, Checkpoint.open(packed), with_report)
    path = packed / "README.md"
    return metadata_load(path) or {}, path.read_text()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished checkpoint beside its `model`, with the card of its run."""
    folder = tmp_path_factory.mktemp("card")
    out = folder / "out"
    save_model(folder / "model")
    assert quantize("quarot", folder / "model", out, "--rounding", "nearest", "--kv-bits", "4").exit_code == 0
    return out


def test_every_run_leaves_a_card_and_its_code_loads_the_model(packed: Path) -> None:
    text = (packed / "README.md").read_text()
    assert metadata_load(packed / "README.md") == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["ptq", "quarot"],
    }  # fmt: skip
    assert "quantize quarot model OUT --rounding nearest --key-bits 4 --value-bits 4" in text
    assert f"| {read_result(packed).bits_per_weight:.3f} |" in text and "`report.html` shows" in text
    code = text.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(packed))
    names: dict = {}
    exec(code.replace(f', AutoTokenizer.from_pretrained("{packed}")', ", None"), names)  # this model has no tokenizer
    model = names["model"]
    assert isinstance(model, PreTrainedModel) and model(torch.tensor([[1, 2]])).logits.isfinite().all()


@pytest.mark.parametrize("words", ["fp6 {model}", "fp6 demo --group-size 64", "quarot {model} --rounding nearest"])
def test_the_command_of_a_card_is_the_one_that_was_given(words: str, packed: Path, tmp_path: Path) -> None:
    """What it makes is there already."""
    out, (command, model, *options) = tmp_path / "out", words.format(model=packed.with_name("model")).split()
    assert quantize(command, model, out, *options).exit_code == 0
    block = (out / "README.md").read_text().rpartition("```\nquantize ")[2].partition("\n```")[0]
    again, name, _, *rest = shlex.split(block)
    assert (again, name) == (command, Path(model).name)
    done = quantize(command, model, out, *rest)
    assert done.exit_code == 0 and "finished before" in done.stderr, done.stderr


def test_the_name_on_the_hub_is_the_base_and_its_license_stays(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en, de]\ntags: [x]\nlicense_link: 3\n---\nText")
    head, text = card(packed, tmp_path, "org/name@v1", with_report=False)
    assert head["base_model"] == "org/name" and head["base_model_relation"] == "quantized"
    assert head["license"] == "mit" and head["language"] == ["en", "de"] and head["tags"] == ["ptq", "quarot"]
    assert "license_link" not in head and "report.html" not in text
    assert "--rounding nearest --skip '*.up_proj' --offline" in text


@pytest.mark.parametrize(
    "content",
    [
        b"no head", b"---\n- a list\n---\n", b"---\na: [\n---\n", b"---\na: 1\na: 2\n---\n", b"\xff\xfe---",
        b"---\nlicense: {a: b}\nlanguage: [[en]]\n---\n", b"---\na: " + b"[" * 5000 + b"\n---\n", b"-" * 1_000_001,
    ],
)  # fmt: skip
def test_of_a_strange_card_nothing_is_taken(packed: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "README.md").write_bytes(content)
    assert model_card.inherited(tmp_path) == {}


def test_no_card_and_a_folder_are_no_fault(tmp_path: Path) -> None:
    assert model_card.inherited(tmp_path) == {}
    (tmp_path / "README.md").mkdir()
    assert model_card.inherited(tmp_path) == {}


def test_plain_results_need_no_package(tmp_path: Path) -> None:
    assert quantize("rotate", save_model(tmp_path / "model"), tmp_path / "out").exit_code == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "plain numbers" in text and "import ptq" not in text and "report.html" not in text
    assert metadata_load(tmp_path / "out" / "README.md")["tags"] == ["quarot"]


def test_an_edited_card_is_no_damage_and_prepacking_keeps_it(packed: Path, tmp_path: Path) -> None:
    (packed / "README.md").write_text("mine")
    assert quantize("verify", packed).exit_code == 0
    assert quantize("prepack", packed, tmp_path / "tiled", "--target", "cpu").exit_code == 0
    assert (tmp_path / "tiled" / "README.md").read_text() == "mine"
