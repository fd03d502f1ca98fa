"""Tokens per second of `generate`, and peak memory: bf16 against the packed models, each in a process of its own.

python scripts/bench_generate.py demo            the demo model
python scripts/bench_generate.py 1b              a random Llama of 1.1 B weights, made on the first run
python scripts/bench_generate.py 1b --context 4000     decoding behind a long prompt
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FOLDER = Path(tempfile.gettempdir()) / "ptq-bench"
CORES = len(os.sched_getaffinity(0))
RECIPES: dict[str, dict[str, Any]] = {
    "W4A16": {},
    "W4A8": {"activation_bits": 8},
    "W4A4KV4": {"activation_bits": 4, "key_bits": 4, "value_bits": 4},
}
"""Rounded to nearest: speed does not depend on how codes were chosen."""
PLAIN = {"bf16": "transformers", "bf16, oneDNN": "onednn", "bf16, ptq": "ptq"}
"""The original, as transformers runs it; with its linears prepacked by oneDNN; with what `ptq.fast_decode` installs."""
READ_BYTES = 1 << 30


@app.command(hidden=True)
def measured(model: str, context: int, new_tokens: int, rounds: int, linears: str) -> None:
    """Load a model, decode greedily behind `context` tokens, and print what it took as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    import ptq  # noqa: F401

    started = time.perf_counter()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    load = time.perf_counter() - started
    read = sum(p.nbytes for name, p in loaded.named_parameters() if "embed_tokens" not in name)
    _change(loaded, linears)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.config.vocab_size, (1, context), generator=generator)
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    seconds, prefill, reads = [], [], []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            reads.append(_read(data))
            times = [time.perf_counter()]
            out = loaded(ids, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter())
            for _ in range(new_tokens):
                token = out.logits[:, -1:].argmax(-1)
                out = loaded(token, past_key_values=out.past_key_values, use_cache=True)
                times.append(time.perf_counter())
            prefill.append(times[1] - times[0])
            seconds.append(median(b - a for a, b in zip(times[1:], times[2:], strict=False)))
    cache = out.past_key_values
    nbytes = cache.memory() if hasattr(cache, "memory") else sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - READ_BYTES
    share = median(read / token / bandwidth for token, bandwidth in zip(seconds[1:], reads[1:], strict=True))
    print(json.dumps({
        "load": load, "token": median(seconds[1:]), "prefill": median(prefill[1:]), "bytes": read, "cache": nbytes,
        "bandwidth": median(reads[1:]), "share": share, "peak": peak,
    }))  # fmt: skip


def _change(model: Any, linears: str) -> None:
    """Give the plain linears of a model another way to multiply, see `PLAIN`."""
    import torch
    from torch import nn

    from ptq import fast_decode

    class Prepacked(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.bias = linear.bias
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    if linears == "ptq":
        fast_decode.install(model)
    if linears == "onednn":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, Prepacked(child))


def _read(data: Any) -> float:
    """Bytes per second of a plain read on all threads: the faster of two."""
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - started))
    return best


def packed(model: str, name: str, changes: dict[str, Any]) -> Path:
    """The packed model of a recipe, made where it is not there yet."""
    out = FOLDER / f"{Path(model).name}-{name}"
    if not out.exists():
        import ptq
        from quarot.plan import QuarotRecipe

        group = 64 if model == "demo" else 128
        recipe = QuarotRecipe(rounding="nearest", group_size=group, **changes)
        ptq.quantize(model, out, recipe, ptq.RunOptions(report=False))
    return out


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="demo, 1b, or a folder.")],
    context: Annotated[int, typer.Option(help="Tokens before those that are timed.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are timed.")] = 64,
    rounds: Annotated[int, typer.Option(help="Medians are taken over so many.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = CORES,
) -> None:
    """One row per recipe, in Markdown."""
    if model == "1b":
        folder = FOLDER / "llama-1b"
        if not folder.exists():
            script = Path(__file__).with_name("random_model.py")
            sizes = ["--blocks=22", "--positions=8192"]
            subprocess.run([sys.executable, script, folder, *sizes], check=True)
        model = str(folder)
    from ptq import source

    folders = {name: (source.resolve(model), linears) for name, linears in PLAIN.items()}
    folders |= {name: (packed(model, name, recipe), "transformers") for name, recipe in RECIPES.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    print(f"| {threads} threads, {context} tokens before | tokens/s | times bf16 | of bandwidth / bytes per token | "
          "prefill, s | cache, MB | peak, MB |\n|---|---|---|---|---|---|---|")  # fmt: skip
    base = None
    for name, (folder, linears) in folders.items():
        arguments = ["measured", str(folder), str(context), str(new_tokens), str(rounds), linears]
        done = subprocess.run(
            [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, check=True
        )
        found = json.loads(done.stdout)
        base = base or found["token"]
        print(f"| {name} | {1 / found['token']:.1f} | {base / found['token']:.2f} | {100 * found['share']:.0f} % of "
              f"{found['bandwidth'] / 1e9:.0f} GB/s / {found['bytes'] / 1e6:.0f} MB | {found['prefill']:.2f} | "
              f"{found['cache'] / 1e6:.2f} | {found['peak'] / 1e6:.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in ("measured", "main", "--help"):
        sys.argv.insert(1, "main")
    app()
