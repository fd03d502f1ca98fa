"""Calibration rows: some text, tokenised once, and a seeded choice of its non-overlapping windows."""

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from ptq.errors import InputError
from ptq.models.families import family_or_default
from ptq.statistics import text_sources

# Far above what is needed (English has about 4 characters per token), and above all of WikiText-2.
MIN_TEXT_LIMIT = 16 << 20
# A tokenizer takes over two hundred bytes of memory per token, and some have one for each character.
PIECE = 1 << 18
TEXT_PER_TOKEN = 32


def load_rows(
    spec: str, tokenizer: Any, samples: int, sequence_length: int, seed: int, extra: int = 0, bos: int | None = None
) -> Int64[Tensor, "r t"]:
    """`samples` rows of `sequence_length` token ids, and up to `extra` others behind them, as far as the text goes.

    `spec` is as of `text_sources.load`; text beyond max(16 MiB, 32 bytes per token wanted) is not looked at. It is
    tokenised once, in pieces of a quarter of a million characters, and cut into windows (`windows_of`); a private
    generator seeded with `seed` picks the rows, so the user's global random state is left alone.

    Raises InputError (no such file, not UTF-8, bad line, too few tokens), RunError (the hub cannot be reached).
    """
    for option, value, least in (
        ("--samples", samples, 1),
        ("--sequence-length", sequence_length, 1 if bos is None else 2),
    ):
        if value < least:
            raise InputError(f"{option} {value}: must be at least {least}")
    text = text_sources.load(spec, tokenizer, max(MIN_TEXT_LIMIT, TEXT_PER_TOKEN * samples * sequence_length))
    ids = _tokens(text, tokenizer, special=bos is None)
    windows = windows_of(ids, sequence_length, bos)
    if not text.strip():
        raise InputError(f"calibration {spec} is empty; pass a text")
    if len(windows) < samples:
        fewer = "--samples or " if samples > 1 else ""
        if extra and (fit := len(windows) - extra) > 0:
            fewer = f"--samples to {fit}, which leaves {extra} rows to measure on, or "
        raise InputError(
            f"calibration {spec}: found {len(ids)} tokens, which is {len(windows)} rows of {sequence_length}, not "
            f"{samples}; lower {fewer}--sequence-length, or pass a longer text"
        )
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[: samples + extra]
    return windows[chosen]


def bos_of(tokenizer: Any, config: Any) -> int | None:
    """The token in front of every window of text for a model with this transformers config; None for most models
    (`Family.needs_bos`). Raises InputError where one is needed, and nobody says which."""
    text = config.get_text_config()
    if not family_or_default(text).needs_bos:
        return None
    bos = text.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if not isinstance(bos, int):
        raise InputError(
            f"{text.model_type}: every text must begin with the beginning-of-sequence token, and the tokenizer has "
            "none; name it as bos_token in tokenizer_config.json"
        )
    return bos


def windows_of(ids: Int64[Tensor, " n"], length: int, bos: int | None = None) -> Int64[Tensor, "w {length}"]:
    """Tokens cut into windows that do not overlap; the tail that fills none is dropped. With `bos`, that token is in
    front of every window, and part of its length."""
    own = length if bos is None else length - 1
    windows = ids[: len(ids) // own * own].view(-1, own)
    return windows if bos is None else F.pad(windows, (1, 0), value=bos)


def _tokens(text: str, tokenizer: Any, special: bool) -> Int64[Tensor, " n"]:
    """The tokens of a text, with the tokenizer's own special tokens in the first piece if they are wanted."""
    found, start = [], 0
    while start < len(text) or not found:
        end = _end_of_piece(text, start)
        options = {} if special and not start else {"add_special_tokens": False}
        ids = tokenizer(text[start:end], verbose=False, **options)["input_ids"]
        found.append(torch.tensor(ids, dtype=torch.int64))
        start = end
    return torch.cat(found)


def _end_of_piece(text: str, start: int) -> int:
    """In front of an end of line and the blanks around it, if there is one: most tokenizers begin a new token there."""
    if len(text) - start <= PIECE:
        return len(text)
    line = text.rfind("\n", start, start + PIECE)
    length = len(text[start:line].rstrip()) if line > start else 0
    return start + (length or PIECE)


def fingerprint(*rows: Int64[Tensor, "_r _t"]) -> str:
    """SHA-256 of one or several sets of rows and their shapes."""
    digest = hashlib.sha256()
    for some in rows:
        shape = "x".join(map(str, some.shape))
        digest.update(f"{shape} ".encode() + some.cpu().contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()
