"""`quantize perplexity`: perplexity of any causal language model, plain or packed, by the papers' protocol
(`ptq.commands.windows`), and how far it is from another, its original."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ptq.commands.evaluate import Agreement, Perplexity, compare, perplexity
from ptq.commands.windows import Windows, context_for, windows_from_text
from ptq.demo import demo_path
from ptq.errors import InputError, RunError
from ptq.files import hub
from ptq.files.dtypes import name_of
from ptq.hf.loading import load_config, load_model, load_tokenizer
from ptq.pipeline.progress import counting
from ptq.reporting.sizes import with_error
from ptq.statistics import text_sources
from ptq.statistics.calibration import bos_of

DATASET = "wikitext2"
"""The text that papers predict."""


@dataclass(frozen=True)
class Question:
    """What is to be measured: `model`, which may be compared with `against`, on the file `text` or on a `dataset`, in
    windows of `context` tokens. `dtype` None is the stored one."""

    model: str
    text: Path | None
    dataset: str | None
    context: int | None
    against: str | None
    device: torch.device
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Measured:
    """The answer, with what a reader must know to repeat it."""

    question: Question
    text_name: str
    windows: Windows
    result: Perplexity | Agreement
    dtype: str

    @property
    def own(self) -> Perplexity:
        """That of the model itself."""
        return self.result.model if isinstance(self.result, Agreement) else self.result


def measure(question: Question) -> Measured:
    """Load the model, or both, and run every window through.

    Raises InputError for models, texts and contexts that do not fit each other, RunError where a dataset cannot be
    fetched or a loss is not finite.
    """
    config = load_config(question.model)  # a folder that is no model is told as such
    context = context_for(config, question.context)
    tokenizer = load_tokenizer(question.model)
    name, text = _text(question, tokenizer)
    bos = bos_of(tokenizer, config)
    windows = windows_from_text(tokenizer, text, context, name, bos)
    if question.against is not None:
        context_for(load_config(question.against), context)  # which may not reach as far
        theirs = windows_from_text(load_tokenizer(question.against), text, context, bos=bos)
        if not torch.equal(windows.tokens, theirs.tokens):
            raise InputError(
                f"{question.model} and {question.against} tokenise the text differently; --against is the model "
                "that the other was made from"
            )
    model = load_model(question.model, question.dtype, question.device)
    with counting("windows") as advance:
        if question.against is None:
            result = perplexity(model, windows, progress=advance)
        else:  # in the same dtype, so that the divergence is not that of two precisions
            original = load_model(question.against, model.dtype, question.device)
            result = compare(model, original, windows, progress=advance)
    return Measured(question, name, windows, result, name_of(model.dtype))


def _text(question: Question, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """(name, text) of what is to be predicted; the text exactly as the file has it."""
    if question.text is not None and question.dataset is not None:
        raise InputError("give --text or --dataset, not both")
    if question.dataset is not None:
        return question.dataset, _wikitext2()
    path = question.text
    if path is None:
        if "demo" not in (question.model, question.against):
            raise InputError(f"name the text to predict: --text FILE or --dataset {DATASET}")
        path = demo_path() / "heldout.txt"
    return str(path), text_sources.read_text(path, tokenizer)


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


def as_record(measured: Measured) -> dict[str, Any]:
    """The numbers, for JSON."""
    question, windows, result = measured.question, measured.windows, measured.result
    record: dict[str, Any] = {
        "model": question.model,
        "text": measured.text_name,
        "tokenizer": windows.tokenizer,
        "bos": windows.bos,
        "tokens_found": windows.found,
        "windows": len(windows),
        "context": windows.context,
        "tokens_predicted": measured.own.tokens,
        **_numbers(measured.own),
        "dtype": measured.dtype,
        "device": str(question.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if isinstance(result, Agreement):
        record["against"] = {
            "model": question.against,
            **_numbers(result.original),
            "kl": result.kl,
            "kl_standard_error": result.kl_standard_error,
            "top1": result.top1,
            "loss_increase": result.loss_increase,
            "loss_increase_standard_error": result.loss_increase_standard_error,
        }
    return record


def _numbers(value: Perplexity) -> dict[str, float | None]:
    return {
        "loss": value.loss,
        "loss_standard_error": value.loss_standard_error,
        "perplexity": _or_none(value.perplexity),
        "standard_error": _or_none(value.standard_error),
    }


def _or_none(value: float | None) -> float | None:
    """JSON has no word for what is not finite."""
    return value if value is not None and math.isfinite(value) else None


def as_table(measured: Measured) -> Table:
    """The same for people."""
    question, windows, result, own = measured.question, measured.windows, measured.result, measured.own
    table = Table(show_header=False, title=f"{question.model} on {measured.text_name}")
    table.add_row("perplexity", _with_error(own.perplexity, own.standard_error))
    table.add_row("loss (nats per token)", _with_error(own.loss, own.loss_standard_error))
    if isinstance(result, Agreement):
        theirs = result.original
        table.add_row(f"perplexity of {question.against}", _with_error(theirs.perplexity, theirs.standard_error))
        table.add_row("loss increase", _with_error(result.loss_increase, result.loss_increase_standard_error))
        growth = math.expm1(min(result.loss_increase, 700.0))  # exp of more is no number
        table.add_row("growth of the perplexity", f"{100 * growth:+.2f} %")
        table.add_row("KL(original || model), nats", _with_error(result.kl, result.kl_standard_error))
        table.add_row("same most likely token", f"{100 * result.top1:.2f} %")
    table.add_row("windows x context", f"{len(windows)} x {windows.context} of {windows.found} tokens")
    table.add_row("tokenizer", windows.tokenizer)
    table.add_row("beginning-of-sequence token", windows.bos)
    table.add_row("computed in", f"{measured.dtype} on {question.device}")
    return table


def _with_error(value: float, error: float | None) -> str:
    return with_error(value, error) + ("" if error is not None else " (one window: no standard error)")
