"""Integer weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Fragments** (`ptq.ops.fragments`), and beside them scales and zeros as for tiles (`ptq.ops.tiles.tile_scales`):

- `fragments` uint8 [row tiles, blocks, 128 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)

The products are those of `quarot.tiled_ops`: `integer_linear_fragments` for floats, whose kernels differ from the
reference in the last bits, and `integer_quantized_fragments` for quantised tokens, the same to the bit where a row has
one scale; the float32 sums of several groups are added in another order.
"""

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from ptq.ops.fragments import unpack
from ptq.ops.op_declarations import declare_linear, declare_quantized_linear
from ptq.ops.tiles import untile_scales
from quarot import tiled_ops
from quarot.integer_ops import scaled

WEIGHT, NUMBERS = "Tensor fragments, Tensor scale, Tensor? zero", "int n, int bits, int group_size"


def dequantize(
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    n: int,
    bits: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that fragments stand for."""
    zero = None if zero is None else untile_scales(zero, n)
    return scaled(unpack(fragments, n, bits, k), untile_scales(scale, n), zero, bits, group_size)


def quantized(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
    input_bits: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`tiled_ops.product` with a weight in fragments. `input_bits`: of the integers, which nobody looks at; where they
    are four, some GPUs multiply faster."""
    codes = unpack(fragments, n, bits, q.shape[-1])
    flat = None if zero is None else untile_scales(zero, n)
    return tiled_ops.product(q, q_scale, codes, untile_scales(scale, n), flat, bias, bits, group_size, dtype)


linear = declare_linear("integer_linear_fragments", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("integer_quantized_fragments", WEIGHT, f"{NUMBERS}, int input_bits", quantized)
