"""The tables of quantised activations and KV cache: bits, an ablation, and models with planted outliers.

python scripts/activation_table.py demo
python scripts/activation_table.py MODEL --text STORIES.txt --group-size 32 --out table.json

Protocol and checks are those of scripts/perplexity_table.py: every row is a full run of `ptq.quantize`, loaded again,
measured on the packed bytes through the ops that users run, in float32. `--only` picks some of the tables.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from unittest import mock

import one_sentence
import typer
from perplexity_table import Task, increase, measure_original, prepared, quantized
from plant_outliers import plant, plant_keys

from ptq import methods
from ptq.kv.kv_cache import key_rotation
from quarot.plan import QuarotRecipe, clips_for

GROUPS = {"demo": 64, "babyllama-char361": 32, "stories260k": 4}
"""Columns that share a weight scale: the largest usual group that divides every width of the model."""
DEFAULT_GROUP = 64
EIGHT = {"weight_bits": 8, "activation_bits": 8, "key_bits": 8, "value_bits": 8}
SIX = {"weight_bits": 6, "activation_bits": 6, "key_bits": 6, "value_bits": 6}
FOUR = {"weight_bits": 4, "activation_bits": 4, "key_bits": 4, "value_bits": 4}
PLAIN = {"rotate": False, "rounding": "nearest", "activation_clip": 1.0, "cache_clip": 1.0, "key_centers": False}
BAR_INT8, BAR_PLANTED, COLLAPSE = 0.5, 3.0, 100.0
"""Percent: W8A8KV8 above the original; planted above not planted; what is called a collapse."""


class Part(StrEnum):
    bits = "bits"
    ablation = "ablation"
    keys = "keys"
    planted = "planted"
    clips = "clips"


@dataclass(frozen=True)
class Row:
    """One quantised model, measured. Losses are in nats per token, over `compared`."""

    table: str
    name: str
    recipe: dict[str, Any]
    compared: str
    """What the increase is over."""
    bits_per_weight: float | None
    perplexity: float
    loss_increase: float
    loss_increase_error: float
    step: float | None = None
    """Loss increase over the row above, where that is what a row adds to."""
    step_error: float | None = None


def percent(loss_increase: float, error: float) -> tuple[float, float]:
    """Growth of the perplexity in percent, and its standard error to first order."""
    ratio = math.exp(min(loss_increase, 700.0))
    return 100 * (ratio - 1), 100 * ratio * error


BITS: dict[str, dict[str, Any]] = {
    "W8A8KV8": EIGHT,
    "W6A6KV6": SIX,
    "W4A8KV4": {**FOUR, "activation_bits": 8},
    "W4A4KV4": FOUR,
    "W4A4KV16": {"weight_bits": 4, "activation_bits": 4},
    "W4A16KV16": {"weight_bits": 4},
    **{f"KV{bits} only": {"weight_bits": 16, "key_bits": bits, "value_bits": bits} for bits in (8, 4, 3, 2)},
    "K4 V2 only": {"weight_bits": 16, "key_bits": 4, "value_bits": 2},
    "K2 V4 only": {"weight_bits": 16, "key_bits": 2, "value_bits": 4},
}

ABLATION: dict[str, dict[str, Any]] = {
    "no rotation": {**FOUR, **PLAIN},
    "R1, R2": {**FOUR, **PLAIN, "rotate": True, "online": False},
    "and R3": {**FOUR, **PLAIN, "rotate": True, "online": False},
    "and R4": {**FOUR, **PLAIN, "rotate": True},
    "and clipping": {**FOUR, "rounding": "nearest", "key_centers": False},
    "and centred keys": {**FOUR, "rounding": "nearest"},
    "and GPTQ": FOUR,
}
"""Each row adds to the one above. Clipping: the default clips of inputs, keys and values; weights always search."""
KEYS: list[dict[str, dict[str, Any]]] = [
    {
        f"K{bits}, no R3": {**change, "key_centers": False},
        f"K{bits} and R3": {**change, "key_centers": False},
        f"K{bits} centred and R3": change,
    }
    for bits in (4, 3, 2)
    for change in [{"weight_bits": 16, "key_bits": bits, "online": False}]
]
"""R3, and centres: nothing but keys is quantised. Also with outliers in the keys, where the balance is one more row."""

AND_R3 = "and R3"
"""R3 without R4 is no option of the recipe: the plan of these rows is edited."""

NO_BALANCE = "no balance"
"""Nor is a plan without the balance of queries and keys."""

PLANTED: dict[str, dict[str, Any]] = {
    "W4A4, no rotation, nearest": {"weight_bits": 4, "activation_bits": 4, "rotate": False, "rounding": "nearest"},
    "W4A4, QuaRot": {"weight_bits": 4, "activation_bits": 4},
    "W4A4KV4, QuaRot": FOUR,
}
CLIPS = {
    "W4A4KV4": FOUR,
    "W4A4KV16": {"weight_bits": 4, "activation_bits": 4},
    "W6A6KV16": {"weight_bits": 6, "activation_bits": 6},
    "W8A8KV16": {"weight_bits": 8, "activation_bits": 8},
    "W4A4KV16, no rotation": {"weight_bits": 4, "activation_bits": 4, "rotate": False},
}
SEEDS = range(4)
"""Another draw of signs and rows moves a loss by as much as a clip does, so the table of clips has means over some."""


def recipe_for(task: Task, group_size: int, changes: dict[str, Any]) -> QuarotRecipe:
    """GPTQ, rotated and clipped, but for the changes."""
    common = {
        "calibration": str(task.calibration), "samples": task.samples, "sequence_length": task.sequence_length,
        "group_size": group_size,
    }  # fmt: skip
    return QuarotRecipe(**{**common, **changes})


def keys_online() -> AbstractContextManager[Any]:
    """Plans with a rotated cache, whatever the recipe says about online rotations."""
    planner = methods.planner

    def edited(method: str) -> Callable[..., Any]:
        def plan(shape: Any, family: Any, recipe: QuarotRecipe, tensors: Any) -> Any:
            found = planner(method)(shape, family, recipe, tensors)
            assert found.cache is not None
            own = {} if recipe.cache_clip is not None else {"key_clip": clips_for(shape.head_dim)[recipe.key_bits]}
            return replace(found, cache=replace(found.cache, hadamard=key_rotation(shape.head_dim), **own))

        return plan

    return mock.patch.object(methods, "planner", edited)


def unbalanced(edit: bool) -> AbstractContextManager[Any]:
    """Plans without the balance of queries and keys."""
    return mock.patch("quarot.plan.keys_balanced", lambda plan, *_: plan) if edit else nullcontext()


def row(
    table: str, name: str, task: Task, recipe: QuarotRecipe, original: list[float], compared: str = "original"
) -> tuple[Row, list[float]]:
    """Quantise, measure, and compare with `original`."""
    with keys_online() if name.endswith(AND_R3) else nullcontext(), unbalanced(NO_BALANCE in name):
        result, found = quantized(task, recipe)
    changes = {key: value for key, value in recipe.as_dict().items() if key != "calibration"}
    perplexity = math.exp(min(fmean(found), 700.0))
    return Row(table, name, changes, compared, result.bits_per_weight, perplexity, *increase(found, original)), found


def bits_table(task: Task, group_size: int, original: list[float]) -> Iterator[Row]:
    for name, changes in BITS.items():
        yield row("bits", name, task, recipe_for(task, group_size, changes), original)[0]


def steps(
    table: str, task: Task, group_size: int, changes: dict[str, dict[str, Any]], original: list[float]
) -> Iterator[Row]:
    """Rows of which each is also compared with the one above."""
    above: list[float] = []
    for name, change in changes.items():
        own, found = row(table, name, task, recipe_for(task, group_size, change), original)
        step, error = increase(found, above) if above else (None, None)
        yield replace(own, step=step, step_error=error)
        above = found


def keys_table(task: Task, group_size: int, original: list[float]) -> Iterator[Row]:
    """R3 and nothing else, on the model and on the one with outliers in its keys."""
    with tempfile.TemporaryDirectory() as temporary:
        other = replace(task, folder=plant_keys(task.folder, Path(temporary) / "planted"))
        for pair in KEYS:
            yield from steps("keys", task, group_size, pair, original)
            planted = {f"outliers in keys, {NO_BALANCE}, {name}": change for name, change in pair.items()}
            planted |= {f"outliers in keys, {name}": change for name, change in pair.items() if name.endswith(AND_R3)}
            yield from steps("keys", other, group_size, planted, original)


def planted_table(task: Task, group_size: int, original: list[float], channels: int) -> Iterator[Row]:
    """Every recipe on the model and on the one with outliers; the second is compared with the first."""
    with tempfile.TemporaryDirectory() as temporary:
        other = replace(task, folder=plant(task.folder, Path(temporary) / "planted", channels))
        for name, changes in PLANTED.items():
            recipe = recipe_for(task, group_size, changes)
            own, found = row("planted", name, task, recipe, original)
            yield own
            yield row("planted", f"{name}, outliers planted", other, recipe, found, f"{name}, not planted")[0]


def clips_table(task: Task, group_size: int, original: list[float]) -> Iterator[Row]:
    """The default clips, and below them searched ones."""
    for name, changes in CLIPS.items():
        default, above = mean_row(name, task, group_size, changes, original)
        yield default
        changes = {**changes, "activation_clip": "search"}
        searched, found = mean_row(f"{name}, searched clips", task, group_size, changes, original)
        step, error = increase(found, above)
        yield replace(searched, step=step, step_error=error)


def mean_row(
    name: str, task: Task, group_size: int, changes: dict[str, Any], original: list[float]
) -> tuple[Row, list[float]]:
    """A row of which every loss is the mean over `SEEDS`."""
    recipes = [recipe_for(task, group_size, {**changes, "seed": seed}) for seed in SEEDS]
    runs = [row("clips", name, task, recipe, original) for recipe in recipes]
    found = [fmean(losses) for losses in zip(*(losses for _, losses in runs), strict=True)]
    loss_increase, error = increase(found, original)
    perplexity = math.exp(min(fmean(found), 700.0))
    first = replace(runs[0][0], perplexity=perplexity, loss_increase=loss_increase, loss_increase_error=error)
    return first, found


def markdown(found: Row) -> str:
    bits = f"{found.bits_per_weight:.2f}" if found.bits_per_weight is not None else "16"
    rounding = "" if found.recipe["weight_bits"] == 16 else found.recipe["rounding"]
    step = "" if found.step is None or found.step_error is None else _growth(found.step, found.step_error)
    growth = _growth(found.loss_increase, found.loss_increase_error)
    return (
        f"| {found.name} | {bits} | {rounding} | {_number(found.perplexity)} | {growth} | {found.compared} | {step} |"
    )


def _growth(loss_increase: float, error: float) -> str:
    value, width = percent(loss_increase, error)
    return f"{value:+.2f} ± {width:.2f} %" if value < 1e4 else f"{value:+.1e} %"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.1e}"


def verdicts(rows: list[Row]) -> Iterator[str]:
    """How the bars of the project are met."""
    for found in rows:
        growth = _growth(found.loss_increase, found.loss_increase_error)
        if found.name == "W8A8KV8":
            yield f"W8A8KV8: {growth} (bar: {BAR_INT8} %)"
        if found.step is not None and found.step_error is not None:
            yield f"{found.table}, {found.name}: {_growth(found.step, found.step_error)} (earns its place: below 0)"
        if found.table == "planted" and "planted" in found.compared:
            bar = f"collapses: above {COLLAPSE} %" if "no rotation" in found.name else f"bar: {BAR_PLANTED} %"
            yield f"{found.name}: {growth} ({bar})"


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text for GPTQ.  [demo: its calibration.txt]")] = None,
    split: Annotated[float, typer.Option(help="Without --calibration: the share of TEXT to measure on.")] = 0.5,
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Calibration rows of --context tokens.")] = 128,
    group_size: Annotated[int | None, typer.Option(help="Of the weights.  [default: by model, or 64]")] = None,
    channels: Annotated[int, typer.Option(help="Channels of each kind that become outliers.")] = 4,
    only: Annotated[list[Part] | None, typer.Option(help="Repeatable.  [default: all]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all rows as JSON.")] = None,
) -> None:
    """Print the tables as Markdown."""
    size = GROUPS.get(Path(model).name, DEFAULT_GROUP) if group_size is None else group_size
    rows: list[Row] = []
    with prepared(model, text, calibration, split, context, windows, samples) as task:
        original = measure_original(task)
        tables = {
            Part.bits: lambda: bits_table(task, size, original),
            Part.ablation: lambda: steps("ablation", task, size, ABLATION, original),
            Part.keys: lambda: keys_table(task, size, original),
            Part.planted: lambda: planted_table(task, size, original, channels),
            Part.clips: lambda: clips_table(task, size, original),
        }
        for part in only or list(Part):
            print(f"\n{part}, weights in groups of {size}\n" if size else f"\n{part}, weights per channel\n")
            print("| what | true weight bits | rounding | perplexity | growth | over | over the row above |")
            print("|---" * 7 + "|", flush=True)
            for found in tables[part]():
                rows.append(found)
                print(markdown(found), flush=True)
    print("", *verdicts(rows), sep="\n")
    if out is not None:
        record = {"model": model, "original": math.exp(fmean(original)), "windows": windows, "context": context}
        out.write_text(json.dumps({**record, "rows": [asdict(found) for found in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    one_sentence.run(main)
