"""Weights in the layout of a kernel, on disk: format `prepacked`, version 1, written by `quantize prepack`.

It stands for another format, `of`: its stored parts are what that format makes of its bytes for a target, so loading
has nothing left to do. `layout` is the version of that layout; where the kernels' layout changes, it is raised, and
older files are refused, since only the plain bytes of a format are kept readable for ever.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptq.errors import InputError
from ptq.weights import formats
from ptq.weights.formats import Codebook, Format, Parts, Scales
from ptq.weights.layouts import LaidOut
from ptq.weights.rounding import Rounded


@dataclass(frozen=True)
class Runtime:
    """What runs the model."""

    device: str
    """Type of the torch device."""
    layout: str
    version: int
    """Version of the layout; a checkpoint records it, and another one is refused."""


TARGETS = {
    "cpu": Runtime("cpu", "tiles", 1),
    "sm_80": Runtime("cuda", "fragments", 1),
    "sm_90": Runtime("cuda", "fragments", 1),
}
"""`layout` as in `ptq.weights.layouts`."""


@dataclass(frozen=True)
class PrepackedFormat:
    """The format that `of` describes ({"format", "version", options...}), as the kernels of `target` read it. Layers
    multiply with `inner`."""

    target: str = "cpu"
    layout: int = TARGETS["cpu"].version
    of: dict[str, Any] = field(default_factory=lambda: {"format": "dense", "version": 1, "dtype": "float32"})

    name: ClassVar[str] = "prepacked"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        version = target_of(self.target).version
        if self.layout != version:
            raise InputError(
                f"prepacked for {self.target} in layout version {self.layout!r}, this package reads version {version}; "
                "run `quantize prepack` again on the checkpoint that it was made from"
            )
        if not isinstance(self.of, dict) or self.of.get("format") in (None, self.name):
            raise InputError(f"{self.name}: `of` must describe another format, found {str(self.of)[:80]}")
        if self.of.get("version") != self.inner.version:
            raise InputError(
                f"{self.inner.name} has layout version {self.of.get('version')!r}, this package reads version "
                f"{self.inner.version}; install the version of ptq that wrote the checkpoint"
            )
        if target_of(self.target).device != "cpu" and not isinstance(self.inner, LaidOut):
            raise InputError(
                f"{self.inner.name} has no layout for {self.target}, where its weights are read as they are stored; "
                "load the plain checkpoint"
            )

    @cached_property
    def inner(self) -> Format:
        """The format that this one stands for."""
        options = {key: value for key, value in self.of.items() if key not in ("format", "version")}
        return formats.get(str(self.of["format"]), **options)

    @property
    def codebook(self) -> Codebook | None:
        return self.inner.codebook

    def options(self) -> dict[str, Any]:
        return {"target": self.target, "layout": self.layout, "of": self.of}

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        stored = self.inner.buffers(n, k)
        with FakeTensorMode():  # shapes alone, through the same code
            parts = {part: torch.empty(shape, dtype=dtype, device="cpu") for part, (shape, dtype) in stored.items()}
            return {part: (tuple(t.shape), t.dtype) for part, t in self.lay_out(parts).items()}

    def lay_out(self, stored: Parts) -> Parts:
        """The inner format's stored parts as this one stores them; where the layout does not fit them, as they are."""
        target = target_of(self.target)
        if target.device == "cpu":
            return self.inner.prepack(stored, "cpu")
        return cast(LaidOut, self.inner).laid_out(stored, target.layout)

    def pack(self, rounded: Rounded) -> Parts:
        return self.lay_out(self.inner.pack(rounded))

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[Tensor, Scales]:
        return self.inner.unpack(parts, n, k)

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        return self.inner.dequantize(parts, n, k)

    def linear(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None = None) -> Float[Tensor, "*t n"]:
        return self.inner.linear(x, parts, bias)

    def prepack(self, parts: Parts, device: torch.device | str) -> Parts:
        """The parts as they are. Raises InputError on a device that is not the target's."""
        kind = torch.device(device).type
        if kind != target_of(self.target).device:
            raise InputError(
                f"the checkpoint is prepacked for {self.target}, but the model is on {kind}; load the checkpoint that "
                "it was made from"
            )
        return {part: tensor.to(device) for part, tensor in parts.items()}

    def unprepack(self, parts: Parts) -> Parts:
        return parts


def target_of(name: object) -> Runtime:
    """The target of that name. Raises InputError where there is none."""
    if not isinstance(name, str) or name not in TARGETS:
        raise InputError(f"unknown target {str(name)[:80]!r}; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]
