"""Perplexity of any causal language model, plain or packed, by the papers' protocol (see ptq/commands/windows.py).

python scripts/perplexity.py demo
python scripts/perplexity.py OUT --against MODEL --dataset wikitext2 --json
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ptq.commands.evaluate import Agreement, Perplexity, compare, perplexity
from ptq.commands.windows import Windows, context_for, windows_from_text
from ptq.demo import demo_path
from ptq.errors import InputError, RunError
from ptq.files import hub
from ptq.files.dtypes import name_of
from ptq.hf.loading import load_model, load_tokenizer
from ptq.pipeline.progress import counting
from ptq.statistics import text_sources
from ptq.statistics.calibration import bos_of
from ptq.usage import OneCommand

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dataset(StrEnum):
    wikitext2 = "wikitext2"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class Options:
    model: str
    text: Path | None
    dataset: Dataset | None
    context: int | None
    device: Device
    dtype: Dtype
    against: str | None


@dataclass(frozen=True)
class Measured:
    options: Options
    text_name: str
    windows: Windows
    result: Perplexity | Agreement
    dtype: str
    device: str


def target_device(requested: Device) -> torch.device:
    if requested is Device.cuda and not torch.cuda.is_available():
        raise InputError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    if requested is Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(requested.value)


def read_text(options: Options, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """(name, text) of what is to be predicted; the text exactly as the file has it."""
    if options.text and options.dataset:
        raise InputError("give --text or --dataset, not both")
    if options.dataset:
        return options.dataset.value, read_dataset(options.dataset)
    path = options.text
    if path is None:
        if "demo" not in (options.model, options.against):
            raise InputError("name the text to predict: --text FILE or --dataset wikitext2")
        path = demo_path() / "heldout.txt"
    text = text_sources.read_text(path, tokenizer)
    if not text.strip():
        raise InputError(f"{path} is empty; give a text of at least one window")
    return str(path), text


def read_dataset(dataset: Dataset) -> str:
    """WikiText-2 raw, test split, its lines joined by two newlines as in the papers."""
    import huggingface_hub.constants
    from datasets import load_dataset  # slow to import, and not needed for a local text

    assert dataset is Dataset.wikitext2
    if not hub.is_known():  # then what was fetched before, or an error at once
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the hub's client raises many unrelated types
        reason = " ".join(str(error).split())
        raise RunError(
            f"dataset {dataset.value} could not be fetched from the hub: {reason}; pass a local file: --text FILE"
        ) from error
    return "\n\n".join(rows["text"])


def measure(options: Options) -> Measured:
    device = target_device(options.device)
    tokenizer = load_tokenizer(options.model)
    text_name, text = read_text(options, tokenizer)
    dtype = None if options.dtype is Dtype.auto else getattr(torch, options.dtype.value)
    model = load_model(options.model, dtype, device)
    context = context_for(model.config, options.context)
    bos = bos_of(tokenizer, model.config)
    windows = windows_from_text(tokenizer, text, context, text_name, bos)
    with counting("windows") as advance:
        if options.against is None:
            result = perplexity(model, windows, progress=advance)
        else:
            theirs = windows_from_text(load_tokenizer(options.against), text, context, bos=bos)
            if not torch.equal(windows.tokens, theirs.tokens):
                raise InputError(f"{options.model} and {options.against} tokenise the text differently")
            # In the same dtype, so that the divergence is not that of two precisions.
            original = load_model(options.against, model.dtype, device)
            result = compare(model, original, windows, progress=advance)
    return Measured(options, text_name, windows, result, name_of(model.dtype), str(device))


def as_json(measured: Measured) -> str:
    result, windows = measured.result, measured.windows
    own = result.model if isinstance(result, Agreement) else result
    record = {
        "model": measured.options.model,
        "text": measured.text_name,
        "tokenizer": windows.tokenizer,
        "bos": windows.bos,
        "tokens_found": windows.found,
        "windows": len(windows),
        "context": windows.context,
        "tokens_predicted": own.tokens,
        **perplexity_record(own),
        "dtype": measured.dtype,
        "device": measured.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if isinstance(result, Agreement):
        record["against"] = {
            "model": measured.options.against,
            **perplexity_record(result.original),
            "kl": result.kl,
            "kl_standard_error": result.kl_standard_error,
            "top1": result.top1,
            "loss_increase": result.loss_increase,
            "loss_increase_standard_error": result.loss_increase_standard_error,
        }
    return json.dumps(record, indent=2)


def perplexity_record(value: Perplexity) -> dict[str, float | None]:
    return {
        "loss": value.loss,
        "loss_standard_error": value.loss_standard_error,
        "perplexity": value.perplexity,
        "standard_error": value.standard_error,
    }


def as_table(measured: Measured) -> Table:
    result, windows = measured.result, measured.windows
    table = Table(show_header=False, title=f"{measured.options.model} on {measured.text_name}")
    own = result.model if isinstance(result, Agreement) else result
    table.add_row("perplexity", with_error(own.perplexity, own.standard_error))
    table.add_row("loss (nats per token)", with_error(own.loss, own.loss_standard_error))
    if isinstance(result, Agreement):
        original = result.original
        table.add_row(
            f"perplexity of {measured.options.against}", with_error(original.perplexity, original.standard_error)
        )
        table.add_row("loss increase", with_error(result.loss_increase, result.loss_increase_standard_error))
        table.add_row("growth of the perplexity", f"{100 * math.expm1(result.loss_increase):+.2f} %")
        table.add_row("KL(original || model), nats", with_error(result.kl, result.kl_standard_error))
        table.add_row("same most likely token", f"{100 * result.top1:.2f} %")
    table.add_row("windows x context", f"{len(windows)} x {windows.context} of {windows.found} tokens")
    table.add_row("tokenizer", windows.tokenizer)
    table.add_row("beginning-of-sequence token", windows.bos)
    table.add_row("computed in", f"{measured.dtype} on {measured.device}")
    return table


def with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else " (one window: no standard error)")


@app.command(cls=OneCommand)
def main(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or `demo`.")],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to predict. Default for demo: its held-out text.")
    ] = None,
    dataset: Annotated[Dataset | None, typer.Option(help="A text from the hub instead.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per window. Default: 2048, or the model's limit.")] = None,
    device: Annotated[Device, typer.Option()] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: as stored (float16 becomes float32 on a CPU).")] = Dtype.auto,
    against: Annotated[str | None, typer.Option(help="The original: adds KL divergence and top-1 agreement.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Perplexity: non-overlapping windows, the tail dropped, exp of the mean token loss."""
    if not debug:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    try:
        measured = measure(Options(model, text, dataset, context, device, dtype, against))
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        known = isinstance(error, InputError | RunError)
        sentence = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"perplexity.py: {sentence}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from error
    if as_json_:
        print(as_json(measured))
    else:
        console = Console()
        with console.capture() as table:
            console.print(as_table(measured))
        typer.echo(table.get(), nl=False)  # which prints ± where the terminal is said to know ASCII alone


if __name__ == "__main__":
    app()
