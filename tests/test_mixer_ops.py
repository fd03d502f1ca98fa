"""`ptq::conv_step`, `ptq::gated_delta_rule`, `ptq::gated_rms_norm` and `ptq::delta_net_step` against float64, and what
they refuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import at_level
from torch import Tensor

from ptq.ops import mixer_ops

DTYPES = (torch.float32, torch.bfloat16)
ops = torch.ops.ptq
OPS = ("conv_step", "gated_delta_rule", "gated_rms_norm", "delta_net_step")


@pytest.fixture(params=("portable", "avx2", "avx512"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, exact: Tensor, places: float = 1) -> bool:
    """Whether numbers are right to their dtype's last places, of the largest one."""
    place = 2**-8 if found.dtype == torch.bfloat16 else 2**-20
    return bool(((found.double() - exact).abs() <= places * place * (exact.abs() + exact.abs().max() / 8)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "b, c, room, width", [(1, 6144, 4, 4), (3, 37, 3, 4), (2, 16, 5, 2), (1, 1, 1, 1), (2, 5, 1, 2)]
)
def test_convolution(b: int, c: int, room: int, width: int, bias: bool, dtype: torch.dtype, level: str) -> None:
    x, weight = draw(b, c, 1, dtype=dtype), draw(c, width, dtype=dtype, seed=1)
    added = draw(c, dtype=dtype, seed=2) if bias else None
    for silu in (False, True):
        states = [draw(b, c, room, dtype=dtype, seed=3) for _ in range(2)]
        before = states[0].clone()
        found = ops.conv_step(x, states[0], weight, added, silu)
        wanted = mixer_ops.conv_step(x, states[1], weight, added, silu)
        seen = torch.cat((before, x), -1)
        assert torch.equal(states[0], seen[..., 1:]) and torch.equal(states[0], states[1])
        exact = torch.nn.functional.conv1d(
            seen[..., -width:].double(), weight.double()[:, None], None if added is None else added.double(), groups=c
        )
        exact = torch.nn.functional.silu(exact) if silu else exact
        assert found.dtype == dtype and found.shape == x.shape
        assert close(found, exact, 2) and close(wanted, exact, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("b, t, shared, heads, dk, dv", [
    (1, 1, 16, 32, 128, 128), (2, 1, 3, 3, 20, 70), (1, 9, 1, 4, 7, 16), (3, 5, 2, 4, 33, 1), (2, 0, 1, 1, 4, 4),
])  # fmt: skip
def test_delta_rule(
    b: int, t: int, shared: int, heads: int, dk: int, dv: int, norm: bool, dtype: torch.dtype, level: str
) -> None:
    q, k = (draw(b, t, shared, dk, dtype=dtype, seed=seed) / dk**0.5 for seed in (1, 2))
    v, g, beta = draw(b, t, heads, dv, dtype=dtype, seed=3), -draw(b, t, heads).exp(), draw(b, t, heads).sigmoid()
    states = [draw(b, heads, dk, dv, seed=4) for _ in range(2)]
    exact = states[0].double()
    found = ops.gated_delta_rule(q, k, v, g, beta, states[0], norm)
    wanted = mixer_ops.gated_delta_rule(q, k, v, g, beta, states[1], norm)
    assert found.dtype == dtype and found.shape == v.shape
    one, other = (x.double().repeat_interleave(heads // shared, 2) for x in (q, k))
    if norm:
        one, other = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (one, other))
    for i in range(t):
        exact = exact * g[:, i].double().exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", exact, other[:, i])
        delta = (v[:, i].double() - known) * beta[:, i].double()[..., None]
        exact = exact + torch.einsum("bhk,bhv->bhkv", other[:, i], delta)
        y = torch.einsum("bhkv,bhk->bhv", exact, one[:, i]) / dk**0.5
        assert close(found[:, i], y, 2) and close(wanted[:, i], y, 2)
    assert all(close(state, exact, 2) for state in states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 128), (1, 3, 70), (2, 1), (0, 16)])
def test_gated_norm(shape: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
    x, gate, gain = 3 * draw(*shape, dtype=dtype), 4 * draw(*shape, dtype=dtype, seed=1), draw(shape[-1], dtype=dtype)
    found, wanted = ops.gated_rms_norm(x, gate, gain, 1e-6), mixer_ops.gated_rms_norm(x, gate, gain, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=2**-18 if dtype == torch.float32 else 2**-7, atol=1e-30)
    assert 0 in shape or (found == wanted).double().mean() > (0.2 if dtype == torch.float32 else 0.9)


def given() -> dict[str, list[Any]]:
    """Good arguments of each op."""
    heads = [draw(2, 3, 2, 8), draw(2, 3, 2, 8), draw(2, 3, 4, 6), -draw(2, 3, 4).abs(), draw(2, 3, 4).sigmoid()]
    return {
        "conv_step": [draw(2, 5, 1), draw(2, 5, 3), draw(5, 4), draw(5), True],
        "gated_delta_rule": [*heads, draw(2, 4, 8, 6), True],
        "gated_rms_norm": [draw(3, 8), draw(3, 8), draw(8), 1e-5],
        "delta_net_step": delta_net(2, 24, 2, 4, 8, 6),
    }


def delta_net(
    b: int, k: int, shared: int, heads: int, dk: int, dv: int, dtype: torch.dtype = torch.float32
) -> list[Any]:
    channels = 2 * shared * dk + heads * dv
    shapes = (b, 1, k), (b, 1, channels), (b, 1, heads * dv), (b, channels, 4), (b, heads, dk, dv)
    net = (channels, 1, 4), (channels,), (heads, k), (heads, k), (heads,), (heads,), (dv,)
    drawn = [draw(*shape, seed=seed) for seed, shape in enumerate((*shapes, *net))]
    drawn[10] *= 30  # more than the softplus of which is the number itself
    return [*(x if place in (4, 9, 10) else x.to(dtype) for place, x in enumerate(drawn)), 1e-5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 2048, 16, 32, 128, 128), (3, 70, 1, 3, 12, 20), (19, 64, 2, 2, 8, 16)])
def test_delta_net(sizes: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
    """The steps one by one, those that are no ops of ours in float64."""
    x, qkv, z, conv_state, state, conv, bias, a, b, a_log, dt_bias, gain, eps = delta_net(*sizes, dtype)
    states = conv_state.clone(), state.clone()
    found = ops.delta_net_step(x, qkv, z, conv_state, state, conv, bias, a, b, a_log, dt_bias, gain, eps)
    _, _, shared, heads, dk, dv = sizes
    mixed = ops.conv_step(qkv.transpose(1, 2), states[0], conv[:, 0], bias, True).transpose(1, 2)
    parts = mixed.split((shared * dk, shared * dk, heads * dv), 2)
    q, k, v = (part.unflatten(2, (-1, d)) for part, d in zip(parts, (dk, dk, dv), strict=True))
    one, other = (ops.dense_linear(x, w, None).double() for w in (a, b))
    g = -a_log.double().exp() * torch.nn.functional.softplus(one + dt_bias.double())
    y = ops.gated_delta_rule(q, k, v, g.float(), other.sigmoid().to(dtype).float(), states[1], True)
    wanted = ops.gated_rms_norm(y, z.view(y.shape), gain, eps).view(z.shape)
    assert found.dtype == dtype and torch.equal(conv_state, states[0])
    rtol = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(state, states[1], rtol=rtol, atol=1e-3 * rtol)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    again = delta_net(*sizes, dtype)
    torch.testing.assert_close(mixer_ops.delta_net_step(*again), found, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("op", OPS)
def test_numbers_that_do_not_depend_on_threads_and_strides(op: str, level: str) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count, strided in ((1, False), (3, True)):
            torch.set_num_threads(count)
            arguments = given()[op]
            for place, x in enumerate(arguments):
                if isinstance(x, Tensor) and x.dim() > 1 and "state" not in str(argument_names(op)[place]) and strided:
                    arguments[place] = x.transpose(0, -1).contiguous().transpose(0, -1)
            results.append(getattr(ops, op)(*arguments))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    torch.library.opcheck(getattr(ops, op).default, tuple(given()[op]))


def argument_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(ops, op).default._schema.arguments]


@pytest.mark.parametrize("op", OPS)
def test_what_does_not_fit_is_refused(op: str, level: str) -> None:
    for place, name in enumerate(argument_names(op)):
        good = given()[op]
        if not isinstance(good[place], Tensor):
            continue
        x = good[place]
        wrongs = [x.double(), x[..., :0], x[None], x.half()]
        if name == "state":
            wrongs.append(x.transpose(0, -1).contiguous().transpose(0, -1))  # could not be written to
        if name == "weight":
            wrongs.append(draw(5, 5))  # wider than what is known
        for wrong in wrongs:
            arguments = list(good)
            arguments[place] = wrong
            with pytest.raises(RuntimeError):
                getattr(ops, op)(*arguments)
                pytest.fail(f"{name}: {wrong.shape} {wrong.dtype}")
