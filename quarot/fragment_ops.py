"""Integer weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Fragments** (`ptq.ops.fragments`), and beside them scales and zeros as for tiles (`ptq.ops.tiles.tile_scales`):

- `fragments` uint8 [row tiles, blocks, 128 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)

The products are those of `quarot.tiled_ops`: `integer_linear_fragments` for floats, whose kernels differ from the
reference in the last bits, and `integer_quantized_fragments` for quantised tokens, the same to the bit where a row has
one scale; the float32 sums of several groups are added in another order.

Up to 8 bfloat16 tokens must lie below 2^48 (`csrc/fragments_cuda/weights.cuh`): what is larger becomes infinity.
"""

import functools

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from ptq.ops import fragments
from ptq.ops.op_declarations import declare_linear, declare_quantized_linear
from quarot import tiled_ops

WEIGHT, NUMBERS = "Tensor fragments, Tensor scale, Tensor? zero", "int n, int bits, int group_size"

dequantize = functools.partial(tiled_ops.dequantize_packed, fragments.unpack)


def quantized(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
    input_bits: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`tiled_ops.quantized_packed` with a weight in fragments. `input_bits`: of the integers, which nobody looks at;
    where they are four, some GPUs multiply faster."""
    return tiled_ops.quantized_packed(
        fragments.unpack, q, q_scale, codes, scale, zero, bias, n, bits, group_size, dtype
    )


declare_linear("integer_linear_fragments", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("integer_quantized_fragments", WEIGHT, f"{NUMBERS}, int input_bits", quantized)
