"""Models that were published with weights of few bits, read as if they were stored in 16: nothing else knows that they
are not."""

from collections.abc import Mapping
from typing import Any

from ptq.files import fp8_source, mxfp4_source
from ptq.files.checkpoint import Checkpoint


def form(config: Mapping[str, Any]) -> str | None:
    """The form in which a config says that the weights are, of those that are read; None for every other, and for plain
    weights."""
    if mxfp4_source.stated(config):
        return "MXFP4"
    return None if fp8_source.stated(config) is None else "FP8"


def dequantized(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with such weights as weights of the config's dtype, and a sentence for the user; a plain one as it
    is. No weight is read. Raises InputError where it is quantised in another way, and where weights and scales do not
    fit."""
    if mxfp4_source.stated(checkpoint.config):
        return mxfp4_source.dequantized(checkpoint)
    found = fp8_source.dequantized(checkpoint)
    mxfp4_source.refuse_unexplained(checkpoint)
    return found
