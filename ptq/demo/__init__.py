"""The `demo` model: a small Llama that ships with the package, so that every command works offline. See README.md."""

from pathlib import Path


def demo_path() -> Path:
    """The folder of the demo model: config, weights, tokenizer, `heldout.txt` and `calibration.txt`."""
    return Path(__file__).resolve().parent
