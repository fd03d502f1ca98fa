"""The model card of a result: what the hub reads of it, and that it tells the truth."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from huggingface_hub import metadata_load
from tiny_models import save_model
from transformers import PreTrainedModel

from ptq.files.checkpoint import Checkpoint
from ptq.pipeline.result import read_result
from ptq.recipe import Recipe
from ptq.reporting import model_card, report_schema
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")

RECIPE = QuarotRecipe(rounding="nearest", skip=("*.up_proj",), online=False)


def card(
    packed: Path, original: Path, model: str, with_report: bool = True, recipe: Recipe = RECIPE
) -> tuple[dict, str]:
    """What a card says in its head, and all of its text."""
    found = replace(report_schema.read(packed / "report.json"), model=model)
    written = Checkpoint.open(shutil.copytree(packed, original / "packed", dirs_exist_ok=True))
    model_card.write(found, recipe, original, written, with_report)
    path = written.folder / "README.md"
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
    assert "this makes it again, from where the folder of the original lies:" in text
    assert f"| {read_result(packed).bits_per_weight:.3f} |" in text and "`report.html` shows" in text
    assert "| bits of keys and of values in the KV cache |  | 4, 4 |" in text and "came without" not in text
    assert loaded_by(text, packed)["written"].shape[1] > 50


def test_a_result_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert quantize("fp6", model, tmp_path / "out").exit_code == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "It came without a tokenizer" in text and "generate" not in text
    loaded = loaded_by(text, tmp_path / "out")["model"]
    assert isinstance(loaded, PreTrainedModel) and loaded(torch.tensor([[1, 2]])).logits.isfinite().all()


def loaded_by(text: str, packed: Path) -> dict[str, Any]:
    """What the code of a card makes."""
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(packed)), names)
    return names


def test_a_card_says_on_what_text_was_measured(tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran off. " * 100)
    options = ("--calibration", text, "--activation-bits", "8")
    assert quantize("fp6", model, tmp_path / "a", *options).exit_code == 0
    card = (tmp_path / "a" / "README.md").read_text()
    assert "rows of text.txt, to which nothing was fitted |" in card
    assert "| bits of the inputs of these linears |  | 8 |" in card
    found = read_result(tmp_path / "a")
    assert found.text == "text.txt, to which nothing was fitted"
    assert f"| {found.original_perplexity:.3f} | {found.perplexity:.3f} |" in card


def test_a_text_with_no_rows_but_those_that_are_fitted_to_is_told(tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran off. " * 100)
    count = str(4200 // 128)
    assert quantize("quarot", model, tmp_path / "out", "--calibration", text, "--samples", count).exit_code == 0
    what = "text.txt, to which the model was fitted"
    assert what in (tmp_path / "out" / "README.md").read_text() and read_result(tmp_path / "out").text == what


@pytest.mark.parametrize("typed", [".", "{model}/../model/", "cache/models--org--name/snapshots/0123abc"])
def test_what_a_model_is_called(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "model")
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots"
    snapshot.mkdir(parents=True)
    if "cache" in typed:
        model.rename(snapshot / "0123abc")
    else:
        monkeypatch.chdir(model)
    assert quantize("fp6", typed.format(model=model), tmp_path / "out").exit_code == 0
    head, text = metadata_load(tmp_path / "out" / "README.md") or {}, (tmp_path / "out" / "README.md").read_text()
    name = "name" if "cache" in typed else "model"
    assert f"# {name} in " in text and head.get("base_model") == ("org/name" if "cache" in typed else None)


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
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en, no]\ntags: [x]\nlicense_link: 3\n---\nText")
    head, text = card(packed, tmp_path, "org/name@v1", with_report=False)
    assert "this makes it again:" in text
    assert head["base_model"] == "org/name" and head["base_model_relation"] == "quantized"
    assert head["license"] == "mit" and head["language"] == ["en", "no"] and head["tags"] == ["ptq", "quarot"]
    assert "license_link" not in head and "report.html" not in text
    assert "--rounding nearest --skip '*.up_proj' --offline" in text


def test_what_is_but_rotated_is_no_quantisation_and_names_are_one_line(packed: Path, tmp_path: Path) -> None:
    rotated = QuarotRecipe(rounding="nearest", weight_bits=16, online=False)
    head, text = card(packed, tmp_path, "org/name@refs/pr/1", recipe=rotated)
    assert head["base_model"] == "org/name" and "base_model_relation" not in head and "# name in" in text
    _, text = card(packed, tmp_path, "a\n```\n<b>|")
    assert "# a ``` &lt;b>\\| in" in text and "\n~~~\nquantize quarot 'a\n```\n<b>|' OUT" in text


@pytest.mark.parametrize(
    "content",
    [
        b"no head", b"---\n- a list\n---\n", b"---\na: [\n---\n", b"\xff\xfe---",
        b"---\nlicense: {a: b}\nlanguage: [{}]\n---\n", b"---\na: " + b"[" * 5000 + b"\n---\n",
        b"---\nlicense: mit\n---\n" + b" " * 1_000_000, b"---\nlicense: mit\na: !!bool maybe\n---\n",
        b"---\nlicense: mit\na: !!int ''\n---\n", b"---\nlicense: mit\na: !!timestamp x\n---\n",
    ],
)  # fmt: skip
def test_of_a_strange_card_nothing_is_taken(tmp_path: Path, content: bytes) -> None:
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
    packed = shutil.copytree(packed, tmp_path / "packed")
    (packed / "README.md").write_text("mine")
    assert quantize("verify", packed).exit_code == 0
    assert quantize("prepack", packed, tmp_path / "tiled", "--target", "cpu").exit_code == 0
    text = (tmp_path / "tiled" / "README.md").read_text()
    assert text.startswith("mine\nSince then, `quantize prepack --target cpu`")
