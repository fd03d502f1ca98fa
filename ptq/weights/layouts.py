"""The layouts of weights in memory: what the kernels of a device read, and how a format makes it from its stored parts.

The bytes of a layout are described where they are made: `ptq.ops.tiles`, `ptq.ops.fragments`, `fp6.fragments`,
`quip_sharp.tiled_ops` and `quip_sharp.fragment_ops`.
"""

from typing import Protocol, runtime_checkable

import torch

from ptq.weights.formats import Format, Parts

LAYOUTS = {"cpu": "tiles", "cuda": "fragments"}
"""By the type of a torch device. Elsewhere the ops read the stored parts."""


@runtime_checkable
class LaidOut(Format, Protocol):
    """A format that has these layouts."""

    def lay_out(self, parts: Parts, layout: str) -> Parts:
        """Stored parts as "tiles" or "fragments", on the device where they are, with an empty part `shape` [n, k, 0]
        that says what they were made from."""
        ...


def of(parts: Parts) -> str | None:
    """The layout of a weight; None: as it is stored."""
    return next((layout for layout in LAYOUTS.values() if layout in parts), None)


def prepack(format: LaidOut, parts: Parts, device: torch.device | str, fits: bool = True) -> Parts:
    """`Format.prepack` of such a format, from stored parts or another layout; `fits`: whether these weights have
    layouts at all."""
    layout = LAYOUTS.get(torch.device(device).type)
    if layout in parts:
        return parts
    stored = {part: tensor.to(device).contiguous() for part, tensor in format.unprepack(parts).items()}
    return format.lay_out(stored, layout) if fits and layout is not None else stored
