"""The end of quickstart.sh: load a packed demo checkpoint like any other model, generate, measure, print one table.

python scripts/quickstart.py CHECKPOINT
"""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import ptq  # noqa: F401  (lets from_pretrained load packed checkpoints)
from ptq.checkpoint import Checkpoint
from ptq.contents import summary
from ptq.demo import demo_path
from ptq.evaluate import compare, context_for, tokens_per_second, windows_from_text

PROMPT = "def __init__(self, "


def main(checkpoint: str) -> None:
    folders = {"original (bf16)": Path(demo_path()), "QuaRot INT4": Path(checkpoint)}
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders.values()]
    original, packed = models
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    written = packed.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(f"\nThe packed model goes on from {PROMPT!r}:\n\n{tokenizer.decode(written[0], skip_special_tokens=True)}\n")

    windows = windows_from_text(tokenizer, (demo_path() / "heldout.txt").read_text(), context_for(original.config))
    windows = type(windows)(windows.tokens[:64], windows.found, windows.tokenizer, windows.bos)
    agreement = compare(packed, original, windows)
    table = Table("", "MB", "bits per weight", "perplexity", "tokens/s", title="demo, on its held-out text")
    rows = zip(folders.items(), models, (agreement.original, agreement.model), strict=True)
    for (name, folder), model, measured in rows:
        contents = summary(Checkpoint.open(folder))
        bits = "16" if contents.bits_per_weight is None else f"{contents.bits_per_weight:.2f}"
        speed = tokens_per_second(model, prompt["input_ids"][0])
        table.add_row(name, f"{contents.nbytes / 1e6:.2f}", bits, f"{measured.perplexity:.3f}", f"{speed:.0f}")
    Console().print(table)
    print(
        f"KL divergence from the original: {agreement.kl:.4f} nats per token; same first choice: {agreement.top1:.1%}"
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1])
