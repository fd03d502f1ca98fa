"""Small-float weights in the layout that the CPU kernels read: ops, with references in PyTorch. Not on disk.

**Tiles** (`ptq.ops.tiles`) of the codes, and beside them `scale` int16 [row tiles, g, 16]: bits of bfloat16. Group i of
a row is its columns [i * group_size, (i + 1) * group_size), the last one may have fewer; group_size 0: one group per
row, else a multiple of 32. A code stands for scale * value (`fp6.element`).

**W6A16**, `minifloat_linear_tiled`: floating-point x. The values of all elements are exact in bfloat16, so products
with bfloat16 x are exact; sums are in float32, and the scale comes once in a group. Subnormal bfloat16 x may count as
zero.

**W6A8**, `minifloat_linear_quantized`: tokens x = q_scale * q, q int8. Where all values of the element times 2^s are
integers that int8 holds (`Element.int8_shift`), it is defined to the bit: per output and group I = sum of q (value
2^s), an exact integer; in float32, group after group, acc = acc + scale * I, each operation rounded; y = acc *
(q_scale 2^-s), then + bias, then the cast to the dtype asked for. For the other elements q is multiplied as bfloat16,
exactly, and summed as in W6A16; then * q_scale, + bias. `minifloat_linear_tokens` quantises x itself, as
`ptq.ops.activations` does: the same bits in one call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from fp6.element import Element, decode
from ptq.ops import activations as _activations  # noqa: F401 (its ops)
from ptq.ops import tiles
from ptq.ops.op_declarations import declare_linear, declare_quantized_linear, declare_tokens_linear
from ptq.ops.tiles import untile_scales
from ptq.weights.grouped import loaded_scale

WEIGHT, NUMBERS = "Tensor tiles, Tensor scale", "int n, int exponent, int mantissa, int group_size"


Unpack = Callable[[Tensor, int, Element, Any], Tensor]
"""Codes [n, k] of a weight in the order of some kernels, n, the element and k."""


def dequantize_packed(
    unpack: Unpack,
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    n: int,
    exponent: int,
    mantissa: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that tiles or fragments stand for."""
    element = Element(exponent, mantissa)
    return scaled(unpack(codes, n, element, k), untile_scales(scale, n), element, group_size)


def scaled(
    codes: UInt8[Tensor, "n k"], scale: Int16[Tensor, "n g"], element: Element, group_size: int
) -> Float32[Tensor, "n k"]:
    """The numbers that codes stand for; scales are bits of bfloat16."""
    number = loaded_scale(scale)
    if group_size:
        number = number.repeat_interleave(group_size, 1)[:, : codes.shape[1]]
    return decode(codes, element) * number


def quantized_packed(
    unpack: Unpack,
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    bias: Float[Tensor, " n"] | None,
    n: int,
    exponent: int,
    mantissa: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`product` with a weight in tiles or fragments."""
    element = Element(exponent, mantissa)
    stored = unpack(codes, n, element, q.shape[-1]), untile_scales(scale, n)
    return product(q, q_scale, *stored, bias, element, group_size, dtype)


def product(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "n k"],
    scale: Int16[Tensor, "n g"],
    bias: Float[Tensor, " n"] | None,
    element: Element,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """The product of quantised tokens, as the module docstring defines it. Float64 holds the integers."""
    tokens, factor = q.reshape(q_scale.numel(), q.shape[-1]).double(), q_scale.reshape(-1, 1)
    value = decode(codes, element).double()
    shift = element.int8_shift
    if shift is not None:
        value, factor = value * 2**shift, factor * 2.0**-shift
    number = loaded_scale(scale)
    acc = q_scale.new_zeros(tokens.shape[0], codes.shape[0], dtype=torch.float32)
    for g in range(number.shape[1]):
        columns = slice(g * group_size, (g + 1) * group_size) if group_size else slice(None)
        acc = acc + number[:, g] * (tokens[:, columns] @ value[:, columns].t()).float()
    y = acc * factor
    return (y if bias is None else y + bias.float()).to(dtype).view(*q.shape[:-1], codes.shape[0])


def _unpack(codes: UInt8[Tensor, "tiles blocks size"], n: int, element: Element, k: Any) -> UInt8[Tensor, "n k"]:
    return tiles.unpack(codes, n, element.bits, k)


dequantize = functools.partial(dequantize_packed, _unpack)
linear_quantized = functools.partial(quantized_packed, _unpack)

declare_linear("minifloat_linear_tiled", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("minifloat_linear_quantized", WEIGHT, NUMBERS, linear_quantized)
declare_tokens_linear("minifloat_linear_tokens", WEIGHT, NUMBERS, "minifloat_linear_quantized")
