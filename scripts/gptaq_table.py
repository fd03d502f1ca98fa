"""The table of GPTAQ: how close models come to the original when weights make up for what is done to their inputs.

python scripts/gptaq_table.py demo
python scripts/gptaq_table.py MODEL --text STORIES.txt --group-size 32

Protocol and checks are those of scripts/perplexity_table.py. Cells are means over seeds: KL(original || quantised) in
nats per token, and the growth of the perplexity in percent.
"""

import math
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import one_sentence
import typer
from perplexity_table import Task, load, prepared
from transformers import PreTrainedModel

import ptq
from ptq.commands.evaluate import Agreement, compare
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

ROWS: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "INT4, groups": (QuarotRecipe, {"weight_bits": 4, "group_size": 32}),
    "INT4": (QuarotRecipe, {"weight_bits": 4}),
    "INT3": (QuarotRecipe, {"weight_bits": 3}),
    "INT2": (QuarotRecipe, {"weight_bits": 2}),
    "W4A4": (QuarotRecipe, {"weight_bits": 4, "activation_bits": 4, "group_size": 32}),
    "W4A4KV4": (
        QuarotRecipe,
        {"weight_bits": 4, "activation_bits": 4, "key_bits": 4, "value_bits": 4, "group_size": 32},
    ),
    "QuIP#, 4 bits": (QuipSharpRecipe, {"bits": 4}),
    "QuIP#, 3 bits": (QuipSharpRecipe, {"bits": 3}),
    "QuIP#, 2 bits": (QuipSharpRecipe, {"bits": 2}),
}


def agreement(task: Task, original: PreTrainedModel, recipe: Recipe) -> Agreement:
    """Quantise into a temporary folder, load what was written, and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        ptq.quantize(task.folder, out, recipe, ptq.RunOptions(progress=False))
        return compare(load(out), original, task.windows)


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale, where there are groups.")] = 32,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 64,
    seeds: Annotated[int, typer.Option(help="Draws of signs and rows.")] = 2,
    alpha: Annotated[list[float] | None, typer.Option(help="Repeatable.  [default: 0, 0.25, 0.5, 1]")] = None,
) -> None:
    """Print the table as Markdown."""
    alphas = alpha or [0.0, 0.25, 0.5, 1.0]
    with prepared(model, text, None, 0.5, 256, windows, 128) as task:
        original = load(task.folder)
        print("| KL (growth of the perplexity, %) | " + " | ".join(f"alpha {share:g}" for share in alphas) + " |")
        print("|---" * (1 + len(alphas)) + "|", flush=True)
        for name, (method, options) in ROWS.items():
            if "group_size" in options:
                options = {**options, "group_size": group_size}
            cells = []
            for share in alphas:
                common = {"calibration": str(task.calibration), "samples": task.samples, "gptaq_alpha": share}
                found = [
                    agreement(task, original, method(**common, sequence_length=task.sequence_length, seed=s, **options))
                    for s in range(seeds)
                ]
                growth = 100 * math.expm1(fmean(x.loss_increase for x in found))
                cells.append(f"{fmean(x.kl for x in found):.3g} ({growth:+.2f})")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    one_sentence.run(main)
