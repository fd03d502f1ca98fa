"""`quantize quip-sharp`."""

from typing import Annotated, Literal

import typer

from ptq import cli
from ptq.recipe import RunOptions


def register(app: typer.Typer) -> None:
    """Add the commands of this method."""
    app.command("quip-sharp")(cli.command(quip_sharp))


def quip_sharp(
    model: cli.Model,
    out: cli.Out,
    bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3 or 4.")] = 2,
    rounding: Annotated[Literal["nearest", "ldlq"], typer.Option(help="ldlq needs calibration text.")] = "ldlq",
    finetune: cli.Finetune = "none",
    finetune_epochs: cli.FinetuneEpochs = 5,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate/--no-rotate", help="Transform weights before they are rounded; without that quality suffers."
        ),
    ] = True,
    activation_bits: Annotated[
        int, typer.Option(help="Bits of the inputs of quantised linears, per token: 8, or 16 to leave them alone.")
    ] = 8,
    embedding_bits: cli.EmbeddingBits = 16,
    calibration: cli.Calibration = None,
    samples: cli.Samples = 128,
    sequence_length: cli.SequenceLength = None,
    damping: Annotated[float, typer.Option(help="Share of the Hessian's mean diagonal that is added to it.")] = 0.01,
    gptaq_alpha: cli.GptaqAlpha = 0.0,
    sweeps: Annotated[
        int, typer.Option(help="Sweeps of coordinate descent after LDLQ, at most; none raises the loss.")
    ] = 4,
    seed: cli.Seed = 0,
    device: cli.Device = "auto",
    work: cli.Work = None,
    restart: cli.Restart = False,
    show_plan: cli.ShowPlan = False,
    report: cli.Report = True,
    skip: cli.Skip = None,
    bits_for: cli.BitsFor = None,
    debug: cli.Debug = False,
) -> None:
    """QuIP#: weights of 2, 3 or 4 bits on the E8 lattice, after a random Hadamard transform on both of their sides."""
    from quip_sharp.plan import QuipSharpRecipe

    recipe = QuipSharpRecipe(
        rounding=rounding, calibration=calibration, samples=samples, sequence_length=sequence_length, damping=damping,
        sweeps=sweeps, gptaq_alpha=gptaq_alpha, seed=seed, embedding_bits=embedding_bits, skip=tuple(skip or ()),
        widths=tuple(bits_for or ()), bits=bits, rotate=rotate, activation_bits=activation_bits,
        finetune=finetune, finetune_epochs=finetune_epochs,
    )  # fmt: skip
    if rounding == "nearest":
        cli.refuse_idle(recipe, "with --rounding nearest", "gptaq_alpha", "damping", "sweeps")
    cli.run(model, out, recipe, RunOptions(work=work, restart=restart, device=device, report=report), show_plan)
