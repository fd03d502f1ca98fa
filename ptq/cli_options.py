"""Arguments and options that commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a hub name (ORG/NAME or ORG/NAME@REVISION), or `demo`, which ships with ptq.",
    ),
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder of the result: new, empty, or of the same command unfinished.")
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Calibration text or chats: FILE.txt, FILE.jsonl, wikitext2, c4 or a dataset, NAME:CONFIG:SPLIT.",
    ),
]
EmbeddingBits = Annotated[
    int,
    typer.Option(
        help="Bits of the embedding and the head, rounded to the nearest integers: 8, 6 or 4; 16 leaves them alone."
    ),
]
Samples = Annotated[int, typer.Option(help="Rows of calibration text.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens per row. Default: 2048, or the model's limit.")]
GptaqAlpha = Annotated[
    float,
    typer.Option(
        help="Weights make up for so much of what earlier rounding did to their inputs, 0 to 1, as in GPTAQ: 0.25 is "
        "closer to the original than 0, and takes longer. Not for linears of experts."
    ),
]
Finetune = Annotated[
    Literal["none", "blocks", "full"],
    typer.Option(
        help="Training after rounding. blocks: within each block, what is not rounded yet, the norms, and the bfloat16 "
        "scales (quarot, fp6) or sign vectors (quip-sharp) of what is rounded are trained to give the original block's "
        "output; full: after that these and the head are trained to give the original model's logits. Needs "
        "calibration text. Not for models with experts, or whose blocks share keys and values."
    ),
]
FinetuneEpochs = Annotated[
    int, typer.Option(help="Passes over the text, at most: in each turn of a block, and with the whole model.")
]
Damping = Annotated[float, typer.Option(help="Share of the Hessian's mean diagonal that is added to it.")]
Sweeps = Annotated[
    int,
    typer.Option(
        help="After GPTQ: sweeps of coordinate descent, at most; none raises the loss. Above 0, bfloat16 scales are "
        "chosen by that loss, too: 4 is closer to the original than 0, and takes longer."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random signs and of the choice of rows.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What computes.")]
Work = Annotated[Path | None, typer.Option(help="Folder of unfinished work. Default: OUT.work.")]
Restart = Annotated[bool, typer.Option("--restart", help="Throw unfinished work away.")]
ShowPlan = Annotated[bool, typer.Option("--plan", help="Print what would be done, and do nothing.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html and report.json into OUT.")]
Skip = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Leave linears alone, such as '*.down_proj'; repeatable."),
]
BitsFor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=BITS",
        help="Other bits for some linears, such as '*.down_proj=4'; repeatable, the first pattern that matches counts.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
