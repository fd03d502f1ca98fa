"""`quantize quarot` and `quantize rotate`."""

from typing import Annotated, Literal

import typer

from ptq import cli
from ptq.recipe import RunOptions
from quarot.plan import QuarotRecipe

Online = Annotated[bool, typer.Option(help="Also rotate the input of down_proj, at run time; --offline: only rotations "
                                           "that vanish into the weights.")]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands of this method."""
    app.command()(cli.command(quarot))
    app.command()(cli.command(rotate))


def quarot(
    model: cli.Model,
    out: cli.Out,
    weight_bits: Annotated[int, typer.Option(help="2 to 8, or 16 to rotate only.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Input channels that share a scale; 0: one scale per output channel.")
    ] = 0,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with a zero-point per scale.")
    ] = True,
    rounding: Annotated[Literal["nearest", "gptq"], typer.Option(help="gptq needs calibration text.")] = "gptq",
    rotate: Annotated[bool, typer.Option("--rotate/--no-rotate", help="Rotations at all.")] = True,
    online: Annotated[
        bool,
        typer.Option(
            "--online/--offline",
            help="Also the rotation of down_proj's input, which runs "
            "at run time; --offline: only those that vanish into the weights.",
        ),
    ] = True,
    calibration: cli.Calibration = None,
    samples: cli.Samples = 128,
    sequence_length: cli.SequenceLength = None,
    damping: Annotated[float, typer.Option(help="Share of the Hessian's mean diagonal that is added to it.")] = 0.01,
    seed: cli.Seed = 0,
    device: cli.Device = "auto",
    work: cli.Work = None,
    restart: cli.Restart = False,
    show_plan: cli.ShowPlan = False,
    skip: cli.Skip = None,
    debug: cli.Debug = False,
) -> None:
    """QuaRot: rotate the model so that nothing has outliers, then round its weights to integers."""
    recipe = QuarotRecipe(
        rounding=rounding, calibration=calibration, samples=samples, sequence_length=sequence_length, damping=damping,
        seed=seed, skip=tuple(skip or ()), weight_bits=weight_bits, group_size=group_size, symmetric=symmetric,
        rotate=rotate, online=online,
    )  # fmt: skip
    cli.run(model, out, recipe, RunOptions(work=work, restart=restart, device=device), show_plan)


def rotate(
    model: cli.Model,
    out: cli.Out,
    seed: cli.Seed = 0,
    device: cli.Device = "auto",
    work: cli.Work = None,
    restart: cli.Restart = False,
    show_plan: cli.ShowPlan = False,
    debug: cli.Debug = False,
) -> None:
    """The rotated model, not quantised: a plain Hugging Face checkpoint for any runtime (offline rotations only)."""
    recipe = QuarotRecipe(rounding="nearest", seed=seed, weight_bits=16, online=False)
    cli.run(model, out, recipe, RunOptions(work=work, restart=restart, device=device), show_plan)
