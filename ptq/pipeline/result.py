"""What a run has made and measured, as it returns it and as its record keeps it."""

from dataclasses import dataclass
from pathlib import Path

from ptq.errors import InputError
from ptq.pipeline.work import RECORD, read_record


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
    """What these were measured on, and whether weights were fitted to it; None: a few random tokens."""


def read_result(out: Path) -> Result:
    """The result of a finished run. Raises InputError for a record that has none."""
    try:
        stored = read_record(out / RECORD)["result"]
        texts, numbers = {str, type(None)}, {int, float, type(None)}
        if any(type(found) not in (texts if name == "text" else numbers) for name, found in stored.items()):
            raise TypeError
        return Result(out, **stored)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{out / RECORD}: no result of a run is in it; quantise again") from error
