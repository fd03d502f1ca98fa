"""Text that a user names: a file, or a dataset of the hub."""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ptq.errors import InputError, RunError
from ptq.files import source
from ptq.files.header import parse_json_object

TEXT_FIELDS = ("text", "content")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?", re.ASCII)
HUB_ALIASES = {"wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1", "c4": "allenai/c4:en"}


def load(spec: str, limit: int) -> str:
    """The text that a user named, as far as `limit`.

    Raises InputError (no such file, not UTF-8, bad line), RunError (the hub cannot be reached).
    """
    path = Path(spec).expanduser()
    if spec in HUB_ALIASES:
        return _join(_hub_documents(spec), limit)
    if path.suffix.lower() in (".txt", ".jsonl"):
        return read_text(path, limit)
    if path.exists():
        raise InputError(f"calibration {spec}: expected a .txt or .jsonl file, `wikitext2`, `c4` or a hub dataset")
    if not HUB_NAME.fullmatch(spec):
        raise InputError(f"calibration {spec!r}: no such file, and not a hub dataset like `org/name`; check the path")
    return _join(_hub_documents(spec), limit)


def _join(documents: Iterable[str], limit: int) -> str:
    parts: list[str] = []
    size = 0
    for document in documents:
        parts.append(document)
        size += len(document)
        if size >= limit:
            break
    return "\n\n".join(parts)[:limit]


def _decode(data: bytes, path: Path, offset: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            f"{path}: not UTF-8 at byte {at} (0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None


def _cannot_read(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions")


def read_text(path: Path, limit: int = sys.maxsize - 1) -> str:
    """The text as the file is (no newline translation), cut at a character's start after `limit` bytes; of .jsonl
    the documents, cut after `limit` characters.

    Raises InputError for a file that cannot be read, is not UTF-8, or has a line without text where there must be one.
    """
    path = path.expanduser()
    if path.suffix.lower() == ".jsonl":
        return _join(_jsonl_documents(path), limit)
    try:
        with path.open("rb") as file:
            data = file.read(min(limit + 1, path.stat().st_size + 1))
    except OSError as error:
        raise _cannot_read(path, error) from error
    if len(data) > limit:
        while limit and data[limit] & 0xC0 == 0x80:  # a continuation byte: go back to where its character starts
            limit -= 1
        data = data[:limit]
    return _decode(data, path)


def _jsonl_documents(path: Path) -> Iterator[str]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(raw, path, offset)
                offset += len(raw)
                if line.strip():
                    row = parse_json_object(raw, f"{path}: line {number}")
                    yield _field(row, f"{path}: line {number}")
    except OSError as error:
        raise _cannot_read(path, error) from error


def _field(row: dict[str, Any], where: str) -> str:
    for name in TEXT_FIELDS:
        if isinstance(row.get(name), str):
            return row[name]
    raise InputError(f"{where}: expected a string named `text` or `content`, found the fields {sorted(row)[:10]}")


def _hub_documents(spec: str) -> Iterator[str]:
    """The documents of a hub dataset's `train` split, streamed: only what is used is fetched."""
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as error:
        raise InputError(f"calibration {spec}: needs `pip install datasets`; or pass a local .txt file") from error
    if not source.hub_is_known():
        raise RunError(
            f"calibration {spec}: this machine has no network, or cannot find the hub; pass a local file: "
            "--calibration FILE.txt"
        )
    name, _, configuration = HUB_ALIASES.get(spec, spec).partition(":")
    try:
        for row in datasets.load_dataset(name, configuration or None, split="train", streaming=True):
            yield _field(dict(row), f"calibration {spec}")
    except InputError:
        raise
    except DatasetNotFoundError as error:
        raise InputError(
            f"calibration {spec}: neither a local file nor a public hub dataset; check the name"
        ) from error
    except Exception as error:  # the network's and the files' errors share no base class; the cause stays chained
        raise RunError(
            f"calibration {spec}: could not reach the hub or read the dataset ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:120] if str(error) else 'no reason given'}); "
            "check the network, or pass a local file: --calibration FILE.txt"
        ) from error
