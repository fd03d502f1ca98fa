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
from ptq.commands.perplexity import Dataset, distance, growth, machine_record, numbers, text_record, windows_for
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


@dataclass(frozen=True)
class Compared:
    """One checkpoint: what it takes, and how far it is from the original."""

    model: str
    size: Contents
    agreement: Agreement

    @property
    def bits_per_weight(self) -> float | None:
        """True bits of what is quantised, scales and all; None: nothing is."""
        return self.size.bits_per_weight

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self.size.nbytes

    @property
    def perplexity(self) -> float:
        """exp(mean loss per predicted token)."""
        return self.agreement.model.perplexity

    @property
    def kl(self) -> float:
        """Mean KL(original || checkpoint), nats per predicted token."""
        return self.agreement.kl

    @property
    def top1(self) -> float:
        """Share of predicted tokens where it and the original have the same most likely one."""
        return self.agreement.top1

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {**_size_record(self.model, self.size), **numbers(self.agreement.model), **distance(self.agreement)}


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Checkpoints beside their original on the windows of a text, computed in `dtype` on `device`; printed, it is the
    table of `quantize compare`."""

    original: str
    original_size: Contents
    rows: tuple[Compared, ...]
    """One per checkpoint, in the order given."""
    text_name: str
    windows: Windows
    dtype: str
    device: torch.device

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON: what `quantize compare --json` prints."""
        plain = numbers(self.rows[0].agreement.original)
        return {
            **text_record(self.text_name, self.windows),
            "original": {**_size_record(self.original, self.original_size), **plain},
            "checkpoints": [row.as_record() for row in self.rows],
            **machine_record(self.dtype, self.device),
        }

    @property
    def original_perplexity(self) -> float:
        """exp(mean loss per predicted token)."""
        return self.rows[0].agreement.original.perplexity

    def __str__(self) -> str:
        """The table of the command."""
        alone = ": no standard errors" if len(self.windows) == 1 else ""
        windows = f"{len(self.windows)} x {self.windows.context} tokens, in {self.dtype}{alone}"
        table = Table(box=None)
        for title in ("", "bits/weight", "MB", "perplexity", "growth, %", "KL, nats", "same token, %"):
            table.add_column(title, justify="right" if title else "left", no_wrap=True)
        plain = (f"{self.original_size.nbytes / 1e6:.2f}", _short(self.original_perplexity))
        table.add_row(self.original, "", *plain, "", "", "")
        for row in self.rows:
            found, bits = row.agreement, row.bits_per_weight
            error, grown = found.loss_increase_standard_error, growth(found)
            table.add_row(
                row.model, "" if bits is None else f"{bits:.3f}", f"{row.nbytes / 1e6:.2f}", _short(row.perplexity),
                "much" if grown > MUCH else with_error(100 * grown, error and 100 * (1 + grown) * error, digits=2),
                with_error(found.kl, found.kl_standard_error, digits=5), f"{100 * found.top1:.2f}",
            )  # fmt: skip
        return whole_table(Group(Text(f"{self.text_name}: {windows}"), table))

    __repr__ = __str__


def compare(
    original: str | Path,
    checkpoints: Sequence[str | Path],
    text: str | Path | None = None,
    *,
    dataset: Dataset | None = None,
    context: int | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Comparison:
    """Checkpoints of one model beside it: size, perplexity and divergence of each. All of them are in memory.

    text: a file (.txt, .jsonl); or `dataset`, fetched from the hub. Neither: the held-out text of the model `demo`.
    context: tokens of a window; None: the papers' 2048, or as many as the original takes.
    device: `auto` (a GPU where there is one), `cpu` or `cuda`. dtype: of what is not packed; None: the original's.
    progress: whether stderr shows how much is done.

    Raises InputError for models, texts and contexts that do not fit each other, RunError where a dataset cannot be
    fetched or a loss is not finite.
    """
    if isinstance(checkpoints, str | Path) or not checkpoints:
        raise InputError(f"give the checkpoints as a list, such as ['OUT']; found {str(checkpoints)!r}")
    plain_name, place = source.spelled(original, "original"), device_named(str(device))
    names = [source.spelled(each, "a checkpoint") for each in checkpoints]
    text_name, windows = windows_for([plain_name, *names], text, dataset, context)
    *sizes, plain_size = (summary(Checkpoint.open(source.resolve(each))) for each in (*names, plain_name))
    plain = load_model(plain_name, dtype, place)
    models = [load_model(each, plain.dtype, place) for each in names]
    with counting("windows", progress) as advance:
        found = evaluate.compare_all(models, plain, windows, progress=advance)
    rows = tuple(map(Compared, names, sizes, found))
    return Comparison(plain_name, plain_size, rows, text_name, windows, dtype_name(plain.dtype), place)


def _size_record(model: str, size: Contents) -> dict[str, Any]:
    """What a model takes, for JSON."""
    return {"model": model, "bits_per_weight": size.bits_per_weight, "bytes": size.nbytes}


def _short(perplexity: float) -> str:
    return f"{perplexity:.3f}" if perplexity < 1e6 else f"{perplexity:.1e}"
