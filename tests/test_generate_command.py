"""`quantize generate`, which continues a text or answers."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import check_refused, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

from ptq.cli import app
from ptq.commands import generate as command
from ptq.demo import demo_path


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DEMO = demo_path()
PROMPT = "def read(path):"
STATED = r"(\d+) tokens? read in \d+\.\d\d s, (\d+) written(, \d+\.\d a second)?(; the model has no more positions)?\n"


def written(*arguments: object) -> tuple[str, tuple[str, ...]]:
    """What it writes, and what it says of that."""
    result = quantize("generate", *arguments)
    assert result.exit_code == 0, result.output
    found = re.fullmatch(STATED, result.stderr)
    assert found, result.stderr
    return result.stdout, found.groups()


def expected(prompt: str, new_tokens: int, folder: Path = DEMO) -> str:
    """What transformers writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    out = AutoModelForCausalLM.from_pretrained(folder).generate(**ids, max_new_tokens=new_tokens, do_sample=False)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text + "\n"


def test_it_continues_with_the_most_likely_tokens() -> None:
    text, said = written("demo", PROMPT, "--max-new-tokens", 20)
    assert text == expected(PROMPT, 20)
    count = len(AutoTokenizer.from_pretrained(DEMO)(PROMPT)["input_ids"])
    assert said[:2] == (str(count), "20") and said[2] and not said[3]


def test_a_packed_checkpoint_and_its_cache(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--bits", 2, "--rounding", "nearest", "--kv-bits", 4, "--no-report")
    assert quantize("quarot", "demo", out, *options).exit_code == 0
    text, said = written(out, PROMPT, "--max-new-tokens", 12)
    assert text == expected(PROMPT, 12, out) != expected(PROMPT, 12) and said[1] == "12"


def test_the_prompt_from_a_pipe() -> None:
    given = ["generate", "demo", "-", "--max-new-tokens", "5"]
    for end in ("", "\n"):  # as `echo` ends it
        assert CliRunner().invoke(app, given, input=PROMPT + end).stdout == expected(PROMPT, 5)
    check_refused(CliRunner().invoke(app, given, input=b"caf\xe9"), "stdin: not UTF-8 at byte 3")
    check_refused(quantize("generate", "demo", os.fsdecode(b"caf\xe9")), "the prompt is not UTF-8 at character 3")


@pytest.mark.parametrize("given", [
    dict(num_beams=4), dict(num_beams=2, do_sample=True), dict(num_return_sequences=2, do_sample=True),
    dict(stop_strings=["zzz"]), dict(penalty_alpha=0.6, top_k=4), dict(prompt_lookup_num_tokens=3),
    dict(min_new_tokens=200), dict(min_length=300), dict(temperature=0.1, top_p=0.5, top_k=3, do_sample=True),
    dict(eos_token_id=[1, 2]), dict(max_length=7),
], ids=str)  # fmt: skip
def test_settings_of_the_model_that_a_stream_cannot_take(given: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    edit_json(folder / "generation_config.json", **given)
    text, said = written(folder, PROMPT, "--max-new-tokens", 16, "--temperature", 0)
    assert text == expected(PROMPT, 16) and said[1] == "16"


def test_the_last_position_may_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the text is whole."""
    prompt = "a = 1\n" * 126
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    room = 512 - len(tokenizer(prompt)["input_ids"])
    assert 0 < room < 20
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=room, do_sample=False)[0]
    monkeypatch.setattr(command, "_ends", lambda settings: [int(ids[-1])])
    assert not written("demo", prompt)[1][3]


def test_a_disk_that_is_full() -> None:
    """Is no fault of the model."""

    def refuse(text: str, nl: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer, "echo", refuse)
        result = quantize("generate", "demo", PROMPT)
    check_refused(result, "stdout: No space left on device", code=1)


def test_one_token_has_no_pace() -> None:
    _, said = written("demo", PROMPT, "--max-new-tokens", 1)
    assert said[1:3] == ("1", None)


def test_a_seed_makes_the_choice_and_the_global_one_stays() -> None:
    state = torch.random.get_rng_state()
    drawn = ["demo", PROMPT, "--max-new-tokens", 20, "--temperature", 1.5, "--seed"]
    first, again, other = (written(*drawn, seed)[0] for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_stops_where_the_model_has_no_more_positions(tmp_path: Path) -> None:
    _, said = written("demo", "a = 1\n" * 126, "--max-new-tokens", 600)
    assert said[3] and int(said[0]) + int(said[1]) == 512
    check_refused(quantize("generate", "demo", "a = 1\n" * 200), "positions; give a shorter one")


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(DEMO, folder)
    template = "{% for message in messages %}# {{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}: def {% endif %}")
    asked = written(folder, "read a file", "--max-new-tokens", 8)[0]
    assert asked == written(folder, "read a file", "--max-new-tokens", 8, "--chat")[0]
    assert asked == expected("# read a file: def ", 8)
    assert written(folder, "read a file", "--max-new-tokens", 8, "--no-chat")[0] == expected("read a file", 8)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only systems') }}")
    check_refused(quantize("generate", folder, "read"), "chat template does not take the prompt: only systems")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message.content %}# {{ part.text }}{% endfor %}{% endfor %}: def "
    )
    assert written(folder, "read a file", "--max-new-tokens", 8)[0] == asked
    (folder / "chat_template.jinja").write_text("nothing")
    check_refused(quantize("generate", folder, "read"), "chat template leaves the prompt out")
    check_refused(quantize("generate", "demo", "read", "--chat"), "--chat: the model's tokenizer has no chat template")


def test_bad_input(tmp_path: Path) -> None:
    check_refused(quantize("generate", "demo", ""), "the prompt is empty")
    check_refused(quantize("generate", tmp_path, "a"), "config.json: missing")
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    check_refused(quantize("generate", tmp_path / "model", "a"), "holds no tokenizer")
    check_refused(quantize("generate", tmp_path / "none", "a"), "no such folder")
    check_refused(quantize("generate", "demo", "a", "--max-new-tokens", 0), "--max-new-tokens")
    check_refused(quantize("generate", "demo", "a", "--device", "tpu"), "--device must be auto, cpu or cuda")


def test_transformers_speaks_again_afterwards() -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    written("demo", PROMPT, "--max-new-tokens", 1)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
