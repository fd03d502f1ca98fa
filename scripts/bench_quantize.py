"""How fast quantising is, how much memory it takes, and whether it survives being killed. One command, one row.

python scripts/bench_quantize.py layer --k 11008     GPTQ of one layer from its Hessian
python scripts/bench_quantize.py rtn                 a 3 GB model to INT4 against a copy of its files
python scripts/bench_quantize.py fp6                 the same model to small floats
python scripts/bench_quantize.py gptq-block          GPTQ of two blocks of a 7B model's shape: memory and phases
python scripts/bench_quantize.py resume              20 kills at random moments, then the bytes compared

Models are random; they and the results lie in --folder, and a model that is there is used again. What is measured
runs in a process of its own, and this one stays small: Linux counts the parent's memory at the fork as the child's.
"""

import filecmp
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import one_sentence
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

COPY_BYTES = 8 << 20
MIB = 1 << 20

Folder = Annotated[Path, typer.Option(help="Where models and results lie.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]
Repeats = Annotated[int, typer.Option(help="Runs; medians are printed.")]
FOLDER = Path(tempfile.gettempdir()) / "ptq-bench"
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Shape:
    """A random Llama."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    blocks: int
    vocab: int


SMALL = Shape(2048, 5632, heads=32, kv_heads=8, blocks=30, vocab=32000)
"""2.97 GB in bf16."""
WIDE = Shape(4096, 11008, heads=32, kv_heads=32, blocks=2, vocab=2048)
"""Two blocks of Llama-2-7B, and the demo's vocabulary, whose tokenizer it borrows."""


# --- one layer --------------------------------------------------------------------------------------------------------


@app.command()
def layer(
    n: int = 4096,
    k: int = 4096,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
    repeats: Repeats = 5,
    threads: Threads = CORES,
) -> None:
    """GPTQ of one random layer from its Hessian: seconds from W and H to codes, the Cholesky factor included."""
    import torch

    from ptq.weights import rounding
    from quarot.integer import IntegerGrid

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)  # weight and Hessian of the peers' measurement
    w = torch.randn(n, k) * 0.02
    x = torch.randn(k + 1024, k) * (0.1 + torch.rand(k))
    h = x.t() @ x / len(x)
    del x
    grid = IntegerGrid(bits, group_size, symmetric)
    total = float((w @ h).mul_(w).sum(dtype=torch.float64))

    def loss(rounded: rounding.Rounded) -> float:
        error = grid.decode(rounded.codes, rounded.scales) - w
        return float((error @ h).mul_(error).sum(dtype=torch.float64)) / total

    times = []
    for _ in range(repeats + 1):
        used_up = h.clone()
        start = time.perf_counter()
        rounded = rounding.ldlq(w, used_up, grid)
        times.append(time.perf_counter() - start)
    nearest = loss(rounding.nearest(w, grid))
    kind = "symmetric" if symmetric else "asymmetric"
    print(f"GPTQ [{n}, {k}] INT{bits} {kind}, group {group_size or 'channel'}, {threads} threads: "
          f"{median(times[1:]):.2f} s (median of {repeats}, best {min(times[1:]):.2f}); "
          f"loss {loss(rounded):.5f} (nearest {nearest:.5f})")  # fmt: skip


# --- whole models -----------------------------------------------------------------------------------------------------


def random_model(shape: Shape, folder: Path) -> Path:
    """A Llama with random weights, made by a process of its own where it is not there yet."""
    path = folder / f"llama-{shape.blocks}x{shape.hidden}x{shape.intermediate}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(shape).items()]
        subprocess.run([sys.executable, Path(__file__).with_name("random_model.py"), path, *options], check=True)
    return path


@dataclass(frozen=True)
class Run:
    """A run of `ptq.quantize` in a process of its own. Seconds and bytes."""

    whole: float
    """From the start of the process to its end."""
    imports: float
    baseline: int
    """Memory after the imports."""
    peak: int
    phases: dict[str, tuple[float, int]]
    """Seconds in all of every kind of task, and the peak memory up to its end."""
    result: dict[str, Any]


def quantize(model: Path, out: Path, threads: int, method: str = "quarot", **recipe: Any) -> Run:
    """Run `measured` in a fresh process."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.with_name(f"{out.name}.work"), ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "measured", method, str(model), str(out), json.dumps(recipe)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return Run(time.perf_counter() - start, **json.loads(done.stdout))


@app.command(hidden=True)
def measured(method: str, model: Path, out: Path, recipe_json: str) -> None:
    """Quantise, and print what it took: the command `quantize METHOD` with a clock around every kind of task."""
    start = time.perf_counter()
    import ptq
    from ptq.pipeline import pipeline, stages
    from ptq.pipeline.tasks import Tasks
    from ptq.statistics.hessian import Hessians

    if method == "fp6":
        from fp6.plan import Fp6Recipe as Recipe
    else:
        from quarot.plan import QuarotRecipe as Recipe

    imports, baseline = time.perf_counter() - start, peak_memory()
    seconds: dict[str, float] = defaultdict(float)
    peaks: dict[str, int] = {}

    def clocked(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            value = function(*args, **named)
            seconds[name] += time.perf_counter() - began
            peaks[name] = peak_memory()
            return value

        setattr(owner, name, run)

    clocked(Hessians, "collect")
    clocked(Tasks, "linear")
    for name in ("ends", "embed", "block", "advance"):
        clocked(stages, name)
    for name in ("complete", "write_record"):
        clocked(pipeline, name)
    clocked(pipeline.proof, "reload")
    result = ptq.quantize(model, out, Recipe(**json.loads(recipe_json)), ptq.RunOptions(progress=False))
    phases = {name: (seconds[name], peaks[name]) for name in seconds}
    found = {"nbytes": result.nbytes, "bits_per_weight": result.bits_per_weight}
    times = {"imports": imports, "baseline": baseline, "peak": peak_memory(), "phases": phases}
    print(json.dumps({**times, "result": found}))


def peak_memory() -> int:
    """The most memory that this process has ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy_files(source: Path, target: Path) -> float:
    """Seconds to read and write the tensor files of a model, each forced to disk, as `quantize` does with its own."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    buffer = memoryview(bytearray(COPY_BYTES))
    start = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as reader, (target / path.name).open("wb", buffering=0) as writer:
            while count := reader.readinto(buffer):
                writer.write(buffer[:count])
            os.fsync(writer.fileno())
    return time.perf_counter() - start


def print_phases(run: Run) -> None:
    print("\n| phase | seconds | peak memory up to its end, MiB |\n|---|---|---|")
    print(f"| imports | {run.imports:.1f} | {run.baseline / MIB:.0f} |")
    for name, (seconds, peak) in run.phases.items():
        print(f"| {name} | {seconds:.1f} | {peak / MIB:.0f} |")


@app.command()
def rtn(
    rotate: Annotated[bool, typer.Option("--rotate/--no-rotate", help="With rotations.")] = True,
    group_size: int = 0,
    repeats: Repeats = 3,
    threads: Threads = CORES,
    folder: Folder = FOLDER,
) -> None:
    """Round a 3 GB model to INT4 and compare with a copy of its files, turn by turn; the page cache is warm."""
    what = f"RTN INT4 {'rotated' if rotate else 'not rotated'}"
    against_copy(what, repeats, threads, folder, rounding="nearest", rotate=rotate, group_size=group_size)


@app.command()
def fp6(
    element: str = "e2m3",
    group_size: int = 0,
    scale_search: str = "absmax",
    repeats: Repeats = 3,
    threads: Threads = CORES,
    folder: Folder = FOLDER,
) -> None:
    """Round a 3 GB model to small floats and compare with a copy of its files, as `rtn` does."""
    options = {"element": element, "group_size": group_size, "scale_search": scale_search}
    what = f"FP6 {' '.join(map(str, options.values()))}"
    against_copy(what, repeats, threads, folder, method="fp6", **options)


def against_copy(what: str, repeats: int, threads: int, folder: Path, **recipe: Any) -> None:
    """Quantise the small model, and copy its files, turn by turn."""
    model = random_model(SMALL, folder)
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    copies, runs = [], []
    copy_files(model, folder / "copy")
    for _ in range(repeats):
        copies.append(copy_files(model, folder / "copy"))
        shutil.rmtree(folder / "copy")
        runs.append(quantize(model, folder / "rtn", threads, **recipe))
    copy, run = median(copies), sorted(runs, key=lambda run: run.whole)[len(runs) // 2]
    ratio = median(copy / run.whole for copy, run in zip(copies, runs, strict=True))
    work = median(copy / (run.whole - run.imports) for copy, run in zip(copies, runs, strict=True))
    print(f"{what} of {nbytes / 1e9:.2f} GB, {threads} threads: "
          f"{run.whole:.1f} s ({nbytes / run.whole / 1e9:.2f} GB/s), of it {run.imports:.1f} s imports; "
          f"copy {copy:.1f} s ({nbytes / copy / 1e9:.2f} GB/s); {100 * ratio:.0f} % of the copy's speed "
          f"({100 * work:.0f} % without imports); peak memory {run.peak / 1e6:.0f} MB")  # fmt: skip
    print_phases(run)
    shutil.rmtree(folder / "rtn")


@app.command()
def gptq_block(
    samples: int = 32,
    sequence_length: int = 512,
    group_size: int = 128,
    gptaq_alpha: float = 0.0,
    threads: Threads = CORES,
    folder: Folder = FOLDER,
) -> None:
    """GPTQ of two blocks of a 7B model's shape: the peak memory against what has to be there."""
    shape, model = WIDE, random_model(WIDE, folder)
    calibration = Path(__file__).parents[1] / "ptq" / "demo" / "calibration.txt"
    run = quantize(
        model, folder / "gptq", threads, rounding="gptq", group_size=group_size, samples=samples,
        sequence_length=sequence_length, calibration=str(calibration), gptaq_alpha=gptaq_alpha,
    )  # fmt: skip
    from ptq.statistics.chunks import CHUNK_TOKENS  # not before: this process has to be small

    h, m = shape.hidden, shape.intermediate
    parts = {
        "imports": run.baseline,
        "one block in float32": 4 * (4 * h * h + 3 * h * m),
        "its Hessians": 4 * (3 * h * h + m * m),
        "a chunk of activations": 4 * CHUNK_TOKENS * (3 * h + 4 * m),
        **({"its cross moments": 4 * (3 * h * h + m * m)} if gptaq_alpha else {}),
    }
    budget = sum(parts.values())
    print(f"GPTQ INT4 of 2 blocks {h} x {m}, {samples} x {sequence_length} tokens, {threads} threads: "
          f"{run.whole:.0f} s; peak memory {run.peak / MIB:.0f} MiB, budget {budget / MIB:.0f} MiB "
          f"({' + '.join(f'{name} {size / MIB:.0f}' for name, size in parts.items())})")  # fmt: skip
    print_phases(run)
    shutil.rmtree(folder / "gptq")


# --- resume -----------------------------------------------------------------------------------------------------------


@app.command()
def resume(kills: int = 20, samples: int = 32, seed: int = 0, folder: Folder = FOLDER) -> None:
    """Kill `quantize quarot demo` again and again, then compare its bytes with those of a run that nobody disturbed."""
    moments = random.Random(seed)
    undisturbed, out = folder / "undisturbed", folder / "killed"
    for old in (undisturbed, out, work_folder(undisturbed), work_folder(out)):
        shutil.rmtree(old, ignore_errors=True)

    def start(target: Path) -> subprocess.Popen[bytes]:
        options = ["--samples", str(samples), "--sequence-length", "128", "--group-size", "32"]
        command = [sys.executable, "-m", "ptq", "quarot", "demo", str(target), *options]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began, process = time.perf_counter(), start(undisturbed)
    while process.poll() is None and not work_folder(undisturbed).exists():
        time.sleep(0.01)
    first = time.perf_counter() - began
    assert process.wait() == 0
    last = time.perf_counter() - began
    done = results = 0
    where: list[str] = []
    while done < kills or out.exists() or work_folder(out).exists():
        if out.exists():
            check_same(undisturbed, out)
            results += 1
            shutil.rmtree(out)
            continue
        process = start(out)
        try:
            # Before `first` the process only imports.
            code = process.wait(moments.uniform(first, last) if done < kills else None)
            assert code == 0, code
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            done += 1
            where.append(str(len(list(work_folder(out).rglob("*.safetensors")))))
    print(f"{done} kills between {first:.1f} and {last:.1f} s, with {', '.join(where)} files in the work folder; "
          f"{results} results, each byte for byte that of the undisturbed run")  # fmt: skip
    shutil.rmtree(undisturbed)


def work_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.work")


def check_same(one: Path, other: Path) -> None:
    """Both folders hold the same files with the same bytes, but for the log with its seconds."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir()), "the folders hold different files"
    names.remove("ptq_log.jsonl")
    _, different, failed = filecmp.cmpfiles(one, other, names, shallow=False)
    hashes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in different for folder in (one, other)]
    assert not different and not failed, (different, failed, hashes)


if __name__ == "__main__":
    one_sentence.run(app)
