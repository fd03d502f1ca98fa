"""Integer weights of 2 to 8 bits: the grid, the bytes, the linear layer. Format `quarot/integer`, version 1.

**Numbers.** A code c of b bits, 0 .. 2^b - 1, stands for scale * (c - zero). Symmetric: zero is 2^(b-1) and is not
stored, so c - zero is the two's complement range -2^(b-1) .. 2^(b-1) - 1; the scale may be negative, which gives the
side with the larger weights the one value more. Asymmetric: zero is an integer 0 .. 2^b - 1.
Group i of a row is its columns [i * group_size, (i + 1) * group_size); group_size 0: the whole row is one group.

**Bytes**, for W[n, k] with g groups in a row:

- `codes`, U8 [n, ceil(k b / 8)]: each row is one little-endian bit stream. Code i is its bits [i b, (i + 1) b), lowest
  bit first; bit j of the stream is bit j % 8 (value 2^(j % 8)) of byte j // 8. The rest of the last byte is zero.
- `scale`, I16 [n, g]: the bits of a bfloat16 number (sign, 8 exponent, 7 fraction bits), little-endian. An integer
  dtype, because loaders cast floating-point tensors to the model's dtype, and float16 would change or overflow them.
  With integer scales, U8 [n, 1 + g]: `quarot.integer_scales`.
- `zero`, U8 [n, g]; only if asymmetric.

Weights are rounded with exactly the stored scale, so that bfloat16's coarseness costs nothing: it only thins the scales
that the clip search can choose from. True bits per weight: b + 16 / group_size, + 8 / group_size if asymmetric; with
integer scales b + 8 / group_size + 8 / k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float32, Int8, Int64, UInt8
from torch import Tensor

from ptq.errors import InputError
from ptq.ops import bitstream, fragments
from ptq.ops.op_declarations import call
from ptq.ops.tiles import listed, tile_scales, untile_scales
from ptq.weights import ggml
from ptq.weights.compressed_tensors import Scheme, to_bytes, to_words
from ptq.weights.formats import Parts, Scales, check_parts
from ptq.weights.grouped import check_group_size
from ptq.weights.layouts import LaidOut, Ops
from ptq.weights.rounding import Rounded
from quarot import (  # noqa: F401 (their ops)
    expert_ops,
    fragment_ops,
    integer_ops,
    integer_scales,
    layer_ops,
    row_ops,
    tiled_ops,
)
from quarot.integer_grid import IntegerGrid

OPS = torch.ops.ptq


@dataclass(frozen=True)
class IntegerFormat(LaidOut):
    """The bytes described above, and the ops that multiply with them. Raises InputError for values out of range."""

    bits: int = 4
    group_size: int = 0
    symmetric: bool = True
    scale: str = "bfloat16"

    name: ClassVar[str] = "quarot/integer"
    version: ClassVar[int] = 1
    ops = Ops(
        linear={"tiles": OPS.integer_linear_tiled.default, "fragments": OPS.integer_linear_fragments.default},
        quantized={"tiles": OPS.integer_linear_quantized.default, "fragments": OPS.integer_quantized_fragments.default},
        layer=OPS.integer_layer.default,
        tokens=OPS.integer_linear_tokens.default,
        experts=OPS.integer_experts.default,
        all_experts=OPS.integer_all_experts.default,
        takes_input_bits=("fragments",),
    )
    scale_parts = ("scale", "zero")

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise InputError(f"{self.name}: bits must be 2 to 8, found {self.bits!r}")
        check_group_size(self.group_size, f"{self.name}: group size")
        if type(self.symmetric) is not bool:
            raise InputError(f"{self.name}: symmetric must be true or false, found {self.symmetric!r}")
        integer_scales.check_kind(self.scale, self.bits, self.group_size, self.symmetric, f"{self.name}: ")

    @property
    def codebook(self) -> IntegerGrid:
        return IntegerGrid(self.bits, self.group_size, self.symmetric, scale=self.scale)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.bits, self.group_size

    def options(self) -> dict[str, Any]:
        options = {"bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}
        return options if self.scale == "bfloat16" else {**options, "scale": self.scale}

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        g = self.codebook.groups(k)
        scale = ((n, g), torch.int16)
        if self.scale == "integer":
            integer_scales.check_width(k)
            scale = ((n, 1 + g), torch.uint8)
        parts = {"codes": ((n, bitstream.packed_size(k, self.bits)), torch.uint8), "scale": scale}
        return parts if self.symmetric else {**parts, "zero": ((n, g), torch.uint8)}

    def pack(self, rounded: Rounded) -> Parts:
        scale = integer_scales.encode(rounded.scales["scale"], self.scale)
        parts = {"codes": OPS.integer_pack(rounded.codes, self.bits), "scale": scale}
        return parts if self.symmetric else {**parts, "zero": rounded.scales["zero"]}

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[UInt8[Tensor, "n k"], Scales]:
        parts = self.unprepack(parts)
        check_parts(self, parts, n, k)
        scale = integer_scales.numbers(parts["scale"])
        zero = torch.full_like(scale, 2 ** (self.bits - 1), dtype=torch.uint8) if self.symmetric else parts["zero"]
        return bitstream.unpack(parts["codes"], self.bits, k), {"scale": scale, "zero": zero}

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        parts = self.unprepack(parts)
        check_parts(self, parts, n, k)
        return integer_ops.dequantize(parts["codes"], parts["scale"], parts.get("zero"), self.bits, self.group_size, k)

    def rows(
        self, parts: Parts, index: Int64[Tensor, " u"], k: int, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "u k"]:
        """See `ptq.layers.embedding.RowFormat`."""
        held, numbers = (parts["scale"], parts.get("zero"), index), (self.bits, self.group_size, k, dtype)
        kernels = self.scale == "bfloat16"  # look up rows with these scales alone
        if "codes" in parts:
            look_up = OPS.integer_rows.default if kernels else row_ops.rows
            return look_up(parts["codes"], *held, *numbers)
        if "tiles" in parts:
            look_up = OPS.integer_rows_tiled.default if kernels else row_ops.rows_tiled
            return look_up(parts["tiles"], *held, parts["shape"].shape[0], *numbers)
        return row_ops.rows_of_fragments(parts["fragments"], *held, parts["shape"].shape[0], *numbers)

    def linear_stored(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None) -> Float[Tensor, "*t n"]:
        scales = integer_scales.words(parts["scale"]), parts.get("zero")
        return call(OPS.integer_linear.default, x, parts["codes"], *scales, bias, *self.numbers)

    def quantized_stored(
        self, q: Int8[Tensor, "*t k"], q_scale: Float32[Tensor, "*t"], parts: Parts, bias: Tensor | None
    ) -> Float32[Tensor, "*t n"]:
        codes = bitstream.unpack(parts["codes"], self.bits, q.shape[-1])
        scales = parts["scale"], parts.get("zero")
        return tiled_ops.product(q, q_scale, codes, *scales, bias, self.bits, self.group_size, torch.float32)

    def linears(
        self, x: Float[Tensor, "*t k"], parts: Sequence[Parts], biases: Sequence[Tensor | None]
    ) -> list[Float[Tensor, "*t _n"]] | None:
        """`linear` for several weights; None where they are not all in tiles."""
        weights = _weights(parts, biases)
        if weights is None:
            return None
        return OPS.integer_linears_tiled.default(x, *weights, self.bits, self.group_size)

    def linears_quantized(
        self,
        q: Int8[Tensor, "*t k"],
        q_scale: Float32[Tensor, "*t"],
        parts: Sequence[Parts],
        biases: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> list[Float[Tensor, "*t _n"]] | None:
        """`linear_quantized` for several weights; None where they are not all in tiles."""
        weights = _weights(parts, biases)
        if weights is None:
            return None
        return OPS.integer_linears_quantized.default(q, q_scale, *weights, self.bits, self.group_size, dtype)

    def lay_out(self, parts: Parts, layout: str) -> Parts:
        n, size = parts["codes"].shape
        k = size * 8 // self.bits  # or up to three too many: the zeros that fill the last byte count as codes here
        make = OPS.integer_prepack if layout == "tiles" else fragments.prepack
        if layout != "tiles":
            parts = {**parts, "scale": integer_scales.words(parts["scale"])}
        scales = {part: tile_scales(parts[part]) for part in ("scale", "zero") if part in parts}
        return {layout: make(parts["codes"], self.bits, k), **scales, "shape": parts["codes"].new_empty(n, k, 0)}

    def compressed_scheme(self, quantized_input: bool) -> Scheme:
        """See `ptq.weights.compressed_tensors`."""
        if not self.symmetric:
            raise InputError("integers with zero-points are not exported; quantise with --symmetric")
        if quantized_input and (self.bits != 8 or self.group_size):
            raise InputError(
                "with inputs in 8 bits, other runtimes need weights of 8 bits with one scale a row; quantise with "
                "--weight-bits 8 --group-size 0, or with --activation-bits 16"
            )
        groups = {"strategy": "group", "group_size": self.group_size} if self.group_size else {"strategy": "channel"}
        numbers = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        return Scheme("int-quantized" if quantized_input else "pack-quantized", {**numbers, **groups}, quantized_input)

    def compress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        scale = {"weight_scale": integer_scales.words(parts["scale"]).view(torch.bfloat16)}
        if scheme.format == "int-quantized":
            return {"weight": (parts["codes"] ^ 128).view(torch.int8), **scale}
        return {"weight_packed": to_words(parts["codes"]), **scale, "weight_shape": torch.tensor([n, k])}

    def decompress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        if scheme.format == "int-quantized":
            codes = parts["weight"].view(torch.uint8) ^ 128
        else:
            codes = to_bytes(parts["weight_packed"], bitstream.packed_size(k, self.bits))
        return {"codes": codes, "scale": parts["weight_scale"].view(torch.int16)}

    def ggml_type(self, k: int) -> str:
        """See `ptq.weights.ggml`."""
        if not self.symmetric:
            raise InputError("integers with zero-points are not exported; quantise with --symmetric")
        return ggml.integer_type(self.bits, self.group_size, k).name

    def ggml_blocks(self, parts: Parts, n: int, k: int) -> UInt8[Tensor, "n bytes"]:
        codes, scales = self.unpack(parts, n, k)
        return ggml.integer_blocks(codes, scales["scale"], self.bits, self.group_size)

    def check_values(self, parts: Parts) -> None:
        if "zero" in parts and self.bits < 8 and bool((parts["zero"] >> self.bits).any()):
            raise InputError(f"{self.name}: a zero-point is above {2**self.bits - 1}; the file is damaged")
        integer_scales.check_multiples(parts["scale"])

    def unprepack(self, parts: Parts) -> Parts:
        if "shape" not in parts:
            return parts
        n, k = parts["shape"].shape[:2]
        if "tiles" in parts:
            codes = OPS.integer_unprepack(parts["tiles"], n, self.bits, k)
        else:
            codes = fragments.unprepack(parts["fragments"], n, self.bits, k)
        scales = {part: untile_scales(parts[part], n) for part in ("scale", "zero") if part in parts}
        if scales["scale"].dtype == torch.int16 and self.scale == "integer":
            scales["scale"] = integer_scales.encode(integer_scales.numbers(scales["scale"]), self.scale)
        return {"codes": codes, **scales}


def _weights(parts: Sequence[Parts], biases: Sequence[Tensor | None]) -> tuple[list[Any], ...] | None:
    """Tiles, scales, zeros, biases and n of several weights, as the ops on lists take them."""
    held = listed(parts, "tiles", "scale", "zero")
    if held is None:
        return None
    given = any(bias is not None for bias in biases)
    full = [parts[0]["tiles"].new_empty(0) if bias is None else bias for bias in biases] if given else []
    return *held[:3], full, held[3]
