"""Numbers as records and reports hold them."""

import math
from typing import Any


def six_digits(value: Any) -> Any:
    """Floats, also those in lists and dicts, with six digits: the last ones of a sum depend on the number of threads.
    None for what is not finite, which JSON has no word for; all else as it is."""
    if isinstance(value, dict):
        return {key: six_digits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = map(six_digits, value)
        return list(found) if isinstance(value, list) else tuple(found)
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
