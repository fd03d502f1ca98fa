"""Single rows of integer weights: every layout against the whole weight, to the bit."""

from collections.abc import Iterator

import pytest
import torch
from conftest import Ops, at_level, ops_at
from test_tiled import draw, random_parts

from ptq.layers import embedding
from quarot.integer import IntegerFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 32, 0), (16, 32, 32), (33, 96, 32), (50, 172, 0), (37, 1, 0), (19, 640, 128), (17, 35, 5))
"""n, k, group size."""


@pytest.fixture(params=("reference", "portable"))
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    yield from ops_at(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_are_those_of_the_weight(ops: Ops, bits: int, symmetric: bool, shape: tuple[int, int, int]) -> None:
    n, k, group = shape
    format = IntegerFormat(bits, group, symmetric)
    parts = random_parts(format, n, k)
    whole = format.dequantize(parts, n, k)
    index = torch.randint(0, n, (23,), generator=draw(n))
    index[0], index[-1] = n - 1, 0
    tiled = format.prepack(parts, "cpu")
    for dtype in DTYPES:
        expected = whole[index].to(dtype)
        found = ops["integer_rows"](parts["codes"], parts["scale"], parts.get("zero"), index, bits, group, k, dtype)
        assert found.dtype == dtype and torch.equal(found, expected)
        if "tiles" in tiled:
            held = tiled["tiles"], tiled["scale"], tiled.get("zero")
            assert torch.equal(ops["integer_rows_tiled"](*held, index, n, bits, group, k, dtype), expected)
    if group % 32 == 0:  # what a GPU holds
        assert torch.equal(format.rows(format.lay_out(parts, "fragments"), index, k), whole[index])
    assert torch.equal(format.rows(tiled, index, k), whole[index])


def test_strides_and_no_rows(ops: Ops) -> None:
    format = IntegerFormat(4, 32)
    parts = random_parts(format, 40, 64)
    whole = format.dequantize(parts, 40, 64)
    wide = {part: torch.stack([tensor, tensor], 2).flatten(1)[:, ::2] for part, tensor in parts.items()}
    every_third = torch.arange(40)[::3]
    found = ops["integer_rows"](wide["codes"], wide["scale"], None, every_third, 4, 32, 64, torch.float32)
    assert torch.equal(found, whole[every_third])
    none = torch.empty(0, dtype=torch.long)
    tiled = format.prepack(parts, "cpu")
    assert ops["integer_rows"](parts["codes"], parts["scale"], None, none, 4, 32, 64, torch.float32).shape == (0, 64)
    held = tiled["tiles"], tiled["scale"], None
    assert ops["integer_rows_tiled"](*held, none, 40, 4, 32, 64, torch.bfloat16).shape == (0, 64)


@pytest.mark.parametrize("row", [-1, 40, 47, 2**40])
def test_a_row_that_does_not_exist(ops: Ops, row: int) -> None:
    """The last tile of 40 rows has room for 48."""
    format, index = IntegerFormat(4, 32), torch.tensor([3, row])
    parts = random_parts(format, 40, 64)
    tiled = format.prepack(parts, "cpu")
    with pytest.raises((IndexError, RuntimeError), match=r"does not exist|out of range"):
        ops["integer_rows"](parts["codes"], parts["scale"], None, index, 4, 32, 64, torch.float32)
    with pytest.raises((IndexError, RuntimeError), match=r"does not exist|out of range"):
        ops["integer_rows_tiled"](tiled["tiles"], tiled["scale"], None, index, 40, 4, 32, 64, torch.float32)
    with pytest.raises(IndexError, match=r"out of range"):
        format.rows(format.lay_out(parts, "fragments"), index, 64)


def test_what_does_not_fit_is_refused() -> None:
    format, index, op = IntegerFormat(4, 32), torch.tensor([3]), torch.ops.ptq.integer_rows
    codes, scale = random_parts(format, 40, 64).values()
    for _ in at_level("portable"):
        for arguments in (
            (codes[:, 1:], scale, index, 4, 32, 64),
            (codes, scale[:39], index, 4, 32, 64),
            (codes, scale, index.int(), 4, 32, 64),
            (codes, scale, index[None], 4, 32, 64),
            (codes, scale, index, 9, 32, 64),
            (codes, scale, index, 4, 48, 64),
        ):
            with pytest.raises(RuntimeError, match="integer_rows"):
                op(*arguments[:2], None, *arguments[2:], torch.float32)


def test_threads_do_not_change_the_result() -> None:
    format = IntegerFormat(6, 128)
    parts, index = random_parts(format, 300, 1024), torch.randint(0, 300, (700,), generator=draw(1))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(format.rows(format.prepack(parts, "cpu"), index, 1024, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_opcheck() -> None:
    format, index = IntegerFormat(3, 32, False), torch.tensor([3, 0, 17])
    parts = random_parts(format, 18, 64)
    tiled = format.prepack(parts, "cpu")
    check, op, numbers = torch.library.opcheck, torch.ops.ptq, (3, 32, 64, torch.bfloat16)
    check(op.integer_rows.default, (parts["codes"], parts["scale"], parts["zero"], index, *numbers))
    check(op.integer_rows_tiled.default, (tiled["tiles"], tiled["scale"], tiled["zero"], index, 18, *numbers))


def test_the_format_can_be_an_embeddings() -> None:
    assert isinstance(IntegerFormat(), embedding.RowFormat)
