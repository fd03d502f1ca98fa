"""The ops that compute chosen experts (`ptq.ops.expert_ops`) against their references, and what they refuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, at_level

import fp6.expert_ops
import quarot.expert_ops
import quip_sharp.expert_ops
from fp6.minifloat import MinifloatFormat
from ptq.ops import hadamard
from ptq.weights import rounding
from quarot.integer import IntegerFormat
from quip_sharp.e8p_format import E8PFormat

ROWS = {
    "one token": ([0, 0, 0], [1, 1, 1]),
    "experts in common": ([0, 1, 3, 1, 0], [1, 3, 1]),
    "nobody's token": ([2, 2], [1, 1]),
    "more than four rows": ([0, 1, 0, 1, 2, 3], [2, 4]),
}
CASES: list[dict[str, Any]] = [
    dict(format=format, hidden=hidden, width=width, input_bits=bits, down_bits=down, order=order)
    for format, hidden, width, bits, down, order in (
        (IntegerFormat(4), 64, 96, 8, 8, 32), (IntegerFormat(4), 64, 96, 0, 0, 32),
        (IntegerFormat(4, 64, symmetric=False), 64, 128, 4, 4, 128),
        (IntegerFormat(3, symmetric=False), 50, 33, 8, 0, 0),
        (IntegerFormat(8), 50, 33, 0, 8, 0), (IntegerFormat(2, 64, symmetric=False), 128, 64, 0, 0, 64),
        (MinifloatFormat("e2m3"), 64, 96, 8, 8, 32), (MinifloatFormat("e2m3", 64), 64, 128, 0, 0, 0),
        (MinifloatFormat("e3m2"), 50, 33, 8, 8, 0), (MinifloatFormat("e3m3", 64), 128, 64, 0, 8, 0),
        (E8PFormat(2), 64, 96, 8, 8, 48), (E8PFormat(3), 72, 40, 8, 8, 20), (E8PFormat(4), 64, 33, 0, 8, 1),
        (E8PFormat(2), 50, 64, 0, 0, 64), (E8PFormat(4), 64, 96, 8, 0, 32),
        (IntegerFormat(4, 32, scale="integer"), 64, 96, 8, 8, 32),
        (E8PFormat(2), 32, 4096, 8, 8, 4096),  # more rows than are transformed at once
    )
]  # fmt: skip
ASYMMETRIC, FLOATS, LATTICE = CASES[2], CASES[7], CASES[10]
CASES += [{**CASES[place], "clamped": (1.7, 0.5)} for place in (0, 1, 3, 6, 7, 10, 12, 14)]


@pytest.fixture(params=("portable", "avx2", "avxvnni", "avx512bf16", SLOW_PAIRS, "dotprod"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def op_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """The op of a format, and its reference."""
    if isinstance(case["format"], E8PFormat):
        return torch.ops.ptq.e8p_experts.default, quip_sharp.expert_ops.experts
    if isinstance(case["format"], IntegerFormat):
        return torch.ops.ptq.integer_experts.default, quarot.expert_ops.experts
    return torch.ops.ptq.minifloat_experts.default, fp6.expert_ops.experts


def arguments(
    dtype: torch.dtype,
    rows: str,
    format: Any,
    hidden: int,
    width: int,
    input_bits: int,
    down_bits: int,
    order: int,
    clamped: tuple[float, ...] = (),
) -> list[Any]:
    """Those of the op, for four tokens; with biases where gates are clamped. Where linears have signs, these are any
    numbers."""
    generator = torch.Generator().manual_seed(0)
    tokens, counts = ROWS[rows]
    weights = []
    for n, k in [(width, hidden)] * (2 * len(counts)) + [(hidden, width)] * len(counts):
        w = torch.randn(n, -(-k // 8) * 8 if isinstance(format, E8PFormat) else k, generator=generator)
        rounded = rounding.nearest(w / k**0.5 + 0.02, format.codebook)
        weights.append(format.prepack(format.pack(rounded), "cpu"))
    names = ("tiles", "scale", "zero") if isinstance(format, IntegerFormat) else ("tiles", "scale")
    lists = [[part[name] for part in weights if name in part] for name in names]
    x = torch.randn(4, hidden, generator=generator).to(dtype)
    shares = torch.rand(len(tokens), generator=generator).tolist()
    outputs = [width] * (2 * len(counts)) + [hidden] * len(counts)
    between = [torch.randn(n, generator=generator).to(dtype) for n in outputs] if clamped else [], clamped
    if isinstance(format, E8PFormat):
        inputs = [hidden] + [width] * len(counts)
        su, sv = ([torch.randn(n, generator=generator) for n in sizes] for sizes in (inputs, outputs))
        outside, inside = (hadamard.dense_factors(size, x.device) for size in (hadamard.largest_block(hidden), order))
        numbers = width, format.bits, input_bits, 0.95, down_bits, 0.9
        return [x, tokens, counts, shares, *lists, su, sv, *numbers, *outside, *inside, *between]
    numbers = [format.bits] if isinstance(format, IntegerFormat) else [*format.small_float.sizes]
    down = [*hadamard.dense_factors(order, x.device), down_bits, 0.9] if order else [[], 0, down_bits, 0.9]
    numbers = [width, *numbers, format.group_size, input_bits, 0.95]
    return [x, tokens, counts, shares, *lists, *numbers, *down, *between]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(value) for value in case.values()))
def test_the_bits_of_single_ops(case: dict[str, Any], rows: str, dtype: torch.dtype, level: str) -> None:
    given, (op, reference) = arguments(dtype, rows, **case), op_of(case)
    found, wanted = op(*given), reference(*given)
    assert found.dtype == dtype and torch.equal(found, wanted)
    x, tokens = given[0], given[1]
    others = [token for token in range(4) if token not in tokens]
    assert not found[others].any() and found[tokens].any(1).all()
    strided = torch.cat((x, x), 1)[:, : x.shape[1]]
    assert torch.equal(op(strided, *given[1:]), wanted)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", (CASES[0], FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_damage_shows(case: dict[str, Any], dtype: torch.dtype, level: str) -> None:
    given, (op, _) = arguments(dtype, "experts in common", **case), op_of(case)
    for number in (torch.nan, torch.inf):
        given[0][1, 3] = number
        found = op(*given)
        assert not found[1].isfinite().any() and found[[0, 3]].isfinite().all()


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_schema_and_fake(case: dict[str, Any]) -> None:
    given = tuple(arguments(torch.float32, "experts in common", **case))
    for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(op_of(case)[0], given, test_utils=check)


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_what_does_not_fit_is_refused(case: dict[str, Any], level: str) -> None:
    good, (op, _) = arguments(torch.float32, "experts in common", **case), op_of(case)
    names = [argument.name for argument in op._schema.arguments]
    x, tiles = good[0], good[4]
    wrongs = [
        ("x", x[None]), ("x", x[:2]), ("x", torch.cat((x, x), 1)), ("x", x.half()), ("tokens", [0, 1, 4, 1, 0]),
        ("tokens", [0, 1, -1, 1, 0]), ("tokens", [0, 1, 3, 1]), ("tokens", []), ("counts", [1, 4, 0]),
        ("counts", [1, 3, 2]), ("counts", [1, 3]), ("shares", [0.5]), ("tiles", tiles[:-1]), ("tiles", tiles[::-1]),
        ("scale", good[5][:-1]), ("zero", good[5][:-1]), ("width", 145), ("bits", 9), ("exponent", 5),
        ("group_size", 32), ("su", [torch.ones(64)] * 3), ("su", [torch.ones(96)] * 4), ("sv", [torch.ones(64)] * 9),
        ("sv", [torch.ones(64).double()] * 9), ("sv", []), ("width_order", 0), ("width_order", 64),
        ("biases", [torch.ones(64)] * 8), ("biases", [torch.ones(65)] * 9), ("clamped", [1.7]),
    ]  # fmt: skip
    wrapped = list(good)  # a sum of counts that comes to five again
    wrapped[1:4] = [0, 1, 3, 1, 0], [2**62, 2**62, 2**62, 2**62 + 5], [0.5] * 5
    wrapped[4:7] = [part[:1] * 12 if isinstance(part, list) else part for part in good[4:7]]
    with pytest.raises(RuntimeError, match="do not fit together"):
        op(*wrapped)
    for name, wrong in wrongs:
        if name not in names:
            continue
        given = list(good)
        given[names.index(name)] = wrong
        with pytest.raises(RuntimeError):
            op(*given)
