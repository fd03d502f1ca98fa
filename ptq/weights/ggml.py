"""Weights as llama.cpp stores them (ggml): rows of blocks, each with its scales and codes, and nothing rounded again.

A block of 32 has one scale d in float16. One of 256 has a d, too, and small integers that multiply it for every 16
columns: here always the same, so these types hold weights with one scale a row alone.

| type | columns | a number is |
|---|---|---|
| Q2_K | 256 | d s q - m z with q of 0 .. 3; here s = z = 1 and m = 2 d |
| Q3_K | 256 | d s (q - 4); s = 1 |
| Q4_0 | 32 | d (q - 8) |
| Q5_0 | 32 | d (q - 16) |
| Q6_K | 256 | d s (q - 32); s = 1 |
| Q8_0 | 32 | d q with q of -128 .. 127 |
| MXFP4 | 32 | 2^(e - 127) times a float e2m1 |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float16, Float32, UInt8
from torch import Tensor

from ptq.errors import InputError
from ptq.weights.formats import Parts

SMALL, LARGE = 32, 256
"""Columns of a block."""
Codes = UInt8[Tensor, "n blocks _size"]
Blocks = UInt8[Tensor, "n _bytes"]


@runtime_checkable
class InGgml(Protocol):
    """A format whose weights ggml can hold."""

    def ggml_type(self, k: int) -> str:
        """The type of W[n, k]. Raises InputError, saying which options ggml can hold, for others."""
        ...

    def ggml_blocks(self, parts: Parts, n: int, k: int) -> Blocks:
        """The rows of W[n, k] in that type, from the stored parts. Raises InputError for numbers that do not fit."""
        ...


@dataclass(frozen=True)
class Integers:
    """How a type stores integers of `bits` bits, of which 2^(bits - 1) is zero."""

    name: str
    bits: int
    size: int
    """Columns of a block."""
    body: Callable[[Codes], Codes]
    """The bytes of a block's codes; for blocks of 256, of all but d."""


def integer_type(bits: int, group_size: int, k: int) -> Integers:
    """The type of symmetric integers. Raises InputError for widths and groups that none holds."""
    type = TYPES[8 if bits == 7 else bits]  # 7 bits: as 8
    if k % type.size or (group_size or k) % type.size:
        needed = "one scale a row (--group-size 0)" if type.size == LARGE else "groups of 32, 64 or 128, or of a row"
        raise InputError(
            f"weights of {bits} bits are {type.name} in llama.cpp, with {needed} and a multiple of {type.size} "
            f"columns; found {k} columns, {f'groups of {group_size}' if group_size else 'one scale a row'}"
        )
    return type


def integer_blocks(codes: UInt8[Tensor, "n k"], scale: Float32[Tensor, "n g"], bits: int, group_size: int) -> Blocks:
    """Rows of symmetric integers, scale * (code - 2^(bits - 1)), in their `integer_type`. Scales become float16, of
    which those below 6e-5 have fewer bits than bfloat16. Raises InputError for scales that are too large for it."""
    n, k = codes.shape
    type = integer_type(bits, group_size, k)
    d = scale.repeat_interleave((group_size or k) // type.size, 1).half()
    largest = 2 * d if type.name == "Q2_K" else d
    if not largest.isfinite().all():
        most = 65504 // (2 if type.name == "Q2_K" else 1)
        raise InputError(f"a scale is {float(scale.abs().max()):.3g}, and {type.name} of llama.cpp holds up to {most}")
    codes = codes + (2 ** (type.bits - 1) - 2 ** (bits - 1))
    held, number = type.body(codes.view(n, -1, type.size)), _bytes(d)
    if type.name == "Q2_K":
        return torch.cat([held, number, _bytes(2 * d)], -1).flatten(1)
    return torch.cat([held, number] if type.size == LARGE else [number, held], -1).flatten(1)


def _bytes(d: Float16[Tensor, "n blocks"]) -> Codes:
    return d.contiguous().view(torch.uint8).view(*d.shape, 2)


def mxfp4_blocks(codes: UInt8[Tensor, "n k"], exponents: UInt8[Tensor, "n g"]) -> Blocks:
    """Rows of MXFP4, of floats e2m1 in groups of 32."""
    return torch.cat([exponents[..., None], _nibbles(codes.view(len(codes), -1, SMALL))], -1).flatten(1)


def _nibbles(codes: Codes) -> Codes:
    """The low four bits: of the first half of a block below those of the second."""
    low, high = (codes & 15).chunk(2, -1)
    return low | high << 4


def _q5_0(codes: Codes) -> Codes:
    """A word with the highest bits, then nibbles."""
    bits = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return torch.cat([bits.sum(-1, dtype=torch.uint8), _nibbles(codes)], -1)


def _q8_0(codes: Codes) -> Codes:
    return codes ^ 128  # two's complement


def _pairs(codes: Codes) -> Codes:
    """The low two bits of 256 codes: of each half, byte j has those of columns j, j + 32, j + 64 and j + 96."""
    fields = (codes & 3).unflatten(-1, (2, 4, 32)) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return fields.sum(-2, dtype=torch.uint8).flatten(-2)


def _q2_k(codes: Codes) -> Codes:
    """For every 16 columns a byte, s below z; then the codes."""
    return torch.cat([_ones(codes, [0x11] * 16), _pairs(codes)], -1)


def _q3_k(codes: Codes) -> Codes:
    """Bit i of byte j: the highest one of column 32 i + j; the others; sixteen s + 32 of 6 bits."""
    high = (codes >> 2).unflatten(-1, (8, 32)) << torch.arange(8, dtype=torch.uint8)[:, None]
    # 33 is 1 in the four bits below and 2 in the two above, which have bytes of their own.
    scales = [0x11] * 8 + [0xAA] * 4
    return torch.cat([high.sum(-2, dtype=torch.uint8), _pairs(codes), _ones(codes, scales)], -1)


def _q6_k(codes: Codes) -> Codes:
    """Of each half: the low four bits, of columns j below those of j + 64; the two above as `_pairs`; then s."""
    low = (codes & 15).unflatten(-1, (2, 2, 64))
    nibbles = (low[..., 0, :] | low[..., 1, :] << 4).flatten(-2)
    return torch.cat([nibbles, _pairs(codes >> 4), _ones(codes, [1] * 16)], -1)


def _ones(codes: Codes, values: list[int]) -> Codes:
    """The same bytes for every block."""
    return torch.tensor(values, dtype=torch.uint8).expand(*codes.shape[:2], -1)


TYPES = {
    type.bits: type
    for type in (
        Integers("Q2_K", 2, LARGE, _q2_k),
        Integers("Q3_K", 3, LARGE, _q3_k),
        Integers("Q4_0", 4, SMALL, _nibbles),
        Integers("Q5_0", 5, SMALL, _q5_0),
        Integers("Q6_K", 6, LARGE, _q6_k),
        Integers("Q8_0", 8, SMALL, _q8_0),
    )
}
