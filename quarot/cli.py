"""`quantize quarot` and `quantize rotate`."""

from typing import Annotated, Any, Literal

import typer

from ptq import cli, cli_options
from ptq.errors import InputError
from ptq.recipe import RunOptions

ActivationClip = Annotated[
    str | None,
    typer.Option(
        help="Share of a token's largest input that is kept; search: one for every input, found on the calibration "
        "text. Default: 0.9 at 4 bits, 0.95 at 6, 1 at 8."
    ),
]
CacheClip = Annotated[
    float | None,
    typer.Option(
        help="Share of the range of keys and values that is kept. Default: the one with the least error for Gaussian "
        "heads of this size, such as 0.6, 0.8 and 0.95 at 2, 3 and 4 bits of 128 channels; without rotations 0.9, 0.95 "
        "and 0.95; 1 for more bits."
    ),
]
GroupSize = Annotated[
    int, typer.Option(help="Input channels that share a scale, a divisor of all; 0: one per output channel.")
]
Online = Annotated[
    bool,
    typer.Option(
        "--online/--offline",
        help="Also the rotations that run with the model, of down_proj's input, of cached keys, and around a head "
        "that is tied to the embedding; --offline: only those that vanish into the weights.",
    ),
]
KeyCenters = Annotated[
    bool,
    typer.Option(
        "--key-centers/--no-key-centers",
        help="Cache keys without what those of a head have in common, which attention does not see; where there is "
        "calibration text.",
    ),
]
ScaleKind = Annotated[
    Literal["bfloat16", "integer"],
    typer.Option(
        help="Of groups. integer: multiples of one step per row, for up to 4 bits; with quantised activations many "
        "tokens are multiplied as with one scale per row."
    ),
]
Symmetric = Annotated[bool, typer.Option("--symmetric/--asymmetric", help="Without or with a zero-point per scale.")]
WeightBits = Annotated[
    int, typer.Option("--weight-bits", "--bits", help="Bits per weight: 2 to 8; 16 leaves them unrounded.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this method."""
    app.command()(cli.command(quarot))
    app.command()(cli.command(rotate))


def quarot(
    model: cli_options.Model,
    out: cli_options.Out,
    weight_bits: WeightBits = 4,
    group_size: GroupSize = 0,
    symmetric: Symmetric = True,
    scale: ScaleKind = "bfloat16",
    rounding: Annotated[Literal["nearest", "gptq"], typer.Option(help="gptq needs calibration text.")] = "gptq",
    rotate: Annotated[bool, typer.Option("--rotate/--no-rotate", help="Rotate the model before it is rounded.")] = True,
    online: Online = True,
    activation_bits: Annotated[
        int, typer.Option(help="Bits of the inputs of quantised linears, per token: 8, 6 or 4; 16 leaves them alone.")
    ] = 16,
    activation_clip: ActivationClip = None,
    kv_bits: Annotated[int, typer.Option(help="Bits of cached keys and values: 2, 3, 4, 6, 8 or 16 (as is).")] = 16,
    key_bits: Annotated[int | None, typer.Option(help="Bits of cached keys. Default: --kv-bits.")] = None,
    value_bits: Annotated[int | None, typer.Option(help="Bits of cached values. Default: --kv-bits.")] = None,
    kv_clip: CacheClip = None,
    kv_sinks: Annotated[
        int, typer.Option(help="Tokens at the start whose keys and values are not quantised: attention sinks.")
    ] = 0,
    key_centers: KeyCenters = True,
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
    bits_for: cli_options.BitsFor = None,
    debug: cli_options.Debug = False,
) -> None:
    """QuaRot: rotate a model so that nothing has outliers, then round weights, activations and KV cache to integers."""
    from quarot.plan import QuarotRecipe

    keys, values = _cache_bits(kv_bits, key_bits, value_bits)
    recipe = QuarotRecipe(
        rounding=rounding, calibration=calibration, samples=samples, sequence_length=sequence_length, damping=damping,
        sweeps=sweeps, gptaq_alpha=gptaq_alpha, finetune=finetune, finetune_epochs=finetune_epochs, seed=seed,
        embedding_bits=embedding_bits, skip=tuple(skip or ()),
        widths=tuple(bits_for or ()), weight_bits=weight_bits, group_size=group_size, symmetric=symmetric,
        scale=scale, rotate=rotate, online=online, activation_bits=activation_bits,
        activation_clip=_clip(activation_clip), key_bits=keys, value_bits=values, cache_clip=kv_clip,
        cache_sinks=kv_sinks, key_centers=key_centers,
    )  # fmt: skip
    _refuse_idle(recipe, model)
    cli.run_method(model, out, recipe, RunOptions(work=work, restart=restart, device=device, report=report), show_plan)


def _cache_bits(both: int, keys: int | None, values: int | None) -> tuple[int, int]:
    """Bits of cached keys and of values."""
    from ptq.kv.kv_cache import check_bits

    if both != 16 and keys is not None and values is not None:
        raise InputError("--kv-bits does nothing beside --key-bits and --value-bits; leave it out")
    check_bits(both, "--kv-bits")
    return both if keys is None else keys, both if values is None else values


def _clip(text: str | None) -> Any:
    """What `--activation-clip` asks for; what is neither a number nor a word that the recipe knows, it refuses."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _refuse_idle(recipe: Any, model: str) -> None:
    """Refuse every option that changes nothing in this `QuarotRecipe` (a type that would have to be imported here)."""
    if recipe.weight_bits == 16:
        fitted = recipe.finetune != "none" or recipe.activation_clip == "search"
        unread = recipe.calibration is None and model != "demo"
        rows = (*(() if fitted else ("samples",)), *(("sequence_length",) if unread else ()))
        solver = "damping", "sweeps", "gptaq_alpha"
        recipe.refuse_idle("with --weight-bits 16", "group_size", "symmetric", "scale", *solver, *rows)
    if not recipe.rotate:
        recipe.refuse_idle("with --no-rotate", "online")


def rotate(
    model: cli_options.Model,
    out: cli_options.Out,
    seed: Annotated[int, typer.Option(help="Seed of the random signs.")] = 0,
    device: cli_options.Device = "auto",
    work: cli_options.Work = None,
    restart: cli_options.Restart = False,
    show_plan: cli_options.ShowPlan = False,
    debug: cli_options.Debug = False,
) -> None:
    """The rotated model, not quantised: a plain Hugging Face checkpoint for any runtime (offline rotations only)."""
    from quarot.plan import QuarotRecipe

    recipe = QuarotRecipe(rounding="nearest", seed=seed, weight_bits=16, online=False)
    cli.run_method(model, out, recipe, RunOptions(work=work, restart=restart, device=device, report=False), show_plan)
