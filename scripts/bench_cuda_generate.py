"""Tokens per second of decoding a random Llama on a GPU: bf16 against the packed formats, a CUDA graph per token.

python scripts/bench_cuda_generate.py --output gpu_check/generate        generate.json and generate.md
python scripts/bench_cuda_generate.py --output gpu_check/generate --only "FP6 e2m3 W6A16" --compiled
python scripts/bench_cuda_generate.py --output generate --device cpu --shape tiny      only shows that it works

Nothing is downloaded, quantised or stored: each model is made on the device, with random codes in exactly the layers
that its recipe plans, and freed before the next one. Row by row: the cache is filled with a prompt, a few tokens warm
up, then one step (forward, greedy choice, position) is captured and replayed; its time is the median distance of the
ends of two steps that follow each other. The last column is a check: the logits of the last step against a forward of
all tokens at once without a cache, |a - b| / |b|. A row that fails says so, and the exit code is 1.

The limit is what the copy bandwidth allows: bytes per token are all weights but the embedding; the cache is left out.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import bench_cuda
import one_sentence
import random_packed_model as packed
import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from fp6.plan import Fp6Recipe
from ptq.errors import InputError
from ptq.kv.attention import CACHE
from ptq.ops import native
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

VARIANTS: dict[str, Recipe | None] = {
    "bf16": None,
    "INT4 W4A16 g128": QuarotRecipe(rounding="nearest", group_size=128),
    "FP6 e2m3 W6A16": Fp6Recipe(),
    "E8P W2A8": QuipSharpRecipe(rounding="nearest"),
    "INT4 W4A16 g128, 4-bit cache": QuarotRecipe(rounding="nearest", group_size=128, key_bits=4, value_bits=4),
}
"""The layers as these recipes plan them, with their Hadamard transforms."""
PROMPT, WARM_UP = 32, 3
MOST_DIFFERENCE = 0.15
"""Of the check. Logits that have nothing to do with each other differ by 1.4; rounding in 32 narrow layers gave at most
0.03 on a CPU."""


@dataclass(frozen=True)
class Row:
    variant: str
    step: str
    """How a step is run."""
    tokens_per_second: float = 0.0
    milliseconds: float = 0.0
    bytes_per_token: int = 0
    of_copy: float = 0.0
    """Tokens per second, as a share of what the copy bandwidth allows."""
    difference: float = 0.0
    error: str | None = None


# --- decoding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What one step changes, always in the same memory."""

    cache: Any
    length: int
    token: Tensor
    """[1, 1], the one that is fed next."""
    position: Tensor
    """[1, 1], its."""


def logits_of(model: PreTrainedModel, state: State, ids: Tensor, positions: Tensor) -> Tensor:
    """A forward that appends to the cache. The mask is made here: transformers makes none for one token."""
    mask = torch.arange(state.length, device=ids.device) <= positions[:, None, :, None]
    return model(ids, position_ids=positions, attention_mask=mask, **{CACHE: state.cache}).logits


def started(model: PreTrainedModel, prompt: Tensor, length: int) -> State:
    """The state behind a prompt."""
    token, position = prompt[:, :1].clone(), torch.full_like(prompt[:, :1], prompt.shape[1])
    state = State(packed.cache_of(model, length), length, token, position)
    positions = torch.arange(prompt.shape[1], device=prompt.device)[None]
    token.copy_(greedy(logits_of(model, state, prompt, positions)))
    return state


def greedy(logits: Tensor) -> Tensor:
    """[1, 1], the choice of the last token: torch's argmax over a whole vocabulary would run on one multiprocessor."""
    last = logits[:, -1]
    parts = last.unflatten(-1, (math.gcd(last.shape[-1], 256), -1))
    top, at = parts.max(-1)
    best = top.argmax(-1, keepdim=True)
    return best * parts.shape[-1] + at.gather(-1, best)


def step_of(model: PreTrainedModel, state: State, compiled: bool) -> Callable[[], Tensor]:
    """One decoded token; gives its logits."""

    def step() -> Tensor:
        logits = logits_of(model, state, state.token, state.position)
        state.token.copy_(greedy(logits))
        state.position.add_(1)
        return logits

    if not compiled:
        return step
    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True)


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step as a CUDA graph; every replay gives the same tensor."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def seconds_on_gpu(step: Callable[[], Tensor], tokens: int, fed: Callable[[], None]) -> float:
    """Median time between the ends of steps that are queued one after the other."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(tokens + 1)]
    ends[0].record(torch.cuda.current_stream())
    for end in ends[1:]:
        fed()
        step()
        end.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(ends, ends[1:], strict=False)) / 1e3


def seconds_on_cpu(step: Callable[[], Tensor], tokens: int, fed: Callable[[], None]) -> float:
    times = []
    for _ in range(tokens):
        fed()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(model: PreTrainedModel, tokens: int, compiled: bool) -> tuple[float, float]:
    """Seconds per token, and the difference of the check."""
    device = model.device
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), device=device)
    needed = PROMPT + WARM_UP + tokens + 1
    state = started(model, prompt, -(-needed // 64) * 64)  # attention likes a mask of such a width
    step, history = step_of(model, state, compiled), [prompt]

    def fed() -> None:
        history.append(state.token.clone())

    graphed = device.type == "cuda"
    stream = torch.cuda.Stream() if graphed else None  # a graph must be warmed up on a stream of its own
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            fed()
            step()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        step = captured(step)
    seconds = (seconds_on_gpu if graphed else seconds_on_cpu)(step, tokens, fed)
    fed()
    found = step()[:, -1].float()
    wanted = model(torch.cat(history, 1), use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return seconds, float((found - wanted).norm() / wanted.norm())


def measure_variant(variant: str, shape: str, device: torch.device, tokens: int, compiled: bool, copy: float) -> Row:
    """Build, measure, free. `copy`: GB/s."""
    how = ("compiled" if compiled else "eager") + (", CUDA graph" if device.type == "cuda" else ", no graph")
    try:
        model = packed.build(VARIANTS[variant], packed.config_of(shape), device, torch.bfloat16)
        seconds, difference = measure(model, tokens, compiled)
    except (RuntimeError, InputError) as error:  # the next one may work; the exit code tells
        return Row(variant, how, error=f"{type(error).__name__}: {error}"[:2000])
    nbytes = packed.bytes_per_token(model)
    wrong = None if difference <= MOST_DIFFERENCE else f"the steps give other logits than a forward: {difference:.2f}"
    return Row(variant, how, 1 / seconds, 1e3 * seconds, nbytes, nbytes / seconds / copy / 1e9, difference, wrong)


# --- the table ------------------------------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, read and write counted."""
    if device.type == "cuda":
        return bench_cuda.copy_bandwidth()
    source = torch.ones(1 << 25, dtype=torch.uint8)
    target, times = torch.zeros_like(source), []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() / statistics.median(times) / 1e9


def markdown(about: dict[str, str], shape: str, copy: float, rows: list[Row]) -> str:
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    lines = [
        f"{head}; copy {copy:.0f} GB/s; Llama of shape {shape}, one sequence, {PROMPT} tokens before",
        "",
        "| | step | tokens/s | ms | GB per token | of copy bandwidth / bytes | against a forward |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.error is not None:
            lines.append(f"| {row.variant} | {row.step} | **failed**: {row.error.splitlines()[0]} | | | | |")
            continue
        lines.append(
            f"| {row.variant} | {row.step} | {row.tokens_per_second:.1f} | {row.milliseconds:.2f} "
            f"| {row.bytes_per_token / 1e9:.3f} | {row.of_copy:.0%} | {row.difference:.3f} |"
        )
    return "\n".join(lines) + "\n"


def measure_all(
    variants: list[str], output: Path, device: torch.device, shape: str, tokens: int, compiled: bool
) -> list[Row]:
    """The rows, printed and written."""
    graphed = device.type == "cuda"
    copy = copy_bandwidth(device)
    about = bench_cuda.machine() if graphed else {"device": device.type, "torch": torch.__version__}
    rows: list[Row] = []
    for variant in variants:
        rows.append(measure_variant(variant, shape, device, tokens, compiled, copy))
        gc.collect()
        if graphed:
            torch.cuda.empty_cache()
        record = {"machine": about, "shape": shape, "copy": copy, "rows": [asdict(row) for row in rows]}
        output.with_suffix(".json").write_text(json.dumps(record, indent=1))  # after each: a later one may hang
        output.with_suffix(".md").write_text(markdown(about, shape, copy, rows))
    print(markdown(about, shape, copy, rows))
    return rows


def main(
    output: Annotated[Path, typer.Option(help="Where to write: this name with .json and .md.")],
    device: Annotated[str, typer.Option(help="cuda, or cpu: without graphs, to see that it works.")] = "cuda",
    shape: Annotated[str, typer.Option(help=f"One of: {', '.join(packed.SHAPES)}.")] = "8b",
    tokens: Annotated[int, typer.Option(help="Tokens that are timed.", min=2)] = 32,
    compiled: Annotated[bool, typer.Option(help="Compile the step first: torch.compile(fullgraph=True).")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A row to measure; all where none is named.")] = None,
) -> None:
    """Measure row by row, print the table and write it. Exit code 1 where a row failed."""
    if shape not in packed.SHAPES or not set(only or ()) <= set(VARIANTS):
        raise SystemExit(f"bench_cuda_generate: shapes are {', '.join(packed.SHAPES)}; rows are {', '.join(VARIANTS)}")
    where = torch.device(device)
    if where.type == "cuda" and not native.has_cuda():
        raise SystemExit("bench_cuda_generate: no CUDA device, or the kernels are not built: run scripts/gpu_check.sh")
    torch.manual_seed(0)
    with torch.no_grad():
        rows = measure_all(
            [name for name in VARIANTS if not only or name in only], output, where, shape, tokens, compiled
        )
    failed = [row for row in rows if row.error is not None]
    for row in failed:
        print(f"{row.variant}: {row.error}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    one_sentence.run(main)
