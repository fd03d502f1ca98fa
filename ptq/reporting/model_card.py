"""The model card of a result: `README.md`, which the hub shows, and which tells whoever is given the folder how to load
it."""

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from ptq.files.checkpoint import Checkpoint
from ptq.files.companions import has_tokenizer
from ptq.files.hub import CARD
from ptq.files.shards import write_bytes
from ptq.files.source import HUB_NAME
from ptq.recipe import Recipe
from ptq.reporting.report_schema import PAGE, Report
from ptq.reporting.report_tables import value
from ptq.reporting.sizes import size_text, with_error
from ptq.startup import DISTRIBUTION

INHERITED = ("language", "license", "license_name", "license_link")
"""What is true of the original and stays so."""
MAX_CARD_BYTES = 1_000_000
PLAIN = "Its weights are plain numbers: it loads and runs as the original does."
PACKED = f"""It takes the package `{DISTRIBUTION}`, which lets transformers load it and has native kernels for it.
In the folder of its source, `pip install --no-build-isolation .` installs it. Without `import ptq` transformers reports
`Unknown quantization type, got ptq`, or suggests `ignore_mismatched_sizes`. `FOLDER` is where this file is, or its name
on the hub."""
PYTHON = """```python
import ptq
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
written = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(written[0]))
```

Or in a shell: `quantize generate FOLDER "Once upon a time"`. Any other tool that loads models through transformers:
`python -m ptq.run TOOL`, and its arguments."""
WITHOUT_TOKENIZER = """```python
import ptq
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("FOLDER")
```

It came without a tokenizer: that of the original fits."""
VERIFY = "`quantize verify FOLDER` tells whether every byte that a model is loaded from is as it was written."


def write(report: Report, recipe: Recipe, original: Path, written: Checkpoint, with_report: bool) -> None:
    """Write the card of a result into its folder, atomically. Raises RunError.

    `recipe` is what was asked for, `original` the folder of the model, from whose card license and language are taken,
    `written` the result, in which there is a page of the report or not.
    """
    packed = "quantization_config" in written.config
    name = report.model.partition("@")[0]
    hub_name = name if HUB_NAME.fullmatch(name) else None
    data = ModelCardData(
        base_model=hub_name, base_model_relation="quantized" if hub_name and recipe.rounds else None,
        library_name="transformers", pipeline_tag="text-generation",
        tags=[*(["ptq"] if packed else []), recipe.command], **inherited(original),
    )  # fmt: skip
    text = f"---\n{data.to_yaml()}\n---\n\n{_body(report, recipe, written, hub_name)}"
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
    except Exception:  # its author's affair, and YAML raises whatever it likes
        return {}
    plain = {key: _plain(given.get(key)) for key in INHERITED}
    return {key: found for key, found in plain.items() if found}


def _plain(found: Any) -> Any:
    """A string, or those of a list; None for anything else. To YAML the code of Norwegian is a No."""
    if isinstance(found, list):
        return [part for each in found if isinstance(part := _plain(each), str)]
    found = "no" if found is False else found
    return found if isinstance(found, str) else None


def _one_line(text: str) -> str:
    """As a heading or a cell of a table has it."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _body(report: Report, recipe: Recipe, written: Checkpoint, hub_name: str | None) -> str:
    bits = "" if report.bits_per_weight is None else f" in {report.bits_per_weight:.3g} bits a weight"
    command = shlex.join(["quantize", recipe.command, report.model, "OUT", *recipe.arguments()])
    found = "" if hub_name or report.model == "demo" else ", from where the folder of the original lies"
    name, fence = report.model.partition("@")[0].rpartition("/")[2], "~~~" if "```" in command else "```"
    return f"""# {_one_line(name)}{bits}, by {recipe.title}

{_loading(written)}

## What it is

| | original | this |
|---|---|---|
{_rows(report, written)}

Made by [{recipe.title}]({recipe.paper}) as `{DISTRIBUTION}` does it ({report.made_with}); this makes it again{found}:

{fence}
{command}
{fence}
"""


def _loading(written: Checkpoint) -> str:
    if "quantization_config" not in written.config:
        return PLAIN
    return "\n\n".join([PACKED, PYTHON if has_tokenizer(written.folder) else WITHOUT_TOKENIZER, VERIFY])


def _rows(report: Report, written: Checkpoint) -> str:
    rows = [("size of all tensors", size_text(report.bytes_before), size_text(report.bytes_after))]
    if report.bits_per_weight is not None:
        what = f"bits per weight of {report.quantised_weights:,} that are quantised, scales included"
        rows.append((what, "", f"{report.bits_per_weight:.3f}"))
    inputs = sorted({layer.activation_bits for layer in report.layers if layer.activation_bits is not None})
    if inputs:
        rows.append(("bits of the inputs of these linears", "", ", ".join(map(str, inputs))))
    if cache := written.config.get("quantization_config", {}).get("kv_cache"):
        rows.append(("bits of keys and of values in the KV cache", "", f"{cache['key_bits']}, {cache['value_bits']}"))
    if (found := report.positions) is not None:
        old, new = (value(each, ".3f") for each in found.perplexities)
        rows.append((f"perplexity of {found.rows} rows of {_one_line(found.text)}", old, new))
        kl = with_error(report.kl, report.kl_standard_error)
        rows.append(("KL divergence from the original on them, nats per token", "", kl))
        rows.append(("tokens of them with the same first choice", "", value(report.top1, ".1%")))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
