"""The report as one HTML page: no script, no network, pictures as SVG inside."""

import math
from collections.abc import Iterator
from html import escape
from statistics import fmean
from typing import Any

from ptq.reporting import charts, report_tables
from ptq.reporting.charts import Place, Series
from ptq.reporting.report_schema import LayerRow, Observed, Positions, Report
from ptq.reporting.report_tables import value as _value
from ptq.reporting.sizes import size_text, with_error

BEFORE, AFTER = "#d9822b", "#1a56c4"
KINDS = ("#1a56c4", "#5b9bd5", "#12877d", "#8e5ea2", "#d9822b", "#b5502f", "#7a8b1f", "#5f6368")
PARTS = {
    "codes": "#1a56c4", "scale": "#5b9bd5", "zero": "#a8c7ea", "weights": "#9aa0a6", "embedding": "#12877d",
    "head": "#8e5ea2", "biases": "#b5502f", "norms": "#d9822b", "sign vectors": "#7a8b1f",
}  # fmt: skip
WIDTH = 960
MOST_BINS = 48
"""Bins of positions in the picture; the JSON has every position."""

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#202124;background:#fff;max-width:980px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2.2em 0 .3em;break-after:avoid}p{margin:.3em 0 .8em}
.sub,.note{color:#5f6368}.cards{display:flex;flex-wrap:wrap;gap:.8em;margin:1.2em 0}
.cards div{border:1px solid #e0e3e7;border-radius:8px;padding:.5em .9em;min-width:8em}
.cards b{display:block;font-size:1.25em}.cards span{color:#5f6368;font-size:.85em}
code{font:.88em ui-monospace,monospace;background:#f3f4f6;border-radius:4px;padding:.1em .35em;margin-right:.3em;
display:inline-block}svg{width:100%;height:auto;break-inside:avoid}
table{border-collapse:collapse;font-size:.8em;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.22em .5em;border-bottom:1px solid #e8eaed;vertical-align:top}
th{border-bottom:2px solid #9aa0a6}td.n,th.n{text-align:right;white-space:nowrap}tr{break-inside:avoid}
@media print{body{margin:0;max-width:none;font-size:12px}}
"""


def page(report: Report) -> str:
    """The whole page."""
    sections = [_header(report), *_outliers(report), *_errors(report), _sizes(report), *_positions(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.model)}, quantised</title><style>{STYLE}{charts.STYLE}</style></head><body>\n"
        + "\n".join([*sections, report_tables.layers(report), *report_tables.trainings(report), _footer(report)])
        + "\n</body></html>\n"
    )


def _header(report: Report) -> str:
    cards = [(f"{size_text(report.bytes_before)} → {size_text(report.bytes_after)}", "all tensors, before and after")]
    if report.bits_per_weight is not None:
        weights = f"{report.quantised_weights:,} quantised weights, scales included"
        cards.append((f"{report.bits_per_weight:.3f} bits", f"per weight, true: {weights}"))
    found = report.positions
    if found is not None:
        old, new = found.perplexities
        cards.append((f"{_value(old, '.3f')} → {_value(new, '.3f')}", f"perplexity on {found.text}"))
        kl = with_error(report.kl, report.kl_standard_error)
        cards.append((kl, "KL from the original on it, nats per token"))
        cards.append((_value(report.top1, ".1%"), "of its tokens: same first choice"))
    else:
        cards.append(
            ("no text", "so the quality was not measured; quantize verify OUT --against MODEL --text FILE does")
        )
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in cards)
    recipe = "".join(f"<code>{escape(f'{key} {_plain(value)}')}</code>" for key, value in _settings(report.recipe))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    exact = "the model was the original to the bit"
    close = f"the model gave the logits of the original to {_value(report.rotation_error, '.1e')}"
    return (
        f"<h1>{escape(report.model)}</h1>"
        f'<p class="sub">{escape(report.family)} · before rounding, {exact if report.rotation_error == 0 else close} '
        "· read again from disk, the result gave the logits that were measured</p>"
        f'<div class="cards">{boxes}</div><p>{recipe}</p>{notes}'
    )


def _settings(recipe: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in recipe.items() if value not in (None, [], ()))


# --- outliers ---------------------------------------------------------------------------------------------------------


NOT_ROTATED = "Nothing was rotated here, so both curves are one; a rotation would spread it."


def _outliers(report: Report) -> Iterator[str]:
    if not report.inputs:
        return
    rotated = any(layer.rotation for layer in report.layers)
    yield (
        f"<h2>{'Outliers before and after rotation' if rotated else 'Outliers'}</h2>"
        "<p>The largest magnitude of every channel of a layer's input, relative to the input's root mean square. "
        "Quantisation gives a token one range for all its channels: where one channel stands out, the others get what "
        + f"is left. {'Rotation spreads it.' if rotated else NOT_ROTATED} Measured on "
        + f"{'a few random tokens' if report.positions is None else escape(report.positions.text)}.</p>"
        + channels_picture(report)
        + "<p>Over all blocks: kurtosis of a token, 3 for a Gaussian one, large where few channels hold everything; "
        "logarithmic.</p>" + _blocks_picture(report, "kurtosis")
    )
    if any(found.after.rounding_error is not None for found in report.inputs):
        yield (
            "<p>Error of a token when it is rounded to the grid of the activations, relative to its size, squared: "
            "what the original would suffer, and what the rotated model does"
            + _with_clips(report)
            + ".</p>"
            + _blocks_picture(report, "rounding_error")
        )


def _with_clips(report: Report) -> str:
    searched = any(layer.clip_error is not None for layer in report.layers)
    return "; with the default clips: those that were found are in the table of layers" if searched else ""


def channels_picture(report: Report, standalone: bool = False) -> str:
    """Largest magnitude per channel, original and rotated, of a few layers."""
    drawn = [found for found in report.inputs if found.before.curve is not None]
    blocks, kinds = sorted({found.block for found in drawn}), list(dict.fromkeys(found.kind for found in drawn))
    width, height = WIDTH / 3, 190
    body = [_legend()]
    for row, kind in enumerate(kinds):
        same = [found for found in drawn if found.kind == kind]
        values = [value for found in same for side in (found.before, found.after) for value in side.curve or ()]
        y = charts.axis(values, log=True)
        for found in same:
            place = (blocks.index(found.block) * width, 26 + row * height, width, height)
            body.append(_channels_panel(place, found, y))
    size = (max(len(blocks), 2) * width, 26 + len(kinds) * height)
    return charts.figure(
        *size,
        "Largest magnitude per channel over rms of a layer's input, original and rotated",
        "".join(body),
        standalone,
    )


def _channels_panel(place: Place, found: Observed, y: charts.Axis) -> str:
    lines = []
    for label, side, colour, width in (("original", found.before, BEFORE, 0.9), ("rotated", found.after, AFTER, 1.2)):
        curve = side.curve or ()
        xs = [(index + 0.5) * found.channels / len(curve) for index in range(len(curve))]
        lines.append(Series(label, colour, xs, curve, width))
    peaks = [_value(side.peak_to_median, ".3g") for side in (found.before, found.after)]
    x = charts.Axis(0, found.channels)
    note = f"max/median {peaks[0]} → {peaks[1]}"
    return charts.panel(place, f"block {found.block}, {found.kind.rpartition('.')[2]}", x, y, lines, note)


def _blocks_picture(report: Report, measure: str) -> str:
    kinds = list(dict.fromkeys(found.kind for found in report.inputs))
    width, height = WIDTH / max(len(kinds), 3), 180
    values = [getattr(side, measure) for found in report.inputs for side in (found.before, found.after)]
    y, body = charts.axis(values, log=True), [_legend()]
    for column, kind in enumerate(kinds):
        same = sorted((found for found in report.inputs if found.kind == kind), key=lambda found: found.block)
        xs = [found.block for found in same]
        lines = []
        for label, colour, side in (("original", BEFORE, "before"), ("rotated", AFTER, "after")):
            ys = [getattr(getattr(found, side), measure) for found in same]
            titles = [f"{found.linear}, {label}: {_value(v, '.4g')}" for found, v in zip(same, ys, strict=True)]
            lines.append(Series(label, colour, xs, ys, titles=titles))
        place = (column * width, 26, width, height)
        body.append(charts.panel(place, kind, charts.axis(xs, whole=True), y, lines))
    label = f"{measure.replace('_', ' ')} of the inputs by block, original and rotated"
    return charts.figure(WIDTH, 26 + height, label, "".join(body))


def _legend() -> str:
    return charts.legend(46, 16, [("original", BEFORE, ""), ("rotated", AFTER, "")])


# --- errors, sizes, positions -----------------------------------------------------------------------------------------


def _errors(report: Report) -> Iterator[str]:
    measures = {"error": "of the weight: |W − Ŵ|² / |W|²", "loss": "of the layer's output on calibration data"}
    layers = report_tables.experts_as_one(report.layers)
    rounded = [layer for layer in layers if layer.block is not None and layer.error is not None]
    shown = [name for name in measures if any(getattr(layer, name) is not None for layer in rounded)]
    if not shown:
        return
    kinds = list(dict.fromkeys(_kind(layer) for layer in rounded))
    colours = {kind: KINDS[index % len(KINDS)] for index, kind in enumerate(kinds)}
    width, height, body = WIDTH / 2, 250, [charts.legend(46, 16, [(kind, colours[kind], "") for kind in kinds])]
    x = charts.axis([layer.block for layer in rounded], whole=True)
    for column, measure in enumerate(shown):
        lines = []
        for kind in kinds:
            same = [layer for layer in rounded if _kind(layer) == kind]
            ys = [getattr(layer, measure) for layer in same]
            titles = [f"{layer.name}: {_value(value, '.3g')}" for layer, value in zip(same, ys, strict=True)]
            lines.append(Series(kind, colours[kind], [layer.block or 0 for layer in same], ys, titles=titles))
        y = charts.axis((getattr(layer, measure) for layer in rounded), log=True)
        body.append(charts.panel((column * width, 26, width, height), measures[measure], x, y, lines))
    yield (
        "<h2>Error of every layer</h2><p>Squared and relative, by block.</p>"
        + charts.figure(WIDTH, 26 + height, "Relative error of every linear by block", "".join(body))
    )


def _kind(layer: LayerRow) -> str:
    return layer.name.rpartition(".")[2].partition(" ")[0]


def _sizes(report: Report) -> str:
    sides = (("original", "before", report.bytes_before), ("result", "after", report.bytes_after))
    rows, cells = [], []
    for label, side, whole in sides:
        pieces = [(s.part, _colour(s.part), getattr(s, side)) for s in report.shares if getattr(s, side)]
        rows.append((label, [(*piece, f"{piece[0]}: {_share(piece[2], whole)}") for piece in pieces]))
    for share in report.shares:
        numbers = (_share(share.before, report.bytes_before), _share(share.after, report.bytes_after))
        swatch = f'<svg viewBox="0 0 10 10" style="width:.8em"><path d="M0,0h10v10h-10z" fill="{_colour(share.part)}"/>'
        cells.append([f"{swatch}</svg> {escape(share.part)}", *map(escape, numbers)])
    picture = charts.figure(WIDTH, 78, "Bytes by kind of tensor, original and result", charts.bars(0, 6, WIDTH, rows))
    return f"<h2>Where the bits went</h2>{picture}{report_tables.rows(['part', 'original', 'result'], cells, 1)}"


def _colour(part: str) -> str:
    return PARTS.get(part, "#5f6368")


def _positions(report: Report) -> Iterator[str]:
    found = report.positions
    if found is None:
        return
    xs, (old, new, kl) = _bins(found)
    perplexities = [[math.exp(min(value, 700.0)) for value in losses] for losses in (old, new)]
    x = charts.axis(xs)
    lines = [Series("original", BEFORE, xs, perplexities[0]), Series("packed", AFTER, xs, perplexities[1], dash="5 2")]
    y = charts.axis([value for curve in perplexities for value in curve], log=True)
    width, height = WIDTH / 2, 220
    body = [
        charts.legend(46, 16, [("original", BEFORE, ""), ("packed", AFTER, "5 2")]),
        charts.panel((0, 26, width, height), "perplexity by position", x, y, lines),
        charts.panel((width, 26, width, height), "KL from the original, nats", x, charts.axis(kl, zero=True),
                     [Series("KL", AFTER, xs, kl)]),
    ]  # fmt: skip
    bins = f"; {len(found.kl)} positions in {len(xs)} bins" if len(xs) < len(found.kl) else ""
    yield (
        "<h2>Perplexity and KL by position</h2>"
        f"<p>Mean over {found.rows} {'row' if found.rows == 1 else 'rows'} of {escape(found.text)}{bins}.</p>"
        + charts.figure(WIDTH, 26 + height, "Perplexity and KL divergence by token position", "".join(body))
    )


def _bins(found: Positions) -> tuple[list[float], list[list[float]]]:
    """Middle position and mean values of each bin; positions without a finite number are left out."""
    curves = zip(found.loss_original, found.loss_packed, found.kl, strict=True)
    known = [
        (index + 2, (old, new, kl))
        for index, (old, new, kl) in enumerate(curves)
        if old is not None and new is not None and kl is not None
    ]
    size = -(-len(known) // MOST_BINS) or 1
    groups = [known[start : start + size] for start in range(0, len(known), size)]
    means = [[fmean(values[curve] for _, values in group) for group in groups] for curve in range(3)]
    return [fmean(index for index, _ in group) for group in groups], means


# --- text -------------------------------------------------------------------------------------------------------------


def _footer(report: Report) -> str:
    made = escape(f"{report.made_with} · run {report.fingerprint[:16]}")
    return f'<p class="note">The same numbers are in report.json. {made}</p>'


def _share(size: int, whole: int) -> str:
    return f"{size_text(size)}, {100 * size / whole:.1f} %" if size else ""


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
