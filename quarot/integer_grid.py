"""The grid of integer weights (`quarot.integer`): scales, and codes of the nearest integers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float32, Int, Int64, UInt8
from torch import Tensor

from ptq.weights.formats import Scales
from ptq.weights.grouped import Grouped
from quarot import integer_ops, integer_scales  # noqa: F401 (its ops)

FLOOR = {2: 0.2, 3: 0.35, 4: 0.5, 5: 0.65, 6: 0.75, 7: 0.85, 8: 0.9}
"""Smallest scale worth trying, relative to the full range: the fewer the bits, the more is gained by clipping."""
OPS = torch.ops.ptq


@dataclass(frozen=True)
class IntegerGrid(Grouped):
    """Codebook of dimension 1. Scales: `scale` float32 [n, g] (bfloat16 numbers) and `zero` uint8 [n, g]."""

    bits: int = 4
    group_size: int = 0
    symmetric: bool = True
    steps: int = 16
    """Scales that the clip search tries; 1: the full range, no search. 80 give 1 % less error at 4 bits."""
    scale: str = "bfloat16"

    dim: ClassVar[int] = 1
    per_row: ClassVar[bool] = True

    def fit(self, w: Float32[Tensor, "n k"], *, name: str = "weight") -> Scales:
        """Per group, the scale with the least squared error. Raises InputError for NaN, infinity or a wrong width."""
        self.groups(w.shape[1], name)
        floor = FLOOR[self.bits]
        w = w.contiguous()
        scale, zero = OPS.integer_fit(w, self.bits, self.group_size, self.symmetric, self.steps, floor)
        if self.scale == "integer":
            scale = integer_scales.fit(w, scale, self.bits)
        return {"scale": self.finite(scale, name), "zero": zero}

    def round(
        self, w: Float32[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> UInt8[Tensor, "n c"]:
        scales, size = self.expanded(scales, columns)
        return OPS.integer_round(w.contiguous(), scales["scale"], scales["zero"], self.bits, size)

    def decode(
        self, codes: UInt8[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Float32[Tensor, "n c"]:
        scales, size = self.expanded(scales, columns)
        scale, zero = scales["scale"], scales["zero"]
        code = codes.float().view(*scale.shape, size or codes.shape[1])
        return code.sub_(zero[..., None]).mul_(scale[..., None]).view(codes.shape)

    def round_block(
        self,
        target: Float32[Tensor, "c n"],
        w: Float32[Tensor, "c n"],
        factor: Float32[Tensor, "c c"],
        scales: Scales,
        columns: Int64[Tensor, " c"],
    ) -> tuple[UInt8[Tensor, "c n"], Float32[Tensor, "c n"]]:
        """`feedback.round_block` in one op."""
        (scale, zero), group = self.transposed((scales["scale"], scales["zero"]), columns)
        return OPS.integer_ldlq(target, w, factor, scale, zero, group, self.bits)
