"""Codes of 2 to 8 bits in the order in which the tensor cores of a GPU take them: fragments, version 1. Not on disk.

W[n, k] is padded with zeros to blocks of 16 rows and 64 columns. Of a block, lane l of a warp (g = l // 4, t = l % 4)
holds rows g and g + 8, columns 32 h + 8 t + 4 u + e for h, u in 0..1 and e in 0..3: 32 codes, `bits` words of 32 bits.
A code's bits are cut into planes of 4, 2 and 1 bits, the widest first, which holds the lowest bits (8 bits: two planes
of 4). A plane of width p is p words of each lane, lane after lane, little-endian. With pair j = 2 (e // 2) + (1 if row
g + 8 else 0), i = e % 2 and step s = 2 h + u, a code's field of p bits begins

- p = 4: in word s at bit 4 j + 16 i
- p = 2: in word h at bit 2 (4 u + j) + 16 i
- p = 1: at bit 4 s + j + 16 i

so that a mask gives two neighbouring columns in the two halves of a register. Four steps of
`mma.m16n8k16` (bf16, fp16) or two of `mma.m16n8k32` (int8) use a block up, and the tokens that lane l needs are
8 neighbours: 16-byte loads on both sides (`csrc/fragments_cuda/weights.cuh`). In memory: uint8 [row tiles, blocks,
128 bits].
"""

from collections.abc import Callable

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from ptq.ops import bitstream

ROWS, COLUMNS, HALF = 16, 64, 32
PLANES = {8: (4, 4), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the planes of a code, from its lowest bits up."""

_AT_ONCE = 64  # row tiles: the words of a plane are made as 32-bit numbers, four times the codes


def groups_fit(group_size: int) -> bool:
    """Whether a weight with groups of this size can be cut into fragments: no 32 columns may lie in two groups."""
    return group_size % HALF == 0


def _bit(width: int, device: torch.device) -> Int32[Tensor, "h u p r i"]:
    """The first bit of a field in its word, by h, u, e // 2, row // 8 and e % 2."""
    h, u, p, r, i = (torch.arange(2).view([2 if axis == a else 1 for a in range(5)]) for axis in range(5))
    j, s = 2 * p + r, 2 * h + u
    bit = {4: 4 * j + 0 * s, 2: 2 * (4 * u + j) + 0 * h, 1: 4 * s + j}[width] + 16 * i
    return bit.to(device, torch.int32)


def lanes(code: UInt8[Tensor, "tiles 16 columns"]) -> UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]:
    """The codes that each lane holds: axes row tile, block, g, t, h, u, e // 2, row // 8, e % 2."""
    tiles, blocks = code.shape[0], code.shape[2] // COLUMNS
    return code.view(tiles, 2, 8, blocks, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1, 8)


def planes(words: Int32[Tensor, "tiles blocks 8 4 bits"]) -> UInt8[Tensor, "tiles blocks size"]:
    """The words of every lane as they lie in memory: plane after plane, lane after lane, little-endian."""
    tiles, blocks, bits = words.shape[0], words.shape[1], words.shape[4]
    flat, low = [], 0
    for width in PLANES[bits]:
        plane = words[..., low : low + width].reshape(tiles, blocks, 32 * width).contiguous()
        flat.append(plane.view(torch.uint8))
        low += width
    return torch.cat(flat, 2)


def pack_words(
    code: UInt8[Tensor, "n k"], bits: int, words: Callable[[Tensor], Int32[Tensor, "tiles blocks 8 4 bits"]]
) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments of the codes, one in a byte. `words` makes the `bits` words of a lane from its codes (see `lanes`)."""
    n, k = code.shape
    tiles, blocks = -(-n // ROWS), -(-k // COLUMNS)
    out = code.new_empty(tiles, blocks, 128 * bits)
    for first in range(0, tiles, _AT_ONCE):
        rows = code[first * ROWS : (first + _AT_ONCE) * ROWS]
        count = -(-rows.shape[0] // ROWS)
        padded = torch.nn.functional.pad(rows, (0, blocks * COLUMNS - k, 0, count * ROWS - rows.shape[0]))
        out[first : first + count] = planes(words(lanes(padded.view(count, ROWS, -1))))
    return out


def unpack_words(
    fragments: UInt8[Tensor, "tiles blocks size"],
    n: int,
    bits: int,
    k: int | torch.SymInt,
    codes: Callable[[Tensor], UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]],
) -> UInt8[Tensor, "n k"]:
    """The codes, one in a byte: exact inverse of `pack_words`, where `codes` is that of its `words`."""
    tiles, blocks = fragments.shape[:2]
    words, low = [], 0
    for width in PLANES[bits]:
        plane = fragments[:, :, 128 * low : 128 * (low + width)].contiguous()
        words.append(plane.view(torch.int32).view(tiles, blocks, 8, 4, width))
        low += width
    rows = codes(torch.cat(words, 4)).permute(0, 7, 2, 1, 4, 3, 5, 6, 8)  # r, g, block, h, t, u, p, i
    return rows.reshape(tiles * ROWS, blocks * COLUMNS)[:n, :k]


def pack(code: UInt8[Tensor, "n k"], bits: int) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments of the codes, one in a byte."""

    def words(lanes: UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]) -> Int32[Tensor, "tiles blocks 8 4 bits"]:
        fields, all_words, low = lanes.int(), [], 0
        for width in PLANES[bits]:
            field = ((fields >> low) & (2**width - 1)) << _bit(width, code.device)
            dims = {4: (6, 7, 8), 2: (5, 6, 7, 8), 1: (4, 5, 6, 7, 8)}[width]
            word = field.sum(dims, dtype=torch.int32)  # disjoint bits: the sum wraps where it reaches the sign
            all_words.append(word.reshape(*fields.shape[:4], width))
            low += width
        return torch.cat(all_words, 4)

    return pack_words(code, bits, words)


def unpack(
    fragments: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "n k"]:
    """The codes, one in a byte: exact inverse of `pack`."""

    def codes(words: Int32[Tensor, "tiles blocks 8 4 bits"]) -> UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]:
        code, low = words.new_zeros(*words.shape[:4], 2, 2, 2, 2, 2, dtype=torch.uint8), 0
        for width in PLANES[bits]:
            shape = {4: (2, 2, 1, 1, 1), 2: (2, 1, 1, 1, 1), 1: (1, 1, 1, 1, 1)}[width]
            field = words[..., low : low + width].reshape(*words.shape[:4], *shape) >> _bit(width, words.device)
            code |= ((field & (2**width - 1)) << low).to(torch.uint8)
            low += width
        return code

    return unpack_words(fragments, n, bits, k, codes)


def prepack(codes: UInt8[Tensor, "n bytes"], bits: int, k: int) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments from the packed rows of `bitstream.pack`."""
    return pack(bitstream.unpack(codes, bits, k), bits)


def unprepack(
    fragments: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "n bytes"]:
    """Exact inverse of `prepack`."""
    return bitstream.pack(unpack(fragments, n, bits, k).contiguous(), bits)
