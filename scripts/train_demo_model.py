"""Train the `demo` model: a small Llama on the sources of Python's own standard library, which every machine has.

    python scripts/train_demo_model.py [OUT] [--minutes 25] [--threads 1]       # after scripts/setup.sh test

writes a Hugging Face folder (bf16 safetensors, tokenizer), `heldout.txt`, `calibration.txt`, `train_log.jsonl`, the
loss curve and a README. The split, the initialisation and the order of the batches are seeded. The result still differs
between machines and runs: the learning rate follows the wall clock (unless --steps is given), the standard library
follows the Python version, and the order of float sums follows the processor.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sysconfig
import time
import zlib
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import one_sentence
import tokenizers
import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ptq.commands.evaluate import perplexity
from ptq.commands.windows import windows_from_text

DEMO = Path(__file__).resolve().parent.parent / "ptq" / "demo"
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # special tokens come first
LICENCE = "PYTHON-LICENSE.txt"
LOG = "train_log.jsonl"
PROMPT = "class Stack:\n    def __init__(self, "
VOCABULARY = 2048
CONTEXT = 512
# Tests, vendored code and generated tables (code pages, help topics, build settings) teach little about Python.
EXCLUDED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
CALIBRATION_BYTES = 400_000
BATCH_TOKENS = 2048
WARM_UP_STEPS = 200
LOG_STEPS = 100
SAVE_STEPS = 1000
# The first part trains on half windows, which is faster per token; the rest teaches the second half of the context.
SHORT_PART = 0.7

README = """# demo

A small Llama that has read Python's own standard library. It ships with the package, so that every command of the
toolkit works offline: `quantize quarot demo OUT`. It is here to be quantised and measured, not to write programs.

| | |
|---|---|
| shape | 4 layers, hidden 256, intermediate 704, 4 heads and 2 KV heads of 64, context 512, vocabulary 2048, tied |
| parameters | {parameters:,}, stored in bf16 |
| training | {tokens:,} tokens in {steps:,} steps, {seconds:.0f} s on {settings[threads]} processor thread(s) |
| last training loss | {training_loss:.3f} nats per token |
| **held-out perplexity** | **{perplexity:.2f} ± {standard_error:.2f}** ({windows} windows of {context}, float32) |

![loss](loss.png)

- `heldout.txt`: modules that the model has never seen (one top-level module in twenty, by a checksum of its name).
- `calibration.txt`: a piece of every module that it was trained on, for calibration.
- `train_log.jsonl`, `figures.json`: the course of the training, and the numbers above. The held-out loss drops where
  the training changes from half windows to whole ones: it is measured on whole ones throughout.

```
python scripts/train_demo_model.py --minutes {settings[minutes]:g}     # makes this folder anew
quantize perplexity demo                            # measures it
```

Split, initial weights and batches are seeded. Another training still gives another model: the learning rate follows
the wall clock (`--steps` turns that off), the text follows the Python version (here {python}, PyTorch {torch}), and
the order of float sums follows the processor.

It continues a prompt greedily like this:

```python
{sample}
```

Licence of the texts: they come from the standard library of Python {python}, copyright (c) 2001 and later Python
Software Foundation; all rights reserved; used under the PSF licence agreement in `PYTHON-LICENSE.txt`. Some modules
name further holders in their headers. The weights were trained on these texts alone.
"""

console = Console(stderr=True)


@dataclass(frozen=True)
class Corpus:
    """Sources as (path inside the standard library, text), split by top-level module so that packages stay whole."""

    training: tuple[tuple[str, str], ...]
    heldout: tuple[tuple[str, str], ...]


def is_heldout(top_level_module: str) -> bool:
    """One module in twenty, by a checksum of its name: the same on every machine and Python version."""
    return zlib.crc32(top_level_module.encode()) % 20 == 0


def read_corpus(stdlib: Path) -> Corpus:
    training, heldout = [], []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if EXCLUDED.intersection(parts) or parts[0].startswith(EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            console.print(f"skipped {path}: not UTF-8")
            continue
        side = heldout if is_heldout(parts[0].removesuffix(".py")) else training
        side.append(("/".join(parts), text))
    return Corpus(tuple(training), tuple(heldout))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; it adds no token of its own around a text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for text in encoded for token in [END_OF_TEXT_ID, *text]], dtype=torch.long)


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    # On a CPU, backwards, 1.2 to 1.4 times the speed of the default "sdpa" at these lengths; it is not stored.
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def batches(stream: Tensor, seed: int) -> Generator[Tensor, bool, None]:
    """Random windows of the stream, [rows, length]; send True for whole windows, False for half ones."""
    generator = torch.Generator().manual_seed(seed)
    whole = yield stream[:0]
    while True:
        length = CONTEXT if whole else CONTEXT // 2
        starts = torch.randint(len(stream) - length, (BATCH_TOKENS // length,), generator=generator)
        whole = yield torch.stack([stream[start : start + length] for start in starts.tolist()])


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * peak * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: Tensor, windows: int) -> float:
    """Mean nats per token over the first whole windows of the held-out stream; a running estimate for the log."""
    model.eval()
    rows = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:windows]
    losses = []
    for row in rows.split(8):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(input_ids=row, labels=row, use_cache=False).loss.item() * len(row))
    model.train()
    return sum(losses) / len(rows)


def optimizer_for(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    copy.save_pretrained(folder)


@dataclass(frozen=True)
class Settings:
    """What the training was asked to do; written to figures.json."""

    minutes: float
    steps: int | None
    threads: int
    peak: float
    seed: int


def train(model: LlamaForCausalLM, training: Tensor, heldout: Tensor, folder: Path, settings: Settings) -> None:
    optimizer = optimizer_for(model, settings.peak)
    source = batches(training, settings.seed)
    next(source)
    model.train()
    started, step, tokens, recent = time.perf_counter(), 0, 0, []
    with (folder / LOG).open("w") as log:
        while True:
            elapsed = time.perf_counter() - started
            progress = step / settings.steps if settings.steps else elapsed / (60.0 * settings.minutes)
            done = progress >= 1.0
            if step % LOG_STEPS == 0 or done:
                row = {
                    "step": step,
                    "tokens": tokens,
                    "seconds": round(elapsed, 1),
                    "loss": round(sum(recent) / len(recent), 4) if recent else None,
                    "heldout_loss": round(heldout_loss(model, heldout, 64), 4),
                    "tokens_per_second": round(tokens / elapsed) if step else None,
                }
                recent = []
                print(json.dumps(row), file=log, flush=True)
                console.print_json(json.dumps(row), indent=None)
            if done or step % SAVE_STEPS == 0:
                save(model, folder)
            if done:
                return
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, progress, settings.peak)
            batch = source.send(progress >= SHORT_PART)
            recent.append(train_step(model, optimizer, batch))
            step, tokens = step + 1, tokens + batch.numel()


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def describe(folder: Path, settings: Settings) -> None:
    """Measure the stored model as users will, and write figures.json, the loss curve and the README."""
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = windows_from_text(tokenizer, (folder / "heldout.txt").read_text(encoding="utf-8"), CONTEXT)
    measured = perplexity(model, windows)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    sample = tokenizer.decode(model.generate(**prompt, max_new_tokens=96, do_sample=False)[0])
    figures = {
        "perplexity": measured.perplexity,
        "standard_error": measured.standard_error,
        "windows": measured.windows,
        "context": measured.context,
        "heldout_loss": measured.loss,
        "training_loss": rows[-1]["loss"],
        "parameters": model.num_parameters(),
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "seconds": rows[-1]["seconds"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "settings": asdict(settings),
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw_losses(rows, folder / "loss.png")
    (folder / "README.md").write_text(README.format(**figures, sample=sample), encoding="utf-8")


def draw_losses(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    for key, label in (("loss", "training"), ("heldout_loss", "held out")):
        points = [(row["tokens"] / 1e6, row[key]) for row in rows if row[key] is not None]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="million tokens", ylabel="nats per token", title="demo model: loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def write_texts(corpus: Corpus, folder: Path) -> None:
    version = platform.python_version()
    header = (
        f"# From the standard library of Python {version}, copyright (c) 2001 and later Python Software Foundation;\n"
        f"# all rights reserved. Used under the PSF licence, see {LICENCE} beside this file.\n\n"
    )
    heldout = "\n".join(text for _, text in corpus.heldout)
    (folder / "heldout.txt").write_text(header + heldout, encoding="utf-8")
    # A few whole files would be a narrow sample: take an equal share from the start of every training file's second
    # quarter instead, which also passes over the licence headers.
    share = CALIBRATION_BYTES // len(corpus.training)
    pieces = [text[len(text) // 4 :][:share] for _, text in corpus.training]
    (folder / "calibration.txt").write_text(header + "\n".join(pieces), encoding="utf-8")


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")] = DEMO,
    minutes: Annotated[float, typer.Option(help="Wall-clock budget of the training.")] = 25.0,
    steps: Annotated[int | None, typer.Option(help="Train so many steps instead of by the clock.")] = None,
    threads: Annotated[int, typer.Option(help="Processor threads.")] = 1,
    peak: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.")] = 0,
    describe_only: Annotated[bool, typer.Option(help="Only measure the model in OUT and write its README.")] = False,
) -> None:
    """Train the demo model on the standard library of the Python that runs this script."""
    settings = Settings(minutes, steps, threads, peak, seed)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if describe_only:
        return describe(out, settings)
    stdlib = Path(sysconfig.get_path("stdlib"))
    corpus = read_corpus(stdlib)
    if not (stdlib / "LICENSE.txt").is_file():
        raise typer.BadParameter(f"{stdlib} has no LICENSE.txt, without which its texts may not be passed on")
    out.mkdir(parents=True, exist_ok=True)
    write_texts(corpus, out)
    shutil.copyfile(stdlib / "LICENSE.txt", out / LICENCE)
    tokenizer = train_tokenizer([text for _, text in corpus.training])
    tokenizer.save_pretrained(out)
    training = encode(tokenizer, [text for _, text in corpus.training])
    heldout = encode(tokenizer, [text for _, text in corpus.heldout])
    console.print(f"{len(training)} training tokens, {len(heldout)} held-out tokens")
    train(new_model(), training, heldout, out, settings)
    describe(out, settings)


if __name__ == "__main__":
    one_sentence.run(main)
