"""The end of quickstart.sh: load packed demo checkpoints like any other model, generate, measure, print one table.

python scripts/quickstart.py CHECKPOINT...
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import one_sentence
import torch
import typer
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

import ptq  # noqa: F401  (lets from_pretrained load packed checkpoints)
from ptq.commands.evaluate import compare
from ptq.commands.windows import context_for, windows_from_text
from ptq.demo import demo_path
from ptq.files.checkpoint import Checkpoint
from ptq.reporting.contents import summary

PROMPT = "def __init__(self, "


def main(checkpoints: Annotated[list[str], typer.Argument(help="Packed checkpoints of `demo`.")]) -> None:
    """Load packed demo checkpoints, generate with the last one, measure all, print one table."""
    torch.set_grad_enabled(False)
    disable_progress_bar()
    for checkpoint in checkpoints:
        summary(Checkpoint.open(checkpoint))  # refused before anything is measured
    original: Any = AutoModelForCausalLM.from_pretrained(demo_path())
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[0])
    prompt = tokenizer(PROMPT, return_tensors="pt")
    windows = windows_from_text(tokenizer, (demo_path() / "heldout.txt").read_text(), context_for(original.config))
    windows = replace(windows, tokens=windows.tokens[:64])
    table = Table("", "MB", "bits per weight", "perplexity", "KL, nats", "tokens/s", title="demo, on its held-out text")

    def add(name: str, folder: Path, model: Any, perplexity: float, kl: str) -> None:
        contents = summary(Checkpoint.open(folder))
        bits = "16" if contents.bits_per_weight is None else f"{contents.bits_per_weight:.2f}"
        speed = max(tokens_per_second(model, prompt["input_ids"][0]) for _ in range(3))  # other programs slow it down
        table.add_row(name, f"{contents.nbytes / 1e6:.2f}", bits, f"{perplexity:.3f}", kl, f"{speed:.0f}")

    for checkpoint in checkpoints:
        packed: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
        agreement = compare(packed, original, windows)
        if checkpoint == checkpoints[0]:
            add("original (bf16)", Path(demo_path()), original, agreement.original.perplexity, "")
        name, perplexity = Path(checkpoint).name, agreement.model.perplexity
        add(name, Path(checkpoint), packed, perplexity, f"{agreement.kl:.4f}")
    written = packed.generate(**prompt, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    print(f"\nThe model of the last row goes on from {PROMPT!r}:\n\n{text}\n")
    Console().print(table)


def tokens_per_second(model: Any, prompt: Int[Tensor, " t"], *, new_tokens: int = 64, runs: int = 3) -> float:
    """New tokens per second of greedy `generate` on one prompt, reading the prompt included: median after a warm-up."""
    greedy = GenerationConfig(
        do_sample=False, num_beams=1, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0
    )
    batch, seconds = prompt[None], list[float]()
    for _ in range(runs + 1):
        started = time.perf_counter()
        out = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=greedy)
        seconds.append(time.perf_counter() - started)
        assert out.shape[1] == len(prompt) + new_tokens
    return new_tokens / statistics.median(seconds[1:])


if __name__ == "__main__":
    one_sentence.run(main)
