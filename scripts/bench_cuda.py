"""How fast the CUDA kernels are on this GPU, next to its copy bandwidth and to cuBLAS in bfloat16, all in one run.

python scripts/bench_cuda.py --output gpu_check        gpu_check.json and gpu_check.md

Each case is a CUDA graph that goes once round a pool of weights (or vectors) that no cache holds; its time is the
median of many replays, divided by the size of the pool. GB/s counts what must be moved: packed weights with their
scales, tokens and results, each once; for transforms what is read and what is written. The limit is a large copy.
"""

import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import ptq  # noqa: F401 (the ops)
from ptq import hadamard, native
from ptq.activations import Activation
from quarot.integer import IntegerFormat

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672))  # n, k
ROWS = (1, 4, 16, 64, 256)
VECTORS = (4096, 8192, 11008, 14336, 28672)
POOL = 1 << 29  # bytes, several times any L2


@dataclass(frozen=True)
class Line:
    op: str
    shape: str
    rows: int
    microseconds: float
    gb_per_second: float
    of_copy: float
    """Share of the copy bandwidth."""
    faster_than_cublas: float | None
    """Times faster than `torch.nn.functional.linear` in bfloat16 on the same shape."""


def microseconds(calls: list[Callable[[], Any]], seconds: float = 0.15) -> float:
    """Median time of one call, over replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds * 1e3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]) * 1e3 / len(calls)


def copies_for(size: int) -> int:
    return min(max(2, -(-POOL // max(size, 1))), 128)


def copy_bandwidth() -> float:
    """GB/s of a copy of 1 GiB, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds([lambda: target.copy_(source)] * 2) / 1e3


def random_weight(form: IntegerFormat, n: int, k: int) -> dict[str, Tensor]:
    """Fragments of random codes, made on the GPU."""
    groups = form.codebook.groups(k)
    codes = torch.randint(0, 256, (n, k * form.bits // 8), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, groups, device="cuda") * 0.01).bfloat16().view(torch.int16)
    return form.prepack({"codes": codes, "scale": scale}, "cuda")


def linear_lines(copy: float) -> list[Line]:
    lines = []
    for n, k in SHAPES:
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * n * k))]
        forms = {f"W4A16 g{size or 'row'}": IntegerFormat(4, size, True) for size in (128, 0)}
        pools = {name: [random_weight(f, n, k) for _ in range(copies_for(n * k // 2))] for name, f in forms.items()}
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            reference = microseconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense])
            moved = 2 * rows * (n + k)
            base = moved + 2 * n * k
            shape = f"{n} x {k}"
            lines.append(
                Line("cuBLAS bf16", shape, rows, reference, base / reference / 1e3, base / reference / 1e3 / copy, 1.0)
            )
            for name, form in forms.items():
                size = sum(part.numel() * part.element_size() for part in pools[name][0].values()) + moved
                q, scale = Activation(8, 1.0).quantize(x)
                calls: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
                    name: lambda w, x=x, f=form: f.linear(x, w),
                    name.replace("A16", "A8"): lambda w, q=q, s=scale, f=form: f.linear_quantized(
                        q, s, w, None, torch.bfloat16
                    ),
                }
                for title, call in calls.items():
                    time = microseconds([lambda w=w, call=call: call(w) for w in pools[name]])
                    rate = size / time / 1e3
                    lines.append(Line(title, shape, rows, time, rate, rate / copy, reference / time))
    return lines


def transform_lines(copy: float) -> list[Line]:
    lines = []
    activation = Activation(8, 1.0)
    for k in VECTORS:
        construction = hadamard.construction(k)
        for rows in (1, 256, 2048):
            pool = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * rows * k))]
            calls: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
                "hadamard": (4, lambda x, c=construction: hadamard.apply(x, None, c)),
                "hadamard_quantize": (3, lambda x, c=construction: activation.quantize(x, c)),
                "quantize_tokens": (3, activation.quantize),
            }
            for title, (size, call) in calls.items():
                time = microseconds([lambda x=x, call=call: call(x) for x in pool])
                rate = size * rows * k / time / 1e3
                lines.append(Line(title, str(k), rows, time, rate, rate / copy, None))
    return lines


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver, "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def markdown(about: dict[str, str], copy: float, lines: list[Line]) -> str:
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    rows = [
        f"{head}; copy {copy:.0f} GB/s",
        "",
        "| op | shape | rows | µs | GB/s | of copy | x cuBLAS |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        faster = "" if line.faster_than_cublas is None else f"{line.faster_than_cublas:.2f}"
        rows.append(
            f"| {line.op} | {line.shape} | {line.rows} | {line.microseconds:.1f} | {line.gb_per_second:.0f} "
            f"| {line.of_copy:.0%} | {faster} |"
        )
    return "\n".join(rows) + "\n"


def main(output: Annotated[Path, typer.Option(help="Where to write: this name with .json and .md.")]) -> None:
    """Measure everything, print the table and write it."""
    if native.cuda() is None:
        raise SystemExit("bench_cuda: no CUDA device, or the CUDA kernels are not built: run scripts/gpu_check.sh")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    copy = copy_bandwidth()
    lines = [*transform_lines(copy), *linear_lines(copy)]
    table = markdown(machine(), copy, lines)
    record = {"machine": machine(), "copy": copy, "lines": [asdict(line) for line in lines]}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1))
    output.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    typer.run(main)
