"""Our linear layers as cases for a benchmark of other programs: `integer(w, x)` and `e8p(w, x)` yield (name, bits per
weight, module), where module(x) takes and gives bfloat16 and quantises x itself. Weights are W[n, k], rounded to
nearest. E8P goes without the Hadamard transforms that belong around such a layer.
"""

from collections.abc import Iterator

from jaxtyping import BFloat16, Float32
from torch import Tensor, nn

from ptq.ops.activations import Activation
from ptq.weights import formats, rounding
from quarot.integer import IntegerFormat
from quip_sharp.e8p_format import E8PFormat

FORMATS = ((4, 128), (4, 0), (8, 0), (3, 128), (2, 128))
"""Bits and group size of weights."""
E8P_BITS = (2, 3, 4)
ACTIVATIONS = (None, 8, 4)


class Layer(nn.Module):
    """y = x Wᵀ; a copy owns its weights."""

    def __init__(self, format: IntegerFormat | E8PFormat, parts: formats.Parts, activation: Activation | None) -> None:
        super().__init__()
        self.format, self.activation = format, activation
        for name, part in format.prepack(parts, "cpu").items():
            self.register_buffer(name, part)

    def forward(self, x: BFloat16[Tensor, "t k"]) -> BFloat16[Tensor, "t n"]:
        parts = dict(self.named_buffers())
        if self.activation is None:
            return self.format.linear(x, parts)
        if isinstance(self.format, IntegerFormat):
            y = self.format.linear_tokens(x, self.activation, parts, None, x.dtype)
            assert y is not None
            return y
        return self.format.linear_quantized(*self.activation.quantize(x), parts, None, x.dtype)


def integer(w: Float32[Tensor, "n k"], x: Float32[Tensor, "t k"]) -> Iterator[tuple[str, float, Layer]]:
    """Integer weights with every kind of activations."""
    for bits, group in FORMATS:
        name = f"ptq INT{bits} {f'g{group}' if group else 'channel'}"
        yield from _layers(name, IntegerFormat(bits, group), w, ACTIVATIONS)


def e8p(w: Float32[Tensor, "n k"], x: Float32[Tensor, "t k"]) -> Iterator[tuple[str, float, Layer]]:
    """E8P weights with activations of 16 and 8 bits."""
    for bits in E8P_BITS:
        yield from _layers(f"ptq E8P {bits} bits", E8PFormat(bits), w, ACTIVATIONS[:2])


def _layers(
    name: str, format: IntegerFormat | E8PFormat, w: Float32[Tensor, "n k"], activations: tuple[int | None, ...]
) -> Iterator[tuple[str, float, Layer]]:
    parts = format.pack(rounding.nearest(w, format.codebook))
    stored = 8 * sum(part.nbytes for part in parts.values()) / w.numel()
    for bits in activations:
        yield (
            f"{name} x {f'INT{bits}' if bits else 'bf16'}",
            stored,
            Layer(format, parts, Activation(bits, 0.9) if bits else None),
        )
