"""`quantize compare`: several checkpoints of one model beside it, on one text, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ptq.commands import evaluate
from ptq.commands.evaluate import Agreement
from ptq.commands.perplexity import distance, growth, machine_record, numbers, text_record, windows_for
from ptq.commands.windows import Windows
from ptq.errors import InputError
from ptq.files import source
from ptq.files.checkpoint import Checkpoint
from ptq.files.dtypes import dtype_name
from ptq.hf.loading import device_named, load_model
from ptq.pipeline.progress import counting
from ptq.reporting.console_tables import whole_table
from ptq.reporting.contents import Contents, summary
from ptq.reporting.sizes import with_error

MUCH = 100.0
"""Growth of a perplexity, as a share of it, of which nobody needs the digits."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """How far checkpoints are from their original, each with its size."""

    original: str
    checkpoints: tuple[str, ...]
    sizes: tuple[Contents, ...]
    """Of the checkpoints, and behind them of the original."""
    agreements: tuple[Agreement, ...]
    text_name: str
    windows: Windows
    dtype: str
    device: torch.device

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON: what `quantize compare --json` prints."""
        rows = [
            {"model": model, "bits_per_weight": size.bits_per_weight, "bytes": size.nbytes}
            for model, size in zip((*self.checkpoints, self.original), self.sizes, strict=True)
        ]
        for row, found in zip(rows, self.agreements, strict=False):
            row.update(**numbers(found.model), **distance(found))
        rows[-1].update(numbers(self.agreements[0].original))
        machine = machine_record(self.dtype, self.device)
        return {**text_record(self.text_name, self.windows), "original": rows.pop(), "checkpoints": rows, **machine}

    def __str__(self) -> str:
        """The table of the command."""
        alone = ": no standard errors" if len(self.windows) == 1 else ""
        windows = f"{len(self.windows)} x {self.windows.context} tokens, in {self.dtype}{alone}"
        table = Table(box=None)
        for title in ("", "bits/weight", "MB", "perplexity", "growth, %", "KL, nats", "same token, %"):
            table.add_column(title, justify="right" if title else "left", no_wrap=True)
        theirs = self.agreements[0].original.perplexity
        table.add_row(self.original, "", f"{self.sizes[-1].nbytes / 1e6:.2f}", _short(theirs), "", "", "")
        for model, size, found in zip(self.checkpoints, self.sizes, self.agreements, strict=False):
            bits, error, grown = size.bits_per_weight, found.loss_increase_standard_error, growth(found)
            table.add_row(
                model, "" if bits is None else f"{bits:.3f}", f"{size.nbytes / 1e6:.2f}",
                _short(found.model.perplexity),
                "much" if grown > MUCH else with_error(100 * grown, error and 100 * (1 + grown) * error, digits=2),
                with_error(found.kl, found.kl_standard_error, digits=5), f"{100 * found.top1:.2f}",
            )  # fmt: skip
        return whole_table(Group(Text(f"{self.text_name}: {windows}"), table))

    __repr__ = __str__


def compare(
    original: str | Path,
    checkpoints: Sequence[str | Path],
    text: str | Path | None = None,
    dataset: str | None = None,
    context: int | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Run every window of the file `text`, or of a `dataset`, through all of them, which are in memory together, in the
    dtype of the original, or another.

    Raises InputError for models, texts and contexts that do not fit each other, RunError where a dataset cannot be
    fetched or a loss is not finite.
    """
    if isinstance(checkpoints, str | Path) or not checkpoints:
        raise InputError(f"give the checkpoints as a list, such as ['OUT']; found {str(checkpoints)!r}")
    names, place = (*map(str, checkpoints), str(original)), device_named(str(device))
    name, windows = windows_for(names, text, dataset, context)
    sizes = tuple(summary(Checkpoint.open(source.resolve(each))) for each in names)
    plain = load_model(names[-1], dtype, place)
    models = [load_model(each, plain.dtype, place) for each in names[:-1]]
    with counting("windows") as advance:
        found = evaluate.compare_all(models, plain, windows, progress=advance)
    return Comparison(names[-1], names[:-1], sizes, tuple(found), name, windows, dtype_name(plain.dtype), place)


def _short(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.1e}"
