"""Small-float weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Fragments** (`fp6.fragments`), and beside them the scales as for tiles (`ptq.ops.tiles.tile_scales`):

- `fragments` uint8 [row tiles, blocks, 128 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16

The products are those of `fp6.tiled_ops`: `minifloat_linear_fragments` is W6A16, whose kernels differ from the
reference in the last bits; `minifloat_quantized_fragments` is W6A8, the same to the bit where the element's numbers fit
int8 and a row has one scale.

Up to 8 bfloat16 tokens must lie below 2^48 (`csrc/fragments_cuda/weights.cuh`): what is larger becomes infinity.
"""

import functools

from fp6 import fragments, tiled_ops
from ptq.ops.op_declarations import declare_linear, declare_quantized_linear

WEIGHT, NUMBERS = "Tensor fragments, Tensor scale", "int n, int exponent, int mantissa, int group_size"

dequantize = functools.partial(tiled_ops.dequantize_packed, fragments.unpack)
quantized = functools.partial(tiled_ops.quantized_packed, fragments.unpack)

declare_linear("minifloat_linear_fragments", WEIGHT, NUMBERS, dequantize)
declare_quantized_linear("minifloat_quantized_fragments", WEIGHT, NUMBERS, quantized)
