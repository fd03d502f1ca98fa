"""The demo model that ships with the package: it loads, fits its size, and has learnt to write Python."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ptq.commands.evaluate import perplexity
from ptq.commands.windows import context_for, windows_from_text
from ptq.demo import demo_path

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_path())


def training_script():
    path = ROOT / "scripts" / "train_demo_model.py"
    spec = importlib.util.spec_from_file_location("train_demo_model", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_folder_is_at_most_8_megabytes():
    sizes = {file.name: file.stat().st_size for file in demo_path().iterdir() if file.is_file()}
    assert sum(sizes.values()) <= 8_000_000, sizes


def test_widths_are_natural(model):
    config = model.config
    assert model.config.model_type == "llama"
    assert config.hidden_size % 64 == 0 and config.intermediate_size % 64 == 0 and config.head_dim == 64
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.tie_word_embeddings


def test_tokenizer_round_trips_source_code(tokenizer):
    text = "def f(x: int) -> str:\n    return f'{x}\\t€'  # ok\n\n\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_readme_states_the_perplexity_that_is_measured(model, tokenizer):
    text = (demo_path() / "heldout.txt").read_text(encoding="utf-8")
    figures = json.loads((demo_path() / "figures.json").read_text())
    windows = windows_from_text(tokenizer, text, context_for(model.config))
    assert (len(windows), windows.context) == (figures["windows"], figures["context"])
    assert f"{figures['perplexity']:.2f}" in (demo_path() / "README.md").read_text()
    few = windows_from_text(tokenizer, text[: len(text) // 10], context_for(model.config))
    assert perplexity(model, few).perplexity < 2 * figures["perplexity"]


def test_greedy_text_is_python_like(model, tokenizer):
    prompt = tokenizer("    def __init__(self, ", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert "self." in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


def test_calibration_and_heldout_texts_do_not_overlap():
    calibration = set((demo_path() / "calibration.txt").read_text(encoding="utf-8").splitlines())
    heldout = [
        line for line in (demo_path() / "heldout.txt").read_text(encoding="utf-8").splitlines() if len(line) > 60
    ]
    shared = [line for line in heldout if line in calibration]
    assert len(heldout) > 100
    assert len(shared) < 0.03 * len(heldout), shared[:5]


def test_texts_carry_the_attribution():
    for name in ("heldout.txt", "calibration.txt"):
        assert "Python Software Foundation" in (demo_path() / name).read_text(encoding="utf-8")[:300]
    assert (demo_path() / "PYTHON-LICENSE.txt").is_file()


def test_split_keeps_a_package_on_one_side(tmp_path):
    script = training_script()
    assert script.is_heldout("fractions") and script.is_heldout("concurrent") and not script.is_heldout("json")
    for path in ("fractions.py", "json/decoder.py", "concurrent/futures/a.py", "test/b.py", "encodings/c.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    corpus = script.read_corpus(tmp_path)
    assert [path for path, _ in corpus.heldout] == ["concurrent/futures/a.py", "fractions.py"]
    assert [path for path, _ in corpus.training] == ["json/decoder.py"]
