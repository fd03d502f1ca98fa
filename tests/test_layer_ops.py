"""`ptq::integer_layer`, `ptq::minifloat_layer` and `ptq::e8p_layer` with `ptq::decode_layers` against their references,
and what they refuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, at_level
from layer_arguments import (
    DECODE,
    FORMATS,
    HEADS,
    LOW,
    OF_EACH,
    TOKEN,
    D,
    arguments,
    decoded,
    of_layer,
    of_one,
    of_token,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ptq.ops import held_layer, layer_ops


@pytest.fixture(params=("portable", "avx2", "avxvnni", "avx512", "avx512bf16", SLOW_PAIRS, "amx", "dotprod"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


TWO_SIDED: dict[str, Any] = dict(orders=(64, 96, 64, 96), back=True, signed=True)
CASES: list[dict[str, Any]] = [
    {}, {"bits": 0, "biases": ""}, {"bits": 4, "cache": "packed"}, {"cache": "sinks", "norms": "amqk"},
    {"norms": "amqkAM", "orders": (0, 0, 0, 0), "biases": "qkvogud"},
    {"norms": "AMqk", "orders": (0, 32, 0, 96), "gelu": True},
    {"bits": 0, "cache": "packed", "batch": 1, "orders": (0, 0, 0, 96)}, TWO_SIDED, TWO_SIDED | {"bits": 0, "batch": 4},
    TWO_SIDED | {"biases": "qkvogud", "cache": "packed", "gelu": True},
    TWO_SIDED | {"signed": False, "norms": "", "biases": ""},
    {"multiplier": 0.3, "norms": "amqkAM"}, TWO_SIDED | {"multiplier": -1.7},
    {"mlp": False, "norms": "aqkA", "orders": (0, 32)}, {"mlp": False, "bits": 0, "cache": "packed", "multiplier": 0.3},
    TWO_SIDED | {"mlp": False, "biases": "qkvo", "cache": "sinks"},
    {"fused": "qg", "norms": "amqk", "biases": "qog"}, {"fused": "q", "rotary_dim": 12, "cache": "packed", "batch": 1},
    {"fused": "g", "rotary_dim": 6, "cache": "both", "gelu": True, "batch": 3},
    {"mlp": False, "fused": "q", "rotary_dim": 2},
    {"mlp": False, "moe": True, "norms": "amqkAM", "multiplier": 0.3},
    {"mlp": False, "moe": True, "batch": 4, "tokens": 5, "hidden": 2},
    TWO_SIDED | {"fused": "qg", "biases": "qogd", "norms": "amqkAM", "batch": 4},
    TWO_SIDED | {"fused": "qg", "bits": 0, "cache": "packed", "rotary_dim": 8, "biases": ""},
    {"batch": 5, "hidden": 4}, {"batch": 9, "hidden": 7, "cache": "centred"}, {"hidden": 3, "cache": "sinks"},
    {"batch": 19, "bits": 0, "cache": "packed"}, TWO_SIDED | {"batch": 40, "bits": 0, "fused": "q", "hidden": 6},
    TWO_SIDED | {"batch": 18, "biases": "qkvogud", "multiplier": 0.3, "cache": "packed"},
    {"mixer": "Qkv", "norms": "amqk"}, {"mixer": "Qkv", "fused": "Q", "cache": "packed", "rotary_dim": 8, "bits": 0},
    TWO_SIDED | {"mixer": "Qkv", "batch": 3, "hidden": 2, "cache": "sinks", "biases": "Qo"},
    {"mixer": "cz"}, {"mixer": "cz", "bits": 0, "batch": 1, "norms": "amAM", "multiplier": 0.3},
    {"mixer": "cz", "mlp": False, "moe": True, "biases": "cz"}, {"mixer": "cz", "fused": "cg", "batch": 19},
    TWO_SIDED | {"mixer": "cz", "biases": "czogud"}, {"mixer": "cz", "mlp": False},
    {"mixer": "s"}, {"mixer": "s", "bits": 0, "batch": 1, "norms": "amAM", "multiplier": 0.3},
    {"mixer": "s", "mlp": False, "moe": True, "biases": "s"}, {"mixer": "s", "fused": "g", "batch": 19},
    TWO_SIDED | {"mixer": "s", "biases": "sogud"}, {"mixer": "s", "mlp": False},
    {"mixer": "nl", "norms": "amk"}, {"mixer": "rln", "norms": "amqk", "rope_layout": 1},
    {"mixer": "nl", "fused": "ng"},
    {"mixer": "nl", "rope_layout": 2, "batch": 3, "tokens": 4, "hidden": 3, "bits": 0},
    {"mixer": "rln", "norms": "amqkAM", "mlp": False, "moe": True, "fused": "r", "biases": "rlo", "multiplier": 0.3},
    {"mixer": "rln", "norms": "aq", "mlp": False, "batch": 19},
    TWO_SIDED | {"mixer": "rln", "norms": "amqk", "rope_layout": 1, "biases": "rlnogud"}, TWO_SIDED | {"mixer": "nl"},
    {"sinks": True}, {"sinks": True, "mixer": "Qkv", "tokens": 3, "hidden": 2, "norms": "amqk"},
    TWO_SIDED | {"sinks": True, "batch": 3, "rotary_dim": 8},
    {"tokens": 3}, {"tokens": 5, "hidden": 2, "cache": "packed", "norms": "amqk"},
    {"tokens": 2, "bits": 0, "fused": "qg"},
    TWO_SIDED | {"tokens": 4, "hidden": 3, "cache": "sinks", "fused": "q", "biases": "qog"},
]  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_of_single_ops(format: str, case: dict[str, Any], dtype: torch.dtype, level: str) -> None:
    (op, mine), (_, theirs) = arguments(dtype, format, **case), arguments(dtype, format, **case)
    found, wanted = decoded(op, mine), FORMATS[format][1](*of_layer(theirs))(*of_token(theirs))
    assert found.dtype == dtype and found.shape == mine["x"].shape and bool(found.isfinite().all())
    for a, b in zip((found, *mine["cache"]), (wanted, *theirs["cache"]), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(mine["cache"][0], arguments(dtype, format, **case)[1]["cache"][0])  # something was stored


@pytest.mark.parametrize("cache", ("plain", "packed", "sinks", "centred", "both"))
@pytest.mark.parametrize("format", ("integer", "e2m3", "e8p"))
def test_several_layers_are_those_one_behind_another(format: str, cache: str, level: str) -> None:
    """Each with its own cache, tokens before, scaling and multiplier."""
    own = [dict(norms="am"), dict(norms="amqkAM", multiplier=0.3), dict(norms="A", orders=(0, 0, 0, 96), gelu=True)]

    def made() -> list[tuple[Any, dict[str, Any]]]:
        layers = [arguments(torch.bfloat16, format, cache=cache, hidden=2, **case) for case in own]
        for i, (_, given) in enumerate(layers):
            given["scaling"] *= 1 + i / 4
            given["before"] -= i if cache == "plain" else 0
            given.update({name: layers[0][1][name] for name in ("cos", "sin", "mask")})
            given["mask"] = None if cache == "plain" else given["mask"]
        return layers

    layers, single = made(), made()
    x = layers[0][1]["x"]
    wanted = x
    for op, given in single:
        wanted = decoded(op, given | {"x": wanted})
    each = {name: [given[name] for _, given in layers] for name in OF_EACH}
    held = [tensor for _, given in layers for tensor in given["cache"]]
    token = layers[0][1] | each | {"cache": held}
    found = DECODE([op(*of_layer(given)) for op, given in layers], *of_token(token))
    assert torch.equal(found, wanted)
    for (_, mine), (_, theirs) in zip(layers, single, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine["cache"], theirs["cache"], strict=True))


@pytest.mark.parametrize("decode", (DECODE, layer_ops._decode_layers), ids=["kernel", "reference"])
def test_lists_that_are_not_one_for_each_layer_are_refused(decode: Any) -> None:
    op, given = arguments(torch.float32)
    layers, *token = of_one(op(*of_layer(given)), given)
    for layer in layers:
        vars(layer)["layer"] = FORMATS["integer"][1](*of_layer(given))
    token = dict(zip(TOKEN, token, strict=True))
    assert decode(layers, *token.values()).shape == given["x"].shape
    for name, wrong in (("before", [7, 7]), ("scaling", []), ("residual_multiplier", [1.0] * 3)):
        with pytest.raises(RuntimeError, match="expected as many of everything as layers"):
            decode(layers, *(token | {name: wrong}).values())
    for count, cache in ((0, []), (2, token["cache"][:1] * 3)):
        with pytest.raises(RuntimeError, match="expected as many of everything as layers"):
            DECODE(
                layers * count, *(token | {"cache": cache} | {name: token[name] * count for name in OF_EACH}).values()
            )


TOGETHER = {"factors", "counts", "orders", "back_factors", "back_counts", "back_orders"}
"""Belong together: the cases above have several."""
CHANGED = [name for name in arguments(torch.float32)[1] if name not in TOGETHER | {"round_first"}]
CHANGED = ["x", "cos", "sin", *CHANGED[CHANGED.index("gains") : CHANGED.index("gelu")]]
SPECIAL = [("recurrent", dict(mixer="cz")), ("recurrent", dict(mixer="s")), ("latent", dict(mixer="rln"))]
"""`round_first` makes no difference in float32."""


@pytest.mark.parametrize(("name", "case"), [*((name, {}) for name in CHANGED), *SPECIAL, ("sinks", dict(sinks=True))])
def test_every_argument_counts(name: str, case: dict[str, Any]) -> None:
    """A change of any part of any list changes the result."""
    case = TWO_SIDED | dict(norms="amqkAM", biases="qkvogud") | case
    op, given = arguments(torch.float32, "e8p", **case)
    wanted, was = decoded(op, given), given[name]
    for place in range(len(was) if isinstance(was, list) else 1):
        _, changed = arguments(torch.float32, "e8p", **case)
        if isinstance(was, list):
            changed[name][place] = other(name, was[place])
        else:
            changed[name] = other(name, was)
        assert not torch.equal(decoded(op, changed), wanted), place


@pytest.mark.parametrize("format", FORMATS)
def test_a_held_layer_sees_what_becomes_of_its_tensors(format: str, level: str) -> None:
    """Written to in place, or given other memory: the numbers are those of a layer that is made then."""
    case: dict[str, Any] = dict(norms="amqk", biases="qkvogud")
    case |= dict(TWO_SIDED) if format.startswith("e8p") else {}
    op, given = arguments(torch.float32, format, **case)
    held = op(*of_layer(given))
    was = DECODE(*of_one(held, given))
    for name in ("tiles", "scale", "biases", "gains", "zero"):
        for i, x in enumerate(given.get(name, ())):
            if not x.numel():
                continue
            for how in ("in place", "other memory", "out of order"):
                new = x.flip(0) if x.shape[0] > 1 else x + (1 << 20)
                if how == "in place":
                    x.copy_(new)
                else:
                    x.data = new if how == "other memory" else torch.stack([new, new], -1)[..., 0]
                found = DECODE(*of_one(held, given))
                assert torch.equal(found, decoded(op, given)), (name, i, how)
                assert not torch.equal(found, was), (name, i, how)
                was = found


@pytest.mark.parametrize("format", ("integer", "e2m3", "e8p"))
def test_a_bias_of_bfloat16_is_read_for_every_token(format: str) -> None:
    case = dict(TWO_SIDED) if format == "e8p" else {}
    op, given = arguments(torch.bfloat16, format, **case, biases="qkvogud")
    held = op(*of_layer(given))
    was = DECODE(*of_one(held, given))
    for bias in given["biases"]:
        bias.data.add_(1)
        found = DECODE(*of_one(held, given))
        assert torch.equal(found, decoded(op, given)) and not torch.equal(found, was)
        was = found


WRONG: list[tuple[str, dict[str, Any], Any]] = [
    ("latent", dict(mixer="nl"), lambda x: x[:1]), ("latent", dict(mixer="nl"), lambda x: [x[0][:5], x[1]]),
    ("latent", dict(mixer="nl"), lambda x: [x[0], x[1].bfloat16()]),
    ("latent", dict(mixer="nl"), lambda x: [x[0][0], x[1]]), ("rope_layout", dict(mixer="nl"), lambda x: 4),
    ("latent", dict(mixer="rln", norms="amqk"), lambda x: [x[0][..., 1:], x[1]]),
    ("latent", dict(mixer="cz"), lambda x: [torch.zeros(6, 32, 8), torch.zeros(6, 16, 32)]),
    ("latent", dict(mlp=False), lambda x: [torch.zeros(6, 32, 8), torch.zeros(6, 16, 32)]),
    ("sinks", dict(sinks=True), lambda x: x * 2), ("sinks", dict(sinks=True), lambda x: [x[0][:5]]),
    ("sinks", dict(sinks=True), lambda x: [x[0][None]]), ("sinks", dict(mixer="nl"), lambda x: [torch.zeros(6)]),
    ("sinks", dict(mixer="cz"), lambda x: [torch.zeros(6)]), ("sinks", dict(mixer="s"), lambda x: [torch.zeros(6)]),
    ("recurrent", dict(mixer="s"), lambda x: x[:5]), ("norm_groups", dict(mixer="s"), lambda x: 0),
    ("norm_groups", dict(mixer="s"), lambda x: -3), ("norm_groups", dict(mixer="cz"), lambda x: 1),
    ("norm_groups", dict(), lambda x: 1),
]  # fmt: skip


@pytest.mark.parametrize("name, case, change", WRONG)
def test_mixers_that_do_not_fit_are_refused_when_a_layer_is_made(name: str, case: Any, change: Any) -> None:
    op, given = arguments(torch.float32, **case)
    op(*of_layer(given))
    with pytest.raises(RuntimeError, match="layer|latent_attention"):
        op(*of_layer(given | {name: change(given[name])}))


@pytest.mark.parametrize("mixer", ("nl", "cz", "s"))
def test_a_cache_of_another_kind_is_refused(mixer: str) -> None:
    op, given = arguments(torch.float32, mixer=mixer)
    held, was = op(*of_layer(given)), [x.clone() for x in given["cache"]]
    with pytest.raises(RuntimeError, match="two tensors of the cache"):
        DECODE(*of_one(held, given | {"cache": given["cache"] * 2}))
    assert all(torch.equal(a, b) for a, b in zip(given["cache"], was, strict=True))
    op, given = arguments(torch.float32, cache="packed")
    given["sinks"] = [torch.zeros(HEADS)]
    for run in (lambda: decoded(op, given), lambda: FORMATS["integer"][1](*of_layer(given))(*of_token(given))):
        with pytest.raises(RuntimeError, match="a packed cache does not go with sinks of heads"):
            run()


def test_a_norm_that_comes_later_changes_nothing() -> None:
    op, given = arguments(torch.float32, mixer="nl", norms="amk", mlp=False)
    held = op(*of_layer(given))
    was = DECODE(*of_one(held, given))
    given["gains"][2].data = torch.ones(LOW)
    assert torch.equal(DECODE(*of_one(held, arguments(torch.float32, mixer="nl", norms="amk", mlp=False)[1])), was)


def test_what_stands_for_no_layer() -> None:
    op, given = arguments(torch.float32)
    held = op(*of_layer(given))
    for wrong in (held.clone(), held[:-1], torch.zeros(1, dtype=torch.uint8), torch.empty(0), given["x"]):
        with pytest.raises(RuntimeError, match="expected what an op on layers gave, not a copy of it"):
            DECODE(*of_one(wrong, given))


def test_a_layer_outlives_the_lists_that_it_was_made_of() -> None:
    op, given = arguments(torch.float32)
    held, wanted = op(*of_layer(given)), decoded(op, given)
    given = {name: given[name] for name in TOKEN}
    junk = [torch.randn(4096) for _ in range(64)]
    assert torch.equal(DECODE(*of_one(held, given)), wanted) and junk


def other(name: str, value: Any) -> Any:
    if name in ("input_bits", "clips"):
        return 5 if name == "input_bits" else 0.4
    return value * 1.5 + 0.25


@pytest.mark.parametrize("format", FORMATS)
def test_the_fields_are_the_arguments_of_the_ops(format: str) -> None:
    op, _ = arguments(torch.float32, format)
    names = [argument.name for argument in op._schema.arguments]
    assert names[: len(held_layer.HeldLayer._fields)] == [*held_layer.HeldLayer._fields]
    assert TOKEN == [*held_layer.Token._fields]


@pytest.mark.parametrize("format", FORMATS)
def test_schema_and_fake(format: str) -> None:
    for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
        for cache in ("plain", "sinks"):
            op, given = arguments(torch.float32, format, cache=cache)
            torch.library.opcheck(op, of_layer(given), test_utils=check)
    arguments_of_one = of_one(op(*of_layer(given)), given)  # `opcheck` would copy what stands for a layer
    with FakeTensorMode() as mode:
        fake = DECODE(*tree_map_only(Tensor, mode.from_tensor, arguments_of_one))
    assert fake.shape == given["x"].shape and fake.dtype == given["x"].dtype


@pytest.mark.parametrize("cache", ("plain", "packed", "sinks", "centred", "both"))
@pytest.mark.parametrize("format", ("integer", "e2m3", "e8p"))
def test_what_does_not_fit_is_refused(format: str, cache: str, level: str) -> None:
    op, good = arguments(torch.float32, format, norms="amqkAM", cache=cache, **TWO_SIDED)
    x, gains, rows = good["x"], good["gains"], good["rows"]
    wrongs = [
        ("x", x.expand(2, 2, -1)), ("x", x[0]), ("x", x[..., :-1]), ("x", x[:1]), ("gains", gains[:-1]),
        ("gains", [*gains[:3], torch.ones(5), *gains[4:]]), ("gains", [*gains[:5], torch.ones(5)]), ("eps", [1e-5] * 3),
        ("round_first", [1]), ("cache", good["cache"][1:]), ("cache_bits", [4]), ("before", 256), ("before", -1),
        ("cos", good["cos"][..., :-2]), ("counts", [0] * 3), ("counts", [9] * 4), ("counts", [-1] * 4),
        ("rows", [1, *rows[1:]]), ("rows", [*rows[:-1], 1]), ("rows", rows[:-1]), ("rows", []),
        ("orders", [64, 96, 64, 5]), ("back_orders", [96, 32, 32, 64, 96, 96, 5]), ("input_bits", [8] * 3),
        ("biases", [*good["biases"][:3], torch.ones(5), *[torch.empty(0)] * 3]),
    ]  # fmt: skip
    for name in ("cos", "sin"):
        wrongs.extend((name, wrong) for wrong in (torch.ones(1, 1, 2 * D), torch.ones(1, 1, 3)))
    lists = ("tiles", "scale", "n", "biases", "clips", "su", "sv", "orders", "back_orders", "back_counts")
    wrongs.extend((name, good[name][:-1]) for name in lists)
    wrongs.extend((name, []) for name in ("tiles", "scale", "n"))
    wrongs.extend((name, [value[:-1] for value in good[name]]) for name in ("su", "sv"))
    op, plain = arguments(torch.float32, format, norms="", biases="", cache=cache)
    for dtype in (torch.float16, torch.float64, torch.int8):
        with pytest.raises(RuntimeError, match="x must be float32 or bfloat16"):
            decoded(op, plain | {"x": plain["x"].to(dtype)})
    op, short = arguments(torch.float32, format, cache=cache, **TWO_SIDED, mlp=False)
    for name in lists:
        with pytest.raises(RuntimeError):
            decoded(op, short | {name: short[name][:-1]})
            pytest.fail(name)
    for name, wrong in wrongs:
        if (name, cache) == ("cache_bits", "plain") and len(wrong) == 2:
            continue
        with pytest.raises(RuntimeError):
            decoded(op, good | {name: wrong})
            pytest.fail(f"{name}: {wrong}")


@pytest.mark.parametrize("rows", ([224, -64, 0], [-32, 96, 96], [2**63 - 1, 2**63 - 1, 162]), ids=str)
def test_rows_that_a_fused_weight_does_not_have(rows: list[int], level: str) -> None:
    """Norms of queries would read them."""
    op, given = arguments(torch.float32, norms="amqk", fused="q")
    given["rows"] = [*rows, *given["rows"][3:]]
    with pytest.raises(RuntimeError, match="the weights of input 0 do not have the rows of what they are for"):
        op(*of_layer(given))
