"""Codes of a few bits as bytes: each row one little-endian bit stream. Op `ptq::integer_pack`, for every format.

Code i of a row is its bits [i b, (i + 1) b), lowest bit first; bit j of the stream is bit j % 8 of byte j // 8. The
rest of the last byte is zero.
"""

import math
from typing import Any, TypeVar, cast

import torch
from jaxtyping import UInt8
from torch import Tensor

from ptq.ops.op_declarations import reference_of

Size = TypeVar("Size", int, torch.SymInt)
"""A number, or one that `torch.compile` does not know yet."""


def _overlaps(bits: int, bytes_first: bool) -> tuple[int, int, list[tuple[int, int, int]]]:
    """The shortest run of codes that fills whole bytes: codes and bytes in it, and every (code, byte, shift) where the
    code's bits, shifted left by `shift`, fall into the byte."""
    codes, size = 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)
    hits = [(i, j, i * bits - 8 * j) for i in range(codes) for j in range(size) if -bits < i * bits - 8 * j < 8]
    return codes, size, sorted(hits, key=lambda hit: hit[1] if bytes_first else hit[0])


def _shifted(x: Tensor, shift: int) -> Tensor:
    return x << shift if shift >= 0 else x >> -shift


def packed_size(k: Size, bits: int) -> Size:
    """Bytes of a row of k codes."""
    return (cast(Any, k) * bits + 7) // 8


@reference_of(
    "integer_pack",
    "(Tensor codes, int bits) -> Tensor",
    lambda codes, bits: codes.new_empty(codes.shape[0], packed_size(codes.shape[1], bits)),
)
def pack(codes: UInt8[Tensor, "n k"], bits: int) -> UInt8[Tensor, "n bytes"]:
    """Little-endian bit stream of each row: code i is bits [i * bits, (i + 1) * bits); the last byte ends in zeros."""
    n, k = codes.shape
    run, size, hits = _overlaps(bits, bytes_first=True)
    runs = -(-k // run)
    x = torch.nn.functional.pad(codes, (0, runs * run - k)).view(n, runs, run)
    out = codes.new_zeros(n, runs, size)
    for i, j, shift in hits:
        out[..., j] |= _shifted(x[..., i], shift)  # uint8: bits beyond the byte drop out
    return out.flatten(1)[:, : packed_size(k, bits)].contiguous()


def unpack(packed: UInt8[Tensor, "n bytes"], bits: int, k: int | torch.SymInt) -> UInt8[Tensor, "n k"]:
    """Inverse of `pack`."""
    n = packed.shape[0]
    run, size, hits = _overlaps(bits, bytes_first=False)
    runs = -(-k // run)
    x = torch.nn.functional.pad(packed, (0, runs * size - packed.shape[1])).view(n, runs, size)
    out = packed.new_zeros(n, runs, run)
    for i, j, shift in hits:
        out[..., i] |= _shifted(x[..., j], -shift)
    return (out & (2**bits - 1)).flatten(1)[:, :k]
