"""Calibration rows: the right windows of the right text, the same on every run, and a sentence for every bad input."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from test_text_sources import tokenizer
from tiny_models import save_model
from transformers import AutoTokenizer, GemmaConfig, LlamaConfig

from ptq.commands import verify
from ptq.demo import demo_path
from ptq.errors import InputError
from ptq.pipeline import pipeline, probe_size, token_rows
from ptq.statistics import calibration
from ptq.statistics.calibration import bos_of, fingerprint, load_rows
from quarot.plan import QuarotRecipe


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(32, 127)))
    return str(path)


def test_rows_are_distinct_windows_of_the_text(text):
    rows = load_rows(text, tokenizer, 6, 10, seed=0)
    whole = [300, *range(32, 127)]  # 96 tokens: 9 windows, a tail of 6
    windows = [whole[i : i + 10] for i in range(0, 90, 10)]
    assert rows.shape == (6, 10) and rows.dtype == torch.int64
    assert len({tuple(row) for row in rows.tolist()}) == 6 and all(row in windows for row in rows.tolist())
    every = load_rows(text, tokenizer, 9, 10, seed=0)
    assert sorted(every.tolist()) == sorted(windows)


def test_the_seed_chooses_and_the_global_state_is_left_alone(text):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = load_rows(text, tokenizer, 5, 8, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(load_rows(text, tokenizer, 5, 8, seed=0), first)
    assert not torch.equal(load_rows(text, tokenizer, 5, 8, seed=1), first)


@pytest.mark.parametrize(("extra", "count"), [(0, 5), (2, 7), (4, 9), (6, 9)])
def test_extra_rows_are_others_as_far_as_the_text_goes(text, extra, count):
    rows = load_rows(text, tokenizer, 5, 10, seed=0, extra=extra)
    assert len(rows) == count == len({tuple(row) for row in rows.tolist()})
    assert torch.equal(rows[:5], load_rows(text, tokenizer, 5, 10, seed=0))


def test_windows_that_begin_with_a_token(text):
    """Which is in front of every window and nowhere else: the text itself is read without special tokens."""

    def bare(text, verbose=True, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": [*text.encode()]}

    rows = load_rows(text, bare, 10, 10, seed=0, bos=300)  # 95 tokens: 10 windows of 9, a tail of 5
    whole = [*range(32, 127)]
    assert sorted(rows.tolist()) == [[300, *whole[i : i + 9]] for i in range(0, 90, 9)]
    with pytest.raises(InputError, match="--sequence-length 1: must be at least 2"):
        load_rows(text, bare, 1, 1, seed=0, bos=300)


def test_a_tokenizer_without_bos():
    """The model's own config may say it; a family that needs none has none."""
    bare = SimpleNamespace(bos_token_id=None)
    assert bos_of(bare, LlamaConfig(bos_token_id=1)) is None and bos_of(bare, GemmaConfig(bos_token_id=2)) == 2
    with pytest.raises(InputError, match="gemma: every text must begin with .* name it as bos_token"):
        bos_of(bare, GemmaConfig(bos_token_id=None))


@pytest.mark.parametrize("model_type", ["llama", "gemma", "gemma2", "gemma3_text", "gemma4_text", "vaultgemma"])
def test_rows_of_gemma_begin_with_bos(model_type, calibration_text, tmp_path):
    """As does every window that `verify` measures; those of other models do not."""
    model = save_model(tmp_path / "model", model_type)
    recipe = QuarotRecipe(calibration=str(calibration_text), samples=8, sequence_length=32)
    target = pipeline.plan(str(model), recipe)
    found = [
        *token_rows.choose(target.plan, target.config, recipe, model),
        verify._windows(model, calibration_text).tokens,
    ]
    for rows in found:
        assert bool((rows[:, 0] == 1).all()) == (model_type != "llama") and not (rows[:, 1:] == 1).any()


def test_a_short_text_is_enough_to_measure(tiny, tmp_path):
    """Where nothing is fitted to it, one row will do."""
    (tmp_path / "short.txt").write_text("few words " * 10)
    for length, count in ((100, 1), (50, 2), (20, 4)):  # of 101 tokens: one window, two, five
        recipe = QuarotRecipe(calibration=str(tmp_path / "short.txt"), sequence_length=length, rounding="nearest")
        target = pipeline.plan(str(tiny), recipe)
        rows, probe = token_rows.choose(target.plan, target.config, recipe, tiny)
        assert rows is None and probe.shape == (count, length)
    recipe = QuarotRecipe(calibration=str(tmp_path / "short.txt"), sequence_length=120, rounding="nearest")
    with pytest.raises(InputError, match="0 rows of 120, not 1; lower --sequence-length, or pass"):
        token_rows.choose(target.plan, target.config, recipe, tiny)


@pytest.mark.parametrize("rounding", ["gptq", "nearest"])
@pytest.mark.parametrize(("samples", "shared"), [(8, 0), (60, 0), (62, 4)])
def test_the_probe_is_rows_that_gptq_does_not_see(tiny, calibration_text, samples, shared, rounding):
    """4000 tokens are 62 rows of 64: without any left, the probe is rows that it sees. Without GPTQ, it is as it is."""
    recipe = QuarotRecipe(calibration=str(calibration_text), samples=samples, sequence_length=64, rounding=rounding)
    target = pipeline.plan(str(tiny), recipe)
    rows, probe = token_rows.choose(target.plan, target.config, recipe, tiny)
    assert probe.shape[1] == 64 and 2 <= len(probe) <= probe_size.ROWS
    assert (rows is None) == (rounding == "nearest")
    if rows is not None:
        assert rows.shape == (samples, 64)
        assert sum(row in rows.tolist() for row in probe.tolist()) == shared


def test_long_texts_are_tokenised_in_pieces(tmp_path, monkeypatch):
    """A tokenizer may take two hundred bytes for a character. Pieces are those of one text: none begins anew."""
    seen = []

    def tokenizer(text, verbose=True, add_special_tokens=True):
        seen.append(text)
        return {"input_ids": [300] * add_special_tokens + [*text.encode()]}

    path, content = tmp_path / "a.txt", "some\nlines of text\n\nand one much longer than a piece" + "." * 40 + "\nend\n"
    path.write_text(content)
    whole = load_rows(str(path), tokenizer, 1, len(content) + 1, seed=0)
    assert seen == [content] and whole[0].tolist() == [300, *content.encode()]
    monkeypatch.setattr(calibration, "PIECE", 22)
    seen.clear()
    assert torch.equal(load_rows(str(path), tokenizer, 1, len(content) + 1, seed=0), whole)
    assert "".join(seen) == content and max(map(len, seen)) == 22
    assert seen[:2] == ["some\nlines of text", "\n\nand one much longer "]


def test_too_short(text):
    with pytest.raises(InputError) as caught:
        load_rows(text, tokenizer, 10, 10, seed=0)
    for words in ("found 96 tokens, which is 9 rows of 10, not 10", "lower --samples or --sequence-length"):
        assert words in str(caught.value)
    with pytest.raises(InputError, match="lower --samples to 5, which leaves 4 rows to measure on, or --sequence"):
        load_rows(text, tokenizer, 10, 10, seed=0, extra=4)


def test_an_empty_text(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        load_rows(str(tmp_path / "a.txt"), tokenizer, 1, 1, seed=0)


def test_options_must_be_positive(text):
    with pytest.raises(InputError, match="--samples 0"):
        load_rows(text, tokenizer, 0, 10, seed=0)
    with pytest.raises(InputError, match="--sequence-length -1"):
        load_rows(text, tokenizer, 1, -1, seed=0)


def test_fingerprint():
    rows = torch.arange(6).view(2, 3)
    golden = hashlib.sha256(b"2x3 " + b"".join(i.to_bytes(8, "little") for i in range(6))).hexdigest()
    assert fingerprint(rows) == golden and fingerprint(rows.T.contiguous().T) == golden
    assert fingerprint(rows.view(3, 2)) != golden and fingerprint(rows + 1) != golden


def test_with_a_real_tokenizer(caplog):
    real = AutoTokenizer.from_pretrained(demo_path())
    rows = load_rows(str(demo_path() / "calibration.txt"), real, 4, 64, seed=0)
    assert rows.shape == (4, 64) and 0 <= int(rows.min()) and int(rows.max()) < len(real)
    assert "longer than" not in caplog.text
