"""Charts as SVG text: lines over linear or logarithmic axes, and stacked bars.

Plain text of a few kilobytes, the same for the same numbers, so that pages can be compared byte by byte. All text
that enters a chart is escaped here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

STYLE = (
    "svg{font:11px system-ui,sans-serif;fill:#3c4043}"
    "svg .t{font-weight:600;fill:#202124}"
    "svg .g{stroke:#e8eaed;stroke-width:1}"
    "svg .a{stroke:#9aa0a6;stroke-width:1;fill:none}"
    "svg .m{fill:#5f6368}"
)
"""For the page around the charts; a chart that stands alone brings it along."""
MARGIN = (46, 22, 30, 10)
"""Space left, above, below and right of a panel's frame, for titles and ticks."""
MOST_DECADES = 6

Number = int | float
Place = tuple[Number, Number, Number, Number]
"""Left, top, width and height in pixels."""
Piece = tuple[str, str, Number, str]
"""Of a bar: name, colour, size, what to say about it under the mouse."""


@dataclass(frozen=True)
class Series:
    """One line of a panel. Points that are None or, on a logarithmic axis, not positive are left out."""

    label: str
    colour: str
    xs: Sequence[Number]
    ys: Sequence[Number | None]
    width: Number = 1.6
    dash: str = ""
    titles: Sequence[str] = ()
    """What to say about each point under the mouse; points are then drawn as dots."""


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of pixels."""

    low: Number
    high: Number
    log: bool = False
    start: Number = 0.0
    end: Number = 1.0

    def at(self, value: Number) -> Number:
        """The pixel of a value."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[Number]:
        """Round values inside the range, a handful."""
        if self.log:
            return self._log_ticks()
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (factor * step) <= 5.5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]

    def _log_ticks(self) -> list[Number]:
        span = self.high / self.low
        factors = (1, 2, 5) if span <= 30 else (1, 3) if span <= 1000 else (1,)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = -(-len(decades) // MOST_DECADES) if factors == (1,) else 1
        found = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
        inside = [tick for tick in found if self.low <= tick <= self.high]
        return inside if len(inside) > 2 else replace(self, log=False).ticks()


def axis(values: Iterable[Number | None], log: bool = False, zero: bool = False, whole: bool = False) -> Axis:
    """An axis that holds the values with some air; `zero`: from 0; `whole`: integers, such as block numbers."""
    known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if log:
        low, high = low / 1.25, high * 1.25
        return Axis(low, max(high, 2 * low), True)
    if whole:
        return Axis(low - 0.3, max(high, low + 1) + 0.3)
    if zero:
        low, high = 0.0, max(high, 0.0)  # rounding can put a divergence a hair below zero
    air = 0.06 * (high - low) or abs(high) or 1.0
    return Axis(low if zero else low - air, high + air)


def panel(place: Place, title: str, x: Axis, y: Axis, lines: Sequence[Series], note: str = "") -> str:
    """A frame with ticks, grid and lines; margins belong to its place."""
    left, top, width, height = place
    inner = (left + MARGIN[0], top + MARGIN[1], left + width - MARGIN[3], top + height - MARGIN[2])
    x, y = replace(x, start=inner[0], end=inner[2]), replace(y, start=inner[3], end=inner[1])
    parts = [text(inner[0], inner[1] - 8, title, "t")]
    if note:
        parts.append(text(inner[2], inner[1] - 8, note, "m", "end"))
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(_line(inner[0], at, inner[2], at, "g"))
        parts.append(text(inner[0] - 5, at + 4, number(tick), "m", "end"))
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(_line(at, inner[3], at, inner[3] + 3, "a"))
        parts.append(text(at, inner[3] + 15, number(tick), "m", "middle"))
    parts.append(_line(inner[0], inner[3], inner[2], inner[3], "a"))
    return "".join([*parts, *(_series(line, x, y) for line in lines)])


def _series(line: Series, x: Axis, y: Axis) -> str:
    points: list[tuple[Number, Number, str]] = []
    pieces: list[str] = []
    titles = line.titles or [""] * len(line.xs)
    pen = "M"
    for a, b, title in zip(line.xs, line.ys, titles, strict=True):
        if b is None or (y.log and b <= 0):
            pen = "M"
            continue
        points.append((x.at(a), y.at(b), title))
        pieces.append(f"{pen}{points[-1][0]:.1f},{points[-1][1]:.1f}")
        pen = "L"
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    path = (
        f'<path d="{"".join(pieces)}" fill="none" stroke="{line.colour}" stroke-width="{line.width}" '
        f'stroke-linejoin="round"{dash}/>'
    )
    dots = (
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{line.colour}"><title>{escape(title)}</title></circle>'
        for a, b, title in points
        if title
    )
    return "".join([path, *dots])


def legend(left: Number, top: Number, entries: Iterable[tuple[str, str, str]]) -> str:
    """Names of the lines in a row: (label, colour, dash)."""
    parts = []
    for label, colour, dash in entries:
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<path d="M{left:.1f},{top - 4:.1f}h20" stroke="{colour}" stroke-width="2.4" fill="none"{pattern}/>'
        )
        parts.append(text(left + 25, top, label))
        left += 25 + 6.2 * len(label) + 18
    return "".join(parts)


def bars(left: Number, top: Number, width: Number, rows: Sequence[tuple[str, Sequence[Piece]]]) -> str:
    """Stacked horizontal bars on one scale, each with its label; labels belong to the width."""
    left, width = left + 130, width - 130
    most = max((sum(size for _, _, size, _ in pieces) for _, pieces in rows), default=0) or 1.0
    parts = []
    for index, (label, pieces) in enumerate(rows):
        y, x = top + 34 * index, left
        parts.append(text(left - 8, y + 16, label, "t", "end"))
        for _, colour, size, title in pieces:
            length = width * size / most
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="24" fill="{colour}" stroke="#fff" '
                f'stroke-width="0.6"><title>{escape(title)}</title></rect>'
            )
            x += length
    return "".join(parts)


def text(x: Number, y: Number, content: str, kind: str = "", anchor: str = "") -> str:
    """Text at a place; `kind` is a class of STYLE."""
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>'


def figure(width: Number, height: Number, label: str, body: str, standalone: bool = False) -> str:
    """The whole picture; `label` says what it shows to those who cannot see it."""
    size = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
    if not standalone:
        return f"<svg {size}>{body}</svg>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" {size}>'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def number(value: Number) -> str:
    """A number for a tick: three digits, powers of ten where it is very small or large."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _line(x1: Number, y1: Number, x2: Number, y2: Number, kind: str) -> str:
    return f'<path class="{kind}" d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"/>'
