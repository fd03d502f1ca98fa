"""Small floats ExMy: one sign bit, x exponent bits, y mantissa bits; no infinity, no NaN.

A code of b = 1 + x + y bits is, from the top, the sign s, the exponent E and the mantissa M. With the bias
2^(x-1) - 1 it stands for

    (-1)^s 2^(E - bias) (1 + M / 2^y)     where E > 0
    (-1)^s 2^(1 - bias) M / 2^y           where E = 0: subnormal numbers and two zeros

e3m2, e2m3 and e2m1 are the FP6 and FP4 elements of the OCP Microscaling Formats specification, version 1.0, section
5.3. The codec, the table of values and the table in docs/math.md all come from `Element`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64, UInt8
from torch import Tensor

from ptq.errors import InputError


@dataclass(frozen=True)
class Element:
    """One small float format. `exponent` and `mantissa` are its numbers of bits."""

    exponent: int
    mantissa: int

    @property
    def name(self) -> str:
        return f"e{self.exponent}m{self.mantissa}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Bits of the exponent and of the mantissa, as the ops take them."""
        return self.exponent, self.mantissa

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def top(self) -> int:
        """Exponent of the largest power of two: log2 of it, rounded down for `largest`."""
        return 2**self.exponent - 1 - self.bias

    @property
    def largest(self) -> float:
        """The largest number; what is beyond it saturates."""
        return 2.0**self.top * (2 - 2.0**-self.mantissa)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive number, subnormal; every number is a multiple of it."""
        return self.smallest_normal * 2.0**-self.mantissa

    @property
    def int8_shift(self) -> int | None:
        """s such that every number times 2^s is an integer that int8 holds; None where there is none."""
        shift = self.bias - 1 + self.mantissa
        return shift if self.largest * 2**shift <= 127 else None

    def values(self) -> Float64[Tensor, " codes"]:
        """The number of every code, in the order of the codes. The second half is the first one's negative."""
        code = torch.arange(2 ** (self.bits - 1))
        field, fraction = code >> self.mantissa, (code & (2**self.mantissa - 1)).double() * 2.0**-self.mantissa
        scale = torch.exp2((field.clamp(min=1) - self.bias).double())
        positive = scale * (fraction + (field > 0))
        return torch.cat([positive, -positive])

    def row(self) -> str:
        """The line of docs/math.md about it."""
        integers = (
            "no"
            if self.int8_shift is None
            else f"x {2**self.int8_shift}: up to {int(self.largest * 2**self.int8_shift)}"
        )
        numbers = f"{self.largest:g} | {self.smallest_normal:g} | {self.smallest:g}"
        return f"| {self.name} | {self.bits} | {self.bias} | {numbers} | {integers} |"


ELEMENTS = {
    element.name: element
    for element in (
        Element(3, 2),
        Element(2, 3),
        Element(2, 2),
        Element(3, 1),
        Element(2, 1),
        Element(4, 2),
        Element(3, 3),
    )
}
"""Every element that has a name: six bits first, then five, four, seven."""

AUTO = ("e3m2", "e2m3")
"""What `auto` chooses from, per layer: the elements of six bits. They take the same bytes."""


def element_of(name: object) -> Element:
    """The element of that name. Raises InputError, with the names that there are."""
    if not isinstance(name, str) or name not in ELEMENTS:
        raise InputError(f"unknown element {name!r}; known elements: {', '.join(ELEMENTS)}")
    return ELEMENTS[name]


def encode(x: Float32[Tensor, "*s"], element: Element) -> UInt8[Tensor, "*s"]:
    """The code of the nearest number, halves to the even mantissa; saturated. x must not be NaN. Exact: every step is.

    With 2^E the power of two below |x|, at least that of the subnormal numbers, the numbers around x are multiples of
    2^(E - mantissa), and codes count them.
    """
    u = x.abs().clamp(max=element.largest)
    first = 128 - element.bias  # of the subnormal numbers, as float32 writes it
    field = (u.view(torch.int32) >> 23).clamp(min=first)
    step = ((field - element.mantissa) << 23).view(torch.float32)
    code = (u / step).round().int() + ((field - first) << element.mantissa)
    return (code | (x.signbit().int() << (element.bits - 1))).to(torch.uint8)


def decode(codes: UInt8[Tensor, "*s"], element: Element) -> Float32[Tensor, "*s"]:
    """The numbers of codes."""
    return element.values().float().to(codes.device)[codes.long()]
