"""The ops of `ptq.ops.mixer_ops` against float64, and what they refuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import at_level
from torch import Tensor

from ptq.ops import mixer_ops

DTYPES = (torch.float32, torch.bfloat16)
ops = torch.ops.ptq
OPS = (
    "conv_step", "causal_conv", "gated_delta_rule", "gated_rms_norm", "delta_net_step", "mamba2_scan", "mamba2_step",
)  # fmt: skip
INF = float("inf")


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
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("b, c, t, width", [(1, 3328, 9, 4), (3, 37, 2, 4), (2, 16, 5, 1), (1, 1, 1, 9), (2, 5, 0, 2)])
def test_convolution_of_a_prompt(
    b: int, c: int, t: int, width: int, bias: bool, dtype: torch.dtype, level: str
) -> None:
    rows, weight = draw(b, t, c + 3, dtype=dtype), draw(c, width, dtype=dtype, seed=1)
    added = draw(c, dtype=dtype, seed=2) if bias else None
    for x in (rows[..., 2:-1].transpose(1, 2), rows[..., 2:-1].transpose(1, 2).contiguous()):
        seen, weights = torch.nn.functional.pad(x.double(), (width, 0)), weight.double()[:, None]
        exact = (seen.unfold(2, width, 1)[:, :, 1:] * weights).sum(-1)
        exact = exact if added is None else exact + added.double()[:, None]
        for silu in (False, True):
            found, wanted = ops.causal_conv(x, weight, added, silu), mixer_ops.causal_conv(x, weight, added, silu)
            assert found.dtype == dtype and found.shape == x.shape
            if found.numel():
                assert found.stride() == wanted.stride()
                y = torch.nn.functional.silu(exact) if silu else exact
                assert close(found, y, 2) and close(wanted, y, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [False, True], ids=["short", "whole"])
@pytest.mark.parametrize("b, t, groups, heads, d, n", [
    (1, 1, 1, 48, 64, 128), (2, 19, 3, 3, 20, 70), (1, 40, 1, 4, 7, 16), (3, 5, 2, 4, 33, 1), (1, 17, 2, 2, 1, 144),
    (2, 0, 1, 1, 4, 4),
])  # fmt: skip
def test_scan(
    b: int, t: int, groups: int, heads: int, d: int, n: int, whole: bool, dtype: torch.dtype, level: str
) -> None:
    """Over slices of wider rows, as of a prompt; with D, dt_bias and limits, or without."""
    rows = draw(b, t, heads * d + 2 * groups * n + heads, dtype=dtype)
    *parts, dt = rows.split((heads * d, groups * n, groups * n, heads), 2)
    x, B, C = (part.unflatten(2, (-1, size)) for part, size in zip(parts, (d, n, n), strict=True))  # noqa: N806
    dt, A = 4 * dt, -draw(heads, seed=1).exp()  # noqa: N806
    dt[:, t // 2 :] *= 10  # more than the softplus of which is the number itself
    D, bias = (draw(heads, seed=2), draw(heads, seed=3)) if whole else (None, None)  # noqa: N806
    low, high = (0.5, 3.0) if whole else (0.0, INF)
    states = [draw(b, heads, d, n, seed=4) for _ in range(2)]
    exact = states[0].double()
    found = ops.mamba2_scan(x, dt, A, B, C, D, bias, states[0], low, high)
    wanted = mixer_ops.mamba2_scan(x, dt, A, B, C, D, bias, states[1], low, high)
    assert found.dtype == torch.float32 and found.shape == x.shape
    step = torch.nn.functional.softplus(dt.double() + (0 if bias is None else bias.double())).clamp(low, high)
    ins, outs = (part.double().repeat_interleave(heads // groups, 2) for part in (B, C))
    for i in range(t):
        exact = exact * (step[:, i] * A.double()).exp()[..., None, None]
        exact = exact + torch.einsum("bhd,bhn->bhdn", x[:, i].double() * step[:, i, :, None], ins[:, i])
        y = torch.einsum("bhdn,bhn->bhd", exact, outs[:, i])
        y = y if D is None else y + x[:, i].double() * D.double()[:, None]
        assert close(found[:, i], y, 32) and close(wanted[:, i], y, 32)
    assert all(close(state, exact, 4) for state in states)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), [((3, 96), 1), ((1, 2, 3072), 8), ((5, 70), 2), ((0, 16), 2)])
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
def test_gated_norm_of_groups(shape: tuple[int, ...], groups: int, wide: bool, dtype: torch.dtype, level: str) -> None:
    """With the gate before it, a slice of wider rows; x may be in float32."""
    x, gain = 3 * draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=2)
    x = x.float() if wide else x
    gate = 4 * draw(*shape[:-1], shape[-1] + 3, dtype=dtype, seed=1)[..., 1:-2]
    for before in (False, True):
        found = ops.gated_rms_norm(x, gate, gain, 1e-6, groups, before)
        by = torch.nn.functional.silu(gate.double())
        exact = (x.double() * by if before else x.double()).unflatten(-1, (groups, -1))
        exact = (exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * gain.double()
        assert found.dtype == x.dtype and found.shape == x.shape
        if found.numel():
            assert close(found, exact if before else exact * by, 3)


def given() -> dict[str, list[Any]]:
    """Good arguments of each op."""
    space = [draw(2, 3, 4, 6), draw(2, 3, 4), -draw(4).exp(), draw(2, 3, 2, 5), draw(2, 3, 2, 5)]
    heads = [draw(2, 3, 2, 8), draw(2, 3, 2, 8), draw(2, 3, 4, 6), -draw(2, 3, 4).abs(), draw(2, 3, 4).sigmoid()]
    return {
        "conv_step": [draw(2, 5, 1), draw(2, 5, 3), draw(5, 4), draw(5), True],
        "causal_conv": [draw(2, 5, 7), draw(5, 4), draw(5), True],
        "gated_delta_rule": [*heads, draw(2, 4, 8, 6), True],
        "gated_rms_norm": [draw(3, 8), draw(3, 8), draw(8), 1e-5, 2, True],
        "delta_net_step": delta_net(2, 24, 2, 4, 8, 6),
        "mamba2_scan": [*space, draw(4), draw(4), draw(2, 4, 6, 5), 0.0, INF],
        "mamba2_step": state_space(2, 2, 4, 6, 5),
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


def state_space(b: int, groups: int, heads: int, d: int, n: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    width, channels = heads * d, heads * d + 2 * groups * n
    shapes = (b, 1, width + channels + heads), (b, channels, 4), (b, heads, d, n)
    parts = (channels, 1, 4), (channels,), (heads,), (heads,), (heads,), (width,)
    drawn = [draw(*shape, seed=seed) for seed, shape in enumerate((*shapes, *parts))]
    return [*(x if place in (2, 5, 6, 7) else x.to(dtype) for place, x in enumerate(drawn)), 1e-5, groups]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 48, 64, 128), (3, 8, 16, 20, 12), (19, 1, 3, 5, 16)])
def test_state_space(sizes: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
    """The steps one by one, those that are no ops of ours in float64."""
    product, conv_state, state, conv, bias, a_log, D, dt_bias, gain, eps, norm_groups = state_space(*sizes, dtype)  # noqa: N806
    states = conv_state.clone(), state.clone()
    found = ops.mamba2_step(product, conv_state, state, conv, bias, a_log, D, dt_bias, gain, eps, norm_groups)
    _, groups, heads, d, n = sizes
    gate, mixed, dt = product.split((heads * d, heads * d + 2 * groups * n, heads), 2)
    mixed = ops.conv_step(mixed.transpose(1, 2), states[0], conv[:, 0], bias, True).transpose(1, 2)
    parts = mixed.split((heads * d, groups * n, groups * n), 2)
    x, B, C = (part.unflatten(2, (-1, size)) for part, size in zip(parts, (d, n, n), strict=True))  # noqa: N806
    A = -a_log.double().exp().float()  # noqa: N806
    y = ops.mamba2_scan(x, dt, A, B, C, D, dt_bias, states[1], 0.0, INF).flatten(2)
    wanted = ops.gated_rms_norm(y, gate, gain, eps, norm_groups, True).to(dtype)
    assert found.dtype == dtype and found.shape == gate.shape and torch.equal(conv_state, states[0])
    rtol = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(state, states[1], rtol=rtol, atol=1e-3 * rtol)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
    again = state_space(*sizes, dtype)
    torch.testing.assert_close(mixer_ops.mamba2_step(*again), found, rtol=rtol, atol=rtol)


def test_tokens_that_are_one(level: str) -> None:
    """Expanded over tokens, or over the batch; rows that lie on others."""
    for x in (draw(2, 1, 5).expand(2, 3, 5), draw(1, 3, 5).expand(2, 3, 5), draw(1, 1, 5).expand(2, 3, 5),
              draw(40).as_strided((2, 3, 5), (9, 3, 1)), draw(2, 3, 1).expand(2, 3, 5)):  # fmt: skip
        other = x.contiguous()
        assert torch.equal(ops.gated_rms_norm(other, x, draw(5), 1e-5), ops.gated_rms_norm(other, other, draw(5), 1e-5))
        given = draw(5, 2), None, True
        assert torch.equal(*(ops.causal_conv(part.transpose(1, 2), *given) for part in (x, other)))
        scans = []
        for part in (x, other):
            space, state = given_of_scan(), draw(2, 5, 6, 4)
            space[1] = part
            scans.append((ops.mamba2_scan(*space, None, None, state, 0.0, INF), state))
        assert all(map(torch.equal, *scans))


def given_of_scan() -> list[Tensor]:
    return [draw(2, 3, 5, 6), draw(2, 3, 5), -draw(5).exp(), draw(2, 3, 1, 4), draw(2, 3, 1, 4)]


def swapped(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("op, changes", [
    ("mamba2_step", ((5, lambda x: x[:3]), (6, lambda x: x[:3]), (7, lambda x: x[:3]), (10, lambda x: 5),
                     (2, swapped))),
    ("delta_net_step", ((4, lambda x: x.bfloat16()), (4, swapped), (11, lambda x: x.bfloat16()), (11, lambda x: x[:3]),
                        (9, lambda x: x[:3]), (7, lambda x: x[:3]))),
])  # fmt: skip
def test_a_step_that_is_refused_moves_nothing(op: str, changes: Any, level: str) -> None:
    names = argument_names(op)
    for place, change in changes:
        arguments = given()[op]
        arguments[place] = change(arguments[place])
        states = [x for name, x in zip(names, arguments, strict=True) if name in ("conv_state", "state")]
        before = [x.clone() for x in states]
        with pytest.raises(RuntimeError, match=op):
            getattr(ops, op)(*arguments)
        assert len(states) == 2 and all(map(torch.equal, states, before))


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
        wrongs = [x.double(), x[None], x.half()]
        if op != "causal_conv" or name != "x":  # of no tokens
            wrongs.append(x[..., :0])
        if name == "state":
            wrongs.append(x.transpose(0, -1).contiguous().transpose(0, -1))  # could not be written to
        if name == "weight" and op == "conv_step":
            wrongs.append(draw(5, 5))  # wider than what is known
        for wrong in wrongs:
            arguments = list(good)
            arguments[place] = wrong
            with pytest.raises(RuntimeError):
                getattr(ops, op)(*arguments)
                pytest.fail(f"{name}: {wrong.shape} {wrong.dtype}")
