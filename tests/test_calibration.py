"""Calibration rows: the right windows of the right text, the same on every run, and a sentence for every bad input."""

import copy
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from tiny_models import save_model
from transformers import AutoTokenizer, GemmaConfig, LlamaConfig

from ptq.commands import verify
from ptq.demo import demo_path
from ptq.errors import InputError, RunError
from ptq.pipeline import pipeline, token_rows
from ptq.statistics import calibration
from ptq.statistics.calibration import bos_of, fingerprint, load_rows
from ptq.statistics.text_sources import read_text
from quarot.plan import QuarotRecipe


def tokenizer(text, verbose=True):
    """One token per byte, after a start token 300 as a Llama tokenizer sets it."""
    assert not verbose  # otherwise transformers warns that the text is longer than the model's context
    return {"input_ids": [300, *text.encode()]}


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
    assert probe.shape[1] == 64 and 2 <= len(probe) <= token_rows.PROBE_ROWS
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
    for words in ("found 96 tokens, which is 9 rows of 10, not 10", "--samples", "--sequence-length"):
        assert words in str(caught.value)


def test_an_empty_text(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        load_rows(str(tmp_path / "a.txt"), tokenizer, 1, 1, seed=0)


def test_options_must_be_positive(text):
    with pytest.raises(InputError, match="--samples 0"):
        load_rows(text, tokenizer, 0, 10, seed=0)
    with pytest.raises(InputError, match="--sequence-length -1"):
        load_rows(text, tokenizer, 1, -1, seed=0)


def test_text_is_read_as_it_is(tmp_path):
    data = b"a\r\nb\n\n\n c \xc3\xa9"
    (tmp_path / "a.TXT").write_bytes(data)
    rows = load_rows(str(tmp_path / "a.TXT"), tokenizer, 1, 1 + len(data), seed=0)
    assert rows.tolist() == [[300, *data]]


def test_long_text_is_cut_at_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr("ptq.statistics.calibration.MIN_TEXT_LIMIT", 64)
    seen = []
    for lead in range(4):  # the limit falls on each of the four bytes of a character in turn
        (tmp_path / "a.txt").write_bytes(b"x" * lead + "😀".encode() * 100)
        load_rows(str(tmp_path / "a.txt"), lambda text, verbose: seen.append(text) or {"input_ids": [0]}, 1, 1, seed=0)
    assert seen == ["x" * lead + "😀" * ((64 - lead) // 4) for lead in range(4)]


def test_text_of_a_pipe(tmp_path):
    pipe, text = tmp_path / "pipe", "a\nbc" * 1000
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        for limit in (sys.maxsize - 1, 100):
            written = pool.submit(pipe.write_text, text)
            assert read_text(pipe, limit=limit) == text[:limit]
            written.exception()  # a reader that has enough closes the pipe


def test_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match=r"a.txt: not UTF-8 at byte 3 \(0xff\)"):
        load_rows(str(tmp_path / "a.txt"), tokenizer, 1, 1, seed=0)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xfe"}\n')
    with pytest.raises(InputError, match=r"a.jsonl: not UTF-8 at byte 24 \(0xfe\)"):
        load_rows(str(tmp_path / "a.jsonl"), tokenizer, 1, 1, seed=0)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\n')
    for name in ("a.txt", "a.jsonl"):
        assert load_rows(str(tmp_path / name), tokenizer, 1, 4, seed=0).tolist() == [[300, *b"abc"]]


def test_jsonl_documents_are_joined_by_an_empty_line(tmp_path):
    lines = [json.dumps({"text": "one", "content": "no"}), "", json.dumps({"content": "zwei", "id": 2})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert load_rows(str(tmp_path / "a.jsonl"), tokenizer, 1, 10, seed=0).tolist() == [[300, *b"one\n\nzwei"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"body": "x"}', "named `text` or `content`, or a list named `messages`, found the fields .'body'."),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "is a chat, and the model's tokenizer has no chat template",
        ),
        ('{"text": 3}', "named `text` or `content`"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=f"a.jsonl: line 3: .*{words}"):
        load_rows(str(tmp_path / "a.jsonl"), tokenizer, 1, 1, seed=0)


TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Only user and assistant\nare supported') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer():
    found = AutoTokenizer.from_pretrained(demo_path())
    found.chat_template = TEMPLATE
    return found


def chat(*roles):
    return {"messages": [{"role": role, "content": f"{role}'s own"} for role in roles]}


def test_chats_are_written_out_by_the_model_s_template(tmp_path, chat_tokenizer, monkeypatch):
    rows = [chat("user", "assistant"), {"text": "plain", "messages": []}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = "<|user|>user's own\n<|assistant|>assistant's own\n\n\nplain"
    assert read_text(tmp_path / "a.jsonl", chat_tokenizer) == text
    ids = chat_tokenizer(text)["input_ids"]
    assert load_rows(str(tmp_path / "a.jsonl"), chat_tokenizer, 1, len(ids), seed=0).tolist() == [ids]
    hub(monkeypatch, rows)
    assert load_rows("org/name", chat_tokenizer, 1, len(ids), seed=0).tolist() == [ids]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (chat("user", "system"), "chat template does not take this chat: Only user and assistant"),
        ({"messages": []}, "expected a list of messages, each with `role` and `content`"),
        ({"messages": ["user: hello"]}, "expected a list of messages, each with `role` and `content`"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            "expected a list of messages, each with `role` and `content`",
        ),
    ],
)
def test_bad_chats_name_the_line(tmp_path, chat_tokenizer, row, words):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [chat("user"), row])))
    with pytest.raises(InputError, match=f"a.jsonl: line 2: .*{words}$"):
        load_rows(str(tmp_path / "a.jsonl"), chat_tokenizer, 1, 1, seed=0)


def test_chats_are_the_same_on_any_day(tmp_path, chat_tokenizer):
    dated = copy.deepcopy(chat_tokenizer)
    dated.chat_template = (
        "\n{% macro today() %}{{ strftime_now('%d %b %Y %f') }}{% endmacro %}<{{ today() }}>" + TEMPLATE
    )
    (tmp_path / "a.jsonl").write_text(json.dumps(chat("user")))
    assert read_text(tmp_path / "a.jsonl", dated) == "\n<26 Jul 2024><|user|>user's own\n"


def test_data_is_no_text(tmp_path):
    for name in ("a.json", "a.PARQUET"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(InputError, match="expected plain text, or a .jsonl file"):
            read_text(tmp_path / name)
    (tmp_path / "a.md").write_text("read")
    assert read_text(tmp_path / "a.md") == "read"


def test_what_is_not_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    for spec, words in (
        ("a.csv", "expected a .txt or .jsonl"),
        ("wikitxt2", "is `wikitext2` meant?"),
        (str(tmp_path), "expected a .txt or .jsonl"),
        ("./nowhere", "no such file, and not a hub dataset"),
        ("missing.txt", "cannot be read .No such file"),
        ("missing.jsonl", "cannot be read .No such file"),
    ):
        with pytest.raises(InputError, match=words):
            load_rows(spec, tokenizer, 1, 1, seed=0)


def hub(monkeypatch, answer):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("ptq.files.hub.is_known", lambda: True)
    return calls


def test_without_a_network_nothing_is_tried(monkeypatch):
    calls = hub(monkeypatch, [{"text": "ab"}])
    monkeypatch.setattr("ptq.files.hub.is_known", lambda: False)
    with pytest.raises(
        RunError, match="no such file, and this machine has no network, or cannot find the hub, for a dataset"
    ):
        load_rows("c4", tokenizer, 1, 1, seed=0)
    assert not calls


@pytest.mark.parametrize(
    ("spec", "args"),
    [
        ("wikitext2", ("Salesforce/wikitext", "wikitext-2-raw-v1")),
        ("c4", ("allenai/c4", "en")),
        ("org/name", ("org/name", None)),
        ("org/name:part-2.1", ("org/name", "part-2.1")),
        ("org/name:part:train_sft", ("org/name", "part")),
        ("org/name::train_sft", ("org/name", None)),
    ],
)
def test_hub_datasets_are_streamed(monkeypatch, spec, args):
    calls = hub(monkeypatch, iter([{"text": "ab"}, {"text": ""}, {"text": "c\n"}]))
    assert load_rows(spec, tokenizer, 1, 9, seed=0).tolist() == [[300, *b"ab\n\n\n\nc\n"]]
    assert calls == [(args, {"split": "train_sft" if "sft" in spec else "train", "streaming": True})]


def test_only_as_much_as_needed_is_fetched(monkeypatch):
    monkeypatch.setattr("ptq.statistics.calibration.MIN_TEXT_LIMIT", 100)
    taken = []
    hub(monkeypatch, (taken.append(i) or {"text": "x" * 30} for i in range(1000)))
    load_rows("c4", tokenizer, 1, 2, seed=0)
    assert len(taken) == 4


def dropped_after_one():
    yield {"text": "a"}
    raise ConnectionResetError("gone")


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            ConnectionError("Couldn't reach it\nmore"),
            RunError,
            "could not reach the hub.*Couldn't reach it.*a local file",
        ),
        (TimeoutError(), RunError, "could not reach the hub.*TimeoutError: no reason given.*a local file"),
        (DatasetNotFoundError("x"), InputError, "neither a local file nor a public hub dataset"),
        (
            ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"),
            InputError,
            r"Config name is missing. Please pick one among: \['a', 'b'\]; name both as org/name:CONFIGURATION:SPLIT",
        ),
        (
            ValueError("Bad split: train. Available splits: ['a']"),
            InputError,
            r"Bad split: train. Available splits: \['a'\]; name both as org/name:CONFIGURATION:SPLIT",
        ),
        (json.JSONDecodeError("no", "x", 0), RunError, "could not reach the hub or read the dataset .JSONDecodeError"),
        (dropped_after_one(), RunError, "ConnectionResetError: gone"),
        ([{"body": "x"}], InputError, "calibration org/name: expected a string named `text`"),
    ],
)
def test_hub_errors(monkeypatch, answer, kind, words):
    hub(monkeypatch, answer)
    with pytest.raises(kind, match=words) as caught:
        load_rows("org/name", tokenizer, 1, 1, seed=0)
    assert "\n" not in str(caught.value)


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
