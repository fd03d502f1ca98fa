"""Codes of small floats in the order in which the tensor cores of a GPU take them: fragments, version 1.

Row tiles, blocks, lanes and planes of words are those of `ptq.ops.fragments`, but the bits of a code stay together,
where few instructions make a bfloat16 or float16 number of it. A lane's 32 codes of a block are 16 pairs: pair
8 h + 4 u + 2 (e // 2) + (1 if row g + 8 else 0) is two neighbouring columns, e % 2 = 0 in the low 16 bits of a word, 1
in the high ones.

A half (16 bits) of each of the lane's b words has `slots`: bit positions of a code's sign, and of the lowest bit of
its magnitude (exponent and mantissa, which are contiguous). The bits that are left over in `group` words are gathered:
turned to the left by `turns`, as 32-bit words, they make up one more word, whose first slots hold the last pairs of the
group. Pairs go to groups in their order, in a group to words, in a word to slots.

Half a word of e2m3, whose slots are (15, 4) and (9, 10): signs s, magnitudes m, and four bits that are left over. Those
of three words make up the fourth, turned by 12, 8 and 4, and fill its bits from 4 on: eight pairs in three words.

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
          s0 m1 m1 m1 m1 m1 s1 m0 m0 m0 m0 m0  .  .  .  .

With bfloat16 numbers in mind: their sign is bit 15, and a magnitude whose exponent begins at bit 7 is the number, but
for a power of two. The first slot of most elements is there already, so one mask takes it; the second one of some gets
there in one shift.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from fp6.element import Element
from ptq.ops import bitstream, fragments


@dataclass(frozen=True)
class SlotLayout:
    """Where the bits of an element's codes are, as the module docstring says."""

    slots: tuple[tuple[int, int], ...]
    """Sign and lowest bit of the magnitude."""
    turns: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Words that share a gathered one."""
        return max(len(self.turns), 1)


_SEVEN = SlotLayout(((15, 9), (2, 3)), (14, 12, 10, 8, 6, 4, 2))
LAYOUTS = {
    "e2m1": SlotLayout(((15, 6), (9, 0), (11, 12), (10, 3))),
    "e2m2": SlotLayout(((15, 5), (10, 0), (9, 11)), (11, 4, 3, 2, 1)),
    "e3m1": SlotLayout(((15, 6), (10, 1), (5, 11)), (15, 9, 8, 7, 6)),
    "e3m2": SlotLayout(((15, 5), (10, 0)), (28, 24, 4)),
    "e2m3": SlotLayout(((15, 4), (9, 10)), (12, 8, 4)),
    "e4m2": _SEVEN,
    "e3m3": _SEVEN,
}
"""`csrc/minifloat_cuda/layouts.cuh` holds the same numbers."""


def spare(element: Element) -> int:
    """The bits of a word that no slot of its two halves has."""
    half = 0xFFFF
    for sign, low in LAYOUTS[element.name].slots:
        half ^= 1 << sign | (2 ** (element.bits - 1) - 1) << low
    return half | half << 16


def _rotated_left(word: Int32[Tensor, "*s"], by: int) -> Int32[Tensor, "*s"]:
    """Rotated to the left."""
    return word << by | word >> (32 - by) & (2**by - 1)


def _filled(code: Int32[Tensor, "*s slots 2"], element: Element) -> Int32[Tensor, "*s"]:
    """Words with codes in their first slots."""
    slots = LAYOUTS[element.name].slots[: code.shape[-2]]
    top = element.bits - 1
    half = torch.zeros_like(code[..., 0, :])
    for i, (sign, low) in enumerate(slots):
        half |= code[..., i, :] >> top << sign | (code[..., i, :] & (2**top - 1)) << low
    return half[..., 0] | half[..., 1] << 16


def _emptied(word: Int32[Tensor, "*s"], count: int, element: Element) -> Int32[Tensor, "*s slots 2"]:
    """The codes in the first `count` slots."""
    half, top = torch.stack([word, word >> 16], -1), element.bits - 1
    slots = LAYOUTS[element.name].slots[:count]
    return torch.stack([(half >> low & (2**top - 1)) | (half >> sign & 1) << top for sign, low in slots], -2)


def pack(code: UInt8[Tensor, "n k"], element: Element) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments of the codes, one in a byte."""
    layout = LAYOUTS[element.name]

    def words(lanes: UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]) -> Int32[Tensor, "tiles blocks 8 4 bits"]:
        group, slots = layout.group, len(layout.slots)
        pairs = lanes.reshape(*lanes.shape[:4], element.bits // group, 16 * group // element.bits, 2).int()
        word = _filled(pairs[..., : group * slots, :].unflatten(-2, (group, slots)), element)
        if layout.turns:
            gathered = _filled(pairs[..., group * slots :, :], element)
            bits = [_rotated_left(gathered, 32 - turn) & spare(element) for turn in layout.turns]
            word |= torch.stack(bits, -1)
        return word.flatten(4)

    return fragments.pack_words(code, element.bits, words)


def unpack(
    packed: UInt8[Tensor, "tiles blocks size"], n: int, element: Element, k: int | torch.SymInt
) -> UInt8[Tensor, "n k"]:
    """The codes, one in a byte: exact inverse of `pack`."""
    layout = LAYOUTS[element.name]

    def codes(words: Int32[Tensor, "tiles blocks 8 4 bits"]) -> UInt8[Tensor, "tiles blocks 8 4 2 2 2 2 2"]:
        group, slots = layout.group, len(layout.slots)
        word = words.unflatten(4, (element.bits // group, group))
        pairs = _emptied(word, slots, element).flatten(-3, -2)
        if layout.turns:
            gathered = torch.zeros_like(word[..., 0])
            for i, turn in enumerate(layout.turns):
                gathered |= _rotated_left(word[..., i] & spare(element), turn)
            left = 16 * group // element.bits - pairs.shape[-2]
            pairs = torch.cat([pairs, _emptied(gathered, left, element)], -2)
        return pairs.reshape(*words.shape[:4], 2, 2, 2, 2, 2).to(torch.uint8)

    return fragments.unpack_words(packed, n, element.bits, k, codes)


def prepack(codes: UInt8[Tensor, "n bytes"], element: Element, k: int) -> UInt8[Tensor, "tiles blocks size"]:
    """Fragments from the packed rows of `bitstream.pack`."""
    return pack(bitstream.unpack(codes, element.bits, k), element)


def unprepack(
    packed: UInt8[Tensor, "tiles blocks size"], n: int, element: Element, k: int | torch.SymInt
) -> UInt8[Tensor, "n bytes"]:
    """Exact inverse of `prepack`."""
    return bitstream.pack(unpack(packed, n, element, k).contiguous(), element.bits)
