"""Sizes for people."""


def size_text(nbytes: int | float) -> str:
    """Three digits and a decimal unit: `1.5 KB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
