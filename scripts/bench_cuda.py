"""How fast the CUDA kernels are on this GPU, next to its copy bandwidth and to cuBLAS in bfloat16, all in one run.

python scripts/bench_cuda.py --output gpu_check        gpu_check.json and gpu_check.md
python scripts/bench_cuda.py --many --output gpu_check_many     products of many tokens alone

Each case is a CUDA graph that goes once round a pool of weights (or vectors) that no cache holds; its time is the
median of many replays, divided by the size of the pool. GB/s counts what must be moved: packed weights with their
scales, tokens and results, each once; for transforms what is read and what is written. The limit is a large copy.
"""

import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import bench_cuda_cases as cases
import one_sentence
import torch
import typer
from torch import Tensor

import ptq  # noqa: F401 (the ops)
from fp6.minifloat import MinifloatFormat
from ptq.files.shards import write_bytes, write_json
from ptq.ops import hadamard, native
from ptq.ops.activations import Activation
from quarot.integer import IntegerFormat

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672))  # n, k
ROWS = (1, 4, 16, 64, 256, 1024, 2048)
MANY = (128, 256, 1024, 2048)
FORMS: dict[str, IntegerFormat | MinifloatFormat] = {
    "W4A16 g128": IntegerFormat(4, 128, True),
    "W4A16 row": IntegerFormat(4, 0, True),
    "e2m3 W6A16 row": MinifloatFormat("e2m3"),
    "e3m2 W6A16 row": MinifloatFormat("e3m2"),
    "e2m3 W6A16 g128": MinifloatFormat("e2m3", 128),
}
HALF = ("e3m2 W6A16 row", "W4A16 g128")
"""Those that are measured with float16 tokens too."""
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
    """Times faster than torch in bfloat16 on the same shape: its linear layer, or its attention."""


def microseconds(calls: list[Callable[[], Any]], seconds: float = 0.06) -> float:
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
    """GB/s of a copy of 1 GiB, read and write counted: by a kernel or by cudaMemcpy, whichever is faster (in a graph
    the latter reaches two thirds on an H200)."""
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ways: list[Callable[[], Any]] = [
        lambda: torch.bitwise_not(source, out=target),
        lambda: target.copy_(source),
    ]
    return 8 * source.numel() / min(microseconds([way] * 2) for way in ways) / 1e3


def bits_of(form: IntegerFormat | MinifloatFormat) -> int:
    return form.bits if isinstance(form, IntegerFormat) else form.small_float.bits


def random_weight(form: IntegerFormat | MinifloatFormat, n: int, k: int) -> dict[str, Tensor]:
    """Fragments of random codes, made on the GPU."""
    groups = form.codebook.groups(k)
    codes = torch.randint(0, 256, (n, k * bits_of(form) // 8), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, groups, device="cuda") * 0.01).bfloat16().view(torch.int16)
    return form.prepack({"codes": codes, "scale": scale}, "cuda")


def cublas_times(n: int, k: int, all_rows: tuple[int, ...]) -> dict[int, float]:
    """Microseconds of the bfloat16 product, by the number of rows."""
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * n * k))]
    times = {}
    for rows in all_rows:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        times[rows] = microseconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense])
    return times


def linear_lines(copy: float, all_rows: tuple[int, ...], e8p_bits: tuple[int, ...]) -> Iterator[Line]:
    for n, k in SHAPES:
        reference = cublas_times(n, k, all_rows)
        for rows, time in reference.items():
            rate = (2 * rows * (n + k) + 2 * n * k) / time / 1e3
            yield Line("cuBLAS bf16", f"{n} x {k}", rows, time, rate, rate / copy, 1.0)
        for name, form in FORMS.items():
            pool = [random_weight(form, n, k) for _ in range(copies_for(n * k * bits_of(form) // 8))]
            packed = sum(part.numel() * part.element_size() for part in pool[0].values())
            for rows in all_rows:
                for title, call in _calls(name, form, rows, k).items():
                    time = microseconds([lambda w=w, call=call: call(w) for w in pool])
                    rate = (packed + 2 * rows * (n + k)) / time / 1e3
                    yield Line(title, f"{n} x {k}", rows, time, rate, rate / copy, reference[rows] / time)
            del pool
        for bits in e8p_bits:
            pool = [cases.e8p_weight(bits, n, k) for _ in range(copies_for(n * k * bits // 8))]
            for rows in all_rows:
                for title, call in cases.e8p_calls(bits, rows, k).items():
                    time = microseconds([lambda w=w, call=call: call(w) for w in pool])
                    rate = (n * k * bits // 8 + 2 * rows * (n + k)) / time / 1e3
                    yield Line(title, f"{n} x {k}", rows, time, rate, rate / copy, reference[rows] / time)
            del pool


def cache_lines(copy: float) -> Iterator[Line]:
    """Attention of a decoded token, for one row of a model of 8B shape; beside it torch's in bfloat16."""
    for length in cases.LENGTHS:
        reference = 0.0
        for bits in (16, 4, 2, 8):
            packed = bits < 16
            moved = 2 * cases.HEADS * length * (cases.HEAD_DIM * bits // 8 + 4 * packed)
            count = copies_for(moved)
            pool = [cases.cache(bits, length) if packed else cases.plain_cache(length) for _ in range(count)]
            calls = cases.cache_calls(bits, length) if packed else cases.plain_calls(length)
            for title, call in calls.items():
                time = microseconds([lambda c=c, call=call: call(c) for c in pool])
                reference = reference or time  # torch's is the first
                rate = moved / time / 1e3
                yield Line(title, f"{length} tokens", 1, time, rate, rate / copy, reference / time)


def _calls(
    name: str, form: IntegerFormat | MinifloatFormat, rows: int, k: int
) -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    """What is measured of a format: bfloat16 tokens, maybe float16 ones, and quantised ones where they are exact."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {name: lambda w: form.linear(x, w)}
    if name in HALF:
        half = x.half()
        calls[f"{name} fp16"] = lambda w: form.linear(half, w)
    if isinstance(form, IntegerFormat) or form.small_float.int8_shift is not None:
        q, scale = Activation(8, 1.0).quantize(x)
        calls[name.replace("A16", "A8")] = lambda w: form.linear_quantized(q, scale, w, None, torch.bfloat16)
    if isinstance(form, IntegerFormat):
        few, few_scale = Activation(4, 0.9).quantize(x)
        calls[name.replace("A16", "A4")] = lambda w: form.linear_quantized(few, few_scale, w, None, torch.bfloat16, 4)
        if rows >= 1024:
            calls[f"{name.replace('A16', 'A4')} after hadamard_quantize"] = lambda w: form.linear_quantized(
                *Activation(4, 0.9).quantize(x, hadamard.construction(k)), w, None, torch.bfloat16, 4
            )
    return calls


def transform_lines(copy: float) -> Iterator[Line]:
    activation = Activation(8, 1.0)
    for k in VECTORS:
        construction = hadamard.construction(k)
        for rows in (1, 256, 2048):
            pool = [
                torch.randn(2, rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * rows * k))
            ]
            calls: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
                "hadamard": (4, lambda x, c=construction: hadamard.apply(x[0], None, c)),
                "hadamard_quantize": (3, lambda x, c=construction: activation.quantize(x[0], c)),
                "quantize_tokens": (3, lambda x: activation.quantize(x[0])),
                **cases.step_calls(k),
            }
            for title, (size, call) in calls.items():
                time = microseconds([lambda x=x, call=call: call(x) for x in pool])
                rate = size * rows * k / time / 1e3
                yield Line(title, str(k), rows, time, rate, rate / copy, None)


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


def main(
    output: Annotated[Path, typer.Option(help="Where to write: this name with .json and .md.")],
    many: Annotated[bool, typer.Option("--many", help="Integers and small floats times many tokens alone.")] = False,
) -> None:
    """Measure everything, print the table and write it."""
    if not native.has_cuda():
        raise SystemExit("bench_cuda: no CUDA device, or the CUDA kernels are not built: run scripts/gpu_check.sh")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    about, copy, lines = machine(), copy_bandwidth(), list[Line]()
    products = linear_lines(copy, MANY, ()) if many else linear_lines(copy, ROWS, (2, 3, 4))
    for line in products if many else itertools.chain(transform_lines(copy), cache_lines(copy), products):
        lines.append(line)  # written one by one: who is stopped keeps what there is
        record = {"machine": about, "copy": copy, "lines": [asdict(line) for line in lines]}
        write_json(output.with_suffix(".json"), record, durable=False)
        write_bytes(output.with_suffix(".md"), markdown(about, copy, lines).encode(), durable=False)
    print(markdown(about, copy, lines))


if __name__ == "__main__":
    one_sentence.run(main)
