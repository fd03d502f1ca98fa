"""The points of the E8 codebooks, built from their definitions (Tseng et al. 2024, arXiv:2402.04396, section 4.2).

**E8P**, 2 bits: 2^16 points in 8 dimensions. D̂8 is the set of half-integer vectors with an even sum; S is a set of 256
of their absolute vectors: the 227 with squared norm <= 10, and 29 of squared norm 12 (rule: `table`). A point is a
vector s of S with signs whose number of minus signs has the parity of sum(s), which puts it in D̂8, plus 1/4 or -1/4 in
all coordinates. D̂8 + 1/4 and D̂8 - 1/4 are the two cosets of D8 in E8 + 1/4.

A code (a, m), two bytes: a is the entry of S, m the signs. p = parity(m) chooses the shift, +1/4 for p = 0; the true
signs are m' = m with p added (xor) to bit 0, so m' has an even number of ones. Where sum(s) is odd, coordinate 7 of the
table's entry is negative, which makes the parity right. Four times a point is a vector of odd integers in -11 .. 11:

    P(a, m)_j = T0[a]_j (-1)^(bit j of m') + (1 - 2 p).

**The residual codebook**, 1 bit: 256 points of E8 itself with squared norm <= 4: 0, the 240 roots (squared norm 2) and
15 of the 16 vectors +-2 e_i. T1 holds twice these points.

**Two stages.** 3 and 4 bits add a second point to the first: P = 7 P0 + 8 T1[r], or 7 P0 + 2 P1 (`MULTIPLIERS`). That
is a vector of integers up to 109, or 99: a weight of any number of bits is one scale times bytes. (docs/math.md says
what that costs: next to nothing.)
"""

import functools
import itertools

import torch
from jaxtyping import Int8, Num, UInt8
from torch import Tensor

from ptq.ops.op_declarations import lasting

MULTIPLIERS = {2: (1,), 3: (7, 8), 4: (7, 2)}
"""How many times the point of each stage counts. csrc/e8p/multipliers.h has them again."""


@functools.cache
@lasting()
def table() -> Int8[Tensor, "256 8"]:
    """T0: four times the absolute vectors S, coordinate 7 negated where the sum of the vector is odd. In order:

    - the 227 with squared norm <= 10, by squared norm, then lexicographically;
    - of the 56 with five 3/2 and three 1/2, lexicographically, every second one from the first on, and the second: 29.

    Do not write to it: it is cached.
    """
    vectors = sorted((sum(v * v for v in s), s) for s in itertools.product((2, 6, 10), repeat=8))
    inner = [s for norm, s in vectors if norm <= 160]
    outer = [s for norm, s in vectors if norm == 192 and max(s) == 6]
    chosen = torch.tensor(inner + sorted([*outer[::2], outer[1]]))
    odd = chosen.sum(1) // 4 % 2 == 1
    chosen[odd, 7] *= -1
    return chosen.to(torch.int8)


def points(entry: UInt8[Tensor, "*v"], signs: UInt8[Tensor, "*v"], table: Num[Tensor, "256 8"]) -> Num[Tensor, "*v 8"]:
    """P(a, m) of codes a and m, in the dtype of the table T0."""
    minus = signs[..., None] >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1
    p = minus.sum(-1, keepdim=True, dtype=torch.uint8) & 1
    minus[..., :1] ^= p
    return table[entry.long()] * (1 - 2 * minus.to(torch.int8)) + (1 - 2 * p.to(torch.int8))


@functools.cache
@lasting()
def residual_table() -> Int8[Tensor, "256 8"]:
    """T1: twice the points of the residual codebook. In order: 0; the 240 roots of E8, lexicographically; +2 e_i and
    -2 e_i for i = 0 .. 7, without the last. Do not write to it: it is cached."""
    halves = [v for v in itertools.product((-1, 1), repeat=8) if v.count(-1) % 2 == 0]
    wholes = [v for v in itertools.product((-2, 0, 2), repeat=8) if v.count(0) == 6]
    doubles = [[sign * 4 * (i == j) for j in range(8)] for i in range(8) for sign in (1, -1)]
    return torch.tensor([[0] * 8, *sorted(halves + wholes), *doubles[:-1]], dtype=torch.int8)
