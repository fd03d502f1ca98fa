"""The `quantize` command. Exit codes: 0 done, 1 the run failed, 2 wrong usage or bad input, 128 + n at signal n.

What needs torch or transformers is imported by the command that needs it, for both take seconds: `--help` and a
mistyped option are answered without them.
"""

import errno
import functools
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptq import methods, startup
from ptq.errors import InputError, RunError
from ptq.files import source
from ptq.recipe import Recipe, RunOptions, check_device
from ptq.usage import Commands

if TYPE_CHECKING:
    from ptq.pipeline.result import Result

app = typer.Typer(
    name="quantize",
    cls=Commands,
    help="Make a trained language model small: one command, a packed checkpoint that transformers loads.",
    epilog="To begin: quantize fp6 MODEL OUT. The options of a command: quantize COMMAND --help. Exit codes: 0 done, "
    "1 the run failed, 2 wrong usage or bad input, 130 interrupted, 143 terminated.",
    add_completion=False,
    rich_markup_mode=None,  # its table of options leaves their help a column of twenty letters in 80
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> bool:
    if asked:
        try:
            typer.echo(f"quantize {metadata.version(startup.DISTRIBUTION)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"quantize, {startup.DISTRIBUTION} from a folder: not installed")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn errors into one sentence on stderr and the right exit code, unless `--debug` is given."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            for name in ("model", "checkpoint", "against"):  # a mistyped one need not wait for what the command imports
                if kwargs.get(name) is not None:
                    source.local_folder(kwargs[name])
            check_device(kwargs.get("device", "auto"))
            if str(kwargs.get("out")) == "demo":
                raise InputError("OUT cannot be demo: that names the model that ships with ptq; choose another name")
            function(*args, **kwargs)
        except BrokenPipeError as error:  # `| head`: nobody reads on, and what is still to be flushed goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from error
        except (Exception, KeyboardInterrupt) as error:
            if kwargs.get("debug"):
                traceback.print_exception(error)
            with suppress(OSError):  # SIGHUP: the terminal may be gone
                print(f"quantize: {_sentence(error, 'restart' in kwargs)}", file=sys.stderr)
            raise typer.Exit(_exit_code(error)) from error

    return wrapped


def _exit_code(error: BaseException) -> int:
    if isinstance(error, startup.Stopped):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        return startup.INTERRUPTED
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return 2 if isinstance(error, InputError) or too_long else 1


def _sentence(error: BaseException, goes_on: bool) -> str:
    """What to say of an error of a command, which `goes_on` where it was."""
    if isinstance(error, InputError | RunError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        again = "; give the same command again: it goes on where it was, with --restart it begins anew"
        return f"interrupted{again if goes_on else ''}"
    if isinstance(error, OSError) and error.filename is not None:  # a folder that cannot be made, read or removed
        return f"{error.filename}: {error.strerror}; check the path, its permissions and its disk"
    return f"internal error ({type(error).__name__}: {error}); --debug shows where"


def run_method(model: str, out: Path, recipe: Recipe, options: RunOptions, show_plan: bool) -> None:
    """What every method's command ends in."""
    if recipe.calibration is None and recipe.rounding == "nearest" and model != "demo":
        recipe.refuse_idle("without --calibration", "samples", "sequence_length")
    if recipe.rounding == "nearest":
        recipe.refuse_idle("with --rounding nearest", "damping", "sweeps")
        if recipe.finetune == "none" and getattr(recipe, "activation_clip", None) != "search":
            recipe.refuse_idle("where nothing is fitted to the text", "samples")
    if recipe.finetune == "none":
        recipe.refuse_idle("without --finetune blocks or full", "finetune_epochs")
    if show_plan:
        if is_first_process():
            _show_plan(model, out, recipe, options)
        return
    from ptq.pipeline import pipeline
    from ptq.pipeline.progress import console
    from ptq.pipeline.work import RECORD
    from ptq.reporting.report_schema import PAGE

    finished_before = (source.path_of(out) / RECORD).is_file()
    with startup.interruptible():
        result = pipeline.quantize(model, out, recipe, options)
    if not is_first_process():
        return
    bits = "" if result.bits_per_weight is None else f", {result.bits_per_weight:.3f} bits per quantised weight"
    console.print(f"{result.out}: {result.nbytes / 1e6:.2f} MB{bits}", soft_wrap=True)
    if finished_before:
        console.print("finished before: nothing was done, its files are as they were written", soft_wrap=True)
        if options.report and not (result.out / PAGE).is_file():
            console.print(f"that run had --no-report: for a report, remove {result.out} and repeat it", soft_wrap=True)
        return
    close = f"before rounding, the model equals the original to {result.rotation_error:.1e}"
    console.print(
        f"proven: {close if result.rotation_error else 'before rounding, the model is the original to the bit'}; "
        "read again, the checkpoint gives the logits that were measured",
        soft_wrap=True,
    )
    if not recipe.rounds:
        return
    console.print(_quality(model, recipe, result), soft_wrap=True)
    if (page := result.out / PAGE).is_file():
        console.print(f"what was done to it, in pictures: {page}", soft_wrap=True)


MUCH_LOST = 0.2
"""A KL, nats per token, that goes with a fifth of the perplexity."""


def _quality(model: str, recipe: Recipe, result: "Result") -> str:
    """What is known of a result's quality, and how to know more."""
    from ptq.files import companions

    places = f"{shlex.quote(str(result.out))} --against {shlex.quote(model)}"
    if recipe.calibration is not None or model == "demo":
        more = "" if model == "demo" else f"; `quantize verify {places} --text FILE` measures more text"
        lost = "" if result.kl <= MUCH_LOST else "; warning: that is much, and more bits lose less"
        if result.original_perplexity and result.original_perplexity > _vocabulary(result.out):
            lost += "; warning: the original predicts this text worse than chance does, so this says little"
        return f"on a few rows of {result.text}: {loss(result)}{lost}{more}"
    if not companions.has_tokenizer(result.out):
        return (
            f"its quality was not measured: {model} has no tokenizer; with its files in both folders, text can be used"
        )
    return f"its quality was not measured, for want of text: `quantize verify {places} --text FILE` does"


def _vocabulary(out: Path) -> int:
    """How many tokens the model of a result knows."""
    from ptq.hf.loading import load_config

    return load_config(str(out)).get_text_config().vocab_size


def loss(result: "Result") -> str:
    """What a result has lost on the text that it was measured on."""
    from ptq.reporting.sizes import with_error

    kl = f"KL from the original {with_error(result.kl, result.kl_standard_error)} nats per token"
    if result.perplexity is None or not result.original_perplexity:
        growth = f"about {math.expm1(result.kl):+.1%} of" if result.kl < 1 else "more than twice the"
        return f"{kl}, {growth} perplexity"
    growth = result.perplexity / result.original_perplexity - 1
    return f"{kl}, perplexity {result.original_perplexity:.3f} to {result.perplexity:.3f} ({growth:+.1%})"


def is_first_process() -> bool:
    """Whether this process speaks for all that torchrun has started; of an error any may."""
    return startup.process_of_run()[0] == 0


def _show_plan(model: str, out: Path, recipe: Recipe, options: RunOptions) -> None:
    """Print the plan as a table on stdout, and what else there is to say about it on stderr."""
    from ptq.ops.hadamard import construction
    from ptq.pipeline import needs, pipeline
    from ptq.pipeline.progress import console
    from ptq.pipeline.work import RECORD
    from ptq.reporting import console_tables
    from ptq.statistics import text_sources

    with source.headers_only(model) as (folder, missing):
        target = pipeline.plan(str(folder), pipeline.with_text(recipe, model))
    if recipe.calibration is not None:
        text_sources.check(recipe.calibration)
    plan = target.plan
    for note in plan.notes:
        console.print(note, soft_wrap=True)
    typer.echo(console_tables.plan_table(plan))
    if plan.online_residual is not None:
        typer.echo(console_tables.residual_line(construction(plan.online_residual.order)))
    if plan.cache is not None:
        typer.echo(console_tables.cache_line(asdict(plan.cache)))
    if (bits := needs.bits_per_weight(plan)) is not None:
        typer.echo(f"{bits:.3f} bits per quantised weight")
    estimate = pipeline.estimate(target, model, recipe)
    console.print(str(estimate), soft_wrap=True)
    if (source.path_of(out) / RECORD).is_file():
        state = "holds a result: the command that made it has nothing left to do, any other is refused"
        console.print(f"{out}: {state}", soft_wrap=True)
    elif refusal := pipeline.refusal(estimate, folder, out, options):
        console.print(f"here and now the command would refuse: {refusal}", soft_wrap=True)
    if missing:
        console.print(f"its weights are not here yet: the command itself fetches {missing / 1e9:.1f} GB from the hub")
    if recipe.calibration is None and model != "demo" and needs.needs_text(plan, recipe):
        console.print("to do this, the command needs --calibration TEXT")


def write(text: str) -> None:
    """Put a part of a text on stdout, as far as its encoding goes."""
    encoding = sys.stdout.encoding
    if encoding.lower() not in ("utf-8", "ascii", "us-ascii"):  # ASCII: Typer takes UTF-8 instead
        text = text.encode(encoding, "replace").decode(encoding)
    try:
        typer.echo(text, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"stdout: {error.strerror}") from error


for register in methods.commands():
    register(app)
