"""How fast the ops are on this machine, next to what the memory allows and to torch.

python scripts/bench_ops.py                     everything
python scripts/bench_ops.py --only 'hadamard.*4096' --threads 1
python scripts/bench_ops.py --only 'linear.*batch 16$' --json

INT8 and INT4 name the activations of a linear layer; its time includes quantising them, torch's dynamic INT8 (oneDNN,
float32 input) includes its own. bfloat16 activations are not quantised. Weights have 4 bits. `peer_cases.py` puts the
same layers beside other programs.

Cases of one table line run in turns, many rounds of a tenth of a second, in a new order every round: a ratio is the
median of the ratios within a round, so that a noisy machine disturbs both sides alike. Read ratios, not microseconds.
Weights go round through a pool that no cache holds, as they do in a model.
"""

import itertools
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import torch
import typer

from ptq import hadamard, native
from ptq.activations import Activation
from quarot.integer import IntegerFormat

POOL_BYTES = 256 << 20
ROUND_SECONDS = 0.1
ORDERS = {4096: (64, 64), 11008: (344, 32), 14336: (112, 128)}
"""Widths, and two Hadamard orders whose product each is: the best form in plain torch."""
SHAPES = ((4096, 4096), (11008, 4096), (4096, 14336))
HADAMARD_BATCHES, LINEAR_BATCHES = (1, 512), (1, 16, 128, 512)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Line:
    """One case, measured."""

    case: str
    name: str
    microseconds: float
    gb_per_second: float
    """Of the bytes that it has to move: weights of a linear, input and output of a transform."""
    limit: float
    """Its GB/s as a share of those of the limit (a copy, or a plain read) in the same rounds."""
    ratios: dict[str, float]
    """How many times faster it is than each peer in the same rounds."""


@dataclass(frozen=True)
class Case:
    """Something to call, and the bytes that one call has to move."""

    run: Callable[[], object]
    nbytes: int
    peer: bool = False
    """Whether the others are compared with it."""


def timed(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every case in every round."""
    calls = {}
    for name, case in cases.items():
        case.run()
        start = time.perf_counter()
        case.run()
        calls[name] = max(1, int(ROUND_SECONDS / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            start = time.perf_counter()
            for _ in range(calls[name]):
                cases[name].run()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds


def measure(title: str, limit: str, cases: dict[str, Case], rounds: int) -> Iterator[Line]:
    """Time the cases together; `limit` names the one that only moves bytes."""
    seconds = timed(cases, rounds)

    def ratio(numerator: str, denominator: str) -> float:
        return median(a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True))

    for name, case in cases.items():
        middle = median(seconds[name])
        yield Line(
            case=title, name=name, microseconds=middle * 1e6, gb_per_second=case.nbytes / middle / 1e9,
            limit=ratio(limit, name) * case.nbytes / cases[limit].nbytes,
            ratios={peer: ratio(peer, name) for peer in cases if cases[peer].peer and peer != name},
        )  # fmt: skip


def hadamard_cases(width: int, batch: int, dtype: torch.dtype) -> dict[str, Case]:
    """The transform of every row of x[batch, width]."""
    x = torch.randn(batch, width, dtype=dtype)
    outer, inner = (hadamard.matrix(order).to(dtype) for order in ORDERS[width])
    nbytes, y = 2 * x.nbytes, torch.empty_like(x)

    def kronecker() -> torch.Tensor:
        return (outer @ (x.view(batch, len(outer), len(inner)) @ inner.T)).view(batch, width)

    cases = {
        "copy": Case(lambda: y.copy_(x), nbytes),
        "ptq::hadamard": Case(lambda: hadamard.apply(x, None, width), nbytes, peer=True),
        "torch, two factors": Case(kronecker, nbytes, peer=True),
    }
    for bits in (8, 4):
        fused, construction = Activation(bits, 0.9), hadamard.construction(width)
        cases[f"ptq::hadamard_quantize INT{bits}"] = Case(
            lambda fused=fused, construction=construction: fused.quantize(x, construction), nbytes
        )
    if batch == 1:
        dense = hadamard.matrix(width).to(dtype)
        cases["torch, dense"] = Case(lambda: x @ dense.T, nbytes, peer=True)
    return cases


def linear_cases(n: int, k: int, batch: int) -> dict[str, Case]:
    """y = x Wᵀ with W[n, k]."""
    x = torch.randn(batch, k)
    cases = {"read": _read_case(), **_ours(n, k, x)}
    for name, dtype in DTYPES.items():
        w, like = torch.randn(n, k, dtype=dtype), x.to(dtype)
        weights = itertools.cycle([w.clone() for _ in range(_copies(w.nbytes))])
        cases[f"torch {name}"] = Case(
            lambda like=like, weights=weights: torch.nn.functional.linear(like, next(weights)), w.nbytes, peer=True
        )
    if "onednn" in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = "onednn"
        layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
        with warnings.catch_warnings(action="ignore"):  # deprecated, and still torch's fastest
            layers = [
                torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, torch.qint8)
                for _ in range(_copies(n * k))
            ]
        pool = itertools.cycle(layers)
        cases["torch dynamic int8"] = Case(lambda: next(pool)(x), n * k, peer=True)
    return cases


def _ours(n: int, k: int, x: torch.Tensor) -> dict[str, Case]:
    """Random 4-bit weights; as fast as any other. Rows in and out are float32, or bfloat16 where the name says so."""
    cases = {}
    for group in (128, 0):
        format = IntegerFormat(bits=4, group_size=group)
        parts = {
            part: torch.randint(0, 128, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
            .view(dtype)
            .view(shape)
            for part, (shape, dtype) in format.buffers(n, k).items()
        }
        parts["scale"] = torch.full(parts["scale"].shape, 0.01, dtype=torch.bfloat16).view(torch.int16)
        nbytes = sum(part.nbytes for part in parts.values())
        copies = [
            format.prepack({name: part.clone() for name, part in parts.items()}, "cpu") for _ in range(_copies(nbytes))
        ]
        name = f"group {group}" if group else "per channel"
        like, pool = x.bfloat16(), itertools.cycle(copies)
        cases[f"{name}, bfloat16"] = Case(
            lambda format=format, pool=pool, like=like: format.linear(like, next(pool)), nbytes
        )
        for bits in (8, 4):
            activation = Activation(bits, 0.9)

            def run(format=format, pool=pool, activation=activation):
                return format.linear_quantized(*activation.quantize(x), next(pool), None, x.dtype)

            cases[f"{name}, INT{bits}"] = Case(run, nbytes)
    return cases


def _copies(nbytes: int) -> int:
    return max(2, -(-POOL_BYTES // nbytes))


def _read_case() -> Case:
    """A plain read of memory: a sum, torch's nearest to one."""
    pool = itertools.cycle(torch.ones(POOL_BYTES // 4).chunk(16))
    return Case(lambda: torch.sum(next(pool)), POOL_BYTES // 16)


def tables() -> Iterator[tuple[str, str, Callable[[], dict[str, Case]]]]:
    """Title, limit and cases of everything that can be measured."""
    for dtype_name, dtype in DTYPES.items():
        for width, batch in itertools.product(ORDERS, HADAMARD_BATCHES):
            title = f"hadamard {dtype_name} [{batch}, {width}]"
            yield title, "copy", lambda width=width, batch=batch, dtype=dtype: hadamard_cases(width, batch, dtype)
    for (n, k), batch in itertools.product(SHAPES, LINEAR_BATCHES):
        title = f"linear [{n}, {k}] batch {batch}"
        yield title, "read", lambda n=n, k=k, batch=batch: linear_cases(n, k, batch)


def main(
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Rounds; medians are printed.")] = 7,
    only: Annotated[str, typer.Option(help="Regular expression on the titles.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False,
) -> None:
    """Print a Markdown line per case: µs, GB/s, share of the limit, times faster than torch."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    if not as_json:
        level = native.set_cpu_level(None) if native.available() else "not built, slow references"
        print(f"torch {torch.__version__}, {threads} threads, kernels: {level}\n")
        print("| case | | µs | GB/s | of the limit | times faster than |\n|---|---|---|---|---|---|", flush=True)
    for title, limit, make in tables():
        if not re.search(only, title):
            continue
        for line in measure(title, limit, make(), rounds):
            ratios = ", ".join(f"{peer}: {ratio:.2f}" for peer, ratio in line.ratios.items())
            row = (
                line.case,
                line.name,
                f"{line.microseconds:.1f}",
                f"{line.gb_per_second:.1f}",
                f"{line.limit:.2f}",
                ratios,
            )
            print(json.dumps(asdict(line)) if as_json else f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
