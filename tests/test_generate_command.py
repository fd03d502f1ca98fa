"""`quantize generate`, which continues a text or answers."""

import re
import shutil
from pathlib import Path

import torch
from conftest import check_refused, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

from ptq.cli import app
from ptq.demo import demo_path

PROMPT = "def read(path):"
STATED = r"(\d+) tokens read in \d+\.\d\d s, (\d+) written(, \d+\.\d a second)?(; the model has no more positions)?\n"


def written(*arguments: object) -> tuple[str, tuple[str, ...]]:
    """What it writes, and what it says of that."""
    result = quantize("generate", *arguments)
    assert result.exit_code == 0, result.output
    found = re.fullmatch(STATED, result.stderr)
    assert found, result.stderr
    return result.stdout, found.groups()


def expected(prompt: str, new_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    ids = tokenizer(prompt, return_tensors="pt")
    out = AutoModelForCausalLM.from_pretrained(demo_path()).generate(**ids, max_new_tokens=new_tokens, do_sample=False)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text + "\n"


def test_it_continues_with_the_most_likely_tokens() -> None:
    text, said = written("demo", PROMPT, "--max-new-tokens", 20)
    assert text == expected(PROMPT, 20)
    count = len(AutoTokenizer.from_pretrained(demo_path())(PROMPT)["input_ids"])
    assert said[:2] == (str(count), "20") and said[2] and not said[3]


def test_a_packed_checkpoint_and_its_cache(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert quantize("quarot", "demo", out, "--rounding", "nearest", "--kv-bits", 4, "--no-report").exit_code == 0
    text, said = written(out, PROMPT, "--max-new-tokens", 12)
    assert text.strip() and said[1] == "12"


def test_the_prompt_from_a_pipe() -> None:
    result = CliRunner().invoke(app, ["generate", "demo", "-", "--max-new-tokens", "5"], input=PROMPT)
    assert result.stdout == expected(PROMPT, 5)


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
    shutil.copytree(demo_path(), folder)
    template = "{% for message in messages %}# {{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}: def {% endif %}")
    asked = written(folder, "read a file", "--max-new-tokens", 8)[0]
    assert asked == written(folder, "read a file", "--max-new-tokens", 8, "--chat")[0]
    assert asked == expected("# read a file: def ", 8)
    assert written(folder, "read a file", "--max-new-tokens", 8, "--no-chat")[0] == expected("read a file", 8)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only systems') }}")
    check_refused(quantize("generate", folder, "read"), "chat template does not take the prompt: only systems")
    check_refused(quantize("generate", "demo", "read", "--chat"), "--chat: the model's tokenizer has no chat template")


def test_bad_input(tmp_path: Path) -> None:
    check_refused(quantize("generate", "demo", ""), "the prompt is empty")
    check_refused(quantize("generate", tmp_path, "a"), "holds no tokenizer")
    check_refused(quantize("generate", tmp_path / "none", "a"), "no such folder")
    check_refused(quantize("generate", "demo", "a", "--max-new-tokens", 0), "--max-new-tokens")
    check_refused(quantize("generate", "demo", "a", "--device", "tpu"), "--device must be auto, cpu or cuda")


def test_transformers_speaks_again_afterwards() -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    written("demo", PROMPT, "--max-new-tokens", 1)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
