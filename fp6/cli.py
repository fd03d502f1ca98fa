"""`quantize fp6`."""

from typing import Annotated, Literal

import typer

from ptq import cli, cli_options
from ptq.recipe import RunOptions

ScaleSearch = Annotated[
    Literal["absmax", "mse"], typer.Option(help="mse: the scale with the least squared error, of several; slower.")
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate/--no-rotate",
        help="QuaRot's rotations that vanish into the weights; around a tied head one runs with the model.",
    ),
]
ElementFor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=ELEMENT",
        help="Another element for some linears, such as '*.down_proj=e4m2'; repeatable, the first pattern that matches "
        "counts.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this method."""
    app.command()(cli.command(fp6))


def fp6(
    model: cli_options.Model,
    out: cli_options.Out,
    element: Annotated[
        str,
        typer.Option(
            help="e3m2, e2m3, e2m2, e3m1, e2m1, e4m2, e3m3; or auto: e3m2 or e2m3, per layer, by their error."
        ),
    ] = "e2m3",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels that share a scale, a divisor of all; 0: one per output channel. Default: 0, with "
            "e8m0 scales 32."
        ),
    ] = None,
    scale: Annotated[
        Literal["bfloat16", "e8m0"],
        typer.Option(help="e8m0: powers of two, as in the OCP Microscaling Formats (MXFP6, MXFP4)."),
    ] = "bfloat16",
    scale_search: ScaleSearch = "absmax",
    rounding: Annotated[Literal["nearest", "gptq"], typer.Option(help="gptq needs calibration text.")] = "nearest",
    rotate: Rotate = False,
    activation_bits: Annotated[
        int, typer.Option(help="Bits of the inputs of quantised linears, per token: 8; 16 leaves them alone.")
    ] = 16,
    embedding_bits: cli_options.EmbeddingBits = 16,
    finetune: cli_options.Finetune = "none",
    finetune_epochs: cli_options.FinetuneEpochs = 5,
    calibration: cli_options.Calibration = None,
    samples: cli_options.Samples = 128,
    sequence_length: cli_options.SequenceLength = None,
    damping: cli_options.Damping = 0.01,
    sweeps: cli_options.Sweeps = 0,
    gptaq_alpha: cli_options.GptaqAlpha = 0.0,
    seed: cli_options.Seed = 0,
    device: cli_options.Device = "auto",
    work: cli_options.Work = None,
    restart: cli_options.Restart = False,
    show_plan: cli_options.ShowPlan = False,
    report: cli_options.Report = True,
    skip: cli_options.Skip = None,
    element_for: ElementFor = None,
    debug: cli_options.Debug = False,
) -> None:
    """FP6: weights as small floats of 4 to 7 bits; no calibration text needed."""
    from fp6.plan import Fp6Recipe

    recipe = Fp6Recipe(
        rounding=rounding, calibration=calibration, samples=samples, sequence_length=sequence_length, damping=damping,
        sweeps=sweeps, gptaq_alpha=gptaq_alpha, finetune=finetune, finetune_epochs=finetune_epochs, seed=seed,
        embedding_bits=embedding_bits, skip=tuple(skip or ()),
        widths=tuple(element_for or ()), element=element, group_size=group_size, scale=scale,
        scale_search=scale_search, rotate=rotate, activation_bits=activation_bits,
    )  # fmt: skip
    cli.run_method(model, out, recipe, RunOptions(work=work, restart=restart, device=device, report=report), show_plan)
