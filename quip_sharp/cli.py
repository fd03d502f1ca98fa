"""`quantize quip-sharp`."""

from typing import Annotated, Literal

import typer

from ptq import cli, cli_options
from ptq.recipe import RunOptions


def register(app: typer.Typer) -> None:
    """Add the commands of this method."""
    app.command("quip-sharp")(cli.command(quip_sharp))


def quip_sharp(
    model: cli_options.Model,
    out: cli_options.Out,
    bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3 or 4.")] = 2,
    rounding: Annotated[Literal["nearest", "ldlq"], typer.Option(help="ldlq needs calibration text.")] = "ldlq",
    finetune: cli_options.Finetune = "none",
    finetune_epochs: cli_options.FinetuneEpochs = 5,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate/--no-rotate", help="Transform weights before they are rounded; without that quality suffers."
        ),
    ] = True,
    activation_bits: Annotated[
        int, typer.Option(help="Bits of the inputs of quantised linears, per token: 8, or 16 to leave them alone.")
    ] = 8,
    embedding_bits: cli_options.EmbeddingBits = 16,
    calibration: cli_options.Calibration = None,
    samples: cli_options.Samples = 128,
    sequence_length: cli_options.SequenceLength = None,
    damping: cli_options.Damping = 0.01,
    gptaq_alpha: cli_options.GptaqAlpha = 0.0,
    sweeps: Annotated[
        int, typer.Option(help="Sweeps of coordinate descent after LDLQ, at most; none raises the loss.")
    ] = 4,
    seed: cli_options.Seed = 0,
    device: cli_options.Device = "auto",
    work: cli_options.Work = None,
    restart: cli_options.Restart = False,
    show_plan: cli_options.ShowPlan = False,
    report: cli_options.Report = True,
    skip: cli_options.Skip = None,
    bits_for: cli_options.BitsFor = None,
    debug: cli_options.Debug = False,
) -> None:
    """QuIP#: weights of 2, 3 or 4 bits on the E8 lattice, after a random Hadamard transform on both of their sides."""
    from quip_sharp.plan import QuipSharpRecipe

    recipe = QuipSharpRecipe(
        rounding=rounding, calibration=calibration, samples=samples, sequence_length=sequence_length, damping=damping,
        sweeps=sweeps, gptaq_alpha=gptaq_alpha, seed=seed, embedding_bits=embedding_bits, skip=tuple(skip or ()),
        widths=tuple(bits_for or ()), bits=bits, rotate=rotate, activation_bits=activation_bits,
        finetune=finetune, finetune_epochs=finetune_epochs,
    )  # fmt: skip
    cli.run_method(model, out, recipe, RunOptions(work=work, restart=restart, device=device, report=report), show_plan)
