"""E8 lattice weights of 2, 3 and 4 bits: the bytes and the linear layer. Format `quip_sharp/e8p`, version 1.

**Numbers.** Eight neighbouring weights of a row share one code of 16, 24 or 32 bits: an E8P code (a, m), at 3 bits with
an entry r of the residual codebook, at 4 bits with a second E8P code. W = scale * P, rounded to float32: P is the
integer point of `quip_sharp.e8p`, at 2 bits P0 of (a, m), at 3 bits 7 P0 + 8 T1[r], at 4 bits 7 P0 + 2 P1. Columns that
fill the last code of a row are not part of W.

**Bytes**, for W[n, k] with c = ceil(k / 8):

- `abs`, U8 [n, c]: a of each code. `signs`, U8 [n, c]: m of each code.
- 3 bits: `residual`, U8 [n, c]: r of each code. 4 bits: `residual_abs` and `residual_signs`, U8 [n, c].
- `scale`, I32 [1]: the bits of a float32 number, zero or positive, little-endian. An integer dtype, because loaders
  cast floating-point tensors to the model's dtype.

True bits per weight: 2, 3 or 4, and 32 for the whole weight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float32, Int8, Int32, UInt8
from torch import Tensor

from ptq.errors import InputError
from ptq.ops.expert_ops import ExpertSteps
from ptq.weights.formats import Listed, Parts, Scales, check_parts
from ptq.weights.layouts import LaidOut, Ops, Signs
from ptq.weights.rounding import Rounded
from quip_sharp import expert_ops, fragment_ops, layer_ops, tiled_ops  # noqa: F401 (their ops)
from quip_sharp.codebook import E8Codebook

OPS = torch.ops.ptq
PLANES = {2: ("abs", "signs"), 3: ("abs", "signs", "residual"), 4: ("abs", "signs", "residual_abs", "residual_signs")}

SHIFTS = {"abs": 8, "signs": 0, "residual": 16, "residual_abs": 24, "residual_signs": 16}
"""Where the byte of a plane lies in a code (`e8p_ops`)."""


@dataclass(frozen=True)
class E8PFormat(LaidOut):
    """The bytes described above, and the ops that multiply with them. Raises InputError for values out of range."""

    bits: int = 2

    name: ClassVar[str] = "quip_sharp/e8p"
    version: ClassVar[int] = 1
    ops = Ops(
        linear={"tiles": OPS.e8p_linear_tiled.default, "fragments": OPS.e8p_linear_fragments.default},
        quantized={"tiles": OPS.e8p_linear_quantized.default, "fragments": OPS.e8p_quantized_fragments.default},
        layer=OPS.e8p_layer.default,
        experts=OPS.e8p_experts.default,
        all_experts=OPS.e8p_all_experts.default,
    )
    row_part = "abs"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in PLANES:
            raise InputError(f"{self.name}: bits must be 2, 3 or 4, found {self.bits!r}")

    @property
    def codebook(self) -> E8Codebook:
        return E8Codebook(self.bits)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.bits,)

    def options(self) -> dict[str, Any]:
        return {"bits": self.bits}

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        planes = {plane: ((n, -(-k // 8)), torch.uint8) for plane in PLANES[self.bits]}
        return {**planes, "scale": ((1,), torch.int32)}

    def pack(self, rounded: Rounded) -> Parts:
        planes = {
            plane: (rounded.codes >> SHIFTS[plane]).bitwise_and_(0xFF).to(torch.uint8) for plane in PLANES[self.bits]
        }
        return {**planes, "scale": rounded.scales["scale"].view(torch.int32)}

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[Int32[Tensor, "n c"], Scales]:
        parts = self.unprepack(parts)
        self._check(parts, n, k)
        codes = torch.zeros_like(parts["abs"], dtype=torch.int32)
        for plane in PLANES[self.bits]:
            codes |= parts[plane].int() << SHIFTS[plane]
        return codes, {"scale": parts["scale"].view(torch.float32)}

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        w = self.codebook.decode(*self.unpack(parts, n, k))
        return w if w.shape[1] == k else w[:, :k].contiguous()

    def quantized_stored(
        self, q: Int8[Tensor, "*t k"], q_scale: Float32[Tensor, "*t"], parts: Parts, bias: Tensor | None
    ) -> Float32[Tensor, "*t n"]:
        return tiled_ops.product(q, q_scale, self._planes(parts), parts["scale"], bias, torch.float32)

    def _of_experts(
        self, weights: Listed, signs: Signs | None, width: int, steps: ExpertSteps
    ) -> tuple[Any, ...] | None:
        if signs is None or "tiles" not in weights:
            return None
        gate, down, biases, clamped = steps
        treatments = gate.bits, gate.clip, down.bits, down.clip, gate.factors, gate.order, down.factors, down.order
        return weights["tiles"], weights["scale"], *signs, width, self.bits, *treatments, biases, clamped

    def lay_out(self, parts: Parts, layout: str) -> Parts:
        n, c = parts["abs"].shape
        make = OPS.e8p_prepack if layout == "tiles" else fragment_ops.pack
        packed = make(self._planes(parts))
        return {layout: packed, "scale": parts["scale"], "shape": packed.new_empty(n, 8 * c, 0)}

    def unprepack(self, parts: Parts) -> Parts:
        if "shape" not in parts:
            return parts
        n, k = parts["shape"].shape[:2]
        if "tiles" in parts:
            planes = OPS.e8p_unprepack(parts["tiles"], n, self.bits, k)
        else:
            planes = fragment_ops.unpack(parts["fragments"], n, self.bits, k)
        apart = (plane.clone() for plane in planes.unbind())  # who saves a model looks for tensors that share memory
        return {**dict(zip(PLANES[self.bits], apart, strict=True)), "scale": parts["scale"]}

    def _planes(self, parts: Parts) -> UInt8[Tensor, "bits n c"]:
        return torch.stack([parts[plane] for plane in PLANES[self.bits]])

    def _check(self, parts: Parts, n: int, k: int) -> None:
        check_parts(self, parts, n, k)
        scale = parts["scale"].view(torch.float32)
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise InputError(
                f"{self.name} [{n}, {k}]: `scale` must hold the bits of a finite float32 number, not negative; "
                f"found {scale.item()}"
            )
