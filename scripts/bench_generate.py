"""Tokens per second of decoding, and peak memory: bf16 against the packed models, each in a process of its own.

python scripts/bench_generate.py demo            the demo model
python scripts/bench_generate.py 1b              a random Llama of 1.1 B weights, made on the first run
python scripts/bench_generate.py moe           8 blocks of Qwen3-30B-A3B, random: 128 experts, 8 for a token
python scripts/bench_generate.py qwen3.5-moe --only W4A8      few blocks of another family, see random_family.py
python scripts/bench_generate.py 1b --only W4A8 --only "bf16, oneDNN"      some rows
python scripts/bench_generate.py 1b --context 4000     decoding behind a long prompt
python scripts/bench_generate.py 1b --batch 16 --padded    sixteen rows at once, as many tokens of left padding in each
python scripts/bench_generate.py 1b --only W4A8 --only "llama.cpp, Q4_0"    beside llama.cpp: see llama_cpp_rows.py
"""

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import one_sentence
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FOLDER = Path(tempfile.gettempdir()) / "ptq-bench"
CORES = len(os.sched_getaffinity(0))
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("quarot", {}),
    "W4A8": ("quarot", {"activation_bits": 8}),
    "W4A4KV4": ("quarot", {"activation_bits": 4, "key_bits": 4, "value_bits": 4}),
    "W4A8E8": ("quarot", {"activation_bits": 8, "embedding_bits": 8}),
    "FP6": ("fp6", {}),
    "FP6, A8": ("fp6", {"activation_bits": 8}),
    "E8P, 2 bits": ("quip-sharp", {"bits": 2}),
    "E8P, 4 bits": ("quip-sharp", {"bits": 4}),
}
"""Method and options; rounded to nearest: speed does not depend on how codes were chosen. E8: embedding and head in 8
bits. Integers have groups of 128 (of 64 see `GROUPS_OF_64`), small floats a scale per row; E8P has inputs of 8 bits."""
PLAIN = {"bf16": "transformers", "bf16, oneDNN": "onednn", "bf16, ptq": "ptq"}
"""The original, as transformers runs it; with its linears prepacked by oneDNN; with what `ptq.fast.whole_model`
installs."""
LLAMA_CPP = {f"llama.cpp, {name}": name for name in ("BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "Q2_K")}
"""Rows of another program, measured where they are named."""
MADE = {
    "1b": (FOLDER / "llama-1b", ["--blocks=22", "--positions=8192"]),
    "moe": (FOLDER / "qwen3-moe", ["--blocks=8", "--positions=8192", "--experts=128", "--intermediate=768",
                                   "--head-dim=128", "--kv-heads=4"]),
}  # fmt: skip
"""Random models by what they are called here: folder and options of scripts/random_model.py. Besides there are those
of scripts/random_family.py."""
GROUPS_OF_64 = ("demo", "gpt-oss", "nemotron-nano")
"""Whose widths are no multiples of 128."""
READ_BYTES = 1 << 30


@app.command(hidden=True)
def measured(model: str, linears: str, context: int, new_tokens: int, batch: int, padded: int) -> None:
    """Load a model and print what it holds; then, for every line of stdin, decode greedily behind `context` tokens and
    print the seconds that it took. All as JSON, a line each."""
    import torch
    from random_packed_model import bytes_per_token
    from transformers import AutoModelForCausalLM

    from ptq.kv.attention import CACHE

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    nbytes = bytes_per_token(loaded)
    _change(loaded, linears)
    ids = torch.randint(loaded.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    seen = (torch.arange(context + new_tokens) >= torch.arange(batch)[:, None].clamp(max=context - 1)).long()

    def masked(length: int) -> dict[str, Any]:
        return {"attention_mask": seen[:, :length]} if padded else {}

    print(json.dumps({"bytes": nbytes}), flush=True)
    with torch.inference_mode():
        for _ in sys.stdin:
            times = [time.perf_counter()]
            out = loaded(ids, use_cache=True, logits_to_keep=1, **masked(context))
            times.append(time.perf_counter())
            for length in range(context + 1, context + new_tokens + 1):
                token = out.logits[:, -1:].float().argmax(-1)  # as `generate` does it
                out = loaded(token, **{CACHE: out[CACHE]}, use_cache=True, **masked(length))
                times.append(time.perf_counter())
            steps = [b - a for a, b in zip(times[1:], times[2:], strict=False)]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            found = {"prefill": times[1] - times[0], "token": median(steps), "peak": peak}
            print(json.dumps({**found, "cache": _cache_bytes(out[CACHE])}), flush=True)


def _cache_bytes(cache: Any) -> int:
    if hasattr(cache, "memory"):
        return cache.memory()
    return sum(sum(x.nbytes for x in _held(layer) if x is not None) for layer in cache.layers)


def _held(layer: Any) -> list[Any]:
    """The tensors of a layer of a cache of transformers, some of which keep states."""
    if hasattr(layer, "keys"):
        return [layer.keys, layer.values]
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def _change(model: Any, linears: str) -> None:
    """Give the plain linears of a model another way to multiply, see `PLAIN`."""
    import torch
    from torch import nn

    from ptq.fast import whole_model

    class Prepacked(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.bias = linear.bias
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    if linears == "ptq":
        whole_model.install(model)
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


def packed(model: str, name: str) -> Path:
    """The packed model of a recipe, made where it is not there yet."""
    out = FOLDER / f"{Path(model).name}-{name}"
    if not out.exists():
        import ptq
        from fp6.plan import Fp6Recipe
        from quarot.plan import QuarotRecipe
        from quip_sharp.plan import QuipSharpRecipe

        kind, changes = RECIPES[name]
        grouped = functools.partial(QuarotRecipe, group_size=64 if Path(model).name in GROUPS_OF_64 else 128)
        recipes = {"quarot": grouped, "fp6": Fp6Recipe, "quip-sharp": QuipSharpRecipe}
        recipe = recipes[kind](rounding="nearest", **changes)
        ptq.quantize(model, out, recipe, ptq.RunOptions(report=False))
    return out


def command(model: str, name: str) -> list[str]:
    """What Python runs to measure a row of the table."""
    from ptq.files import source

    if name in LLAMA_CPP:
        import llama_cpp_rows

        return [llama_cpp_rows.__file__, str(llama_cpp_rows.made(source.resolve(model), FOLDER, LLAMA_CPP[name]))]
    if name in PLAIN:
        return [__file__, "measured", str(source.resolve(model)), PLAIN[name]]
    return [__file__, "measured", str(packed(model, name)), "transformers"]


def measure(
    rows: dict[str, list[str]], context: int, new_tokens: int, rounds: int, threads: int, batch: int, padded: bool
) -> Iterator[str]:
    """Rows of the table, by the commands that measure them, in turns: each round reads memory, then decodes, row by
    row."""
    import torch

    torch.set_num_threads(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    numbers = [str(context), str(new_tokens), str(batch), str(int(padded))]
    started = {
        name: subprocess.Popen(
            [sys.executable, *command, *numbers],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        for name, command in rows.items()
    }
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)  # only now: a process begins with the peak of its parent
    nbytes = {name: json.loads(_line(process))["bytes"] for name, process in started.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, process in started.items():
            bandwidth = _read(data)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            result = json.loads(_line(process))
            result |= {"bandwidth": bandwidth, "share": nbytes[name] / result["token"] / bandwidth}
            if number:  # the first round warms up
                found[name].append(result)
    for process in started.values():
        process.communicate()

    def middle(name: str, key: str) -> float:
        return median(result[key] for result in found[name])

    first = next(iter(rows))
    for name in rows:
        faster = median(a["token"] / b["token"] for a, b in zip(found[first], found[name], strict=True))
        speed = batch / middle(name, "token")
        yield (f"| {name} | {speed:.1f} | {faster:.2f} | {100 * middle(name, 'share'):.0f} % of "
               f"{middle(name, 'bandwidth') / 1e9:.0f} GB/s / {nbytes[name] / 1e6:.0f} MB | "
               f"{middle(name, 'prefill'):.2f} | {middle(name, 'cache') / 1e6:.2f} | "
               f"{middle(name, 'peak') / 1e6:.0f} |")  # fmt: skip


def _line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a measured process ended with {process.wait()}")
    return line


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="demo, 1b, moe, a name of random_family.py, or a folder.")],
    context: Annotated[int, typer.Option(help="Tokens before those that are timed.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are timed.")] = 32,
    rounds: Annotated[int, typer.Option(help="Medians are taken over so many, after one to warm up.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = CORES,
    batch: Annotated[int, typer.Option(help="Rows that are decoded at once; tokens/s are those of all.")] = 1,
    padded: Annotated[bool, typer.Option("--padded", help="Each row has one token of left padding more.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A row to measure; all where none is named.")] = None,
) -> None:
    """One row per recipe, in Markdown. Rows are measured in turns and compared with the first."""
    from random_family import SHAPES

    if model in MADE or model in SHAPES:
        folder, sizes = MADE.get(model, (FOLDER / model, []))
        given = [Path(__file__).with_name("random_model.py"), folder, *sizes]
        if model in SHAPES:
            given = [Path(__file__).with_name("random_family.py"), model, folder]
        if not folder.exists():
            subprocess.run([sys.executable, *given], check=True)
        model = str(folder)
    from bench_case import can_prepack

    usual = [name for name in (*PLAIN, *RECIPES) if PLAIN.get(name) != "onednn" or can_prepack()]
    known = (*PLAIN, *RECIPES, *LLAMA_CPP)
    names = [name for name in known if name in only] if only else usual
    if unknown := set(only or ()) - set(names):
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows = {name: command(model, name) for name in names}
    print(f"| {threads} threads, {context} tokens before | tokens/s | times {names[0]} | "
          "of bandwidth / bytes per token | prefill, s | cache, MB | peak, MB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for line in measure(rows, context, new_tokens, rounds, threads, batch, padded):
        print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in ("measured", "main", "--help"):
        sys.argv.insert(1, "main")
    one_sentence.run(app)
