"""What the report of a run holds: the schema of `report.json`, version 1, and its reader.

Fields have the units that they say. Nothing in it depends on where or how fast the run was, so that the same run
writes the same bytes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ptq.errors import InputError

JSON, PAGE = "report.json", "report.html"
"""The files of a report in the folder of a checkpoint."""
VERSION = 1


@dataclass(frozen=True)
class LayerRow:
    """One weight matrix [n, k], and how well it was rounded. Errors are None where it was not."""

    name: str
    block: int | None
    n: int
    k: int
    storage: str
    rotation: str
    activation_bits: int | None
    nbytes: int
    """Bytes of the weight with scales, zero-points, sign vectors and padding."""
    error: float | None
    """Squared error relative to the weight's: |W - Ŵ|² / |W|²."""
    loss: float | None
    """Squared error of the layer's output on the calibration data, relative to the output's."""
    nearest_loss: float | None
    """The same if every weight had been rounded to its nearest code."""
    activation_clip: float | None = None
    """Share of a token's largest magnitude that its integers reach; None where the input is not quantised."""
    clip_error: float | None = None
    """Where the clip was searched: squared error of what the linears of this input give, of a token of the sample,
    relative to its square, because the input is quantised."""
    default_clip_error: float | None = None
    """The same with the default clip."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / (self.n * self.k)


@dataclass(frozen=True)
class Spread:
    """How evenly the input of a linear is spread over its channels (see `ptq.statistics.outliers.MeasuredInput`)."""

    rms: float | None
    """Root of the mean square over all tokens and channels."""
    kurtosis: float | None
    peak_to_rms: float | None
    peak_to_median: float | None
    """Largest magnitude of any channel over that of the median channel."""
    rounding_error: float | None
    """Squared error of a token on the grid of the activations, relative; None where they are not quantised."""
    curve: tuple[float | None, ...] | None
    """Largest magnitude per channel, or per run of neighbours, over `rms`; only of the linears that are drawn."""


@dataclass(frozen=True)
class Observed:
    """The input of a linear in the original model, and in the rotated one after the online transform."""

    linear: str
    block: int
    kind: str
    """The name of the linear inside its block."""
    channels: int
    before: Spread
    after: Spread


@dataclass(frozen=True)
class Share:
    """Bytes of one kind of tensor in the source and in the result."""

    part: str
    before: int
    after: int


@dataclass(frozen=True)
class Positions:
    """Predictions by position, mean over the rows, nats: entry i is about token i + 2 of a row."""

    text: str
    """What the rows are."""
    rows: int
    loss_original: tuple[float | None, ...]
    loss_packed: tuple[float | None, ...]
    kl: tuple[float | None, ...]

    @property
    def perplexities(self) -> tuple[float | None, float | None]:
        """Of the original and of the packed model, over all positions."""
        return _perplexity(self.loss_original), _perplexity(self.loss_packed)


@dataclass(frozen=True)
class Training:
    """Fine-tuning of one kind."""

    name: str
    losses: tuple[float | None, ...]
    """On held-out rows: at the start, then after every epoch; the least is kept. Of a block, relative to the mean
    square of what the original gives; of the whole model, the KL divergence in nats per token."""


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    version: int
    model: str
    family: str
    made_with: str
    """Versions of the packages."""
    fingerprint: str
    """Of the run, as in ptq.json."""
    recipe: dict[str, Any]
    notes: tuple[str, ...]
    bits_per_weight: float | None
    """True bits per quantised weight; None where nothing is quantised."""
    quantised_weights: int
    bytes_before: int
    bytes_after: int
    rotation_error: float | None
    """Relative difference of the rotated model's logits from the original's."""
    kl: float | None
    """Mean KL divergence over the probe's tokens, nats."""
    top1: float | None
    """Share of the probe's tokens with the same most likely successor."""
    shares: tuple[Share, ...]
    layers: tuple[LayerRow, ...]
    inputs: tuple[Observed, ...]
    positions: Positions | None
    trainings: tuple[Training, ...] = ()
    kl_standard_error: float | None = None
    """Of `kl`, with the probe's rows as samples."""


def read(path: Path) -> Report:
    """The report in a `report.json`. Raises InputError for a file that is none of this version."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise InputError(f"{path}: is a report of version {content['version']!r}, this package reads {VERSION}")
        nested = {
            "notes": tuple(content["notes"]),
            "shares": tuple(Share(**share) for share in content["shares"]),
            "layers": tuple(LayerRow(**layer) for layer in content["layers"]),
            "inputs": tuple(
                Observed(**{**found, **{key: _read_spread(found[key]) for key in ("before", "after")}})
                for found in content["inputs"]
            ),
            "positions": content["positions"] and _read_positions(content["positions"]),
            "trainings": tuple(
                Training(training["name"], tuple(training["losses"])) for training in content.get("trainings", ())
            ),
        }
        return Report(**{**content, **nested})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is not the report of a ptq run ({type(error).__name__}: {error})") from error


def _perplexity(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return math.exp(min(fmean(known), 700.0)) if known else None


def _read_spread(content: dict[str, Any]) -> Spread:
    curve = content["curve"]
    return Spread(**{**content, "curve": None if curve is None else tuple(curve)})


def _read_positions(content: dict[str, Any]) -> Positions:
    curves = {key: tuple(content[key]) for key in ("loss_original", "loss_packed", "kl")}
    return Positions(**{**content, **curves})
