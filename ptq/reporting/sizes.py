"""Sizes, times and measured numbers for people."""

import math

LEAST_SHOWN = 1e-6
"""A standard error below is that of rounding."""


def size_text(nbytes: int | float) -> str:
    """Three digits and a decimal unit: `1.5 KB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def duration_text(seconds: int | float) -> str:
    """Seconds, minutes or hours: `12 s`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def with_error(number: float | None, standard_error: float | None, digits: int = 4) -> str:
    """A number with its standard error, as far as they are known: `0.0092 ± 0.0011`. A small error gets more digits,
    of which one at least is no zero."""
    if standard_error is not None and LEAST_SHOWN <= standard_error < 1:
        digits = max(digits, math.ceil(-math.log10(standard_error)))
    found = "n/a" if number is None else f"{number:.{digits}f}"
    return found if standard_error is None else f"{found} ± {standard_error:.{digits}f}"
