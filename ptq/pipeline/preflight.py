"""Before a run starts: whether this machine has what it needs, and what to know of its calibration rows."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ptq.errors import InputError
from ptq.models.model_shape import ModelShape
from ptq.ops import free_memory
from ptq.pipeline import token_rows
from ptq.pipeline.needs import Estimate, needs_hessians, share_of_tokens
from ptq.pipeline.writer import partial_folder
from ptq.planning.plan import Plan
from ptq.recipe import Recipe
from ptq.reporting.sizes import size_text

FEWEST_TOKENS = 10
"""Different tokens that calibration text has at least."""
TOKENS_PER_CHANNEL = 10
"""Calibration tokens per input channel below which a Hessian is mostly noise."""


def warnings(plan: Plan, shape: ModelShape, recipe: Recipe, rows: Tensor | None, probe: Tensor) -> Iterator[str]:
    """What a user should know about the calibration rows and the probe. `recipe` is what was asked for, without
    defaults."""
    formats = [x.format for x in plan.linears if x.format is not None and x.format.codebook is not None]
    if recipe.rounds and plan.cache is None and not formats and not any(x.activation for x in plan.linears):
        yield "warning: nothing is quantised: --skip leaves every linear alone"
    if rows is None and recipe.calibration is not None:
        yield "note: nothing is fitted to the text of --calibration here; it only serves to measure the result"
    fitted = token_rows.are_fitted(rows, probe)
    if fitted:
        yield (
            "warning: the text has no rows but those that the model is fitted to: the KL at the end is measured on "
            "them and too low; `quantize verify OUT --against MODEL --text OTHER.txt` measures other text"
        )
    if rows is not None and (repeated := _repetition(rows)):
        yield (
            f"warning: the calibration text repeats itself ({repeated}): what is fitted to it, and measured on it, "
            "says little about other text"
        )
    needy = max(
        (linear for linear in plan.linears if linear.statistics),
        key=lambda linear: linear.k / share_of_tokens(linear, shape),
        default=None,
    )
    if rows is None or needy is None or not needs_hessians(plan, recipe):
        return
    tokens = round(rows.numel() * share_of_tokens(needy, shape))
    if tokens < TOKENS_PER_CHANNEL * needy.k:
        found = (
            f"{tokens} calibration tokens" if needy.expert is None else f"about {tokens} calibration tokens an expert"
        )
        enough = math.ceil(TOKENS_PER_CHANNEL * needy.k / share_of_tokens(needy, shape) / rows.shape[1])
        yield (
            f"warning: {found} for layers of up to {needy.k} input channels are few; "
            f"{TOKENS_PER_CHANNEL} per channel give steady statistics: --samples {enough}"
            f"{', of a longer text' if fitted else ''}"
        )


def _repetition(rows: Tensor) -> str | None:
    """How calibration rows repeat themselves; None where they do not."""
    different, tokens = len(rows.unique(dim=0)), len(rows.unique())
    if 10 * different < 9 * len(rows):
        return f"{different} different rows of {len(rows)}"
    return f"{tokens} different tokens" if tokens < FEWEST_TOKENS else None


def check(needs: Estimate, work: Path, out: Path, processes: int = 1) -> None:
    """Raise InputError where memory or disk cannot be enough for so many processes on this machine. What a run before
    has left counts as free: it is continued, or thrown away."""
    free, wanted = free_memory.available(), processes * needs.memory
    if wanted > free:
        raise InputError(f"this run needs about {size_text(wanted)} of memory, {size_text(free)} are free; "
                         f"{needs.remedy}")  # fmt: skip
    folders = {work: max(0, needs.work - _used(work)), out: max(0, needs.out - _used(partial_folder(out)))}
    existing = {
        folder: next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        for folder in folders
    }
    devices = {folder: parent.stat().st_dev for folder, parent in existing.items()}
    for folder, device in devices.items():
        wanted = sum(nbytes for other, nbytes in folders.items() if devices[other] == device)
        usage = shutil.disk_usage(existing[folder])
        free = usage.free
        if wanted > free and usage.total:  # where there is no disk, as in /proc, the system says why no folder is made
            without = wanted - (folders[work] if devices[work] == device else 0)
            remedy = "name a folder on another disk with --work" if without <= free else "choose another OUT"
            raise InputError(
                f"{existing[folder]}: this run needs about {size_text(wanted)} of disk, {size_text(free)} are free; "
                f"free some, or {remedy}"
            )


def _used(folder: Path) -> int:
    """Bytes that the files of a folder take on disk; shards that are not filled yet take less than their size."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
