"""The perplexity table: a model quantised in every way, each checkpoint measured as it ships.

python scripts/perplexity_table.py demo
python scripts/perplexity_table.py MODEL --text STORIES.txt --split 0.5 --both-grids --out table.json

Every cell is a full run of `ptq.quantize` into a temporary folder, loaded again with `from_pretrained`, so what is
measured is the packed bytes through the ops that users run. Everything is computed in float32: bfloat16 activations
would blur differences of 0.2 %. The standard errors are those of the ratio, paired window by window.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import one_sentence
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import ptq
from ptq.commands.evaluate import perplexity
from ptq.commands.windows import Windows, windows_from_text
from ptq.demo import demo_path
from ptq.pipeline.result import Result
from ptq.recipe import Recipe, Rounding
from ptq.statistics.calibration import bos_of
from quarot.plan import QuarotRecipe

BITS = (8, 6, 4, 3, 2)
GROUPS = (32, 64, 128)
COLUMNS: tuple[tuple[Rounding, bool], ...] = (("nearest", False), ("nearest", True), ("gptq", False), ("gptq", True))
TITLES = ("RTN", "RTN, rotated", "GPTQ", "GPTQ, rotated")


@dataclass(frozen=True)
class Task:
    """What is quantised, and with which texts."""

    folder: Path
    calibration: Path
    windows: Windows
    samples: int
    sequence_length: int


@dataclass(frozen=True)
class Cell:
    """One quantised model, measured. Losses are in nats per token."""

    bits: int
    group_size: int
    symmetric: bool
    rounding: str
    rotate: bool
    bits_per_weight: float
    perplexity: float
    loss_increase: float
    """Over the original on the same windows; exp of it is the ratio of the perplexities."""
    loss_increase_error: float
    seconds: float

    @property
    def percent(self) -> float:
        """How much the perplexity has grown, in percent."""
        return 100 * math.expm1(self.loss_increase)

    @property
    def percent_error(self) -> float:
        """Standard error of `percent`, to first order."""
        return 100 * math.exp(self.loss_increase) * self.loss_increase_error


def widths(folder: Path) -> list[int]:
    """The input widths of a model's linear layers."""
    config = AutoConfig.from_pretrained(folder)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [config.hidden_size, config.intermediate_size, config.num_attention_heads * head]


def group_sizes(folder: Path) -> list[int]:
    """0 (per channel) and the usual group sizes that divide every width; where none does, the largest below 32."""
    common = math.gcd(*widths(folder))
    usual = [group for group in GROUPS if common % group == 0]
    return [0, *(usual or [max(group for group in range(1, 32) if common % group == 0)])]


def split_text(text: Path, share: float, folder: Path) -> tuple[str, Path]:
    """The first `share` of a text to measure on, and a file with the rest to calibrate with; cut between paragraphs."""
    whole = text.read_text()
    cut = whole.index("\n\n", int(share * len(whole)))
    rest = folder / "calibration.txt"
    rest.write_text(whole[cut:])
    return whole[:cut], rest


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def losses(model: PreTrainedModel, windows: Windows) -> list[float]:
    """The mean loss of every window, in nats per token; perplexity is exp of their mean."""
    return [perplexity(model, replace(windows, tokens=row[None])).loss for row in windows.tokens]


def quantized(task: Task, recipe: Recipe) -> tuple[Result, list[float]]:
    """Quantise into a temporary folder, load what was written, and measure the losses of it."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        result = ptq.quantize(task.folder, out, recipe, ptq.RunOptions(progress=False))
        return result, losses(load(out), task.windows)


def increase(found: list[float], original: list[float]) -> tuple[float, float]:
    """Mean loss increase in nats per token and its standard error, paired window by window."""
    increases = [after - before for after, before in zip(found, original, strict=True)]
    return fmean(increases), stdev(increases) / math.sqrt(len(increases))


def measure(task: Task, original: list[float], recipe: QuarotRecipe) -> Cell:
    """One cell of the table."""
    start = time.perf_counter()
    result, found = quantized(task, recipe)
    assert result.bits_per_weight is not None
    loss_increase, error = increase(found, original)
    return Cell(
        bits=recipe.weight_bits, group_size=recipe.group_size, symmetric=recipe.symmetric, rounding=recipe.rounding,
        rotate=recipe.rotate, bits_per_weight=result.bits_per_weight, perplexity=math.exp(fmean(found)),
        loss_increase=loss_increase, loss_increase_error=error,
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def lines(
    task: Task, original: list[float], bits: list[int], groups: list[int], grids: list[bool]
) -> Iterator[list[Cell]]:
    """The table's lines: the four columns for every grid, group size and number of bits."""
    for symmetric in grids:
        for group_size in groups:
            for width in bits:
                recipes = [
                    QuarotRecipe(
                        rounding=rounding, calibration=str(task.calibration), samples=task.samples,
                        sequence_length=task.sequence_length, weight_bits=width, group_size=group_size,
                        symmetric=symmetric, rotate=rotate,
                    )
                    for rounding, rotate in COLUMNS
                ]  # fmt: skip
                yield [measure(task, original, recipe) for recipe in recipes]


def markdown(line: list[Cell]) -> str:
    first = line[0]
    grid, group = ("sym" if first.symmetric else "asym"), first.group_size or "channel"
    values = (f"{cell.perplexity:.3f} ({cell.percent:+.2f} ± {cell.percent_error:.2f} %)" for cell in line)
    return f"| INT{first.bits} | {group} | {grid} | {first.bits_per_weight:.2f} | {' | '.join(values)} |"


def verdicts(cells: list[Cell]) -> Iterator[str]:
    """How the bars of the project are met."""
    int8 = [cell for cell in cells if cell.bits == 8]
    if int8:
        worst = max(int8, key=lambda cell: abs(cell.percent))
        yield f"INT8, worst of {len(int8)} cells: {worst.percent:+.3f} % (bar: 0.2 %)"
    rotated = [cell for cell in cells if cell.rounding == "gptq" and cell.rotate]
    for cell in rotated:
        if cell.bits == 4 and cell.group_size <= 32:
            grid = "symmetric" if cell.symmetric else "asymmetric"
            name = f"INT4 GPTQ rotated, group {cell.group_size or 'channel'}, {grid}"
            yield f"{name}: {cell.percent:+.2f} % (bar: 4 %; 8 % for a model of 0.26 M)"
    nearest = {(c.bits, c.group_size, c.symmetric, c.rotate): c for c in cells if c.rounding == "nearest"}
    for cell in cells:
        other = nearest[cell.bits, cell.group_size, cell.symmetric, cell.rotate]
        if cell.rounding == "gptq" and cell.bits <= 4 and cell.perplexity > other.perplexity:
            yield f"GPTQ is worse than RTN: {cell.perplexity:.3f} against {other.perplexity:.3f}: {cell}"


@contextmanager
def prepared(
    model: str, text: Path | None, calibration: Path | None, split: float, context: int, windows: int, samples: int
) -> Iterator[Task]:
    """The task for a model; the demo brings its texts. Says on stdout what it is."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(demo_path()) if model == "demo" else Path(model)
    if model == "demo":
        text, calibration = text or folder / "heldout.txt", calibration or folder / "calibration.txt"
    if text is None:
        raise typer.BadParameter("name a text with --text")
    with tempfile.TemporaryDirectory() as temporary:
        if calibration is None:
            measured, calibration = split_text(text, split, Path(temporary))
        else:
            measured = text.read_text()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bos = bos_of(tokenizer, AutoConfig.from_pretrained(folder))
        found = windows_from_text(tokenizer, measured, context, text.name, bos)
        found = replace(found, tokens=found.tokens[:windows])
        print(f"{model}: {len(found)} windows of {context} tokens from {text.name}; calibrated on {samples} such rows")
        yield Task(folder, calibration, found, samples, context)


def measure_original(task: Task) -> list[float]:
    """The losses of the original; says its perplexity on stdout."""
    original = losses(load(task.folder), task.windows)
    before = math.exp(fmean(original))
    print(f"original: {before:.4f} ± {before * stdev(original) / math.sqrt(len(original)):.4f}, float32\n")
    return original


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text for GPTQ.  [demo: its calibration.txt]")] = None,
    split: Annotated[float, typer.Option(help="Without --calibration: the share of TEXT to measure on.")] = 0.5,
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Calibration rows of --context tokens.")] = 128,
    bits: Annotated[list[int] | None, typer.Option(help="Repeatable.  [default: 8, 6, 4, 3, 2]")] = None,
    group_size: Annotated[list[int] | None, typer.Option(help="Repeatable; 0: per channel.  [default: all]")] = None,
    both_grids: Annotated[bool, typer.Option("--both-grids", help="Also the asymmetric grid.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write all cells as JSON.")] = None,
) -> None:
    """Print the table as Markdown."""
    with prepared(model, text, calibration, split, context, windows, samples) as task:
        original = measure_original(task)
        print("| weights | group | grid | true bits | " + " | ".join(TITLES) + " |")
        print("|---" * 8 + "|", flush=True)
        cells: list[Cell] = []
        grids = [True, False] if both_grids else [True]
        for line in lines(task, original, bits or list(BITS), group_size or group_sizes(task.folder), grids):
            cells += line
            print(markdown(line), flush=True)
        print("", *verdicts(cells), sep="\n")
    if out is not None:
        before = math.exp(fmean(original))
        record = {"model": model, "original": before, "windows": len(original), "context": context}
        out.write_text(json.dumps({**record, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")


if __name__ == "__main__":
    one_sentence.run(main)
