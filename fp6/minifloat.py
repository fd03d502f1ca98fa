"""Weights as small floats of 4 to 7 bits: the codebook, the bytes, the linear layer. Format `fp6/minifloat`, version 1.

**Numbers.** A code of an element (`fp6.element`) stands for scale * value(code). Group i of a row is its columns
[i * group_size, (i + 1) * group_size); group_size 0: the whole row is one group.

**Bytes**, for W[n, k] with g groups in a row and codes of b bits:

- `codes`, U8 [n, ceil(k b / 8)]: each row is one little-endian bit stream (`ptq.ops.bitstream`). The bits of a code
  are, from the highest down, sign, exponent, mantissa.
- `scale`, I16 [n, g]: the bits of a bfloat16 number, little-endian; or, with scale `e8m0`, U8 [n, g]: e stands for
  2^(e - 127), and 255 for NaN, which is never written. With groups of 32 and an element of the OCP specification that
  is MXFP6 or MXFP4 data. Integer dtypes, because loaders cast floating-point tensors to the model's dtype.

Weights are rounded with exactly the stored scale. True bits per weight: b + 16 / group_size, or b + 8 / group_size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int, Int64, UInt8
from torch import Tensor

from fp6 import expert_ops, fragment_ops, fragments, layer_ops, minifloat_ops, tiled_ops  # noqa: F401 (their ops)
from fp6.element import Element, element_of
from ptq.errors import InputError
from ptq.ops import bitstream, tiles
from ptq.weights import ggml
from ptq.weights.compressed_tensors import Scheme
from ptq.weights.formats import Parts, Scales, check_parts
from ptq.weights.grouped import Grouped, check_group_size, loaded_scale, stored_scale
from ptq.weights.layouts import LaidOut, Ops
from ptq.weights.rounding import Rounded

OPS = torch.ops.ptq
Scale = Literal["bfloat16", "e8m0"]
Search = Literal["absmax", "mse"]
SCALES, SEARCHES = ("bfloat16", "e8m0"), ("absmax", "mse")


@dataclass(frozen=True)
class MinifloatGrid(Grouped):
    """Codebook of dimension 1. Scales: `scale` float32 [n, g], bfloat16 numbers or powers of two."""

    element: str = "e2m3"
    group_size: int = 0
    scale: str = "bfloat16"
    search: str = "absmax"
    """`mse`: of several scales around absmax / largest, the one with the least squared error; ten times slower."""

    dim: ClassVar[int] = 1
    per_row: ClassVar[bool] = True

    @property
    def small_float(self) -> Element:
        """The element that the codes are of."""
        return element_of(self.element)

    def fit(self, w: Float32[Tensor, "n k"], *, name: str = "weight") -> Scales:
        """The scale of every group. Raises InputError for NaN, infinity or a wrong width."""
        self.groups(w.shape[1], name)
        scale = OPS.minifloat_fit(w.contiguous(), *self._options)
        return {"scale": self.finite(scale, name)}

    def nearest(
        self, w: Float[Tensor, "n k"], *, name: str = "weight"
    ) -> tuple[UInt8[Tensor, "n k"], Scales, float, float]:
        """`fit` and `round` in one pass over a weight of any dtype: codes, scales, |W - Ŵ|² and |W|²."""
        self.groups(w.shape[1], name)
        codes, scale, error, energy = OPS.minifloat_nearest(w, *self._options)
        return codes, {"scale": self.finite(scale, name)}, float(error.sum()), float(energy.sum())

    def round(
        self, w: Float32[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> UInt8[Tensor, "n c"]:
        scales, size = self.expanded(scales, columns)
        return OPS.minifloat_encode(w.contiguous(), scales["scale"], *self.small_float.sizes, size)

    def decode(
        self, codes: UInt8[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Float32[Tensor, "n c"]:
        scales, size = self.expanded(scales, columns)
        return OPS.minifloat_decode(codes, scales["scale"], *self.small_float.sizes, size)

    def round_block(
        self,
        target: Float32[Tensor, "c n"],
        w: Float32[Tensor, "c n"],
        factor: Float32[Tensor, "c c"],
        scales: Scales,
        columns: Int64[Tensor, " c"],
    ) -> tuple[UInt8[Tensor, "c n"], Float32[Tensor, "c n"]]:
        """`feedback.round_block` in one op."""
        (scale,), group = self.transposed((scales["scale"],), columns)
        return OPS.minifloat_ldlq(target, w, factor, scale, group, *self.small_float.sizes)

    @property
    def _options(self) -> tuple[int, int, int, bool, bool]:
        return *self.small_float.sizes, self.group_size, self.scale == "e8m0", self.search == "mse"


@dataclass(frozen=True)
class MinifloatFormat(LaidOut):
    """The bytes described above, and the ops that multiply with them. Raises InputError for values out of range."""

    element: str = "e2m3"
    group_size: int = 0
    scale: str = "bfloat16"

    name: ClassVar[str] = "fp6/minifloat"
    version: ClassVar[int] = 1
    ops = Ops(
        linear={"tiles": OPS.minifloat_linear_tiled.default, "fragments": OPS.minifloat_linear_fragments.default},
        quantized={
            "tiles": OPS.minifloat_linear_quantized.default,
            "fragments": OPS.minifloat_quantized_fragments.default,
        },
        layer=OPS.minifloat_layer.default,
        tokens=OPS.minifloat_linear_tokens.default,
        experts=OPS.minifloat_experts.default,
        all_experts=OPS.minifloat_all_experts.default,
    )

    def __post_init__(self) -> None:
        try:
            element_of(self.element)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        check_group_size(self.group_size, f"{self.name}: group size")
        if self.scale not in SCALES:
            raise InputError(f"{self.name}: scale must be bfloat16 or e8m0, found {self.scale!r}")

    @property
    def small_float(self) -> Element:
        """The element that the codes are of."""
        return element_of(self.element)

    @property
    def codebook(self) -> MinifloatGrid:
        return MinifloatGrid(self.element, self.group_size, self.scale)

    @property
    def numbers(self) -> tuple[int, ...]:
        return *self.small_float.sizes, self.group_size

    def options(self) -> dict[str, Any]:
        return {"element": self.element, "group_size": self.group_size, "scale": self.scale}

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scale = torch.int16 if self.scale == "bfloat16" else torch.uint8
        return {
            "codes": ((n, bitstream.packed_size(k, self.small_float.bits)), torch.uint8),
            "scale": ((n, self.codebook.groups(k)), scale),
        }

    def pack(self, rounded: Rounded) -> Parts:
        return {
            "codes": OPS.integer_pack(rounded.codes, self.small_float.bits),
            "scale": pack_scale(rounded.scales["scale"], self.scale),
        }

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[UInt8[Tensor, "n k"], Scales]:
        parts = self.unprepack(parts)
        check_parts(self, parts, n, k)
        return bitstream.unpack(parts["codes"], self.small_float.bits, k), {"scale": unpack_scale(parts["scale"])}

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        return self.codebook.decode(*self.unpack(parts, n, k))

    def lay_out(self, parts: Parts, layout: str) -> Parts:
        n, size = parts["codes"].shape
        # Maybe one too many: the zeros that fill the last byte count as a code here.
        k = size * 8 // self.small_float.bits
        if layout == "tiles":
            packed = OPS.integer_prepack(parts["codes"], self.small_float.bits, k)
        else:
            packed = fragments.prepack(parts["codes"], self.small_float, k)
        scale = tiles.tile_scales(as_bfloat16(parts["scale"]))
        return {layout: packed, "scale": scale, "shape": packed.new_empty(n, k, 0)}

    def compressed_scheme(self, quantized_input: bool) -> Scheme:
        """See `ptq.weights.compressed_tensors`: its small floats are MXFP6 (of e2m3) and MXFP4."""
        if self.element not in ("e2m3", "e2m1") or self.scale != "e8m0" or self.group_size != 32 or quantized_input:
            raise InputError(
                "of small floats, compressed-tensors holds e2m3 (MXFP6) and e2m1 (MXFP4), with --scale e8m0, groups of "
                f"32 and inputs in 16 bits; found {self.element}, --scale {self.scale}, groups of {self.group_size}"
                f"{', and inputs in few bits' if quantized_input else ''}; quantise anew with `fp6 --scale e8m0 "
                "--element e2m3` or `e2m1`, and --skip for linears whose width is no multiple of 32"
            )
        bits = self.small_float.bits
        integers = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        numbers = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False}
        return Scheme(f"mxfp{bits}-pack-quantized", {**numbers, "strategy": "group", "group_size": 32, **integers})

    def compress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        return {"weight_packed": parts["codes"], "weight_scale": parts["scale"]}

    def decompress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        return {"codes": parts["weight_packed"], "scale": parts["weight_scale"]}

    def ggml_type(self, k: int) -> str:
        """See `ptq.weights.ggml`: its only small floats are MXFP4."""
        if (self.element, self.scale, self.group_size) != ("e2m1", "e8m0", 32) or k % 32:
            raise InputError(
                "of small floats, llama.cpp holds MXFP4 in multiples of 32 columns; quantise with "
                "`fp6 --scale e8m0 --group-size 32 --element e2m1`, or with `quarot --offline`"
            )
        return "MXFP4"

    def ggml_blocks(self, parts: Parts, n: int, k: int) -> UInt8[Tensor, "n bytes"]:
        return ggml.mxfp4_blocks(bitstream.unpack(parts["codes"], 4, k), parts["scale"])

    def unprepack(self, parts: Parts) -> Parts:
        if "shape" not in parts:
            return parts
        n, k = parts["shape"].shape[:2]
        if "tiles" in parts:
            codes = OPS.integer_unprepack(parts["tiles"], n, self.small_float.bits, k)
        else:
            codes = fragments.unprepack(parts["fragments"], n, self.small_float, k)
        scale = tiles.untile_scales(parts["scale"], n)
        return {"codes": codes, "scale": scale if self.scale == "bfloat16" else as_e8m0(scale)}


def pack_scale(scale: Float32[Tensor, "n g"], kind: str) -> Tensor:
    """The stored scale."""
    if kind == "bfloat16":
        stored = stored_scale(scale)
        assert torch.equal(loaded_scale(stored), scale), "scales must be bfloat16 numbers"
        return stored
    bits = scale.view(torch.int32)
    assert not (bits & 0x807FFFFF).any(), "scales must be powers of two"
    return (bits >> 23).to(torch.uint8)


def unpack_scale(stored: Tensor) -> Float32[Tensor, "n g"]:
    """The scale as a number; e8m0 where it is stored in bytes."""
    return loaded_scale(as_bfloat16(stored))


def as_bfloat16(stored: Tensor) -> Tensor:
    """A stored scale as the bits of bfloat16, which hold every e8m0 number: the kernels know one kind only."""
    if stored.dtype == torch.int16:
        return stored
    bits = stored.to(torch.int16) << 7
    bits = torch.where(stored == 0, 0x40, bits)  # 2^-127 is subnormal
    return torch.where(stored == 255, 0x7FC0, bits).to(torch.int16)  # NaN


def as_e8m0(bits: Tensor) -> Tensor:
    """Inverse of `as_bfloat16` for powers of two."""
    return ((bits >> 7) & 0xFF).to(torch.uint8)
