"""Integer weights in the layout that the CPU kernels read: ops, with references in PyTorch. Not on disk.

**Tiles** (`ptq.ops.tiles`), and beside them:

- `tiles` uint8 [row tiles, super-blocks, 64 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)
- or integer scales (`quarot.integer_scales`): `scale` uint8 [row tiles, 1 + g, 16]

**Quantised tokens.** q int8 [*, k] and q_scale float32 [*] stand for x = q_scale * q. `integer_linear_quantized` is
defined to the bit: per output and group I = sum of q (code - zero), an exact integer; in float32, group after group,
acc = acc + scale * I, each operation rounded; y = acc * q_scale, then + bias, then the cast to the dtype asked for.
With integer scales the sum over the groups of multiple * I is an exact integer too, and acc is it, rounded, * step.
`integer_linear_tokens` quantises x itself, as `ptq.ops.activations` does: the same bits in one call.

**Several weights**, one input: `integer_linears_...` give the same numbers as one call for each, and wake the threads
once. The lists `zero` and `bias` are empty, or have one tensor for each weight; a bias of no elements is none. No
gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor

from ptq.ops import activations as _activations  # noqa: F401 (its ops)
from ptq.ops import tiles
from ptq.ops.op_declarations import (
    declare_linear,
    declare_quantized_linear,
    declare_tokens_linear,
    reference_of,
)
from ptq.ops.tiles import untile_scales
from quarot.integer_ops import scaled
from quarot.integer_scales import Stored, Tiled, decode, numbers

WEIGHT, NUMBERS = "Tensor tiles, Tensor scale, Tensor? zero", "int n, int bits, int group_size"


Unpack = Callable[[Tensor, int, int, Any], Tensor]
"""Codes [n, k] of a weight in the order of some kernels, n, bits and k."""


def dequantize_packed(
    unpack: Unpack,
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Tiled,
    zero: UInt8[Tensor, "tiles g 16"] | None,
    n: int,
    bits: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that tiles or fragments stand for."""
    zero = None if zero is None else untile_scales(zero, n)
    return scaled(unpack(codes, n, bits, k), untile_scales(scale, n), zero, bits, group_size)


def product(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "n k"],
    scale: Stored,
    zero: UInt8[Tensor, "n g"] | None,
    bias: Float[Tensor, " n"] | None,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """The product of quantised tokens with codes, as the module docstring defines it. Float64 holds the integers."""
    n, k = codes.shape
    size = group_size or max(k, 1)
    tokens = q.reshape(q_scale.numel(), k)
    whole = scale.dtype == torch.uint8
    step, multiples = decode(scale) if whole else (None, numbers(scale))
    acc = tokens.new_zeros(tokens.shape[0], n, dtype=torch.float64 if whole else torch.float32)
    for g in range(k // size):
        columns = slice(g * size, (g + 1) * size)
        offset = 2 ** (bits - 1) if zero is None else zero[:, g, None].double()
        integers = tokens[:, columns].double() @ (codes[:, columns].double() - offset).t()
        acc = acc + multiples[:, g] * integers.to(acc.dtype)
    if step is not None:
        acc = acc.float() * step.view(-1)
    y = acc * q_scale.reshape(-1, 1)
    y = y if bias is None else y + bias.float()
    return y.to(dtype).view(*q.shape[:-1], n)


def quantized_packed(
    unpack: Unpack,
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Tiled,
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`product` with a weight in tiles or fragments."""
    zero = None if zero is None else untile_scales(zero, n)
    stored = unpack(codes, n, bits, q.shape[-1]), untile_scales(scale, n), zero
    return product(q, q_scale, *stored, bias, bits, group_size, dtype)


dequantize = functools.partial(dequantize_packed, tiles.unpack)
linear_quantized = functools.partial(quantized_packed, tiles.unpack)


def _linears(one: str, inputs: tuple[Tensor, ...], weights: Sequence[Sequence[Any]], *rest: Any) -> list[Tensor]:
    """One call of the op `one` for every weight: `weights` are the lists of tiles, scales, zeros, biases and n."""
    codes, scale, zero, bias, n = weights
    weights, count = (codes, scale, zero, [x if x.numel() else None for x in bias], n), len(codes)
    each = zip(*(column or [None] * count for column in weights), strict=True)
    return [getattr(torch.ops.ptq, one)(*inputs, *weight, *rest) for weight in each]


declare_linear("integer_linear_tiled", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("integer_linear_quantized", WEIGHT, NUMBERS, linear_quantized)
declare_tokens_linear("integer_linear_tokens", WEIGHT, NUMBERS, "integer_linear_quantized")


@reference_of(
    "integer_linears_tiled",
    "(Tensor x, Tensor[] tiles, Tensor[] scale, Tensor[] zero, Tensor[] bias, int[] n, int bits, int group_size) "
    "-> Tensor[]",
    lambda x, tiles, scale, zero, bias, n, *rest: [x.new_empty(*x.shape[:-1], size) for size in n],
)
def linears_tiled(x, tiles, scale, zero, bias, n, bits, group_size):
    """`ptq::integer_linear_tiled` of several weights."""
    return _linears("integer_linear_tiled", (x,), (tiles, scale, zero, bias, n), bits, group_size)


@reference_of(
    "integer_linears_quantized",
    "(Tensor q, Tensor q_scale, Tensor[] tiles, Tensor[] scale, Tensor[] zero, Tensor[] bias, int[] n, int bits, "
    "int group_size, ScalarType dtype) -> Tensor[]",
    lambda q, q_scale, tiles, scale, zero, bias, n, bits, group_size, dtype: [
        q.new_empty(*q.shape[:-1], size, dtype=dtype) for size in n
    ],
)
def linears_quantized(q, q_scale, tiles, scale, zero, bias, n, bits, group_size, dtype):
    """`ptq::integer_linear_quantized` of several weights."""
    return _linears("integer_linear_quantized", (q, q_scale), (tiles, scale, zero, bias, n), bits, group_size, dtype)
