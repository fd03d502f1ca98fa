"""What a run has made and measured, as it returns it and as its record keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ptq.errors import InputError
from ptq.pipeline.work import RECORD, read_record

MEASURED = "nbytes", "rotation_error", "kl", "top1"
"""What every run measures."""


@dataclass(frozen=True)
class Result:
    """What a run has made."""

    out: Path
    bits_per_weight: float | None
    """Bits of the quantised linears, scales and padding included, per weight; None where nothing is quantised."""
    nbytes: int
    """Bytes of all tensors."""
    rotation_error: float
    """Relative difference of the rotated model's logits from the original's, in float32."""
    kl: float
    """Mean KL divergence of the packed model from the original over the probe tokens, nats per token. Where there was
    no `text`, these are a few random ones, and it only says that the model runs."""
    top1: float
    """Share of probe tokens after which both models expect the same token."""
    kl_standard_error: float | None = None
    """That of `kl`, with rows of the probe as samples; None where there is but one."""
    perplexity: float | None = None
    original_perplexity: float | None = None
    """Of both models on the probe's rows of `text`; None where there is none."""
    text: str | None = None
    """What these were measured on, and whether the model was fitted to it; None: a few random tokens."""


def read_result(out: Path) -> Result:
    """The result of a finished run. Raises InputError for a record that has none."""
    return result_of(out, read_record(out / RECORD))


def result_of(out: Path, record: Mapping[str, Any]) -> Result:
    """The result in the record of a run. Raises InputError where there is none."""
    stored, kinds = record.get("result"), {"text": (str, type(None)), **dict.fromkeys(MEASURED, (int, float))}
    try:
        found = {each.name: stored[each.name] for each in fields(Result) if each.name in stored}  # pyright: ignore
        if all(type(value) in kinds.get(name, (int, float, type(None))) for name, value in found.items()):
            return Result(out, **found)
    except TypeError:
        pass
    raise InputError(f"{out / RECORD}: no result of a run is in it; quantise again")
