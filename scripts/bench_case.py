"""What is timed, and how. `bench_ops.py` runs the tables of the modules in its list: each offers `tables()`."""

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ptq.ops import huge_pages

POOL_BYTES = 256 << 20
ROUND_SECONDS = 0.1
SHAPES = ((4096, 4096), (11008, 4096), (4096, 14336))
BATCHES = (1, 16, 128, 512)
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


Table = tuple[str, str, Callable[[], dict[str, Case]]]
"""Title, name of the case that is the limit, and what makes the cases."""


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


def copies(nbytes: int) -> int:
    """How many copies of a weight go round, so that no cache holds them."""
    return max(2, -(-POOL_BYTES // nbytes))


def pooled(run: Callable[..., object], weights: list) -> Callable[[], object]:
    """`run` on the next of the weights at every call, which lie in memory as those of a loaded model do."""
    tensors = [x for x in tree_leaves(weights) if isinstance(x, Tensor) and x.layout is torch.strided]
    huge_pages.use(tensors)
    pool = itertools.cycle(weights)
    return lambda: run(next(pool))


def read_case() -> Case:
    """A plain read of memory: a sum, torch's nearest to one."""
    return Case(pooled(torch.sum, list(torch.ones(POOL_BYTES // 4).chunk(16))), POOL_BYTES // 16)


def can_prepack() -> bool:
    """Whether oneDNN has a layout of its own for bfloat16 on this processor: not with AVX2 alone."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepacked_cases(w: Tensor, x: Tensor) -> dict[str, Case]:
    """torch's bfloat16 linear with the weight in oneDNN's own layout, if it has one: what freezing a compiled model
    gives."""
    if not can_prepack():
        return {}
    weights = [torch.ops.mkldnn._reorder_linear_weight(w, None) for _ in range(copies(w.nbytes))]
    product = torch.ops.mkldnn._linear_pointwise
    run = pooled(lambda weight: product(x, weight, None, "none", [], ""), weights)
    return {"torch bfloat16 prepacked": Case(run, w.nbytes, peer=True)}


def torch_cases(n: int, k: int, x: Tensor) -> dict[str, Case]:
    """torch's own linear layers for y = x Wᵀ with W[n, k]."""
    cases = {}
    for name, dtype in DTYPES.items():
        w, like = torch.randn(n, k, dtype=dtype), x.to(dtype)
        weights = [w.clone() for _ in range(copies(w.nbytes))]
        run = pooled(lambda weight, like=like: torch.nn.functional.linear(like, weight), weights)
        cases[f"torch {name}"] = Case(run, w.nbytes, peer=True)
        if dtype == torch.bfloat16:
            cases |= prepacked_cases(w, like)
    return cases | dynamic_cases(n, k, x)


def dynamic_cases(n: int, k: int, x: Tensor) -> dict[str, Case]:
    """The same in torch's dynamic INT8, where oneDNN is there."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        return {}
    torch.backends.quantized.engine = "onednn"
    layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still torch's fastest
        layers = [
            torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, torch.qint8) for _ in range(copies(n * k))
        ]
    return {"torch dynamic int8": Case(pooled(lambda one: one(x), layers), n * k, peer=True)}
