"""How weights are stored: the protocols `Codebook` and `Format`, and the table of the formats that exist.

A codebook maps numbers to codes; a format adds the bytes of the checkpoint and the linear layer that reads them.
A format's parts are the tensors `<linear>.weight_<part>` of a checkpoint. Names come from the fixed table below:
nothing that a checkpoint says is ever imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int, Int8
from torch import Tensor

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.ops import matmul

if TYPE_CHECKING:
    from ptq.weights.rounding import Rounded

Scales = dict[str, Tensor]
"""What a codebook needs beside the codes to give numbers back, by name."""
Parts = dict[str, Tensor]
"""The stored tensors of one weight, by part."""
Listed = dict[str, list[Tensor]]
"""Those of several weights that have the same parts."""
LayerOp = tuple[Any, tuple[Any, ...]]
"""An op of `ptq.ops.layer_ops`, and the weights of a layer as it takes them."""


@runtime_checkable
class Codebook(Protocol):
    """A set of points in `dim` dimensions, and how weights are scaled to it. `columns` are the columns of the whole
    weight that the given ones are (runs of `dim`); None: all of them, in order."""

    dim: ClassVar[int]
    """d: consecutive weights of a row that share one code. Codes are [n, m] with m = k / d."""
    per_row: ClassVar[bool]
    """Whether scales belong to single rows (every tensor of them is [n, ...]), so that rows can be done in pieces."""

    def fit(self, w: Float32[Tensor, "n k"], *, name: str = "weight") -> Scales:
        """Scales for a weight. Raises InputError, naming `name`, for NaN, infinity or a shape that does not fit."""
        ...

    def round(
        self, w: Float32[Tensor, "n c"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Int[Tensor, "n m"]:
        """Codes of the nearest points."""
        ...

    def decode(
        self, codes: Int[Tensor, "n m"], scales: Scales, columns: Int[Tensor, " c"] | None = None
    ) -> Float32[Tensor, "n c"]:
        """The numbers that codes stand for."""
        ...


@runtime_checkable
class BlockCodebook(Codebook, Protocol):
    """A codebook that brings its own kernel for the inner loop of `rounding.ldlq`."""

    def round_block(
        self,
        target: Float32[Tensor, "c n"],
        w: Float32[Tensor, "c n"],
        factor: Float32[Tensor, "c c"],
        scales: Scales,
        columns: Int[Tensor, " c"],
    ) -> tuple[Int[Tensor, "m n"], Float32[Tensor, "c n"]]:
        """The same codes and errors w - ŵ as `feedback.round_block`."""
        ...


@runtime_checkable
class ScaledCodebook(Codebook, Protocol):
    """A codebook with one scale for a whole weight, part `scale` [1], times points. `rounding.ldlq` then chooses it by
    the loss itself."""

    def trials(self, scales: Scales) -> Sequence[Scales]:
        """Scales that may be better than the fitted ones when feedback is added to the weight; these among them."""
        ...


@runtime_checkable
class RowScaledCodebook(Codebook, Protocol):
    """A codebook with scales of rows, or of groups of their columns. With sweeps, `rounding.ldlq` then chooses those of
    each row by the loss itself."""

    def multiplied(self, scales: Scales, factor: float) -> Scales | None:
        """The scales nearest to so many times these; None where scales are too far apart for that."""
        ...


@runtime_checkable
class OnePassCodebook(Codebook, Protocol):
    """A codebook that fits, rounds and measures in one pass over a weight."""

    def nearest(self, w: Float[Tensor, "n k"], *, name: str = "weight") -> tuple[Tensor, Scales, float, float]:
        """What `fit` and `round` give, and |W - Ŵ|² and |W|². Raises InputError as `fit` does."""
        ...


@runtime_checkable
class Format(Protocol):
    """One way to store a weight W[n, k] and to multiply with it."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Version of the byte layout; a checkpoint records it, and another one is refused."""

    @property
    def codebook(self) -> Codebook | None:
        """None where weights are not rounded; `pack` then finds the weight itself in the place of codes."""
        ...

    def options(self) -> dict[str, Any]:
        """JSON values that make the same format again: `get(name, **options)`."""
        ...

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every stored part. Raises InputError where the format cannot hold this shape."""
        ...

    def pack(self, rounded: "Rounded") -> Parts:
        """The stored bytes of one weight, from its codes and scales."""
        ...

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[Tensor, Scales]:
        """Exact inverse of `pack`. Raises InputError where a part is missing or has another shape or dtype."""
        ...

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        """The weight that the stored bytes stand for."""
        ...

    def linear(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None = None) -> Float[Tensor, "*t n"]:
        """x Wᵀ + bias, in the dtype of x."""
        ...

    def prepack(self, parts: Parts, device: torch.device | str) -> Parts:
        """The parts as the kernels of a device want them, maybe under other names; called once after loading. `linear`,
        `unpack` and `dequantize` take either kind."""
        ...

    def unprepack(self, parts: Parts) -> Parts:
        """Exact inverse of `prepack`: the stored parts."""
        ...


@runtime_checkable
class IntegerInput(Protocol):
    """A format that multiplies with the integers of quantised activations (`ptq.ops.activations`) as they are."""

    def linear_quantized(
        self,
        q: Int8[Tensor, "*t k"],
        q_scale: Float32[Tensor, "*t"],
        parts: Parts,
        bias: Tensor | None,
        dtype: torch.dtype,
        input_bits: int = 8,
    ) -> Float[Tensor, "*t n"]:
        """(q_scale * q) Wᵀ + bias, in `dtype`. `input_bits`: the bits that the integers q have."""
        ...


@runtime_checkable
class Choice(Format, Protocol):
    """Stands in a plan for several formats of one name that take the same buffers: the weight decides which it is.

    No checkpoint ever holds one.
    """

    def choose(self, w: Float[Tensor, "n k"], *, name: str = "weight") -> Format:
        """The format for this weight. Raises InputError, naming `name`, for NaN or infinity."""
        ...


@dataclass(frozen=True)
class DenseFormat:
    """An unquantised weight, for a layer that only carries an online rotation. One part, `dense`: W[n, k]."""

    dtype: str = "float32"
    """float32, float16 or bfloat16. Loading with another dtype casts the weight, as it does for any plain layer."""

    name: ClassVar[str] = "dense"
    version: ClassVar[int] = 1
    codebook: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise InputError(f"dense: dtype must be float32, float16 or bfloat16, found {self.dtype!r}")

    def options(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def buffers(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"dense": ((n, k), getattr(torch, self.dtype))}

    def pack(self, rounded: "Rounded") -> Parts:
        return {"dense": rounded.codes.to(getattr(torch, self.dtype)).contiguous()}

    def unpack(self, parts: Parts, n: int, k: int) -> tuple[Tensor, Scales]:
        dense = parts.get("dense")
        if dense is None or dense.shape != (n, k) or not dense.is_floating_point():
            raise InputError(f"dense: expected one floating-point part `dense` [{n}, {k}], found {parts_text(parts)}")
        return dense, {}

    def dequantize(self, parts: Parts, n: int, k: int) -> Float32[Tensor, "n k"]:
        return self.unpack(parts, n, k)[0].float()

    def linear(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None = None) -> Float[Tensor, "*t n"]:
        return matmul.linear(x, parts["dense"].to(x.dtype), None if bias is None else bias.to(x.dtype))

    def prepack(self, parts: Parts, device: torch.device | str) -> Parts:
        return {part: tensor.to(device) for part, tensor in parts.items()}

    def unprepack(self, parts: Parts) -> Parts:
        return parts


FORMATS = {
    "dense": ("ptq.weights.formats", "DenseFormat"),
    "prepacked": ("ptq.weights.prepacked", "PrepackedFormat"),
    "quarot/integer": ("quarot.integer", "IntegerFormat"),
    "fp6/minifloat": ("fp6.minifloat", "MinifloatFormat"),
    "quip_sharp/e8p": ("quip_sharp.e8p_format", "E8PFormat"),
}
"""Every format: its name in a checkpoint, the module and the class. A new one is one row here and one file."""


def get(name: str, /, **options: Any) -> Format:
    """The format of that name with these options. Raises InputError for a name, option or value that does not exist."""
    if name not in FORMATS:
        raise InputError(f"unknown format {name!r}; known formats: {', '.join(FORMATS)}")
    module, attribute = FORMATS[name]
    kind = getattr(import_module(module), attribute)
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"format {name}: unknown option {unknown[0]!r}; known options: {', '.join(known) or 'none'}")
    return kind(**options)


def check_parts(format: Format, parts: Parts, n: int, k: int) -> None:
    """Raise InputError where stored parts are not those of a weight [n, k], by name, shape and dtype."""
    expected = format.buffers(n, k)
    if {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} != expected:
        wanted = parts_text({part: torch.empty(s, dtype=d, device="meta") for part, (s, d) in expected.items()})
        raise InputError(f"{format.name} [{n}, {k}]: expected the parts {wanted}; found {parts_text(parts)}")


def parts_text(parts: Parts) -> str:
    """Parts as text for a message: name, dtype and shape of each."""
    return ", ".join(f"{part} {dtype_name(t.dtype)} {list(t.shape)}" for part, t in parts.items()) or "none"
