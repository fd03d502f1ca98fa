"""How close models in bfloat16 come to the original when they are calibrated through products of bfloat16, and of
float32.

python scripts/calibration_table.py demo
python scripts/calibration_table.py MODEL --text STORIES.txt --group-size 32

The model is first brought to bfloat16. Rows and protocol are those of scripts/gptaq_table.py. Cells are KL(original ||
quantised) in nats per token, for each seed; the last column is the growth of their mean.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated
from unittest import mock

import one_sentence
import typer
from gptaq_table import ROWS, agreement
from perplexity_table import load, prepared
from transformers import AutoTokenizer

from ptq.ops import matmul


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale, where there are groups.")] = 32,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 64,
    seeds: Annotated[int, typer.Option(help="Draws of signs and rows.")] = 3,
    alpha: Annotated[float, typer.Option(help="GPTAQ's share.")] = 0.0,
) -> None:
    """Print the table as Markdown."""
    if not matmul.has_bfloat16():
        raise SystemExit("this CPU has no products of bfloat16: both columns would be the same")
    with prepared(model, text, None, 0.5, 256, windows, 128) as task, tempfile.TemporaryDirectory() as stored:
        load(task.folder).bfloat16().save_pretrained(stored)
        AutoTokenizer.from_pretrained(task.folder).save_pretrained(stored)
        task = replace(task, folder=Path(stored))
        original = load(task.folder)
        print("| KL | float32 | bfloat16 | growth |\n|---|---|---|---|", flush=True)
        for name, (method, options) in ROWS.items():
            if "group_size" in options:
                options = {**options, "group_size": group_size}
            common = {"calibration": str(task.calibration), "samples": task.samples, "gptaq_alpha": alpha}
            recipes = [method(**common, sequence_length=task.sequence_length, seed=s, **options) for s in range(seeds)]
            found = []
            for fast in (False, True):
                with mock.patch.object(matmul, "has_bfloat16", return_value=fast):
                    found.append([agreement(task, original, recipe).kl for recipe in recipes])
            cells = (" ".join(f"{kl:.4g}" for kl in kls) for kls in found)
            growth = 100 * (fmean(found[1]) / fmean(found[0]) - 1)
            print(f"| {name} | {' | '.join(cells)} | {growth:+.1f} % |", flush=True)


if __name__ == "__main__":
    one_sentence.run(main)
