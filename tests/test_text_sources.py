"""Files, pipes and datasets as text, and a sentence for every one that is none."""

import copy
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from transformers import AutoTokenizer

from ptq.demo import demo_path
from ptq.errors import InputError, RunError
from ptq.statistics.calibration import load_rows
from ptq.statistics.text_sources import read_text


def tokenizer(text, verbose=True):
    """One token per byte, after a start token 300 as a Llama tokenizer sets it."""
    assert not verbose  # otherwise transformers warns that the text is longer than the model's context
    return {"input_ids": [300, *text.encode()]}


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
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\xff")
    with pytest.raises(InputError, match=r"a.txt: not UTF-8 at byte 6 \(0xff\)"):
        load_rows(str(tmp_path / "a.txt"), tokenizer, 1, 1, seed=0)


def test_jsonl_documents_are_joined_by_an_empty_line(tmp_path):
    lines = [json.dumps({"text": "one", "content": "no"}), "", json.dumps({"content": "zwei", "id": 2})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert load_rows(str(tmp_path / "a.jsonl"), tokenizer, 1, 10, seed=0).tolist() == [[300, *b"one\n\nzwei"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"body": "x"}', "named `text` or `content`, or a list named `messages`, found the fields: body .str."),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "is a chat, and the model's tokenizer has no chat template",
        ),
        ('{"text": 3}', "named `text` or `content`, or a list named `messages`, found the fields: text .int."),
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
