"""The picture of the README: the inputs of a model's layers before and after rotation.

python scripts/plot_outliers.py OUT docs/outliers.svg

OUT is a folder that `quantize` has written, with its report.
"""

from pathlib import Path
from typing import Annotated

import one_sentence
import typer

from ptq.reporting.report_page import channels_picture
from ptq.reporting.report_schema import JSON, read


def main(
    out: Annotated[Path, typer.Argument(help="A finished checkpoint with its report.")],
    picture: Annotated[Path, typer.Argument(help="The SVG to write.")],
) -> None:
    """Draw the first picture of a report alone."""
    picture.write_text(channels_picture(read(out / JSON), standalone=True))


if __name__ == "__main__":
    one_sentence.run(main)
