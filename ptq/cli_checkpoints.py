"""The commands of `quantize` that are about a checkpoint which is there."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ptq import cli, cli_options, startup
from ptq.errors import InputError, RunError
from ptq.files import source

if TYPE_CHECKING:  # its imports take seconds
    from ptq.commands.verify import Verification

Packed = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint that `quantize` has made.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the result: new or empty.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for function in (inspect, verify, prepack, export, dequantize):
        app.command()(cli.command(function))


def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint.")],
    as_json: cli_options.Json = False,
    debug: cli_options.Debug = False,
) -> None:
    """What is inside a checkpoint: formats, true bits per weight, rotations, sizes, and what made it."""
    from ptq.files import published
    from ptq.files.checkpoint import Checkpoint
    from ptq.pipeline.result import result_of
    from ptq.pipeline.work import RECORD, read_record
    from ptq.reporting import console_tables, contents

    record = result = doubt = None
    with source.headers_only(checkpoint) as (folder, _):
        opened = Checkpoint.open(folder)
        found = contents.summary(opened)
        if found.groups:
            contents.check_packed(opened)
        try:
            record = read_record(path) if (path := folder / RECORD).is_file() else None
            result = None if record is None else result_of(folder, record)
        except InputError as error:  # what is inside can be told without it
            doubt = str(error).replace(str(folder), checkpoint)
    if as_json:
        made = record and {key: record.get(key) for key in ("recipe", "version", "result")}
        groups = [{**asdict(group), "bits_per_weight": group.bits_per_weight} for group in found.groups]
        print(json.dumps({"groups": groups, "plain_bytes": found.plain_bytes, "bytes": found.nbytes,
                          "bits_per_weight": found.bits_per_weight, "kv_cache": found.cache,
                          "residual_rotation": found.residual, "report": found.report, "made": made},
                         indent=2))  # fmt: skip
        return
    typer.echo(console_tables.contents_table(found))
    if not (found.groups or found.cache or found.residual):
        typer.echo("not quantised: every tensor is a plain one")
    if (form := published.form(opened.config)) is not None:
        typer.echo(f"published in {form}: `quantize` reads such weights as 16-bit numbers")
    if found.report is not None:
        typer.echo(f"report: {found.report}")
    if found.residual is not None:
        typer.echo(console_tables.residual_line(found.residual))
    if found.cache is not None:
        typer.echo(console_tables.cache_line(found.cache))
    if record is not None:
        version = record.get("version", "an unknown version")
        typer.echo(f"made by {record['recipe'].get('method')} with {version}; the whole recipe is in {RECORD}")
    if result is not None and result.text is not None and (found.groups or found.cache):
        typer.echo(f"measured on a few rows of {result.text}: {cli.loss(result)}")
    if doubt is not None:
        typer.echo(doubt)


def verify(
    checkpoint: Packed,
    against: Annotated[
        str | None,
        typer.Option(
            help="The original, to compare logits with, a block at a time; says so where the checkpoint was made from "
            "another model."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="FILE.txt or FILE.jsonl to compare on; else random tokens.")] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="End with exit code 1 where the KL, nats per token of --text, is above this."),
    ] = None,
    as_json: cli_options.Json = False,
    debug: cli_options.Debug = False,
) -> None:
    """Check a checkpoint: every tensor, size and file, and with --against how close it is to the original."""
    if max_kl is not None and against is None:
        raise InputError("--max-kl does nothing without --against, the original to compare with")
    if max_kl is not None and text is None:
        raise InputError("--max-kl needs --text FILE: a KL on random tokens says little about any text")
    if max_kl is not None and not math.isfinite(max_kl):
        raise InputError(f"--max-kl must be a finite number of nats per token, found {max_kl}")
    if against is not None:
        source.check_readable(text)
    from transformers.utils.logging import disable_progress_bar

    from ptq.commands import verify
    from ptq.files.json_numbers import six_digits

    disable_progress_bar()  # transformers' own, of loading
    found = verify.verify(checkpoint, against, text)
    if as_json:
        asked = {"checkpoint": checkpoint, "against": against, "text": text and str(text), "max_kl": max_kl}
        passed = None if max_kl is None else found.kl is not None and found.kl <= max_kl and found.source is not False
        print(json.dumps({**asked, "passed": passed, **six_digits(asdict(found))}, indent=2, allow_nan=False))
    else:
        _print_found(checkpoint, against, text, found)
    if max_kl is not None and found.source is False:
        raise RunError(f"{against}: is not what {checkpoint} was made from, so --max-kl cannot be judged")
    if max_kl is not None and found.kl is not None and not found.kl <= max_kl:
        raise RunError(f"{checkpoint}: KL {found.kl:.6g} from {against} on the text, above --max-kl {max_kl:.6g}")


def _print_found(checkpoint: str, against: str | None, text: Path | None, found: "Verification") -> None:
    """What was found, for people."""
    from ptq.pipeline.work import RECORD
    from ptq.reporting.sizes import with_error

    state = "every one as it was written" if found.recorded else (
        f"whole; without {RECORD} (save_pretrained writes none) changed bytes inside a tensor cannot be found"
    )  # fmt: skip
    typer.echo(f"{checkpoint}: {found.tensors} tensors in {found.files} files, {state}")
    if found.added:
        typer.echo(f"put beside them since, and a model may be loaded from it: {', '.join(found.added)}")
    if found.kl is not None:
        tokens = f"{found.tokens} tokens" if text else f"{found.tokens} random tokens (--text compares on a text)"
        kl = with_error(found.kl, found.kl_standard_error, digits=5)
        alone = " in one window, so without a standard error" if text and found.kl_standard_error is None else ""
        cli.write(f"against {against}: KL {kl} nats per token, same first choice for "
                  f"{found.top1:.2%} of {tokens}{alone}\n")  # fmt: skip
    if found.perplexity is not None and found.original_perplexity is not None:
        growth = found.perplexity / found.original_perplexity - 1
        typer.echo(f"perplexity {found.perplexity:.4f}, of {against} {found.original_perplexity:.4f} ({growth:+.2%})")
    if found.source is False:
        typer.echo(f"{against} is not what was quantised: {RECORD} of {checkpoint} records another config.json, other "
                   "headers or other weights")  # fmt: skip


def prepack(
    checkpoint: Packed,
    out: Out,
    target: Annotated[str, typer.Option(help="What runs it: cpu, sm_80 or sm_90.")] = "cpu",
    debug: cli_options.Debug = False,
) -> None:
    """Put the weights of a checkpoint into the order in which the kernels read them, so that loading need not."""
    from ptq.commands import prepack

    with startup.interruptible():
        count = prepack.prepack(source.resolve(checkpoint), out, target)
    typer.echo(f"{out}: {count} linears in the layout of {target}; each gives its bytes again")


def export(
    checkpoint: Packed,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the result; with --gguf, its file.")],
    gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a GGUF for llama.cpp; FILE: the GGUF of the original model."),
    ] = None,
    debug: cli_options.Debug = False,
) -> None:
    """Write a checkpoint of `quarot --offline`, or of `fp6 --scale e8m0` with e2m1 or e2m3, as compressed-tensors,
    which vLLM reads, or as a GGUF, which llama.cpp reads."""
    from ptq.commands import export, export_gguf

    with startup.interruptible():
        if gguf is None:
            count = export.export(source.resolve(checkpoint), out)
            typer.echo(f"{out}: {count} linears in the format of compressed-tensors; each gives its bytes again")
        else:
            count = export_gguf.export_gguf(source.resolve(checkpoint), gguf, out)
            typer.echo(f"{out}: {count} weights in a GGUF, none of them rounded again")


def dequantize(checkpoint: Packed, out: Out, debug: cli_options.Debug = False) -> None:
    """Write the weights of a checkpoint as plain numbers, for any runtime, and for training."""
    from ptq.commands import dequantize

    with startup.interruptible():
        count, rounded = dequantize.dequantize(source.resolve(checkpoint), out)
    typer.echo(f"{out}: {count} weights as plain numbers")
    for what in rounded:
        typer.echo(f"the checkpoint also rounds {what}; the plain model does not")
