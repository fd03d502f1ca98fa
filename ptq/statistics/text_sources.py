"""Text that a user names: a file, or a dataset of the hub."""

import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ptq.errors import InputError, RunError
from ptq.files import hub, source
from ptq.files.strict_json import parse_json_object

PIECE = 1 << 20
"""Bytes of a file that are read at a time: a pipe does not say how many it has."""
TEXT_FIELDS = ("text", "content")
CHAT_FIELD = "messages"
TEXT_FILES = (".txt", ".raw", ".jsonl")
"""What names of files end in; WikiText is published as wiki.test.raw."""
DATA_FILES = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".zip")
"""Ends of names of files that are no text, though some can be read as such."""
LONGEST_NAME = 4096
"""Characters of a path, as Linux has them."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+|:[\w.-]*:\w[\w.-]*)?", re.ASCII)
HUB_ALIASES = {"wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1", "c4": "allenai/c4:en"}
FIXED_DATE = "{% macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}{{ '' }}"
"""In front of a chat template: many print the date, and the same command must give the same rows on any day."""

Row = tuple[str, dict[str, Any]]
"""Where a document comes from, and its fields."""


def is_file(spec: str) -> bool:
    """Whether a text that a user named is a file, by its name."""
    return Path(spec).suffix.lower() in TEXT_FILES


def check(spec: str) -> None:
    """Raise InputError for what `load` refuses before it reads: a file that is not there, a name that is none."""
    path = source.path_of(spec)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"calibration {spec}: is read more than once, so it must be a file, not a pipe")
    if is_file(spec):
        source.check_readable(path)
    elif spec not in HUB_ALIASES and path.exists():
        wanted = "name such a file in it" if path.is_dir() else "a .jsonl file has one JSON object a line"
        raise InputError(f"calibration {spec}: expected a .txt or .jsonl file ({wanted}), or a hub dataset")
    elif spec not in HUB_ALIASES and (meant := get_close_matches(spec, HUB_ALIASES, cutoff=0.9)):
        raise InputError(f"calibration {spec!r}: no such file; is `{meant[0]}` meant?")
    elif not HUB_NAME.fullmatch(spec):
        raise InputError(f"calibration {spec!r}: no such file, and not a hub dataset like `org/name`; check the path")


def load(spec: str, tokenizer: Any, limit: int) -> str:
    """The text that a user named, as far as `limit` characters (of a .txt file bytes): documents, joined by an empty
    line.

    `spec` is a .txt, .raw or .jsonl file, `wikitext2`, `c4`, or a hub dataset, streamed: `name`, `name:configuration`
    or `name:configuration:split` (`train` unless named; the configuration may be empty). A row of these has a `text` or
    `content`, or `messages`, a chat, which the chat template of `tokenizer` writes out.

    Raises InputError (no such file, not UTF-8, bad line), RunError (the hub cannot be reached).
    """
    check(spec)
    return read_text(Path(spec), tokenizer, limit) if is_file(spec) else _join(_hub_rows(spec), tokenizer, limit)


def _join(rows: Iterable[Row], tokenizer: Any, limit: int) -> str:
    parts: list[str] = []
    size = 0
    for where, row in rows:
        document = _document(row, tokenizer, where)
        parts.append(document)
        size += len(document)
        if size >= limit:
            break
    return "\n\n".join(parts)[:limit]


def _decode(data: bytes | bytearray, path: Path, offset: int = 0) -> str:
    """The text; a byte order mark at the start of a file, which some editors put there, is none of it."""
    try:
        text = data.decode()
        return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            f"{path}: not UTF-8 at byte {at} (0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None


def path_named(text: object) -> Path:
    """The file that a Python user named. Raises InputError for what is no name of one, such as the text itself."""
    if not isinstance(text, str | Path):
        raise InputError(f"text must be the name of a file, found a {type(text).__name__}")
    name = str(text)
    if not name or "\n" in name or len(name) > LONGEST_NAME:
        found = f"{len(name)} characters of text; write them into a file" if name else "an empty name"
        raise InputError(f"text must be the name of a file, found {found}")
    return source.path_of(text)


def read_text(path: Path, tokenizer: Any = None, limit: int = sys.maxsize - 1) -> str:
    """The text as the file is (no newline translation), cut at a character's start after `limit` bytes; of .jsonl
    the documents, cut after `limit` characters.

    Raises InputError for a file that cannot be read, is not UTF-8 or no text, or has a line without text where there
    must be one.
    """
    path = source.path_of(path)
    if path.suffix.lower() == ".jsonl":
        return _join(_jsonl_rows(path), tokenizer, limit)
    if path.suffix.lower() in DATA_FILES:
        raise InputError(f"{path}: expected plain text, or a .jsonl file with a document in every line")
    data = bytearray()
    try:
        with path.open("rb") as file:
            while len(data) <= limit and (piece := file.read(min(PIECE, limit + 1 - len(data)))):
                data += piece
    except OSError as error:
        raise source.cannot_read(path, error) from error
    if len(data) > limit:
        while limit and data[limit] & 0xC0 == 0x80:  # a continuation byte: go back to where its character starts
            limit -= 1
        data = data[:limit]
    return _decode(data, path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(raw, path, offset)
                offset += len(raw)
                if line.strip():
                    where = f"{path}: line {number}"
                    yield where, parse_json_object(line.encode(), where, remedy="correct that line")
    except OSError as error:
        raise source.cannot_read(path, error) from error


def _document(row: dict[str, Any], tokenizer: Any, where: str) -> str:
    for name in TEXT_FIELDS:
        if isinstance(row.get(name), str):
            return row[name]
    if isinstance(row.get(CHAT_FIELD), list):
        return _chat(row[CHAT_FIELD], tokenizer, where)
    found = ", ".join(f"{name} ({type(row[name]).__name__})" for name in sorted(row)[:10]) or "none"
    raise InputError(
        f"{where}: expected a string named `text` or `content`, or a list named `{CHAT_FIELD}`, found the fields: "
        f"{found}"
    )


def _chat(messages: list[Any], tokenizer: Any, where: str) -> str:
    """A chat as the model reads it. The template runs in the sandbox of transformers."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{where}: is a chat, and the model's tokenizer has no chat template; pass text")
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise InputError(f"{where}: expected a list of messages, each with `role` and `content`")
    try:
        template = FIXED_DATE + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception as error:  # a template raises whatever it likes
        raise InputError(f"{where}: the model's chat template does not take this chat: {_one_line(error)}") from error


def _hub_rows(spec: str) -> Iterator[Row]:
    """The rows of one split of a hub dataset, streamed: only what is used is fetched."""
    import datasets  # slow to import, and not needed for a local text
    from datasets.exceptions import DatasetNotFoundError

    if not hub.is_known():
        raise RunError(
            f"calibration {spec}: no such file, and this machine has no network, or cannot find the hub, for a dataset "
            "of that name; pass a local file: --calibration FILE.txt"
        )
    name, configuration, split, *_ = [*HUB_ALIASES.get(spec, spec).split(":"), "", ""]
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    except ValueError as error:  # of datasets itself: a configuration or a split that there is not
        if type(error) is not ValueError:
            raise _cannot_fetch(spec, error) from error
        reason = " ".join(str(error).split())[:500].rstrip(".")
        raise InputError(f"calibration {spec}: {reason}; name both as {name}:CONFIGURATION:SPLIT") from error
    except DatasetNotFoundError as error:
        raise InputError(
            f"calibration {spec}: neither a local file nor a public hub dataset; check the name"
        ) from error
    except Exception as error:  # as below
        raise _cannot_fetch(spec, error) from error
    try:
        for row in rows:
            yield f"calibration {spec}", dict(row)
    except Exception as error:  # the network's and the files' errors share no base class; the cause stays chained
        raise _cannot_fetch(spec, error) from error


def _cannot_fetch(spec: str, error: Exception) -> RunError:
    reason = f"{type(error).__name__}: {_one_line(error)}"
    return RunError(
        f"calibration {spec}: could not reach the hub or read the dataset ({reason}); "
        "check the network, or pass a local file: --calibration FILE.txt"
    )


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else "no reason given"
