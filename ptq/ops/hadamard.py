"""Hadamard matrices: which orders exist here, how they are built, and the op that applies them.

An order is written as a Kronecker product of dense Paley factors and a power of two (Sylvester), found by search:
11008 = Paley I(343) x 2^5. `construction` names the product in the form that checkpoints store,
"paley1:343,sylvester:5", so a later, better search can never change what an old file means.

The transform is orthonormal, y = H x / sqrt(order), and acts block by block when the axis is longer than the order.
H is not symmetric in general: **the inverse is always the transpose**.
"""

import functools
import re

import numpy as np
import torch
from jaxtyping import Float, Float64, Num
from torch import Tensor

from ptq.errors import InputError
from ptq.ops.op_declarations import call, declare, lasting, wants_gradient
from ptq.ops.paley import paley, paley1, paley2, prime_power

MAX_ORDER = 1 << 24  # far beyond any layer; bounds what a hostile checkpoint can ask for
MAX_DENSE = 1024
"""Largest dense factor: building one takes the square of it, applying one as many operations for every number. All
widths of published models that were looked at have factors of at most 924."""
_MATMUL = 6  # the reference multiplies by Sylvester matrices of at most 2^6

Part = tuple[str, int]  # ("paley1", q), ("paley2", q) or ("sylvester", m); the Kronecker product runs left to right


# --- which orders, and how ------------------------------------------------------------------------------------------


def _part_order(part: Part) -> int:
    kind, number = part
    return {"paley1": number + 1, "paley2": 2 * (number + 1), "sylvester": 1 << number}[kind]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _exists_part(part: Part) -> bool:
    kind, number = part
    if kind == "sylvester":
        return number < MAX_ORDER.bit_length()
    remainder = {"paley1": 3, "paley2": 1}.get(kind)
    return number % 4 == remainder and _part_order(part) <= MAX_DENSE and prime_power(number) is not None


@functools.lru_cache(maxsize=4096)
def _search(order: int) -> tuple[Part, ...] | None:
    """The cheapest product: least sum of dense orders (operations per element) plus doublings, then fewest factors."""
    dense = [d for d in _divisors(order) if d & (d - 1) and d <= MAX_DENSE and paley(d) is not None]
    best: tuple[int, int, list[int]] | None = None

    def extend(rest: int, first: int, chosen: list[int]) -> None:
        nonlocal best
        if rest & (rest - 1) == 0:
            cost = (sum(chosen) + rest.bit_length() - 1, len(chosen), chosen)
            best = cost if best is None else min(best, cost)
            return
        for i in range(first, len(dense)):
            if rest % dense[i] == 0:
                extend(rest // dense[i], i, [*chosen, dense[i]])

    extend(order, 0, [])
    if best is None:
        return None
    parts = [found for d in best[2] if (found := paley(d)) is not None]
    doublings = (order // int(np.prod(best[2], dtype=np.int64))).bit_length() - 1
    return (*parts, ("sylvester", doublings)) if doublings or not parts else tuple(parts)


def exists(order: int) -> bool:
    """Whether a Hadamard matrix of this order can be built here. Builds none."""
    return 1 <= order <= MAX_ORDER and _search(order) is not None


@functools.lru_cache(maxsize=4096)
def largest_block(size: int) -> int:
    """The largest order that exists and divides `size` (1 at least)."""
    return next(d for d in reversed(_divisors(size)) if exists(d))


@functools.lru_cache(maxsize=4096)
def construction(order: int) -> str:
    """How the matrix of this order is built, in the form that checkpoints store: "paley1:43,sylvester:7".

    Raises InputError where no construction is known here.
    """
    if not exists(order):
        hint = f"; the largest block that divides it is {largest_block(order)}" if order > 1 else ""
        raise InputError(f"no Hadamard matrix of order {order} can be built{hint}")
    return ",".join(f"{kind}:{number}" for kind, number in _search(order) or ())


@functools.lru_cache(maxsize=4096)
def parse(construction: str) -> tuple[Part, ...]:
    """The parts of a stored construction, checked. Raises InputError for anything that `construction` cannot mean."""
    parts: list[Part] = []
    order = 1
    for text in construction.split(","):
        match = re.fullmatch(r"(paley1|paley2|sylvester):(\d{1,8})", text)
        part = (match[1], int(match[2])) if match else ("", 0)
        if not _exists_part(part) or (parts and parts[-1][0] == "sylvester"):
            raise InputError(
                f"Hadamard construction {construction!r}: expected paley1:Q or paley2:Q, of orders up to {MAX_DENSE}, "
                "then sylvester:M"
            )
        order *= _part_order(part)
        if order > MAX_ORDER:
            raise InputError(f"Hadamard construction {construction!r}: the order is above {MAX_ORDER}")
        parts.append(part)
    return tuple(parts)


def order_of(construction: str) -> int:
    """The order of a stored construction."""
    return int(np.prod([_part_order(part) for part in parse(construction)], dtype=np.int64))


def _part_matrix(part: Part) -> np.ndarray:
    kind, number = part
    if kind != "sylvester":
        return (paley1 if kind == "paley1" else paley2)(number)
    h = np.ones((1, 1), dtype=np.int8)
    for _ in range(number):
        h = np.block([[h, h], [h, -h]])
    return h


@functools.lru_cache(maxsize=8)
def matrix_from(construction: str) -> Float64[Tensor, "order order"]:
    """The +-1 matrix H of a stored construction, H H^T = order I. Do not write to it: it is cached."""
    h = functools.reduce(np.kron, map(_part_matrix, parse(construction)))
    return torch.from_numpy(h.astype(np.float64))


def matrix(order: int) -> Float64[Tensor, "order order"]:
    """The +-1 matrix H of this order, H H^T = order I. Raises InputError where none can be built."""
    return matrix_from(construction(order))


# --- the op ---------------------------------------------------------------------------------------------------------
#
# `factors` holds the dense factors, outermost first; what they leave of the order is a power of two. A factor of order
# K is uint8 [2, K/4, K], for H and for H^T: bit 3 + j of entry [., g, row] says that element 4g + j of the row is -1
# (Paley orders are multiples of 4). The kernels look sums up by it: in this order, and times 8, it is an address as it
# stands, and nothing is packed per call.


def _pack(h: np.ndarray) -> np.ndarray:
    bits = (np.stack([h, h.T]) < 0).reshape(2, len(h), -1, 4)
    codes = (bits * np.array([8, 16, 32, 64], np.uint8)).sum(-1, dtype=np.uint8)
    return np.ascontiguousarray(codes.transpose(0, 2, 1))


@functools.lru_cache(maxsize=256)
def _cached_factors(order: int | str, device: torch.device) -> tuple[list[Tensor], int]:
    name = construction(order) if isinstance(order, int) else order
    dense = [part for part in parse(name) if part[0] != "sylvester"]
    with lasting():
        return [torch.from_numpy(_pack(_part_matrix(part))).to(device) for part in dense], order_of(name)


@torch.compiler.assume_constant_result
def _factors(order: int | str, device: torch.device) -> tuple[list[Tensor], int]:
    """The dense factors on `device`, and the order. A compiled graph holds them as constants."""
    return _cached_factors(order, device)


_ARGUMENTS = "Tensor? signs, Tensor[] factors, int order, int dim, bool transpose"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the transform computes in, and the dtype of its signs: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(x: Tensor, signs: Tensor | None, order: int, dim: int) -> None:
    size = x.shape[dim]
    if size % order:
        raise InputError(f"hadamard: axis {dim} has size {size}, not a multiple of the order {order}")
    if signs is not None and (signs.shape != (size,) or signs.dtype != compute_dtype(x.dtype)):
        raise InputError(
            f"hadamard: signs are {signs.dtype}{list(signs.shape)}, expected {compute_dtype(x.dtype)}[{size}]"
        )


def _fake(x, signs, factors, order, dim, transpose):
    _check(x, signs, order, dim)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_inplace(x, signs, factors, order, dim, transpose):
    _check(x, signs, order, dim)


def _dense_factors(factors: list[Tensor], order: int, transpose: bool, like: Tensor) -> list[Tensor]:
    """+-1 matrices whose Kronecker product is H (or H^T), for the reference."""
    shifts = torch.arange(3, 7, device=like.device, dtype=torch.uint8)
    matrices, rest = [], order
    for codes in factors:
        k = codes.shape[2]
        minus = (codes[int(transpose)].T.to(like.device)[..., None] >> shifts) & 1
        matrices.append(1 - 2 * minus.reshape(k, k).to(like.dtype))
        rest //= k
    while rest > 1:
        m = min(rest.bit_length() - 1, _MATMUL)
        matrices.append(torch.from_numpy(_part_matrix(("sylvester", m))).to(like))
        rest >>= m
    return matrices


def reference(x: Tensor, signs: Tensor | None, factors: list[Tensor], order: int, dim: int, transpose: bool) -> Tensor:
    """The op in plain torch: a product with one small matrix per factor."""
    _check(x, signs, order, dim)
    y = x.movedim(dim, -1).to(compute_dtype(x.dtype)) * order**-0.5
    shape, inner = y.shape, order
    y = y * signs if signs is not None and not transpose else y
    for h in _dense_factors(factors, order, transpose, y):
        k = h.shape[0]
        inner //= k
        size = y.numel() // (k * inner)
        y = y.reshape(size, k) @ h.T if inner == 1 else h @ y.reshape(size, k, inner)
    y = y.reshape(shape)
    y = y * signs if signs is not None and transpose else y
    return y.movedim(-1, dim).to(x.dtype, memory_format=torch.contiguous_format, copy=True).contiguous()


def _inplace_reference(x, signs, factors, order, dim, transpose):
    x.copy_(reference(x, signs, factors, order, dim, transpose))


def _setup_context(ctx, inputs, output):
    _, signs, factors, ctx.order, ctx.dim, ctx.transpose = inputs
    ctx.count = len(factors)
    ctx.save_for_backward(*factors, *([] if signs is None else [signs]))


def _backward(ctx, grad):
    saved = ctx.saved_tensors
    factors, signs = list(saved[: ctx.count]), saved[ctx.count] if len(saved) > ctx.count else None
    back = torch.ops.ptq.hadamard(grad, signs, factors, ctx.order, ctx.dim, not ctx.transpose)
    return back, None, [None] * ctx.count, None, None, None


declare("hadamard", f"(Tensor x, {_ARGUMENTS}) -> Tensor", reference, _fake)
declare("hadamard_", f"(Tensor(a!) x, {_ARGUMENTS}) -> ()", _inplace_reference, _fake_inplace)
torch.library.register_autograd("ptq::hadamard", _backward, setup_context=_setup_context)


def dense_factors(order: int | str | None, device: torch.device) -> tuple[list[Tensor], int]:
    """What ops take for an order or a stored construction: its dense factors on `device`, and the order; none and 0 for
    no transform."""
    return ([], 0) if order is None else _factors(order, device)


def _run(x: Tensor, signs: Tensor | None, order: int | str, dim: int, transpose: bool, inplace: bool) -> Tensor:
    factors, size = _factors(order, x.device)
    if signs is not None:
        signs = signs.to(x.device, compute_dtype(x.dtype))
    if inplace:
        if wants_gradient(x):
            raise InputError("a Hadamard transform in place has no gradient; leave inplace=True out")
        torch.ops.ptq.hadamard_(x, signs, factors, size, dim, transpose)
        torch.autograd.graph.increment_version(x)  # for what has saved x; ops of a library do not
        return x
    return call(torch.ops.ptq.hadamard.default, x, signs, factors, size, dim, transpose)


def apply(
    x: Float[Tensor, "*batch n"],
    signs: Num[Tensor, " n"] | None,
    order: int | str,
    transpose: bool = False,
    inplace: bool = False,
) -> Float[Tensor, "*batch n"]:
    """R x for every vector on the last axis, R = H diag(signs); with `transpose` its inverse, R^T x = signs * (H^T x).

    `order` is an order or a stored construction; n must be a multiple of it (block-diagonal H). Half types compute in
    float32. Differentiable in x (not in `signs`). Raises InputError for an order that does not fit, and in place for
    an x with gradients.
    """
    return _run(x, signs, order, -1, transpose, inplace)


def apply_columns(
    w: Float[Tensor, "n k"],
    signs: Num[Tensor, " n"] | None,
    order: int | str,
    transpose: bool = False,
    inplace: bool = False,
) -> Float[Tensor, "n k"]:
    """R W: `apply` along axis 0, without a transposed copy."""
    return _run(w, signs, order, 0, transpose, inplace)
