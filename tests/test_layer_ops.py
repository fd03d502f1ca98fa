"""`ptq::integer_layer` against its reference, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import at_level
from torch import Tensor

from ptq import hadamard, kv_ops
from quarot import layer_ops
from quarot.integer import IntegerFormat, IntegerGrid

HIDDEN, FEATURES, HEADS, KV_HEADS, D = 64, 96, 6, 2, 16
NAMES = [argument.name for argument in torch.ops.ptq.integer_layer.default._schema.arguments]


@pytest.fixture(params=("portable", "avx2", "avx512bf16"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def arguments(
    dtype: torch.dtype, bits: int = 8, norms: int = 2, cache: str = "plain", order: int = 32, batch: int = 2
) -> list[Any]:
    """Those of the op, with seven tokens before. o_proj alone has a bias."""
    torch.manual_seed(0)
    draw = torch.randn
    format, before = IntegerFormat(4, 0), 7
    shapes = [(HEADS * D, HIDDEN), *[(KV_HEADS * D, HIDDEN)] * 2, (HIDDEN, HEADS * D), *[(FEATURES, HIDDEN)] * 2]
    weights = []
    for n, k in (*shapes, (HIDDEN, FEATURES)):
        w, grid = draw(n, k) / k**0.5, IntegerGrid(4)
        scales = grid.fit(w)
        codes = torch.ops.ptq.integer_pack(grid.round(w, scales), 4)
        parts = {"codes": codes, "scale": scales["scale"].bfloat16().view(torch.int16)}
        weights.append((format.prepack(parts, "cpu"), draw(n, dtype=dtype) if k == HEADS * D else None))
    packed = format.layer_weights(*zip(*weights, strict=True))
    assert packed is not None
    gains = [torch.rand(size, dtype=dtype) + 0.5 for size in (HIDDEN, HIDDEN, HEADS * D, D)[:norms]]
    held: list[Tensor] = []
    states = draw(2, batch, KV_HEADS, before, D)
    if cache == "plain":
        room = torch.zeros(2, batch, KV_HEADS, 9, D, dtype=dtype)
        room[:, :, :, :before] = states
        held.extend(room)
    else:
        for state, channel_major in zip(states, (False, True), strict=True):
            codes, scales = kv_ops.empty_chunks(1, batch, KV_HEADS, D, 4, state.device)
            kv_ops.append(codes, scales, state, 0, 4, 0.95, channel_major)
            held.extend((codes, scales))
    if cache == "sinks":
        held.extend((torch.tensor([0, 2, 0][:batch]), draw(batch, KV_HEADS, 3, D), draw(batch, KV_HEADS, 3, D)))
    numbers = [[1e-5] * norms, [0.0] * norms, [1] * norms]
    down = [*hadamard.dense_factors(order, gains[0].device), bits, 0.9] if order else [[], 0, bits, 0.9]
    turns = [draw(1, 1, D, dtype=dtype) for _ in range(2)]
    r3 = hadamard.dense_factors(D, gains[0].device)
    x = draw(batch, 1, HIDDEN, dtype=dtype)
    return [x, gains, *numbers, *packed, bits, [0.9, 0.8, 0.7], *down, *turns, held, before, [4, 4], 0.95, *r3, D**-0.5]


CASES = [
    {}, {"bits": 0}, {"bits": 4, "cache": "packed"}, {"cache": "sinks", "norms": 4}, {"norms": 4, "order": 0},
    {"bits": 0, "cache": "packed", "batch": 1, "order": 96},
]  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_single_ops(case: dict[str, Any], dtype: torch.dtype, level: str) -> None:
    mine, theirs = arguments(dtype, **case), arguments(dtype, **case)
    found, wanted = torch.ops.ptq.integer_layer(*mine), layer_ops.layer(*theirs)
    assert found.dtype == dtype and found.shape == mine[0].shape
    at = NAMES.index("cache")
    for a, b in zip((found, *mine[at]), (wanted, *theirs[at]), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(mine[at][0], arguments(dtype, **case)[at][0])  # something was stored


def test_schema_and_fake() -> None:
    for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
        for cache in ("plain", "sinks"):
            given = arguments(torch.float32, cache=cache)
            torch.library.opcheck(torch.ops.ptq.integer_layer.default, given, test_utils=check)


@pytest.mark.parametrize("cache", ("plain", "packed", "sinks"))
def test_what_does_not_fit_is_refused(cache: str, level: str) -> None:
    good = arguments(torch.float32, norms=4, cache=cache)
    x, at = good[0], NAMES.index("cache")
    wrongs = [
        ("x", x.expand(2, 2, -1)), ("x", x[0]), ("x", x[..., :-1]), ("x", x[:1]), ("gains", good[1][:-1]),
        ("gains", [*good[1][:3], torch.ones(5), *good[1][4:]]), ("eps", [1e-5] * 3), ("round_first", [1]),
        ("tiles", good[NAMES.index("tiles")][:-1]), ("n", good[NAMES.index("n")][:-1]), ("cache", good[at][:-1]),
        ("cache_bits", [4]), ("before", 256), ("before", -1), ("cos", good[NAMES.index("cos")][..., :-2]),
        ("bias", good[NAMES.index("bias")][1:]), ("clips", [0.9, 0.8]),
    ]  # fmt: skip
    for name, wrong in wrongs:
        if (name, cache) == ("cache_bits", "plain") and len(wrong) == 2:
            continue
        given = list(good)
        given[NAMES.index(name)] = wrong
        with pytest.raises(RuntimeError):
            torch.ops.ptq.integer_layer(*given)
