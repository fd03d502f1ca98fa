"""The model card of a result: `README.md`, which the hub shows, and which tells whoever is given the folder how to load
it."""

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from yaml import YAMLError

from ptq.files.checkpoint import Checkpoint
from ptq.files.hub import CARD
from ptq.files.shards import write_bytes
from ptq.files.source import local_folder
from ptq.recipe import Recipe
from ptq.reporting.report_schema import PAGE, Report
from ptq.reporting.report_tables import value, with_error
from ptq.reporting.sizes import size_text
from ptq.startup import DISTRIBUTION

INHERITED = ("language", "license", "license_name", "license_link")
"""What is true of the original and stays so."""
MAX_CARD_BYTES = 1_000_000
PACKED = f"""It takes the package `{DISTRIBUTION}`, which lets transformers load it, and has native kernels for it:

```python
import ptq
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
```

Or in a shell: `quantize generate FOLDER "Once upon a time"`. `FOLDER` is where this file is, or its name on the hub.
Any other tool that loads models through transformers: `python -m ptq.run TOOL`, and its arguments. `quantize verify
FOLDER` tells whether every byte of weights, configuration and tokenizer is as it was written."""
PLAIN = """Its weights are plain numbers: it loads and runs as the original does."""


def write(report: Report, recipe: Recipe, model: str, original: Path, written: Checkpoint, with_report: bool) -> None:
    """Write the card of a result into its folder, atomically. Raises RunError.

    `model` is what the user typed, `original` its folder, from whose card license and language are taken, `written` the
    result, in which there is a page of the report or not.
    """
    packed = "quantization_config" in written.config
    hub_name = model.partition("@")[0] if local_folder(model) is None else None
    data = ModelCardData(
        base_model=hub_name, base_model_relation=hub_name and "quantized", library_name="transformers",
        pipeline_tag="text-generation", tags=[*(["ptq"] if packed else []), recipe.command], **inherited(original),
    )  # fmt: skip
    text = f"---\n{data.to_yaml()}\n---\n\n{_body(report, recipe, packed)}"
    if with_report:
        text += f"\n`{PAGE}` shows what this did to every layer.\n"
    write_bytes(written.folder / CARD, text.encode(errors="replace"))  # file names can be no Unicode


def inherited(folder: Path) -> dict[str, Any]:
    """License and language, as far as a card in the folder of a model gives them."""
    path = folder / CARD
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            return {}
        given = metadata_load(path) or {}
    except (OSError, ValueError, RecursionError, YAMLError):  # its author's affair
        return {}
    return {key: found for key in INHERITED if (found := given.get(key)) and _is_plain(found)}


def _is_plain(found: Any) -> bool:
    parts = found if isinstance(found, list) else [found]
    return all(isinstance(part, str) for part in parts)


def _body(report: Report, recipe: Recipe, packed: bool) -> str:
    bits = "" if report.bits_per_weight is None else f" in {report.bits_per_weight:.3g} bits a weight"
    command = shlex.join(["quantize", recipe.command, report.model, "OUT", *recipe.arguments()])
    return f"""# {Path(report.model).name}{bits}, by {recipe.title}

{PACKED if packed else PLAIN}

## What it is

| | original | this |
|---|---|---|
{_rows(report)}

Made by [{recipe.title}]({recipe.paper}) as `{DISTRIBUTION}` does it ({report.made_with}):

```
{command}
```
"""


def _rows(report: Report) -> str:
    rows = [("size of all tensors", size_text(report.bytes_before), size_text(report.bytes_after))]
    if report.bits_per_weight is not None:
        what = f"bits per weight of {report.quantised_weights:,} that are quantised, scales included"
        rows.append((what, "", f"{report.bits_per_weight:.3f}"))
    if (found := report.positions) is not None:
        old, new = (value(each, ".3f") for each in found.perplexities)
        rows.append((f"perplexity of {found.rows} rows of {found.text.replace('|', ' ')}", old, new))
        kl = with_error(report.kl, report.kl_standard_error)
        rows.append(("KL divergence from the original on them, nats per token", "", kl))
        rows.append(("tokens of them with the same first choice", "", value(report.top1, ".1%")))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
