"""The methods side by side: a model quantised by named recipes, each checkpoint measured as it ships.

python scripts/method_table.py demo
python scripts/method_table.py MODEL --text STORIES.txt --split 0.5 --only 'E8P|INT2'

Measured as in perplexity_table.py: a full run of `ptq.quantize`, loaded again with `from_pretrained`, in float32;
standard errors are those of the ratio to the original, paired window by window.
"""

import json
import math
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import one_sentence
import typer
from perplexity_table import Task, group_sizes, increase, measure_original, prepared, quantized

from fp6.element import ELEMENTS
from fp6.plan import Fp6Recipe
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe


@dataclass(frozen=True)
class Row:
    """One quantised model, measured. Losses are in nats per token."""

    name: str
    bits_per_weight: float
    perplexity: float
    loss_increase: float
    loss_increase_error: float
    kl: float
    """Mean KL divergence from the original over the run's probe, nats per token."""
    seconds: float

    def markdown(self) -> str:
        percent = 100 * math.expm1(self.loss_increase)
        error = 100 * math.exp(self.loss_increase) * self.loss_increase_error
        return (
            f"| {self.name} | {self.bits_per_weight:.3f} | {self.perplexity:.3f} | {percent:+.2f} ± {error:.2f} % | "
            f"{self.kl:.4f} | {self.seconds:.0f} |"
        )


def recipes(task: Task) -> dict[str, Recipe]:
    """Every recipe of the table, by the name of its row."""
    data: dict[str, Any] = {
        "calibration": str(task.calibration), "samples": task.samples, "sequence_length": task.sequence_length
    }  # fmt: skip
    found: dict[str, Recipe] = {}
    for bits in (2, 3, 4):
        e8p = f"E8P {bits} bits"
        found[f"{e8p}, nearest, no transform"] = QuipSharpRecipe("nearest", bits=bits, rotate=False, **data)
        found[f"{e8p}, nearest"] = QuipSharpRecipe("nearest", bits=bits, **data)
        found[f"{e8p}, LDLQ"] = QuipSharpRecipe(bits=bits, **data)
        found[f"{e8p}, LDLQ, 16-bit inputs"] = QuipSharpRecipe(bits=bits, activation_bits=16, **data)
        found[f"{e8p}, LDLQ, fine-tuned by blocks"] = QuipSharpRecipe(bits=bits, finetune="blocks", **data)
        found[f"{e8p}, LDLQ, fine-tuned in full"] = QuipSharpRecipe(bits=bits, finetune="full", **data)
        for group in group_sizes(task.folder)[:2]:
            name = f"INT{bits} GPTQ, rotated, " + (f"groups of {group}" if group else "per channel")
            grouped: dict[str, Any] = {"weight_bits": bits, "group_size": group, **data}
            found[name] = QuarotRecipe(**grouped)
            found[f"{name}, fine-tuned by blocks"] = QuarotRecipe(finetune="blocks", **grouped)
            found[f"{name}, fine-tuned in full"] = QuarotRecipe(finetune="full", **grouped)
    few: dict[str, Any] = {"activation_bits": 4, "key_bits": 4, "value_bits": 4, **data}
    group = group_sizes(task.folder)[1]
    found["W4A4KV4"] = QuarotRecipe(group_size=group, **few)
    found["W4A4KV4, fine-tuned by blocks"] = QuarotRecipe(group_size=group, finetune="blocks", **few)
    found["W4A4KV4, fine-tuned in full"] = QuarotRecipe(group_size=group, finetune="full", **few)
    return found | small_floats(task, data) | embeddings(task, data)


def embeddings(task: Task, data: dict[str, Any]) -> dict[str, Recipe]:
    """Embedding and head in few bits: they alone, and beside weights of 4 bits."""
    found: dict[str, Recipe] = {}
    for bits in (8, 6, 4):
        alone: dict[str, Any] = {"rounding": "nearest", "weight_bits": 16, "online": False, "embedding_bits": bits}
        found[f"E{bits} alone"] = QuarotRecipe(rotate=False, calibration=data["calibration"], **alone)
        found[f"E{bits} alone, rotated"] = QuarotRecipe(calibration=data["calibration"], **alone)
    for bits in (16, 8, 6, 4):
        group = group_sizes(task.folder)[1]
        found[f"E{bits}, INT4 GPTQ, rotated, groups of {group}"] = QuarotRecipe(
            weight_bits=4, group_size=group, embedding_bits=bits, **data
        )
    return found


def small_floats(task: Task, data: dict[str, Any]) -> dict[str, Recipe]:
    """Every element of FP6 without calibration, its other settings, and integers that were rounded alike."""
    plain: dict[str, Any] = {
        "rounding": "nearest",
        "calibration": data["calibration"],
    }  # the text is for the probe alone
    names = (*(name for bits in (7, 6, 5, 4) for name, e in ELEMENTS.items() if e.bits == bits), "auto")
    found: dict[str, Recipe] = {f"FP6 {name}, nearest": Fp6Recipe(element=name, **plain) for name in names}
    for bits in (8, 6, 5, 4):
        found[f"INT{bits} nearest, per channel"] = QuarotRecipe(weight_bits=bits, rotate=False, **plain)
    found["FP6 e2m3, nearest, 8-bit inputs"] = Fp6Recipe(activation_bits=8, **plain)
    found["FP6 e2m3, nearest, mse"] = Fp6Recipe(scale_search="mse", **plain)
    found["FP6 e2m3, nearest, rotated"] = Fp6Recipe(rotate=True, **plain)
    found["FP6 e2m3, nearest, rotated, mse"] = Fp6Recipe(rotate=True, scale_search="mse", **plain)
    found["FP6 e2m3, GPTQ"] = Fp6Recipe("gptq", **data)
    found["FP6 e2m1, GPTQ"] = Fp6Recipe("gptq", element="e2m1", **data)
    found["FP6 e2m1, GPTQ, fine-tuned in full"] = Fp6Recipe("gptq", element="e2m1", finetune="full", **data)
    group = group_sizes(task.folder)[1]
    for name in ("e3m2", "e2m3", "e2m1"):
        grouped: dict[str, Any] = {"element": name, "group_size": group, **plain}
        found[f"FP6 {name}, nearest, groups of {group}"] = Fp6Recipe(**grouped)
        found[f"FP6 {name}, nearest, groups of {group}, mse"] = Fp6Recipe(scale_search="mse", **grouped)
        found[f"FP6 {name}, nearest, groups of {group}, e8m0"] = Fp6Recipe(scale="e8m0", **grouped)
    for bits in (6, 4):
        found[f"INT{bits} nearest, groups of {group}"] = QuarotRecipe(
            weight_bits=bits, rotate=False, group_size=group, **plain
        )
    return found


def measure(task: Task, original: list[float], name: str, recipe: Recipe) -> Row:
    start = time.perf_counter()
    result, found = quantized(task, recipe)
    seconds = time.perf_counter() - start
    assert result.bits_per_weight is not None
    loss_increase, error = increase(found, original)
    return Row(name, result.bits_per_weight, math.exp(fmean(found)), loss_increase, error, result.kl, seconds)


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    calibration: Annotated[Path | None, typer.Option(help="To calibrate with.  [demo: its calibration.txt]")] = None,
    split: Annotated[float, typer.Option(help="Without --calibration: the share of TEXT to measure on.")] = 0.5,
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Calibration rows of --context tokens.")] = 128,
    only: Annotated[str, typer.Option(help="Rows whose name this regular expression finds.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write all rows as JSON.")] = None,
) -> None:
    """Print the table as Markdown."""
    with prepared(model, text, calibration, split, context, windows, samples) as task:
        original = measure_original(task)
        print("| weights | true bits | perplexity | against the original | KL | seconds |")
        print("|---" * 6 + "|", flush=True)
        rows: list[Row] = []
        for name, recipe in recipes(task).items():
            if re.search(only, name):
                rows.append(measure(task, original, name, recipe))
                print(rows[-1].markdown(), flush=True)
    if out is not None:
        record = {"model": model, "original": math.exp(fmean(original)), "windows": len(original), "context": context}
        out.write_text(json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    one_sentence.run(main)
