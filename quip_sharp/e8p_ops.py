"""The ops of the E8 codebooks: schema, fake kernel and reference in PyTorch. Native kernels (`csrc/e8p`) override them.

A code is an int32: its bits 0-15 are an E8P code, m + 256 a (`quip_sharp.e8p`); bits 16-31 are the second stage, for
3 bits the entry of T1, for 4 bits another E8P code. It stands for scale * P, with P the integer point of
`quip_sharp.e8p`: P0, or the sum of two, each times its multiplier. `tables` are T0 and T1, [1 or 2, 256, 8].

**Search.** The nearest point to y has, for each shift and each entry of T0, the signs of y - shift; where their parity
is wrong, the sign that costs least is flipped. So 2 x 256 inner products find it, of 2^16 points. With two stages, the
second is searched for each of the `candidates` best pairs (entry, shift) of the first, and the nearest sum is taken:
y = w / scale, the first stage looks for y / m0, the second for (y - m0 P0) / m1.

**Ties.** Of equally near points the first is taken: shift +1/4 before -1/4, then the lower entry; of equally cheap
signs the one of the lower coordinate is flipped; zero has the sign +. All arithmetic is float32, each operation
rounded, sums in the order ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)): every implementation finds the same code.
"""

from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor

from ptq.ops.op_declarations import reference_of
from quip_sharp.e8p import MULTIPLIERS, points, residual_table, table

CHUNK = 2048
"""Vectors that the reference searches at a time."""


def tables(bits: int) -> Int8[Tensor, "stages 256 8"]:
    """The tables of the stages of 2, 3 or 4 bits."""
    return torch.stack({2: [table()], 3: [table(), residual_table()], 4: [table(), table()]}[bits])


@reference_of(
    "e8p_round",
    "(Tensor w, Tensor scale, Tensor tables, int bits, int candidates) -> Tensor",
    lambda w, *rest: w.new_empty(w.shape[0], w.shape[1] // 8, dtype=torch.int32),
)
def round_nearest(
    w: Float32[Tensor, "n k"],
    scale: Float32[Tensor, "1"],
    tables: Int8[Tensor, "stages 256 8"],
    bits: int,
    candidates: int,
) -> Int32[Tensor, "n m"]:
    """Codes of the nearest points of w; with two stages, of the nearest found (see above)."""
    vectors, tables = w.reshape(-1, 8), tables.to(w.device)
    codes = [_codes(piece, scale, tables.float(), bits, candidates) for piece in vectors.split(CHUNK)]
    return torch.cat([torch.zeros(0, dtype=torch.int32, device=w.device), *codes]).view(w.shape[0], w.shape[1] // 8)


def _fake_ldlq(target: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape[0] // 8, w.shape[1], dtype=torch.int32), w.new_empty(w.shape)


@reference_of(
    "e8p_ldlq",
    "(Tensor target, Tensor w, Tensor factor, Tensor scale, Tensor tables, int bits, int candidates) "
    "-> (Tensor, Tensor)",
    _fake_ldlq,
)
def ldlq(
    target: Float32[Tensor, "c n"],
    w: Float32[Tensor, "c n"],
    factor: Float32[Tensor, "c c"],
    scale: Float32[Tensor, "1"],
    tables: Int8[Tensor, "stages 256 8"],
    bits: int,
    candidates: int,
) -> tuple[Int32[Tensor, "m n"], Float32[Tensor, "c n"]]:
    """`feedback.round_block`: eight columns at a time from the last to the first, their errors fed to those before, one
    column after the other. `factor` is unit lower block triangular; only what lies below its blocks is read."""
    target, error = target.clone(), torch.empty_like(w)
    codes = torch.empty(len(w) // 8, w.shape[1], dtype=torch.int32, device=w.device)
    for i in reversed(range(len(codes))):
        here = slice(8 * i, 8 * i + 8)
        code = round_nearest(target[here].t().contiguous(), scale, tables, bits, candidates)
        codes[i] = code[:, 0]
        error[here] = w[here] - decode(code, scale, tables, bits).t()
        for j in reversed(range(8 * i, 8 * i + 8)):
            target[: 8 * i].addr_(factor[j, : 8 * i], error[j])
    return codes, error


@reference_of(
    "e8p_decode",
    "(Tensor codes, Tensor scale, Tensor tables, int bits) -> Tensor",
    lambda codes, scale, *rest: scale.new_empty(codes.shape[0], 8 * codes.shape[1]),
)
def decode(
    codes: Int32[Tensor, "n m"], scale: Float32[Tensor, "1"], tables: Int8[Tensor, "stages 256 8"], bits: int
) -> Float32[Tensor, "n k"]:
    """scale * P."""
    (first, *second), tables = MULTIPLIERS[bits], tables.to(codes.device)
    found = _e8p_points(codes, tables[0].float()) * first
    if second:
        found += _second_points(codes >> 16 & 0xFFFF, tables[1].float(), bits) * second[0]
    return (found * scale).flatten(1)


def _codes(
    x: Float32[Tensor, "v 8"], scale: Tensor, tables: Float32[Tensor, "stages 256 8"], bits: int, candidates: int
) -> Int32[Tensor, " v"]:
    y = x * torch.where(scale > 0, 1 / scale, 0.0)
    if bits == 2:
        return _e8p_code(y, _e8p_search(y, tables[0], 1)[1][:, 0], tables[0])
    multiplier, second_multiplier = MULTIPLIERS[bits]
    z = y / multiplier
    best = torch.full((len(x),), -torch.inf, device=x.device)
    found = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    for entry in _e8p_search(z, tables[0], candidates)[1].unbind(1):
        first = _e8p_code(z, entry, tables[0])
        rest = (y - _e8p_points(first, tables[0]) * multiplier) / second_multiplier
        if bits == 3:
            value, second = _plain_search(rest, tables[1])
        else:
            values, entries = _e8p_search(rest, tables[1], 1)
            value, second = values[:, 0], _e8p_code(rest, entries[:, 0], tables[1])
        nearer = value > best
        best = torch.where(nearer, value, best)
        found = torch.where(nearer, first | second << 16, found)
    return found


def _e8p_search(
    y: Float[Tensor, "v 8"], table: Float[Tensor, "256 8"], count: int
) -> tuple[Float[Tensor, "v count"], Int32[Tensor, "v count"]]:
    """Minus half the squared distance to the nearest point of a pair (entry, shift), and the pair as entry + 256 for
    the shift -1: the `count` best, in order."""
    size = table.abs()
    odd = (table[:, 7] < 0)[None, :]
    half_norm = _tree(size * size) * 0.5
    keys = []
    for shift in (1.0, -1.0):
        z = y - shift
        terms = z.abs()[:, None, :] * size
        twice = torch.where(((z < 0).sum(1) % 2 == 1)[:, None] ^ odd, 2.0, 0.0)
        keys.append(((_tree(terms) - half_norm) - (_tree(z * z) * 0.5)[:, None]) - terms.amin(2) * twice)
    value, entry = torch.cat(keys, 1).sort(dim=1, descending=True, stable=True)
    return value[:, :count], entry[:, :count].int()


def _e8p_code(
    y: Float[Tensor, "v 8"], entry: Int32[Tensor, " v"], table: Float[Tensor, "256 8"]
) -> Int32[Tensor, " v"]:
    """The code of the nearest point of a pair (entry, shift)."""
    a, negative = entry & 0xFF, entry >> 8
    row = table[a.long()]
    z = y - (1 - 2 * negative)[:, None]
    signs = (z < 0).int()
    signs[:, 7] ^= (row[:, 7] < 0).int()
    flip = (z.abs() * row.abs()).argmin(1)  # the first of equals
    signs[torch.arange(len(y), device=y.device), flip] ^= signs.sum(1) % 2
    m = (signs << torch.arange(8, device=y.device)).sum(1).int() ^ negative
    return a << 8 | m


def _e8p_points(codes: Int32[Tensor, "*v"], table: Float[Tensor, "256 8"]) -> Float[Tensor, "*v 8"]:
    """P(a, m)."""
    return points((codes >> 8 & 0xFF).to(torch.uint8), (codes & 0xFF).to(torch.uint8), table)


def _plain_search(y: Float[Tensor, "v 8"], table: Float[Tensor, "256 8"]) -> tuple[Tensor, Int32[Tensor, " v"]]:
    """The same for points that are entries of a table as they are."""
    keys = (_tree(y[:, None, :] * table) - _tree(table * table) * 0.5) - (_tree(y * y) * 0.5)[:, None]
    value, entry = keys.sort(dim=1, descending=True, stable=True)
    return value[:, 0], entry[:, 0].int()


def _second_points(codes: Int32[Tensor, "*v"], table: Float[Tensor, "256 8"], bits: int) -> Float[Tensor, "*v 8"]:
    return table[(codes & 0xFF).long()] if bits == 3 else _e8p_points(codes, table)


def _tree(x: Float[Tensor, "*v 8"]) -> Float[Tensor, "*v"]:
    """The sum over the last axis in the order above."""
    for _ in range(3):
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]
