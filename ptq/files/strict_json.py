"""JSON from strangers: an object, of valid Unicode, with every name once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptq.errors import InputError


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"the name {name[:200]!r} occurs twice")
        table[name] = value
    return table


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def tagged(word: str) -> dict[str, str]:
    """A number that JSON does not have, as transformers writes it since version 5; before, it wrote the bare word."""
    return {"__float__": word}


def parse_json_object(
    data: bytes,
    where: str | Path,
    constant: Callable[[str], Any] = _refuse_constant,
    remedy: str = "fetch the file again",
) -> dict[str, Any]:
    """Parse UTF-8 JSON from a stranger: an object, no duplicate names. `constant` is called for Infinity and NaN.

    Raises InputError that names `where` for anything else, including nesting deeper than the parser's stack.
    """
    try:
        return json_object(data, constant)
    except ValueError as error:
        raise InputError(f"{where}: {error}; {remedy}") from None


def json_object(data: bytes, constant: Callable[[str], Any] = _refuse_constant) -> dict[str, Any]:
    """What `parse_json_object` gives. Raises ValueError that says what is wrong."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_refuse_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def read_json_object(
    path: Path, limit: int, constant: Callable[[str], Any] = _refuse_constant
) -> tuple[dict[str, Any], bytes]:
    """Read a JSON object of at most `limit` bytes as `parse_json_object` does; returns it with its raw bytes. Raises
    InputError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the folder and its permissions") from error
    if len(data) > limit:
        raise InputError(f"{path}: larger than the {limit} bytes that such a file may have; it is damaged or hostile")
    return parse_json_object(data, path, constant), data
