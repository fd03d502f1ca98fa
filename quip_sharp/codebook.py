"""The E8 codebooks as `ptq.weights.formats.Codebook`: one code for eight weights, one scale for a whole weight.

| bits | sum of | scale of E8P on a Gaussian of variance 1 | squared error |
|---|---|---|---|
| 2 | E8P | 1 / 1.04 | 0.0914 |
| 3 | E8P + 1-bit residual / 1.75 | 1 / 1.005 | 0.0284 |
| 4 | E8P + E8P / 3.5 | 1 / 0.91 | 0.0076 |

With two stages the scales are chosen together, and the search keeps several candidates of the first stage: what is best
for the first stage alone is not best for the sum. (Tseng et al. 2024, arXiv:2402.04396, appendix F.5, choose one after
the other, for 0.0295 and 0.0096.) Their ratio makes all numbers integers below 128 (`e8p.MULTIPLIERS`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float32, Int, Int8, Int32, Int64
from torch import Tensor

from ptq.errors import InputError
from ptq.weights.formats import Scales
from quip_sharp import e8p_ops

GAUSSIAN = {2: 1 / 1.04 / 4, 3: 1 / 1.005 / 28, 4: 1 / 0.91 / 28}
"""Scales for weights of variance 1: the integer points of E8P are four times the points, with 3 and 4 bits 7 times
that."""
TRIALS = (0.92, 0.96, 1.0, 1.04, 1.08, 1.13, 1.18)
"""What LDLQ tries, relative to the fitted scale: feedback makes the targets larger than the weights."""
CANDIDATES = {2: 1, 3: 4, 4: 8}
"""Pairs (entry, shift) of the first stage for which the second is searched."""
TINY = 1e-30
"""A weight whose root mean square is below this is stored with scale zero."""


@dataclass(frozen=True)
class E8Codebook:
    """Codebook of dimension 8. One part of scales: `scale` float32 [1], times integer points. Codes are int32
    (`e8p_ops`)."""

    bits: int = 2

    dim: ClassVar[int] = 8
    per_row: ClassVar[bool] = False

    @property
    def tables(self) -> Int8[Tensor, "stages 256 8"]:
        return e8p_ops.tables(self.bits)

    def fit(self, w: Float32[Tensor, "n k"], *, name: str = "weight") -> Scales:
        """The scale that is best if the weights are Gaussian, which a randomised Hadamard transform makes them.
        Raises InputError for NaN, infinity, and rows whose squares float32 does not hold."""
        squares = torch.linalg.vector_norm(w, dim=1).double().square()
        if not bool(squares.isfinite().all()):
            row = int((~squares.isfinite()).nonzero()[0])
            found = "too large numbers" if bool(w[row].isfinite().all()) else "NaN or infinity"
            raise InputError(f"{name}: {found} in row {row}; the weight cannot be quantised")
        rms = float((squares.sum() / max(1, w.numel())).sqrt())
        return {"scale": torch.tensor([rms * GAUSSIAN[self.bits]], device=w.device) * (rms > TINY)}

    def trials(self, scales: Scales) -> Sequence[Scales]:
        return [{"scale": scales["scale"] * trial} for trial in TRIALS]

    def round(
        self, w: Float32[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Int32[Tensor, "n m"]:
        return torch.ops.ptq.e8p_round(w, scales["scale"], self.tables, self.bits, CANDIDATES[self.bits])

    def decode(
        self, codes: Int32[Tensor, "n m"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Float32[Tensor, "n c"]:
        return torch.ops.ptq.e8p_decode(codes, scales["scale"], self.tables, self.bits)

    def round_block(
        self,
        target: Float32[Tensor, "c n"],
        w: Float32[Tensor, "c n"],
        factor: Float32[Tensor, "c c"],
        scales: Scales,
        columns: Int64[Tensor, " c"],
    ) -> tuple[Int32[Tensor, "m n"], Float32[Tensor, "c n"]]:
        """`feedback.round_block` in one op."""
        return torch.ops.ptq.e8p_ldlq(target, w, factor, scales["scale"], self.tables, self.bits, CANDIDATES[self.bits])
