"""E8P weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Codes**: uint8 [bits, n, c] with c = ceil(k / 8), as in `tiled_ops`: the stored parts one upon the other.

**Fragments**, layout version 1: uint8 [row tiles, blocks, 256 bits]. W is padded to blocks of 16 rows and 128 columns;
padding codes are zeros. Of a block, lane l of a warp (g = l // 4, t = l % 4) holds rows g and g + 8, of which codes
4 u + t for u in 0..3: eight codes, a byte of each in one plane, byte 2 u + r for row g + 8 r. The first two planes
(entries and signs of the first stage) lie beside each other, 16 bytes for each lane, lane after lane; behind them the
others: at 3 bits 8 bytes for each lane, at 4 bits 16. So a lane reads 16 bytes at once, a warp 512 in a row.
`scale` holds the bits of a float32 number, int32 [1].

The products are those of `tiled_ops`: `e8p_linear_fragments` for floats, whose kernels differ from the reference in the
last bits, and `e8p_quantized_fragments` for quantised tokens, the same to the bit.
"""

import functools

import torch
from jaxtyping import UInt8
from torch import Tensor

from ptq.ops.op_declarations import declare, declare_linear, declare_quantized_linear
from quip_sharp import tiled_ops

ROWS, COLUMNS = 16, 128

WEIGHT, NUMBERS = "Tensor fragments, Tensor scale", "int n, int bits"
"""A weight in the schemas of the products."""


def pack(codes: UInt8[Tensor, "bits n c"]) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments of codes."""
    bits, n, c = codes.shape
    tiles, blocks = -(-n // ROWS), -(-c * 8 // COLUMNS)
    codes = torch.nn.functional.pad(codes, (0, blocks * 16 - c, 0, tiles * ROWS - n))
    # planes, tiles, r, g, blocks, u, t -> tiles, blocks, g, t, planes, u, r
    lanes = codes.view(bits, tiles, 2, 8, blocks, 4, 4).permute(1, 4, 3, 6, 0, 5, 2)
    return torch.cat([lanes[:, :, :, :, :2].flatten(2), lanes[:, :, :, :, 2:].flatten(2)], 2)


def unpack(
    fragments: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "bits n c"]:
    """The codes of k columns: exact inverse of `pack`."""
    tiles, blocks = fragments.shape[:2]
    lanes = [part.view(tiles, blocks, 8, 4, -1, 4, 2) for part in fragments.split([512, 256 * bits - 512], 2)]
    codes = torch.cat(lanes, 4).permute(4, 0, 6, 2, 1, 5, 3).reshape(bits, tiles * ROWS, blocks * 16)
    return codes[:, :n, : -(-k // 8)].contiguous()


dequantize = functools.partial(tiled_ops.dequantize_packed, unpack)
quantized = functools.partial(tiled_ops.quantized_packed, unpack)

declare(
    "e8p_dequantize_fragments",
    f"({WEIGHT}, {NUMBERS}, int k) -> Tensor",
    dequantize,
    lambda fragments, scale, n, bits, k: fragments.new_empty(n, k, dtype=torch.float32),
)
declare_linear("e8p_linear_fragments", WEIGHT, NUMBERS, lambda *parts: torch.ops.ptq.e8p_dequantize_fragments(*parts))
declare_quantized_linear("e8p_quantized_fragments", WEIGHT, NUMBERS, quantized)
