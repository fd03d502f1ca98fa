"""The commands of `quantize` that run a model, packed or not."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ptq import cli, cli_options
from ptq.errors import InputError
from ptq.files import source

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint of `quantize`, a Hugging Face folder, a hub name or `demo`."),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        help="What to compute in; auto: the stored type, but float32 for float16 on a CPU, which takes no float16."
    ),
]

Text = Annotated[
    Path | None,
    typer.Option(
        help="FILE.txt or FILE.jsonl to predict, in UTF-8. This or --dataset is needed, but for the model `demo`."
    ),
]
Dataset = Annotated[Literal["wikitext2"] | None, typer.Option(help="A text from the hub.")]
Context = Annotated[int | None, typer.Option(help="Tokens per window. Default: 2048, or the model's limit.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for function in (generate, perplexity, compare):
        app.command()(cli.command(function))


def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What it continues or answers, in quotes; - reads stdin.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="0 takes the most likely token; above, tokens are drawn, with top-k and top-p of the model's "
            "generation_config.json. Default: whatever that file says.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat template. Default: where there is one.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 0,
    device: cli_options.Device = "auto",
    dtype: Dtype = "auto",
    debug: cli_options.Debug = False,
) -> None:
    """Let a model continue a text, or answer, and say how fast it was."""
    from ptq.commands.generate import Request, generate
    from ptq.hf.loading import device_named
    from ptq.pipeline.progress import console

    request = Request(_stdin() if prompt == "-" else _utf8(prompt), max_new_tokens, temperature, chat, seed)
    with _quiet(debug):
        done = generate(model, request, cli.write, device_named(device), _dtype(dtype))
    cli.write("\n")
    rate = (done.new_tokens - 1) / done.new_seconds if done.new_tokens > 1 else None  # the first is the prompt's
    pace = "" if rate is None else f", {rate:.1f} a second"
    end = "; the model has no more positions" if done.at_limit else ""
    console.print(
        f"{done.prompt_tokens} token{'s' * (done.prompt_tokens != 1)} read in {done.prompt_seconds:.2f} s, "
        f"{done.new_tokens} written{pace}{end}",
        soft_wrap=True,
    )


def perplexity(
    model: Model,
    text: Text = None,
    dataset: Dataset = None,
    context: Context = None,
    against: Annotated[str | None, typer.Option(help="The original model: adds KL, top-1 and loss increase.")] = None,
    device: cli_options.Device = "auto",
    dtype: Dtype = "auto",
    as_json: cli_options.Json = False,
    debug: cli_options.Debug = False,
) -> None:
    """Perplexity by the papers' protocol: windows that do not overlap, the tail dropped, exp of the mean loss."""
    source.check_readable(text)
    from ptq.commands.perplexity import perplexity as measured

    with _quiet(debug):
        made = measured(
            model, text, dataset=dataset, context=context, against=against, device=device, dtype=_dtype(dtype)
        )
    _show(made, as_json)


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The original: a folder, a hub name or `demo`.")],
    checkpoints: Annotated[list[str], typer.Argument(metavar="OUT", help="What was made from it.")],
    text: Text = None,
    dataset: Dataset = None,
    context: Context = None,
    device: cli_options.Device = "auto",
    dtype: Dtype = "auto",
    as_json: cli_options.Json = False,
    debug: cli_options.Debug = False,
) -> None:
    """Checkpoints beside their original, in one table: bits, size, perplexity, KL. All of them are in memory."""
    source.check_readable(text)
    for checkpoint in checkpoints:
        source.local_folder(checkpoint)
    from ptq.commands.compare import compare as compared

    with _quiet(debug):
        made = compared(model, checkpoints, text, dataset=dataset, context=context, device=device, dtype=_dtype(dtype))
    _show(made, as_json)


def _show(made: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(made.as_record(), indent=2, allow_nan=False))
    else:
        cli.write(f"{made}\n")


def _stdin() -> str:
    """The text on stdin, without the end of its last line, which `echo` adds."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: not UTF-8 at byte {error.start}; convert the text to UTF-8") from error


def _utf8(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python keeps bytes of an argument that mean nothing as surrogates
        raise InputError(f"the prompt is not UTF-8 at character {error.start}; convert it to UTF-8") from error
    return prompt


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Within it, but for `debug`, transformers says nothing but errors while it loads and runs a model."""
    if debug:
        yield
        return
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def _dtype(name: str) -> Any:
    import torch

    return None if name == "auto" else getattr(torch, name)
