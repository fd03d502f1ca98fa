"""Codes of 2 to 8 bits in the order in which the CPU kernels read them: tiles, layout version 1. Not on disk.

W[n, k] is padded with zeros to super-blocks of 16 rows and 32 columns. A code's bits are cut into planes (`PLANES`),
the widest first, which holds the lowest bits. A plane of width p is p vectors of 64 bytes; byte 4 r + j of a vector
(row r, j = 0..3) holds 8 / p fields, lowest bits first; field i of vector v belongs to column (v (8 / p) + i) 4 + j.
So one instruction multiplies four neighbouring columns of sixteen rows with four activations, and a thread reads its
rows as one stream. In memory: uint8 [row tiles, super-blocks, 64 bits] (`csrc/tiles/layout.h`).

What a code stands for is another matter: the formats that use tiles say it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from ptq.ops import bitstream
from ptq.ops.op_declarations import reference_of

ROWS, COLUMNS = 16, 32
PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the planes of a code, from its lowest bits up."""


def groups_fit(group_size: int) -> bool:
    """Whether a weight with groups of this size can be tiled: no super-block may lie in two groups."""
    return group_size % COLUMNS == 0


def listed(weights: Sequence[Mapping[str, Tensor]], *names: str) -> list[Any] | None:
    """Parts of several weights in tiles as ops on lists take them: a list for each name (empty where they have no such
    part), then the number of rows of each weight. None where one is not in tiles."""
    if not all("tiles" in parts for parts in weights):
        return None
    lists = [[parts[name] for parts in weights] if name in weights[0] else [] for name in names]
    return [*lists, [parts["shape"].shape[0] for parts in weights]]


def tile_scales(scale: Tensor) -> Tensor:
    """[n, g] to [row tiles, g, 16], padded with zeros: for scales and zeros."""
    n, g = scale.shape
    tiles = -(-n // ROWS)
    return torch.nn.functional.pad(scale, (0, 0, 0, tiles * ROWS - n)).view(tiles, ROWS, g).transpose(1, 2).contiguous()


def untile_scales(scale: Tensor, n: int | torch.SymInt) -> Tensor:
    """Inverse of `tile_scales`."""
    return scale.transpose(1, 2).flatten(0, 1)[:n].contiguous()


@reference_of(
    "integer_prepack",
    "(Tensor codes, int bits, int k) -> Tensor",
    lambda codes, bits, k: codes.new_empty(-(-codes.shape[0] // ROWS), -(-k // COLUMNS), 64 * bits),
)
def prepack(codes: UInt8[Tensor, "n bytes"], bits: int, k: int) -> UInt8[Tensor, "tiles blocks size"]:
    """Tiles from the packed rows of `bitstream.pack`."""
    code = bitstream.unpack(codes, bits, k)
    tiles, blocks = -(-code.shape[0] // ROWS), -(-k // COLUMNS)
    code = torch.nn.functional.pad(code, (0, blocks * COLUMNS - k, 0, tiles * ROWS - code.shape[0]))
    planes, shift = [], 0
    for width in PLANES[bits]:
        fields = ((code >> shift) & (2**width - 1)).view(tiles, ROWS, blocks, width, 8 // width, 4)
        byte = fields[..., 0, :].clone()
        for i in range(1, 8 // width):
            byte |= fields[..., i, :] << (i * width)
        planes.append(byte.permute(0, 2, 3, 1, 4).reshape(tiles, blocks, width * 64))
        shift += width
    return torch.cat(planes, 2)


def unpack(tiles: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt) -> UInt8[Tensor, "n k"]:
    """The codes, one in a byte."""
    count, blocks = tiles.shape[:2]
    code, shift, start = tiles.new_zeros(count, ROWS, blocks, COLUMNS), 0, 0
    for width in PLANES[bits]:
        byte = tiles[:, :, start * 64 : (start + width) * 64].reshape(count, blocks, width, 1, ROWS, 4)
        fields = [(byte >> (i * width)) & (2**width - 1) for i in range(8 // width)]
        code |= torch.cat(fields, 3).permute(0, 4, 1, 2, 3, 5).reshape(code.shape) << shift
        shift, start = shift + width, start + width
    return code.view(count * ROWS, blocks * COLUMNS)[:n, :k]


@reference_of(
    "integer_unprepack",
    "(Tensor tiles, int n, int bits, int k) -> Tensor",
    lambda tiles, n, bits, k: tiles.new_empty(n, bitstream.packed_size(k, bits)),
)
def unprepack(
    tiles: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "n bytes"]:
    """Exact inverse of `prepack`."""
    return bitstream.pack(unpack(tiles, n, bits, k).contiguous(), bits)
