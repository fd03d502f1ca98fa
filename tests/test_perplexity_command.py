"""`quantize perplexity`, which scripts/perplexity.py calls, too."""

import json
import re
import runpy
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import huggingface_hub.constants
import pytest
import torch
from test_evaluate import ROOT, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import ptq
from ptq.cli import app
from ptq.commands import evaluate
from ptq.commands import perplexity as command
from ptq.commands.windows import Windows, windows_from_text
from ptq.errors import InputError
from ptq.files import hub
from ptq.reporting.sizes import with_error


def perplexity(*arguments: str, charset: str = "utf-8") -> Result:
    """The command, in this process."""
    return CliRunner(charset=charset).invoke(app, ["perplexity", *arguments])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, byte_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(0).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


def test_it_prints_what_the_library_computes(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfoxjumpsoverthelazydog" * 2)
    done = perplexity(
        str(model_folder), "--text", str(text), "--context", "16", "--json", "--against", str(model_folder)
    )
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    windows = windows_from_text(AutoTokenizer.from_pretrained(model_folder), text.read_text(), 16)
    expected = evaluate.perplexity(AutoModelForCausalLM.from_pretrained(model_folder).eval(), windows)
    assert record["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert (record["windows"], record["context"], record["tokens_found"]) == (4, 16, 71)
    assert record["against"]["kl"] == 0 and record["against"]["top1"] == 1


def test_the_script_is_the_command(model_folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    arguments = [str(model_folder), "--text", str(text), "--context", "16"]
    monkeypatch.setattr(sys, "argv", ["perplexity.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / "perplexity.py"), run_name="__main__")
    assert end.value.code == 0 and capsys.readouterr().out == perplexity(*arguments).stdout


def test_it_prints_its_table_on_a_terminal_of_ascii(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    done = perplexity(str(model_folder), "--text", str(text), "--context", "16", charset="ascii")
    assert done.exit_code == 0, done.exception
    assert "±" in done.stdout_bytes.decode()


def test_a_loss_whose_exp_is_no_number() -> None:
    """JSON holds null in its place, and the table is printed."""
    own = evaluate.Perplexity(800.0, 1.0, 2, 16)
    other = evaluate.Perplexity(4.0, 1.0, 2, 16)
    windows = Windows(torch.zeros(2, 16, dtype=torch.long), 32, "none", "none")
    result = evaluate.Agreement(own, other, 800.0, 1.0, 0.0, 1.0)
    measured = command.Measured("model", "other", "text", windows, own, result, "float32", torch.device("cpu"))
    record = json.loads(json.dumps(measured.as_record(), allow_nan=False))
    assert record["perplexity"] is None and record["standard_error"] is None and record["loss"] == 800.0
    assert sum("│" in line or "|" in line for line in str(measured).splitlines()) == 11


def test_python_gives_the_numbers_of_the_command(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    found = ptq.perplexity(model_folder, text, context=16, against=str(model_folder), device=torch.device("cpu"))
    done = perplexity(
        str(model_folder), "--text", str(text), "--context", "16", "--against", str(model_folder), "--json"
    )
    assert json.loads(done.stdout) == found.as_record()
    assert found.perplexity == found.original_perplexity and found.kl == 0 and found.top1 == 1
    alone = ptq.perplexity(model_folder, text, context=16)
    assert alone.standard_error == found.standard_error and (alone.kl, alone.original_perplexity) == (None, None)
    assert alone != found and len({alone, found, alone}) == 2


def test_python_is_told_what_is_no_model_text_or_context(model_folder, monkeypatch):
    monkeypatch.setattr(command, "load_model", None)
    text: Any = "thequickbrownfox\n" * 4
    for arguments, message in [
        ({}, "name the text"),
        ({"text": text}, "must be the name of a file, found 68 characters of text"),
        ({"text": "x" * 5000}, "found 5000 characters"),
        ({"text": ""}, "found an empty name"),
        ({"text": ["a.txt"]}, "found a list"),
        ({"text": "a.txt", "context": "256"}, "whole number of tokens, found '256'"),
        ({"text": "a.txt", "context": 256.0}, "found 256.0"),
        ({"dataset": "ptb"}, "dataset 'ptb': the only one is wikitext2"),
        ({"text": "a.txt", "against": 3}, "against must be a folder"),
        ({"model": tiny_llama(0)}, "found a LlamaForCausalLM; a model in memory is saved by its save_pretrained"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            ptq.perplexity(**{"model": model_folder, **arguments})


def test_it_refuses_bad_input_in_one_sentence_before_weights_are_read(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_model", None)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 4)
    folder = str(model_folder)
    for arguments, message in [
        ((folder, "--text", str(tmp_path / "absent.txt")), "absent.txt: cannot be read"),
        ((folder, "--text", str(empty)), "is empty"),
        ((folder, "--text", str(latin)), "not UTF-8 at byte 3"),
        ((folder,), "name the text"),
        ((folder, "--text", str(text), "--dataset", "wikitext2"), "not both"),
        ((folder, "--text", str(text)), "has 33 tokens, too few for one window of 320"),
        ((folder, "--text", str(text), "--context", "400"), "max_position_embeddings 320"),
        ((str(tmp_path), "--text", str(text)), "config.json: missing"),
        (
            (folder, "--text", str(text), "--context", "8", "--against", "demo"),
            "tokenise the text differently; only",
        ),
        ((str(tmp_path / "absent"), "--text", str(text)), "no such folder"),
        ((str(text), "--text", str(text)), "a file; pass the folder"),
        ((), "missing argument 'MODEL' (see `"),
        ((folder, "--windows", "3"), "no such option: --windows (see `"),
        ((folder, "--text"), "option '--text' requires an argument (see `"),
    ]:
        done = perplexity(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_it_refuses_a_checkpoint_with_a_missing_tensor(model_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh")
    done = perplexity(str(broken), "--text", str(text), "--context", "4")
    assert done.exit_code == 2
    assert "model.layers.1.mlp.up_proj.weight" in done.stderr and "Traceback" not in done.stderr


def test_it_compares_both_models_in_one_dtype(model_folder, tmp_path):
    half, bfloat = tmp_path / "half", tmp_path / "bfloat"
    torch.nn.Module.half(model := tiny_llama(0))
    model.save_pretrained(half)
    torch.nn.Module.bfloat16(model)
    model.save_pretrained(bfloat)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for folder in (half, bfloat):
            (folder / name).write_bytes((model_folder / name).read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    common = ("--text", str(text), "--context", "16", "--device", "cpu", "--json")
    done = perplexity(str(bfloat), *common, "--against", str(half))
    assert json.loads(done.stdout)["against"]["kl"] == 0
    done = perplexity(str(half), *common)
    assert json.loads(done.stdout)["dtype"] == "float32"


def test_float16_on_a_cpu_is_refused_for_any_model(model_folder, tmp_path):
    """A packed model would take float32 in its place, and a plain one not."""
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    done = perplexity(
        str(model_folder), "--text", str(text), "--context", "16", "--device", "cpu", "--dtype", "float16"
    )
    assert done.exit_code == 2 and "slower on a CPU; ask for bfloat16" in done.stderr


def test_a_dtype_is_one_of_torchs(model_folder, tmp_path):
    (text := tmp_path / "text.txt").write_text("thequickbrownfox" * 4)
    with pytest.raises(InputError, match="one of torch's, such as torch.bfloat16, found 'float16'"):
        ptq.perplexity(model_folder, text, context=16, dtype=cast(Any, "float16"))


def test_the_model_that_does_not_reach_as_far_is_named(model_folder, tmp_path):
    short = shutil.copytree(model_folder, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    text = tmp_path / "text.txt"
    text.write_text("thequickbrownfox" * 4)
    done = perplexity(str(model_folder), "--text", str(text), "--context", "16", "--against", str(short))
    assert done.exit_code == 2
    assert f"context 16 is longer than {short} reaches: max_position_embeddings 8" in done.stderr


def test_settings_of_a_tokenizer_without_its_vocabulary(model_folder, tmp_path):
    bare = shutil.copytree(model_folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text("abc")
    done = perplexity(str(bare), "--text", str(text))
    assert done.exit_code == 2 and "(it has settings alone: put the model's tokenizer.json there)" in done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, "0.0010"), (0.0011, "0.0010 ± 0.0011"), (3e-5, "0.00101 ± 0.00003"), (1e-9, "0.0010 ± 0.0000")],
)
def test_a_standard_error_is_not_shown_as_zero(error, text):
    assert with_error(0.001012, error) == text


def test_it_does_not_wait_for_a_hub_that_is_out_of_reach(model_folder: Path, monkeypatch):
    """The libraries of the hub would try six times, for half a minute."""
    asked = []
    monkeypatch.setattr(hub, "is_known", lambda: False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: asked.append(arguments) or [])
    monkeypatch.setattr(time, "sleep", asked.append)
    result = perplexity(str(model_folder), "--dataset", "wikitext2")
    assert result.exit_code == 1 and not asked
    assert not huggingface_hub.constants.HF_HUB_OFFLINE  # what is asked for later in this process is asked for
    assert "dataset wikitext2 could not be fetched from the hub" in result.stderr and "--text FILE" in result.stderr
