"""`quantize perplexity`: perplexity of any causal language model, plain or packed, by the papers' protocol
(`ptq.commands.windows`), and how far it is from another, its original."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ptq.commands import evaluate
from ptq.commands.evaluate import Agreement, Perplexity
from ptq.commands.windows import Windows, context_for, windows_from_text
from ptq.demo import demo_path
from ptq.errors import InputError, RunError
from ptq.files import hub, source
from ptq.files.dtypes import dtype_name
from ptq.hf.loading import device_named, load_config, load_model, load_tokenizer
from ptq.pipeline.progress import counting
from ptq.reporting.console_tables import whole_table
from ptq.reporting.sizes import with_error
from ptq.statistics import text_sources
from ptq.statistics.calibration import bos_of

Dataset = Literal["wikitext2"]
DATASET: Dataset = "wikitext2"
"""The text that papers predict."""


@dataclass(frozen=True, repr=False, eq=False)
class Measured:
    """The perplexity of `model` on the windows of a text, computed in `dtype` on `device`; printed, it is the table of
    `quantize perplexity`.

    `own` is what the model itself gave, `agreement` how far it is from the model `against`; None: it was not compared,
    and then so are the numbers that follow from it.
    """

    model: str
    against: str | None
    text_name: str
    windows: Windows
    own: Perplexity
    agreement: Agreement | None
    dtype: str
    device: torch.device

    @property
    def perplexity(self) -> float:
        """Of the model: exp(mean loss per predicted token)."""
        return self.own.perplexity

    @property
    def standard_error(self) -> float | None:
        """Of the perplexity, with windows as samples; None where there is but one."""
        return self.own.standard_error

    @property
    def original_perplexity(self) -> float | None:
        """Of the model that it was compared with."""
        return None if self.agreement is None else self.agreement.original.perplexity

    @property
    def kl(self) -> float | None:
        """Mean KL(original || model), nats per predicted token."""
        return None if self.agreement is None else self.agreement.kl

    @property
    def top1(self) -> float | None:
        """Share of predicted tokens where both have the same most likely one."""
        return None if self.agreement is None else self.agreement.top1

    def as_record(self) -> dict[str, Any]:
        """The numbers, for JSON: what `quantize perplexity --json` prints."""
        record = {
            "model": self.model,
            **text_record(self.text_name, self.windows),
            **numbers(self.own),
            **machine_record(self.dtype, self.device),
        }
        if (found := self.agreement) is not None:
            record["against"] = {"model": self.against, **numbers(found.original), **distance(found)}
        return record

    def __str__(self) -> str:
        """The table of the command."""
        windows, result, own = self.windows, self.agreement, self.own
        table = Table(show_header=False, title=f"{self.model} on {self.text_name}")
        table.add_row("perplexity", _with_error(own.perplexity, own.standard_error))
        table.add_row("loss (nats per token)", _with_error(own.loss, own.loss_standard_error))
        if result is not None:
            theirs = result.original
            table.add_row(f"perplexity of {self.against}", _with_error(theirs.perplexity, theirs.standard_error))
            table.add_row("loss increase", _with_error(result.loss_increase, result.loss_increase_standard_error))
            table.add_row("growth of the perplexity", f"{100 * growth(result):+.2f} %")
            table.add_row("KL(original || model), nats", _with_error(result.kl, result.kl_standard_error))
            table.add_row("same most likely token", f"{100 * result.top1:.2f} %")
        table.add_row("windows x context", f"{len(windows)} x {windows.context} of {windows.found} tokens")
        table.add_row("tokenizer", windows.tokenizer)
        table.add_row("beginning-of-sequence token", windows.bos)
        table.add_row("computed in", f"{self.dtype} on {self.device}")
        return whole_table(table)

    __repr__ = __str__


def perplexity(
    model: str | Path,
    text: str | Path | None = None,
    *,
    dataset: Dataset | None = None,
    context: int | None = None,
    against: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Measured:
    """Perplexity of a model, by the papers' protocol, and with `against`, its original, how far it is from that.

    text: a file (.txt, .jsonl); or `dataset`, fetched from the hub. Neither: the held-out text of the model `demo`.
    context: tokens of a window; None: the papers' 2048, or as many as the model takes.
    device: `auto` (a GPU where there is one), `cpu` or `cuda`. dtype: of what is not packed; None: the stored one.
    progress: whether stderr shows how much is done.

    Raises InputError for models, texts and contexts that do not fit each other, RunError where a dataset cannot be
    fetched or a loss is not finite.
    """
    name, other = source.spelled(model), None if against is None else source.spelled(against, "against")
    place = device_named(str(device))
    text_name, windows = windows_for([name] if other is None else [name, other], text, dataset, context)
    loaded = load_model(name, dtype, place)
    with counting("windows", progress) as advance:
        if other is None:
            own, agreement = evaluate.perplexity(loaded, windows, progress=advance), None
        else:
            original = load_model(other, loaded.dtype, place)
            agreement = evaluate.compare(loaded, original, windows, progress=advance)
            own = agreement.model
    return Measured(name, other, text_name, windows, own, agreement, dtype_name(loaded.dtype), place)


def windows_for(
    models: Sequence[str], text: str | Path | None, dataset: str | None, context: int | None
) -> tuple[str, Windows]:
    """The name of a text, and its windows, which must be the same for all models. Raises as `perplexity` does."""
    first, *others = models
    config = load_config(first)  # a folder that is no model is told as such
    context = context_for(config, context)
    tokenizer = load_tokenizer(first)
    name, read = _text(models, text, dataset, tokenizer)
    bos = bos_of(tokenizer, config)
    windows = windows_from_text(tokenizer, read, context, name, bos)
    for other in others:
        theirs = windows_from_text(load_tokenizer(other), read, context, bos=bos)
        if not torch.equal(windows.tokens, theirs.tokens):
            raise InputError(
                f"{first} and {other} tokenise the text differently; only a model and what was made from it can be "
                "compared"
            )
        context_for(load_config(other), context, other)  # which may not reach as far
    return name, windows


def _text(
    models: Sequence[str], text: str | Path | None, dataset: str | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str]:
    """(name, text) of what is to be predicted; the text exactly as the file has it."""
    if text is not None and dataset is not None:
        raise InputError("give --text or --dataset, not both")
    if dataset is not None:
        if dataset != DATASET:
            raise InputError(f"dataset {dataset!r}: the only one is {DATASET}; any other text as a file: --text FILE")
        return dataset, _wikitext2()
    if text is None:
        if "demo" not in models:
            raise InputError(f"name the text to predict: --text FILE or --dataset {DATASET}")
        text = demo_path() / "heldout.txt"
    return str(text), text_sources.read_text(text_sources.path_named(text), tokenizer)


def _wikitext2() -> str:
    """WikiText-2 raw, test split, its lines joined by two newlines as in the papers."""
    from datasets import load_dataset  # slow to import, and not needed for a local text

    try:
        with hub.asked_if_known():  # else what was fetched before, or an error at once
            rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the hub's client raises many unrelated types
        reason = " ".join(str(error).split())
        raise RunError(
            f"dataset {DATASET} could not be fetched from the hub: {reason}; pass a local file: --text FILE"
        ) from error
    return "\n\n".join(rows["text"])


def text_record(name: str, windows: Windows) -> dict[str, Any]:
    """What was predicted, for JSON."""
    return {
        "text": name,
        "tokenizer": windows.tokenizer,
        "bos": windows.bos,
        "tokens_found": windows.found,
        "windows": len(windows),
        "context": windows.context,
        "tokens_predicted": len(windows) * (windows.context - 1),
    }


def machine_record(dtype: str, device: torch.device) -> dict[str, Any]:
    """What computed, for JSON."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"dtype": dtype, "device": str(device), **versions}


def distance(result: Agreement) -> dict[str, Any]:
    """How far a model is from its original, for JSON."""
    return {
        "kl": result.kl,
        "kl_standard_error": result.kl_standard_error,
        "top1": result.top1,
        "loss_increase": result.loss_increase,
        "loss_increase_standard_error": result.loss_increase_standard_error,
    }


def numbers(value: Perplexity) -> dict[str, float | None]:
    """Loss and perplexity, for JSON."""
    return {
        "loss": value.loss,
        "loss_standard_error": value.loss_standard_error,
        "perplexity": _or_none(value.perplexity),
        "standard_error": _or_none(value.standard_error),
    }


def _or_none(value: float | None) -> float | None:
    """JSON has no word for what is not finite."""
    return value if value is not None and math.isfinite(value) else None


def growth(result: Agreement) -> float:
    """Of the perplexity, as a share of the original's."""
    return math.expm1(min(result.loss_increase, 700.0))  # exp of more is no number


def _with_error(value: float, error: float | None) -> str:
    return with_error(value, error) + ("" if error is not None else " (one window: no standard error)")
