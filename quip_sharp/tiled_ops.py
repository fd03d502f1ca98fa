"""E8P weights in the layout that the CPU kernels read: ops, with references in PyTorch. Not on disk.

**Codes**: uint8 [bits, n, c] with c = ceil(k / 8), the parts of the stored weight one upon the other: the entries and
the signs of the first stage; at 3 bits the entries of the residual book, at 4 bits the entries and signs of a second
E8P. Column 8 i + j of W is coordinate j of code i; what lies beyond k counts as zero. With the integer points P of
`e8p` and a float32 scale, W = scale * P; `scale` holds its bits, int32 [1].

**Tiles**, layout version 1 (`csrc/e8p_tiled/layout.h`): uint8 [row tiles, bits * blocks, 64]. W is padded to blocks of
16 rows and 32 columns, four codes of each row; padding codes are zeros. A block is a vector of 64 bytes for each part
of the codes, in their order: byte 4 r + i belongs to row r, code i of the block. Two kinds of bytes are renumbered:

- signs: bits 0 .. 6 are the true signs (m' of `e8p`) of coordinates 4, 5, 2, 3, 0, 1, 6, bit 7 is p. The sign of
  coordinate 7 follows, as m' has an even number of ones.
- entries of the residual book: the 128 with odd coordinates and the 128 others are counted separately, in order; bit 5
  is set for the first kind, the other seven bits, from the lowest up, are the count.

So a look-up of 128 entries gives the last sign, and one of 64 a coordinate: two shuffles with AVX-512 VBMI.

**Quantised tokens.** q int8 [*, k] and q_scale float32 [*] stand for x = q_scale * q. `e8p_linear_quantized` is defined
to the bit: I = sum of q P, an exact integer; in float32, each operation rounded, y = (scale * I) * q_scale, then
+ bias, then the cast to the dtype asked for.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, Int32, UInt8
from torch import Tensor

from ptq.ops.op_declarations import declare, declare_linear, declare_quantized_linear, lasting, reference_of
from quip_sharp import e8p

ROWS, COLUMNS = 16, 32
PLACES = (4, 5, 2, 3, 0, 1, 6)
"""Which coordinate's sign is bit i of a tile's sign byte."""

WEIGHT, NUMBERS = "Tensor tiles, Tensor scale", "int n, int bits"


@functools.cache
@lasting()
def _tile_signs() -> UInt8[Tensor, "256"]:
    """The byte in a tile of each sign byte m."""
    m = torch.arange(256)
    p = ((m[:, None] >> torch.arange(8)) & 1).sum(1) % 2
    true = m ^ p
    return (sum(((true >> place) & 1) << bit for bit, place in enumerate(PLACES)) | p << 7).to(torch.uint8)


@functools.cache
@lasting()
def _tile_residual() -> UInt8[Tensor, "256"]:
    """The byte in a tile of each entry of the residual book."""
    odd = e8p.residual_table()[:, 0] % 2 != 0
    count = torch.where(odd, odd.cumsum(0), (~odd).cumsum(0)) - 1
    return ((count & 31) | odd.long() << 5 | (count >> 5) << 6).to(torch.uint8)


def _renumbered(codes: UInt8[Tensor, "bits n c"], inverse: bool) -> UInt8[Tensor, "bits n c"]:
    bits = codes.shape[0]
    tables = [None, _tile_signs(), _tile_residual() if bits == 3 else None, _tile_signs()]
    planes = []
    for plane, table in zip(codes, tables[:bits], strict=True):
        if table is not None:
            table = table.to(plane.device)
            plane = (table.argsort().to(torch.uint8) if inverse else table)[plane.long()]
        planes.append(plane)
    return torch.stack(planes)


@reference_of(
    "e8p_prepack",
    "(Tensor codes) -> Tensor",
    lambda codes: codes.new_empty(-(-codes.shape[1] // ROWS), -(-codes.shape[2] // 4) * codes.shape[0], 64),
)
def prepack(codes: UInt8[Tensor, "bits n c"]) -> UInt8[Tensor, "tiles vectors 64"]:
    """Tiles from codes."""
    (bits, n, c), codes = codes.shape, _renumbered(codes, inverse=False)
    tiles, blocks = -(-n // ROWS), -(-c * 8 // COLUMNS)
    # The byte of a padding code is zero as it is: entry 0, all signs +, p = 0.
    codes = torch.nn.functional.pad(codes, (0, blocks * 4 - c, 0, tiles * ROWS - n))
    return codes.view(bits, tiles, ROWS, blocks, 4).permute(1, 3, 0, 2, 4).reshape(tiles, blocks * bits, 64)


@reference_of(
    "e8p_unprepack",
    "(Tensor tiles, int n, int bits, int k) -> Tensor",
    lambda tiles, n, bits, k: tiles.new_empty(bits, n, -(-k // 8)),
)
def unprepack(
    tiles: UInt8[Tensor, "tiles vectors 64"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "bits n c"]:
    """Exact inverse of `prepack`, for k columns."""
    count, blocks = tiles.shape[0], -(-k // COLUMNS)
    vectors = tiles.view(count, blocks, bits, ROWS, 4)
    codes = vectors.permute(2, 0, 3, 1, 4).reshape(bits, count * ROWS, blocks * 4)
    return _renumbered(codes[:, :n, : -(-k // 8)], inverse=True)


def points(codes: UInt8[Tensor, "bits n c"], k: int | torch.SymInt) -> Int8[Tensor, "n k"]:
    """The integer points P that codes stand for."""
    first, *second = e8p.MULTIPLIERS[codes.shape[0]]
    table = e8p.table().to(codes.device)
    found = e8p.points(codes[0], codes[1], table) * first
    if codes.shape[0] == 3:
        found += e8p.residual_table().to(codes.device)[codes[2].long()] * second[0]
    if codes.shape[0] == 4:
        found += e8p.points(codes[2], codes[3], table) * second[0]
    return found.flatten(1)[:, :k]


Unpack = Callable[[Tensor, int, int, Any], Tensor]
"""Codes [bits, n, c] of a weight in the order of some kernels, n, bits and k."""


def dequantize_packed(
    unpack: Unpack, codes: UInt8[Tensor, "..."], scale: Int32[Tensor, "1"], n: int, bits: int, k: int | torch.SymInt
) -> Float32[Tensor, "n k"]:
    """The weight that tiles or fragments stand for."""
    return weight_of(unpack(codes, n, bits, k), scale, k)


def weight_of(
    codes: UInt8[Tensor, "bits n c"], scale: Int32[Tensor, "1"], k: int | torch.SymInt
) -> Float32[Tensor, "n k"]:
    """The weight that codes stand for."""
    return scale.view(torch.float32) * points(codes, k)


def product(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "bits n c"],
    scale: Int32[Tensor, "1"],
    bias: Float[Tensor, " n"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """The product of quantised tokens with codes, as the module docstring defines it. Float64 holds the integers."""
    n, tokens = codes.shape[1], q.reshape(q_scale.numel(), q.shape[-1]).double()
    sums = tokens @ points(codes, q.shape[-1]).double().t()
    y = scale.view(torch.float32) * sums.float() * q_scale.reshape(-1, 1)
    y = y if bias is None else y + bias.float()
    return y.to(dtype).view(*q.shape[:-1], n)


def quantized_packed(
    unpack: Unpack,
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "..."],
    scale: Int32[Tensor, "1"],
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`product` with a weight in tiles or fragments."""
    return product(q, q_scale, unpack(codes, n, bits, q.shape[-1]), scale, bias, dtype)


dequantize = functools.partial(dequantize_packed, unprepack)
linear_quantized = functools.partial(quantized_packed, unprepack)

declare(
    "e8p_dequantize",
    "(Tensor tiles, Tensor scale, int n, int bits, int k) -> Tensor",
    dequantize,
    lambda tiles, scale, n, bits, k: tiles.new_empty(n, k, dtype=torch.float32),
)
declare_linear("e8p_linear_tiled", WEIGHT, NUMBERS, lambda *weight: torch.ops.ptq.e8p_dequantize(*weight))
declare_quantized_linear("e8p_linear_quantized", WEIGHT, NUMBERS, linear_quantized)
