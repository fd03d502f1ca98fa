"""The CUDA kernels of the steps between products without a GPU, as in test_cuda_host.py."""

import ctypes
from typing import Any

import pytest
import torch
from test_cuda_host import (
    ELEMENTS,
    FAST,
    QUANTISE,
    SCHEDULES,
    check,
    compiled,
    pointer,
    quantizer,
    random,
    run_hadamard,
    same,
)  # fmt: skip
from torch import Tensor

from ptq.ops import activations, hadamard, steps

__all__ = ["compiled"]  # the fixture

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
PLACE = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def factors_of(order: int, transpose: bool = False) -> tuple[int, Tensor, ctypes.Array, ctypes.c_int64]:
    """The dense factors of an order, as the host functions take them."""
    factors, _ = hadamard.dense_factors(order, torch.device("cpu"))
    orders, doublings = [f.shape[2] for f in factors], order
    for k in orders:
        doublings //= k
    codes = (ctypes.c_void_p * 8)(*(f[int(transpose)].data_ptr() for f in factors))
    return len(factors), torch.tensor(orders or [0]), codes, ctypes.c_int64(doublings)


def run_input(
    library: ctypes.CDLL, x: Tensor, *, gain: Tensor | None = None, added: Tensor | None = None,
    up: Tensor | None = None, kind: tuple[float, float, bool] = (1e-5, 0.0, True), signs: Tensor | None = None,
    order: int = 0, bits: int = 0, clip: float = 0.9, backwards: bool = False, misalign: bool = False,
    flat: bool = False,
) -> list[Tensor]:  # fmt: skip
    """What `ptq::norm_input` or `ptq::gate_input` gives, by one kernel."""
    library.test_input.restype = ctypes.c_char_p
    tokens, k = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8 if bits else x.dtype)
    scale = torch.full((tokens,), -7.0) if bits else None
    norm, grid = torch.tensor(kind[:2], dtype=torch.float32), quantizer(bits or 8, clip)
    count, orders, codes, doublings = factors_of(order or 1)
    check(
        library.test_input(
            int(backwards), ELEMENTS[x.dtype], pointer(x), pointer(added), pointer(gain), pointer(up), pointer(signs),
            pointer(total), pointer(out), pointer(scale), tokens, k // (order or 1), order, pointer(norm),
            int(kind[2]), pointer(grid), count, pointer(orders), codes, doublings, 2, int(misalign),
            int(flat),
        )
    )  # fmt: skip
    return [*([] if added is None else [total]), out, *([] if scale is None else [scale])]


def near(found: Tensor, wanted: Tensor) -> bool:
    """Within a place of the type, and mostly equal."""
    place = PLACE[found.dtype] * wanted.abs().double() + 1e-30
    return bool(((found.double() - wanted.double()).abs() <= place).all() and (found == wanted).double().mean() > 0.5)


@SCHEDULES
@DTYPES
def test_norm(compiled, dtype: torch.dtype, backwards: bool) -> None:
    library = compiled("steps_host")
    for k, tokens in ((1, 3), (7, 5), (64, 9), (128, 3), (264, 2), (264, 66), (4100, 2), (8200, 2), (16400, 1)):
        x, gain = random(tokens, k, dtype=dtype, seed=k), random(k, dtype=dtype, seed=1)
        for kind in ((1e-6, 0.0, True), (0.5, 0.0, False), (1e-5, 1.0, False)):
            found = run_input(library, x, gain=gain, kind=kind, backwards=backwards, misalign=k % 3 == 0)
            assert near(found[0], steps.rms_norm(x, gain, *kind))
        # Sums of squares of small integers are exact: then so is the rest.
        x, added = (random(tokens, k, seed=seed).mul(4).round().to(dtype) for seed in (2, 3))
        total, found = run_input(library, x, gain=gain, added=added, backwards=backwards)
        assert torch.equal(total, x + added) and torch.equal(found, steps.rms_norm(x + added, gain, 1e-5, 0.0, True))


@SCHEDULES
@DTYPES
def test_gate(compiled, dtype: torch.dtype, backwards: bool) -> None:
    library = compiled("steps_host")
    for k in (1, 70, 256, 4096):
        gate, up = 10 * random(3, k, dtype=dtype, seed=k), random(3, k, dtype=dtype, seed=1)
        gate[0, 0], gate[1, 0] = -200, 200
        found = [
            run_input(library, gate, up=up, backwards=backwards, misalign=k == 70, flat=flat)[0]
            for flat in (True, False)
        ]
        assert torch.equal(*found)
        wanted = torch.nn.functional.silu(gate.double()) * up.double()
        assert ((found[0].double() - wanted).abs() <= 2 * PLACE[dtype] * wanted.abs() + 1e-6).all()
        assert (found[0] == steps.silu_mul(gate, up)).double().mean() > 0.5


@SCHEDULES
@pytest.mark.parametrize(
    "order, blocks",
    [
        (0, 200),
        (0, 264),
        (0, 4104),
        (0, 8200),
        (0, 16400),
        (64, 3),
        (64, 40),
        (128, 1),
        (12, 7),
        (448, 1),
        (2048, 2),
        (7168, 1),
        (6144, 1),
    ],  # fmt: skip
)
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_treated_inputs_are_the_single_kernels_to_the_bit(
    compiled, bits: int, order: int, blocks: int, backwards: bool
) -> None:
    """Norm (or gate), then the transform, then the grid: in one launch, and one after the other."""
    library, single, k = compiled("steps_host"), compiled("hadamard_host"), blocks * (order or 1)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[(order // 4 + bits) % 3]
    tokens = 66 if k == 264 else 5  # many short ones are read again
    x, other = (random(tokens, k, dtype=dtype, seed=seed) for seed in (order, 1))
    gain, signs = random(k, dtype=dtype, seed=2), random(k, seed=3).sign().float() if blocks % 2 else None
    for before in ({"gain": gain}, {"gain": gain, "added": other}, *([] if order else [{"up": other}])):
        how: dict[str, Any] = dict(backwards=backwards, misalign=blocks == 7)
        *total, y = run_input(library, x, **before, **how)
        found = run_input(library, x, **before, signs=signs if order else None, order=order, bits=bits, **how)
        assert all(torch.equal(a, b) for a, b in zip(total, found, strict=False))
        found = found[len(total) :]
        if order:
            mode = QUANTISE if bits else FAST
            wanted = run_hadamard(single, mode, y, order, signs, bits=bits or 8, clip=0.9)
        else:
            wanted = activations.reference(y, bits, 0.9) if bits else (y, y)
        assert same((found[0], found[1]), wanted) if bits else torch.equal(found[0], wanted[0])


def test_damage_shows(compiled) -> None:
    x, gain = random(3, 256), torch.ones(256)
    x[1, 7] = torch.nan
    q, scale = run_input(compiled("steps_host"), x, gain=gain, order=256, bits=8)
    assert scale[1].isnan() and (q[1] == 0).all() and scale[[0, 2]].isfinite().all()


@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [32, 48, 1024])
def test_transform_back_to_another_type(compiled, order: int, dtype: torch.dtype, backwards: bool) -> None:
    library, x, signs = compiled("steps_host"), random(3, order, seed=order), random(order, seed=1).float()
    library.test_transform_to.restype = ctypes.c_char_p
    out = torch.empty(3, order, dtype=dtype)
    arguments = factors_of(order, True)
    count, orders, *rest = arguments
    check(
        library.test_transform_to(
            int(backwards), ELEMENTS[dtype], pointer(x), pointer(signs), pointer(out), 3, order, count, pointer(orders),
            *rest,
        )
    )  # fmt: skip
    wanted, _ = run_hadamard(compiled("hadamard_host"), FAST, x, order, signs, transpose=True)
    assert torch.equal(out, wanted.to(dtype))


@SCHEDULES
@DTYPES
@pytest.mark.parametrize("d", [2, 16, 24, 64, 128])
def test_rotary_to_the_bit(compiled, d: int, dtype: torch.dtype, backwards: bool) -> None:
    library = compiled("steps_host")
    library.test_rotary.restype = ctypes.c_char_p
    cases: list[Any] = [(1, 2, 3, 0, False), (2, 2, 1, 8, False), (1, 1, 5, 3, True)]
    for rows, batch, tokens, spread, misalign in cases:
        q, k = random(batch, tokens, 3 * d + spread, dtype=dtype), random(batch, tokens, d, dtype=dtype, seed=1)
        cos, sin = (random(rows, tokens, d, dtype=dtype, seed=seed) for seed in (2, 3))
        views = [x[..., : heads * d].unflatten(2, (heads, d)).transpose(1, 2) for x, heads in ((q, 3), (k, 1))]
        found = [torch.empty(view.shape, dtype=dtype) for view in views]
        check(
            library.test_rotary(
                int(backwards), ELEMENTS[dtype], pointer(q), pointer(k), pointer(cos), pointer(sin), pointer(found[0]),
                pointer(found[1]), batch, 3, 1, tokens, d, q.shape[2], d, rows, int(misalign),
            )
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(found, steps.rotary(views[0], views[1], cos, sin), strict=True))
