"""`ptq::latent_attention` against its reference, and that against attention to keys and values that are made of the
latent vectors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, at_level
from torch import Tensor

from ptq.ops import latent_ops, steps
from ptq.ops.latent_ops import RopeLayout

OP = torch.ops.ptq.latent_attention.default
PLACES = {name: i for i, name in enumerate(
    ("q", "latent", "rotary", "cos", "sin", "latents", "rope_keys", "before", "keys", "values", "rope_layout",
     "scaling", "mask")
)}  # fmt: skip


@pytest.fixture(params=("portable", "avx2", "avx512", "avx512bf16", SLOW_PAIRS))
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param)


def arguments(
    dtype: torch.dtype = torch.float32, b: int = 2, t: int = 1, heads: int = 3, dk: int = 6, dv: int = 10,
    rank: int = 24, r: int = 8, before: int = 5, rope_layout: RopeLayout = RopeLayout.PAIRS, tables: int = 1,
    hidden: int = 0, gone: int = 0,
) -> list[Any]:  # fmt: skip
    """`hidden`: tokens that a mask hides, fewer in later rows; `gone`: of the room, in front of what is cached."""
    draw = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    given = [made(b, t, heads * (dk + r)), made(b, t, rank), made(b, t, r)]
    table = (tables, t, r // 2 if rope_layout is RopeLayout.COMPLEX else r)
    cos_sin = [made(*table) for _ in range(2)]
    cos_sin = [x.float() for x in cos_sin] if rope_layout is RopeLayout.COMPLEX else cos_sin
    room = [made(b, 1, gone + before + t + 3, size)[:, :, gone:] for size in (rank, r)]
    for x in room:
        x[:, :, before + t :] = torch.inf  # which nobody reads
    matrices = [made(heads, rank, dk) / dk**0.5, made(heads, dv, rank) / rank**0.5]
    seen = torch.arange(before + t) >= hidden - torch.arange(b)[:, None]
    causal = torch.ones(t, before + t, dtype=torch.bool).tril(before)
    mask = seen[:, None, None] & causal if hidden else None
    return [*given, *cos_sin, *room, before, *matrices, rope_layout, (dk + r) ** -0.5, mask]


def copied(given: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in given]


CASES: list[dict[str, Any]] = [
    {}, {"b": 1, "heads": 1, "rank": 1, "r": 2, "dk": 1, "dv": 1, "before": 0}, {"t": 3, "before": 200},
    {"b": 1, "before": 3000, "rank": 64, "r": 16, "dk": 32, "dv": 32, "heads": 5}, {"tables": 2, "before": 140},
    {"t": 5, "before": 127, "hidden": 20, "heads": 4, "rank": 96, "r": 64}, {"b": 1, "gone": 7}, {"gone": 3, "t": 2},
    {"b": 9, "heads": 7, "rank": 40, "r": 10, "before": 33, "hidden": 7}, {"before": 2047}, {"before": 2048, "t": 2},
    {"hidden": 100, "before": 20},
]  # fmt: skip


@pytest.mark.parametrize("rope_layout", RopeLayout)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case: dict[str, Any], dtype: torch.dtype, rope_layout: RopeLayout, level: str) -> None:
    mine = arguments(dtype, rope_layout=rope_layout, **case)
    theirs = copied(mine)
    found, wanted = OP(*mine), latent_ops.latent_attention(*theirs)
    tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, wanted, **tolerance)
    assert torch.equal(mine[5], theirs[5])
    if rope_layout is RopeLayout.COMPLEX:  # torch may multiply and add at once
        torch.testing.assert_close(mine[6], theirs[6], rtol=1e-2, atol=1e-5)
    else:
        assert torch.equal(mine[6], theirs[6])


@pytest.mark.parametrize("rope_layout", RopeLayout)
@pytest.mark.parametrize("t, hidden", ((1, 0), (3, 4)))
def test_it_is_attention_to_keys_and_values_of_all_tokens(t: int, hidden: int, rope_layout: RopeLayout) -> None:
    """In float64, as transformers does it: k = W_k c and v = W_v c for every token of the context."""
    given = [x.double() if isinstance(x, Tensor) and x.dtype != torch.bool else x
             for x in arguments(t=t, hidden=hidden, before=9, rope_layout=rope_layout)]  # fmt: skip
    q, latent, rotary, cos, sin, latents, rope_keys, before, keys, values, _, scaling, mask = given
    (heads, _, dk), dv, after, r = keys.shape, values.shape[1], before + t, rotary.shape[2]
    query = q.view(2, t, heads, dk + r).transpose(1, 2)
    query, rotated = query.split((dk, r), -1)
    known = torch.cat((latents[:, 0, :before], latent), 1)
    shared = torch.cat((rope_keys[:, 0, :before], turn(rotary[:, None], cos, sin, rope_layout)[:, 0]), 1)
    k = torch.einsum("bsr,hrd->bhsd", known, keys)
    v = torch.einsum("bsr,hdr->bhsd", known, values)
    k = torch.cat((k, shared[:, None].expand(-1, heads, -1, -1)), -1)
    asked = torch.cat((query, turn(rotated, cos, sin, rope_layout)), -1)
    seen = torch.ones(t, after, dtype=torch.bool).tril(before) if mask is None else mask
    weight = (asked @ k.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = (weight @ v).transpose(1, 2).flatten(2)
    found = OP(*arguments(t=t, hidden=hidden, before=9, rope_layout=rope_layout))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert found.shape == (2, t, heads * dv)


def turn(x: Tensor, cos: Tensor, sin: Tensor, rope_layout: RopeLayout) -> Tensor:
    """Numbers as complex ones, which are multiplied."""
    r = x.shape[-1]
    if rope_layout is RopeLayout.NONE:
        return x
    if rope_layout is RopeLayout.COMPLEX:
        angles = torch.complex(cos, sin)[:, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (r // 2, 2))) * angles).flatten(-2)
    first, second = (x[..., ::2], x[..., 1::2]) if rope_layout is RopeLayout.PAIRS else x.chunk(2, -1)
    both = torch.cat((first * cos[:, None, :, : r // 2], second * cos[:, None, :, r // 2 :]), -1)
    return both + torch.cat((-second * sin[:, None, :, : r // 2], first * sin[:, None, :, r // 2 :]), -1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_any_number_of_threads_gives_the_same(dtype: torch.dtype, level: str) -> None:
    case: dict[str, Any] = dict(b=2, t=2, heads=16, dk=64, dv=64, rank=128, r=32, before=700, hidden=3)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(OP(*arguments(dtype, **case)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_rows_and_tokens_do_not_change_each_other(level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for before in (150, 2047):
            given = arguments(dtype, b=3, t=2, before=before, heads=5)
            whole = OP(*copied(given))
            for row in range(3):
                one = [x[row : row + 1] if i in (0, 1, 2, 5, 6) else x for i, x in enumerate(copied(given))]
                assert torch.equal(OP(*one)[0], whole[row])
                first = [x[:, :1] if i < 5 else x for i, x in enumerate(one)]
                assert torch.equal(OP(*first)[0, 0], whole[row, 0])


def test_a_row_that_sees_nothing_is_zero(level: str) -> None:
    given = arguments(t=2, hidden=3, before=9)
    given[-1] = given[-1].clone()
    given[-1][0, 0, 1] = False
    found = OP(*given)
    assert not found[0, 1].any() and found[0, 0].any() and found[1].any()


def test_nothing_to_do() -> None:
    assert OP(*arguments(b=0)).shape == (0, 1, 30)
    assert OP(*arguments(t=0)).shape == (2, 0, 30)


WRONG: list[tuple[str, Any]] = [
    ("q", torch.zeros(2, 1, 40)), ("q", torch.zeros(2, 1, 42, dtype=torch.float16)), ("latent", torch.zeros(2, 1, 25)),
    ("rotary", torch.zeros(2, 2, 8)), ("rotary", torch.zeros(2, 1, 7)), ("cos", torch.zeros(1, 1, 6)),
    ("sin", torch.zeros(1, 1, 8, dtype=torch.bfloat16)), ("cos", torch.zeros(3, 1, 8)),
    ("latents", torch.zeros(2, 2, 9, 24)), ("latents", torch.zeros(2, 1, 9, 48)[..., ::2]),
    ("rope_keys", torch.zeros(2, 1, 8, 8)), ("rope_keys", torch.zeros(1, 1, 9, 8)), ("before", 9), ("before", -1),
    ("keys", torch.zeros(3, 24, 5)), ("keys", torch.zeros(3, 24)), ("values", torch.zeros(4, 10, 24)),
    ("values", torch.zeros(3, 10, 24, dtype=torch.bfloat16)), ("rope_layout", 7),
    ("mask", torch.ones(2, 1, 1, 5, dtype=torch.bool)), ("mask", torch.ones(2, 1, 1, 6)),
]  # fmt: skip


@pytest.mark.parametrize("name, wrong", WRONG)
def test_what_does_not_fit_is_refused(name: str, wrong: Any) -> None:
    given = arguments()
    OP(*copied(given))
    given[PLACES[name]] = wrong
    before = copied(given[5:7])
    with pytest.raises(RuntimeError, match="latent_attention"):
        OP(*given)
    assert all(torch.equal(a, b) for a, b in zip(given[5:7], before, strict=True))


def test_the_reference_turns_as_the_other_ops_do() -> None:
    x, cos, sin = (torch.randn(2, 1, 3, 8), *torch.randn(2, 1, 3, 8))
    assert torch.equal(latent_ops._with_rope(x, RopeLayout.HALVES, cos, sin), steps.rotary(x, x, cos, sin)[0])
