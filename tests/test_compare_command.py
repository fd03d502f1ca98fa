"""`quantize compare`."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import check_refused, quantize
from test_evaluate import tiny_llama
from typer.testing import Result

import ptq
from ptq.commands import evaluate
from ptq.commands import perplexity as perplexity_command
from ptq.errors import InputError
from ptq.pipeline import progress
from quarot.plan import QuarotRecipe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer) -> dict[str, str]:
    """An original, two checkpoints of it, another model, and a text."""
    folder = tmp_path_factory.mktemp("compare")
    for name, seed in (("model", 0), ("other", 1)):
        tiny_llama(seed).save_pretrained(folder / name)
        byte_tokenizer.save_pretrained(folder / name)
    for bits in (3, 8):
        recipe = QuarotRecipe(rounding="nearest", weight_bits=bits)
        ptq.quantize(folder / "model", folder / f"w{bits}", recipe, ptq.RunOptions(progress=False, report=False))
    (folder / "text.txt").write_text("thequickbrownfoxjumpsoverthelazydog" * 4)
    return {name: str(folder / name) for name in ("model", "other", "w3", "w8", "text.txt")}


def compare(folders: dict[str, str], *arguments: str) -> Result:
    text = ("--text", folders["text.txt"], "--context", "16")
    return quantize("compare", *(folders.get(word, word) for word in arguments), *text)


def test_it_gives_the_numbers_of_perplexity(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The original sees every window once."""
    seen, own = [], evaluate._logits
    monkeypatch.setattr(evaluate, "_logits", lambda model, row: seen.append(model) or own(model, row))
    done = compare(folders, "model", "w3", "w8", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(seen) == 3 * found["windows"] and {seen.count(model) for model in seen} == {found["windows"]}
    for name, row in zip(("w3", "w8"), found["checkpoints"], strict=True):
        arguments = (folders[name], "--against", folders["model"], "--text", folders["text.txt"], "--context", "16")
        alone = json.loads(quantize("perplexity", *arguments, "--json").stdout)
        against = alone.pop("against")
        bits, nbytes = (json.loads(quantize("inspect", folders[name], "--json").stdout)[key]
                        for key in ("bits_per_weight", "bytes"))  # fmt: skip
        assert row.pop("bits_per_weight") == bits and row.pop("bytes") == nbytes
        assert row == {key: {**against, **alone}[key] for key in row}
        assert found["original"]["perplexity"] == against["perplexity"]
        assert {key: alone[key] for key in ("text", "windows", "dtype")} == {
            key: found[key] for key in ("text", "windows", "dtype")
        }
    assert found["checkpoints"][0]["kl"] > 10 * found["checkpoints"][1]["kl"] > 0


def test_python_gives_the_numbers_of_the_command(folders: dict[str, str]) -> None:
    done = compare(folders, "model", "w3", "w8", "--json")
    found = ptq.compare(Path(folders["model"]), [folders["w3"], Path(folders["w8"])], folders["text.txt"], context=16)
    assert found.as_record() == json.loads(done.stdout)
    assert str(found) == repr(found) == compare(folders, "model", "w3", "w8").stdout.rstrip("\n")
    assert [row.model for row in found.rows] == [folders["w3"], folders["w8"]]
    assert found.rows[0].bits_per_weight < found.rows[1].bits_per_weight and found.rows[0].kl > found.rows[1].kl
    assert found.original_perplexity == found.as_record()["original"]["perplexity"]
    for no_list in (folders["w3"], []):
        with pytest.raises(InputError, match="as a list"):
            ptq.compare(folders["model"], no_list, folders["text.txt"])


def test_python_measures_without_a_word_if_asked(folders: dict[str, str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1.0)
    text = folders["text.txt"]
    for visible in (True, False):
        ptq.compare(folders["model"], [folders["w8"]], text, context=16, progress=visible)
        ptq.perplexity(folders["w8"], text, context=16, progress=visible)
        ptq.verify(folders["w8"], folders["model"], text, progress=visible)
        said = capsys.readouterr().err
        assert said.count("windows: 1 of") == 2 * visible and said.count("blocks: 1 of") == visible


def test_its_table(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names are whole, whatever the width."""
    monkeypatch.setenv("COLUMNS", "80")
    done = compare(folders, "model", "w3", "w8", "model")
    title, heads, plain, *rows = (line.split() for line in done.stdout.splitlines())
    assert title[0] == f"{folders['text.txt']}:" and heads[:2] == ["bits/weight", "MB"]
    assert plain[0] == folders["model"] and [row[0] for row in rows] == [folders[x] for x in ("w3", "w8", "model")]
    assert rows[0][1].startswith("3.") and rows[1][1].startswith("8.") and rows[0].count("±") == 2
    assert rows[2][1:3] == plain[1:3] and rows[2][3:] == "0.00 ± 0.00 0.00000 ± 0.00000 100.00".split()


def test_names_are_no_markup_and_one_window_has_no_error(folders: dict[str, str], tmp_path: Path) -> None:
    odd = shutil.copytree(folders["w3"], tmp_path / "a[bold]x[/y]")
    text = tmp_path / "te[xt].txt"
    text.write_text("thequickbrownfox" * 2)
    done = quantize("compare", folders["model"], odd, "--text", text, "--context", "20")
    title, _, _, row = done.stdout.splitlines()
    assert title.startswith(f"{text}: 1 x 20 tokens") and title.rstrip().endswith("no standard errors")
    assert row.startswith(f"{odd} ") or row.split()[0] == str(odd)
    assert "±" not in row


def test_what_cannot_be_compared_is_refused(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = compare(folders, "model", "w3", "other")  # the same tokenizer: strangers are far, and no mistake
    assert done.exit_code == 0
    monkeypatch.setattr(perplexity_command, "load_tokenizer", lambda *args: pytest.fail("too late"))
    check_refused(compare(folders, "model", "w3", str(tmp_path / "none")), "none': no such folder")
    check_refused(quantize("compare", folders["model"]), "missing argument 'OUT'")
