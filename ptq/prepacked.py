"""Weights in the layout of a kernel, on disk: format `prepacked`, version 1, written by `quantize prepack`.

It stands for another format, `of`: its stored parts are what that format's `prepack` makes for a target, so loading has
nothing left to do. `layout` is the version of the tiles of that target; where the kernels' tiles change, it is raised,
and older files are refused, since only the plain bytes of a format are kept readable for ever.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptq import formats
from ptq.errors import InputError
from ptq.formats import Codebook, Format, IntegerInput, Parts, Scales
from ptq.rounding import Rounded

LAYOUTS = {"cpu": 1}
"""Targets that there are tiles for, and the version of these (`ptq.tiles`, `quip_sharp.tiled_ops`)."""
PLANNED = ("sm_80", "sm_90")
"""Targets whose kernels read the plain bytes."""


@dataclass(frozen=True)
class PrepackedFormat:
    """The format that `of` describes ({"format", "version", options...}), as the kernels of `target` read it."""

    target: str = "cpu"
    layout: int = LAYOUTS["cpu"]
    of: dict[str, Any] = field(default_factory=lambda: {"format": "dense", "version": 1, "dtype": "float32"})

    name: ClassVar[str] = "prepacked"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_target(self.target)
        if self.layout != LAYOUTS[self.target]:
            raise InputError(
                f"prepacked for {self.target} in layout version {self.layout!r}, this package reads version "
                f"{LAYOUTS[self.target]}; run `quantize prepack` again on the checkpoint that it was made from"
            )
        if not isinstance(self.of, dict) or self.of.get("format") in (None, self.name):
            raise InputError(f"{self.name}: `of` must describe another format, found {str(self.of)[:80]}")
        if self.of.get("version") != self.inner.version:
            raise InputError(
                f"{self.inner.name} has layout version {self.of.get('version')!r}, this package reads version "
                f"{self.inner.version}; install the version of ptq that wrote the checkpoint"
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
            return {part: (tuple(t.shape), t.dtype) for part, t in self.inner.prepack(parts, self.target).items()}

    def pack(self, rounded: Rounded) -> Parts:
        return self.inner.prepack(self.inner.pack(rounded), self.target)

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[Tensor, Scales]:
        return self.inner.unpack(parts, n, k)

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        return self.inner.dequantize(parts, n, k)

    def linear(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None = None) -> Float[Tensor, "*t n"]:
        return self.inner.linear(x, parts, bias)

    def linear_quantized(
        self,
        q: Int8[Tensor, "*t k"],
        q_scale: Float32[Tensor, "*t"],
        parts: Parts,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "*t n"]:
        """The inner format's product, or with the numbers that the tokens stand for where it has none."""
        if isinstance(self.inner, IntegerInput):
            return cast(IntegerInput, self.inner).linear_quantized(q, q_scale, parts, bias, dtype)
        return self.inner.linear((q.float() * q_scale[..., None]).to(dtype), parts, bias)

    def prepack(self, parts: Parts, device: torch.device | str) -> Parts:
        """The parts as they are on the target; on another device as that one wants them."""
        if torch.device(device).type == self.target:
            return {part: tensor.to(device) for part, tensor in parts.items()}
        return self.inner.prepack(self.inner.unprepack(parts), device)

    def unprepack(self, parts: Parts) -> Parts:
        if next(iter(parts.values())).device.type in (self.target, "meta"):
            return parts
        return self.inner.prepack(self.inner.unprepack(parts), self.target)


def check_target(target: object) -> None:
    """Raise InputError for a target that has no tiles."""
    if target in PLANNED:
        raise InputError(
            f"target {target}: there is no prepacked layout for it, its kernels read the plain bytes; load the "
            f"checkpoint as it is, or choose {' or '.join(LAYOUTS)}"
        )
    if not isinstance(target, str) or target not in LAYOUTS:
        raise InputError(f"unknown target {str(target)[:80]!r}; known targets: {', '.join((*LAYOUTS, *PLANNED))}")
