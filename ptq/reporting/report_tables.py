"""The tables of the report's page."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape
from statistics import fmean
from typing import Any

from ptq.planning.outline import of_any_expert
from ptq.reporting.report_schema import LayerRow, Report

MEANS = ("error", "loss", "nearest_loss", "activation_clip", "clip_error", "default_clip_error")
"""Numbers of layers of which a mean is shown."""


def experts_as_one(layers: Iterable[LayerRow]) -> list[LayerRow]:
    """The layers, the same one of all experts of a block that are stored alike as one: its numbers are means over those
    that have any."""
    found: dict[tuple[Any, ...], list[LayerRow]] = {}
    for layer in layers:  # sign vectors are named after a linear, too
        name, rotation = map(of_any_expert, (layer.name, layer.rotation))
        found.setdefault((name, rotation, layer.storage, layer.activation_bits), []).append(layer)
    return [some[0] if len(some) == 1 else _mean(name, rotation, some) for (name, rotation, *_), some in found.items()]


def _mean(name: str, rotation: str, layers: list[LayerRow]) -> LayerRow:
    numbers = {key: [getattr(layer, key) for layer in layers] for key in MEANS}
    known = {key: [value for value in values if value is not None] for key, values in numbers.items()}
    means: dict[str, Any] = {key: fmean(values) if values else None for key, values in known.items()}
    nbytes = round(fmean(layer.nbytes for layer in layers))
    return replace(layers[0], name=f"{name} ({len(layers)})", rotation=rotation, nbytes=nbytes, **means)


def layers(report: Report) -> str:
    """Every weight matrix."""
    names = ["layer", "n × k", "stored as", "rotated", "input", "bits", "weight error", "output error", "nearest"]
    cells = [
        [
            escape(layer.name), f"{layer.n} × {layer.k}", escape(layer.storage), escape(layer.rotation),
            _input(layer), f"{layer.bits_per_weight:.2f}",
            *(value(number, ".3g", "") for number in (layer.error, layer.loss, layer.nearest_loss)),
        ]
        for layer in experts_as_one(report.layers)
    ]  # fmt: skip
    return f"<h2>Layers</h2>{rows(names, cells, 5)}"


def _input(layer: LayerRow) -> str:
    if layer.activation_bits is None:
        return ""
    clip = "" if layer.activation_clip is None else f", clip {layer.activation_clip:.3g}"  # older reports have none
    return f"{layer.activation_bits} bits{clip}"


def trainings(report: Report) -> Iterator[str]:
    """What fine-tuning has done to the loss on held-out rows."""
    if not report.trainings:
        return
    cells = []
    for training in report.trainings:
        known = [loss for loss in training.losses if loss is not None]
        start, best = (value(known[0], ".4g"), value(min(known), ".4g")) if known else ("", "")
        cells.append([escape(training.name), start, best, str(len(training.losses) - 1)])
    yield (
        "<h2>Fine-tuning</h2><p>Losses on rows of the calibration text that were held out. Of a block: the squared "
        "difference from what the original gives, relative to that; of the whole model: the KL divergence from the "
        "original, in nats per token.</p>" + rows(["what", "before", "after", "epochs"], cells, 1)
    )


def rows(names: list[str], cells: list[list[str]], first_number: int) -> str:
    """A table; `cells` are HTML, those from column `first_number` on are numbers."""

    def row(tag: str, content: list[str]) -> str:
        kinds = (' class="n"' if index >= first_number else "" for index in range(len(content)))
        return "<tr>" + "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, content, strict=True)) + "</tr>"

    body = "".join(row("td", line) for line in cells)
    return f"<table><thead>{row('th', [escape(name) for name in names])}</thead><tbody>{body}</tbody></table>"


def value(number: float | None, form: str, missing: str = "n/a") -> str:
    """A number that may be missing."""
    return missing if number is None else format(number, form)
