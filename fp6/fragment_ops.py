"""Small-float weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Fragments** (`fp6.fragments`), and beside them the scales as for tiles (`ptq.ops.tiles.tile_scales`):

- `fragments` uint8 [row tiles, blocks, 128 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16

The products are those of `fp6.tiled_ops`: `minifloat_linear_fragments` is W6A16, whose kernels differ from the
reference in the last bits; `minifloat_quantized_fragments` is W6A8, the same to the bit where the element's numbers fit
int8 and a row has one scale.
"""

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from fp6 import tiled_ops
from fp6.element import Element
from fp6.fragments import unpack
from ptq.ops.op_declarations import declare_linear, declare_quantized_linear
from ptq.ops.tiles import untile_scales

WEIGHT, NUMBERS = "Tensor fragments, Tensor scale", "int n, int exponent, int mantissa, int group_size"


def dequantize(
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    n: int,
    exponent: int,
    mantissa: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that fragments stand for."""
    element = Element(exponent, mantissa)
    return tiled_ops.scaled(unpack(fragments, n, element, k), untile_scales(scale, n), element, group_size)


def quantized(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    bias: Float[Tensor, " n"] | None,
    n: int,
    exponent: int,
    mantissa: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`tiled_ops.product` with a weight in fragments."""
    element = Element(exponent, mantissa)
    codes = unpack(fragments, n, element, q.shape[-1])
    return tiled_ops.product(q, q_scale, codes, untile_scales(scale, n), bias, element, group_size, dtype)


linear = declare_linear("minifloat_linear_fragments", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("minifloat_quantized_fragments", WEIGHT, NUMBERS, quantized)
