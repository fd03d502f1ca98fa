"""Our integer linear layers as cases for a benchmark of other programs: `cases(w, x)` yields (name, bits per weight,
module), where module(x) takes and gives bfloat16 and quantises x itself. Weights are W[n, k], rounded to nearest.
"""

from collections.abc import Iterator

from jaxtyping import BFloat16, Float32
from torch import Tensor, nn

from ptq import rounding
from ptq.activations import Activation
from quarot.integer import IntegerFormat

FORMATS = ((4, 128), (4, 0), (8, 0), (3, 128), (2, 128))
"""Bits and group size of weights."""
ACTIVATIONS = (None, 8, 4)


class Layer(nn.Module):
    """y = x Wᵀ; a copy owns its weights."""

    def __init__(self, format: IntegerFormat, parts: dict[str, Tensor], activation: Activation | None) -> None:
        super().__init__()
        self.format, self.activation = format, activation
        for name, part in format.prepack(parts, "cpu").items():
            self.register_buffer(name, part)

    def forward(self, x: BFloat16[Tensor, "t k"]) -> BFloat16[Tensor, "t n"]:
        parts = dict(self.named_buffers())
        if self.activation is None:
            return self.format.linear(x, parts)
        return self.format.linear_quantized(*self.activation.quantize(x), parts, None, x.dtype)


def cases(w: Float32[Tensor, "n k"], x: Float32[Tensor, "t k"]) -> Iterator[tuple[str, float, Layer]]:
    """Every format with every kind of activations."""
    for bits, group in FORMATS:
        format = IntegerFormat(bits, group)
        parts = format.pack(rounding.nearest(w, format.codebook))
        stored = 8 * sum(part.nbytes for part in parts.values()) / w.numel()
        for activation in ACTIVATIONS:
            name = (
                f"ptq INT{bits} {f'g{group}' if group else 'channel'} x {f'INT{activation}' if activation else 'bf16'}"
            )
            yield name, stored, Layer(format, parts, None if activation is None else Activation(activation, 0.9))
