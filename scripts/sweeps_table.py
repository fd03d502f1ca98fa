"""The table of sweeps: how close models come to the original when scales are chosen by the loss, and codes improved.

python scripts/sweeps_table.py demo
python scripts/sweeps_table.py MODEL --text STORIES.txt --group-size 32

Protocol and checks are those of scripts/perplexity_table.py, cells those of scripts/gptaq_table.py.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import one_sentence
import typer
from gptaq_table import agreement
from perplexity_table import load, prepared

from fp6.plan import Fp6Recipe
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe

ROWS: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "INT4, groups": (QuarotRecipe, {"weight_bits": 4, "group_size": 32}),
    "INT4": (QuarotRecipe, {"weight_bits": 4}),
    "INT3": (QuarotRecipe, {"weight_bits": 3}),
    "INT2": (QuarotRecipe, {"weight_bits": 2}),
    "e2m1, groups": (Fp6Recipe, {"element": "e2m1", "group_size": 32, "rounding": "gptq", "rotate": True}),
}
COLUMNS: dict[str, dict[str, Any]] = {
    "GPTQ": {},
    "`--sweeps 4`": {"sweeps": 4},
    "`--gptaq-alpha 0.25`": {"gptaq_alpha": 0.25},
    "both": {"sweeps": 4, "gptaq_alpha": 0.25},
}


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale, where there are groups.")] = 32,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 64,
    seeds: Annotated[int, typer.Option(help="Draws of signs and rows.")] = 2,
) -> None:
    """Print the table as Markdown."""
    with prepared(model, text, None, 0.5, 256, windows, 128) as task:
        original = load(task.folder)
        print("| KL (growth of the perplexity, %) | " + " | ".join(COLUMNS) + " |")
        print("|---" * (1 + len(COLUMNS)) + "|", flush=True)
        given = {"calibration": str(task.calibration), "samples": task.samples}
        for name, (method, options) in ROWS.items():
            if "group_size" in options:
                options = {**options, "group_size": group_size}
            cells = []
            for more in COLUMNS.values():
                all_options = {**given, **options, **more, "sequence_length": task.sequence_length}
                found = [agreement(task, original, method(**all_options, seed=seed)) for seed in range(seeds)]
                growth = 100 * math.expm1(fmean(x.loss_increase for x in found))
                cells.append(f"{fmean(x.kl for x in found):.3g} ({growth:+.2f})")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    one_sentence.run(main)
