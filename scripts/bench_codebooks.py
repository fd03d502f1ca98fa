"""How well codebooks round, beside what is possible, and how fast. One command, one table.

python scripts/bench_codebooks.py gaussian       error per weight of every format on Gaussian rows of 4096
python scripts/bench_codebooks.py proxy          LDLQ on synthetic layers: scalar grids against the lattice
python scripts/bench_codebooks.py search         weights per second of the E8 search, every instruction set
python scripts/bench_codebooks.py layer          transform, LDLQ and sweeps of a layer: seconds, memory, loss

`gaussian` has the error of the best scalar quantisers from integrals, and the least error that any code of so many bits
per weight can have, 2^(-2 bits) (the rate-distortion limit).
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar

import one_sentence
import torch
import typer

from ptq.ops import hadamard, native
from ptq.weights import formats, rounding
from ptq.weights.formats import Codebook, Scales
from quip_sharp.codebook import CANDIDATES, E8Codebook

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WIDTH = 4096
CORES = len(os.sched_getaffinity(0))
Threads = Annotated[int, typer.Option(help="Threads of torch.")]

FORMATS = [
    *[(f"E8, {bits} bits", "quip_sharp/e8p", {"bits": bits}) for bits in (2, 3, 4)],
    *[(f"integers, {bits} bits per channel", "quarot/integer", {"bits": bits}) for bits in (2, 3, 4, 5, 6, 8)],
    *[(f"integers, {bits} bits in groups of 128", "quarot/integer", {"bits": bits, "group_size": 128})
      for bits in (2, 3, 4)],
    *[(f"integers, {bits} bits in groups of 128, integer scales", "quarot/integer",
       {"bits": bits, "group_size": 128, "scale": "integer"}) for bits in (2, 3, 4)],
    *[(f"{element} per channel", "fp6/minifloat", {"element": element}) for element in (
        "e2m1", "e2m2", "e3m1", "e2m3", "e3m2", "e3m3", "e4m2")],
    ("e2m3 in groups of 128", "fp6/minifloat", {"element": "e2m3", "group_size": 128}),
    *[(f"{element} in groups of 32, e8m0", "fp6/minifloat", {"element": element, "group_size": 32, "scale": "e8m0"})
      for element in ("e2m1", "e2m3", "e3m2")],
]  # fmt: skip
"""Title, format and options of what `gaussian` rounds."""


# --- scalar quantisers of a Gaussian, from integrals ------------------------------------------------------------------


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def moments(low: float, high: float) -> tuple[float, float, float]:
    """Integrals of 1, x and x² under the density from `low` to `high`."""
    edges = [(x * density(x) if math.isfinite(x) else 0.0) for x in (low, high)]
    mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    return mass, density(low) - density(high), mass - edges[1] + edges[0]


def distortion(points: list[float]) -> float:
    """Mean squared error of the nearest of ascending points."""
    total = 0.0
    for point, mass, first, second in cells(points):
        total += second - 2 * point * first + point * point * mass
    return total


def cells(points: list[float]) -> Iterator[tuple[float, float, float, float]]:
    middles = [-math.inf, *((a + b) / 2 for a, b in zip(points, points[1:], strict=False)), math.inf]
    for i, point in enumerate(points):
        yield point, *moments(middles[i], middles[i + 1])


def best_uniform(bits: int) -> float:
    """The error of the grid of half-integers with the best step."""

    def error(step: float) -> float:
        return distortion([step * (i + 0.5 - 2 ** (bits - 1)) for i in range(2**bits)])

    low, high = 1e-3, 3.0
    for _ in range(80):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if error(a) < error(b) else (a, high)
    return error(low)


def lloyd_max(bits: int) -> float:
    """The error of the best scalar quantiser (Lloyd 1957, Max 1960): every point the mean of its cell."""
    points = [math.sqrt(3) * (2 * i + 1 - 2**bits) / 2**bits * 2 for i in range(2**bits)]
    for _ in range(4000 if bits < 5 else 20000):
        points = [first / mass for _, mass, first, _ in cells(points)]
    return distortion(points)


# --- tables -----------------------------------------------------------------------------------------------------------


def head(*names: str) -> None:
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


@app.command()
def gaussian(
    samples: Annotated[int, typer.Option(help="Weights, at least a million.")] = 1 << 24,
    threads: Threads = CORES,
    seed: int = 0,
) -> None:
    """Squared error per weight and relative RMS error on rows of 4096 Gaussian numbers, nearest rounding."""
    torch.set_num_threads(threads)
    w = torch.randn(-(-samples // WIDTH), WIDTH, generator=torch.Generator().manual_seed(seed))
    print(f"{w.numel() / 1e6:.1f} M samples of variance 1, seed {seed}\n")
    head("codebook", "true bits", "squared error", "relative RMS", "limit", "dB above it")

    def line(title: str, bits: float, error: float) -> None:
        limit = 2 ** (-2 * bits)
        decibels = 10 * math.log10(error / limit)
        row(title, f"{bits:.3f}", f"{error:.4g}", f"{100 * math.sqrt(error):.2f} %", f"{limit:.4g}", f"{decibels:.2f}")

    for bits in (2, 3, 4, 5, 6):
        line(f"uniform, best step, {bits} bits (integral)", bits, best_uniform(bits))
        line(f"Lloyd-Max, {bits} bits (integral)", bits, lloyd_max(bits))
    for title, name, options in FORMATS:
        format = formats.get(name, **options)
        stored = format.buffers(*w.shape).values()
        nbits = sum(8 * math.prod(shape) * dtype.itemsize for shape, dtype in stored)
        line(title, nbits / w.numel(), rounding.nearest(w, assured(format.codebook)).error)


def assured(codebook: Codebook | None) -> Codebook:
    assert codebook is not None
    return codebook


class BestUniform:
    """The grid of 2^bits half-integers with the best step for a Gaussian, one step for the whole weight."""

    dim: ClassVar[int] = 1
    per_row: ClassVar[bool] = False

    def __init__(self, bits: int) -> None:
        self.half = 2 ** (bits - 1) - 0.5
        self.step = {2: 0.9957, 3: 0.5860, 4: 0.3352}[bits]

    def fit(self, w: torch.Tensor, *, name: str = "weight") -> Scales:
        return {"step": self.step * w.square().mean().sqrt()}

    def round(self, w: torch.Tensor, scales: Scales, columns: torch.Tensor | None = None) -> torch.Tensor:
        return (w / scales["step"] + self.half).round().clamp(0, 2 * self.half).to(torch.uint8)

    def decode(self, codes: torch.Tensor, scales: Scales, columns: torch.Tensor | None = None) -> torch.Tensor:
        return (codes.float() - self.half) * scales["step"]


def synthetic(k: int, power: float) -> torch.Tensor:
    """A Hessian with eigenvalues i^-power in a random basis."""
    g = torch.Generator().manual_seed(k)
    basis = torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64))[0]
    return ((basis * torch.arange(1, k + 1, dtype=torch.float64) ** -power) @ basis.t()).float()


@app.command()
def proxy(n: int = 256, k: int = 1024, sweeps: int = 10, threads: Threads = CORES) -> None:
    """Relative proxy loss tr(E H Eᵀ) / tr(W H Wᵀ) of Gaussian weights under Hessians of three steepnesses."""
    torch.set_num_threads(threads)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    powers = {"flat": 0.0, "1/i": 1.0, "1/i^1.5": 1.5}
    hessians = {title: synthetic(k, power) for title, power in powers.items()}
    print(f"Gaussian weights [{n}, {k}], damping 0.01; in brackets the sweeps that were needed\n")
    head("codebook", "solver", *powers)
    for bits in (2, 3, 4):
        for title, codebook in ((f"uniform, {bits} bits", BestUniform(bits)), (f"E8, {bits} bits", E8Codebook(bits))):
            found = [rounding.ldlq(w.clone(), h.clone(), codebook) for h in hessians.values()]
            row(title, "nearest", *(f"{one.nearest_loss or 0:.5f}" for one in found))
            row(title, "LDLQ", *(f"{one.loss or 0:.5f}" for one in found))
            swept = [rounding.ldlq(w.clone(), h.clone(), codebook, sweeps=sweeps) for h in hessians.values()]
            row(title, "LDLQ and sweeps", *(f"{one.loss or 0:.5f} ({one.sweeps})" for one in swept))


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Median time of a call, the first left out."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


@app.command()
def search(rounds: int = 5, threads: Threads = 1) -> None:
    """Speed of rounding to the nearest points: M weights/s of every instruction set that there is."""
    torch.set_num_threads(threads)
    w = torch.randn(64, WIDTH)
    levels = ("portable", "avx2", "avx512") if native.load() else ("reference",)
    head("M weights/s", "candidates", *levels)
    for bits in (2, 3, 4):
        codebook = E8Codebook(bits)
        scales, speeds = codebook.fit(w), []
        for level in levels:
            if native.load():
                native.set_cpu_level(level)
            speeds.append(w.numel() / seconds(lambda c=codebook, s=scales: c.round(w, s), rounds) / 1e6)
        row(f"E8, {bits} bits", CANDIDATES[bits], *(f"{speed:.1f}" for speed in speeds))
    if native.load():
        native.set_cpu_level(None)


def memory(field: str) -> float:
    """VmRSS or VmHWM (the peak) of this process in MB, as Linux says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


@app.command()
def layer(n: int = 4096, k: int = 4096, bits: int = 2, sweeps: int = 0, threads: Threads = CORES) -> None:
    """Seconds, memory beside W and H, and the loss of one layer, given its Hessian: transform of W on both sides, LDLQ
    with its search for a scale, sweeps."""
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=g)
    x = torch.randn(2 * k, k, generator=g) * torch.arange(1, k + 1).float().pow(-0.5)
    h = x.t() @ x
    del x
    signs = [(torch.randint(0, 2, (size,), generator=g) * 2 - 1).float() for size in (n, k)]
    h = hadamard.apply_columns(hadamard.apply(h, signs[1], k), signs[1], k)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    start = time.perf_counter()
    w = hadamard.apply_columns(hadamard.apply(w, signs[1], k), signs[0], n)
    transformed = time.perf_counter() - start
    found = rounding.ldlq(w, h, E8Codebook(bits), sweeps=sweeps)
    took = time.perf_counter() - start
    extra = memory("VmHWM") - before
    head("layer", "bits", "sweeps", "threads", "transform s", "all s", "extra MB", "nearest", "loss")
    row(f"{n} x {k}", bits, found.sweeps or 0, threads, f"{transformed:.2f}", f"{took:.2f}", f"{extra:.0f}",
        f"{found.nearest_loss:.4f}", f"{found.loss:.4f}")  # fmt: skip


if __name__ == "__main__":
    one_sentence.run(app)
