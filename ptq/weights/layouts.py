"""Weights as the kernels of a device read them: the layouts, and what all formats that have them do alike.

The bytes of a layout are described where they are made: `ptq.ops.tiles`, `ptq.ops.fragments`, `fp6.fragments`,
`quip_sharp.tiled_ops` and `quip_sharp.fragment_ops`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor
from torch._ops import OpOverload

from ptq.ops import fragments, tiles
from ptq.ops.activations import Activation
from ptq.ops.expert_ops import ExpertRows, ExpertSteps
from ptq.ops.op_declarations import call
from ptq.ops.tiles import listed
from ptq.weights.formats import Format, LayerOp, Listed, Parts

Signs = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Of inputs, and of products."""
LAYOUTS = {"cpu": "tiles", "cuda": "fragments"}
"""By the type of a torch device. Elsewhere the ops read the stored parts."""
FITS = {"tiles": tiles.groups_fit, "fragments": fragments.groups_fit}


def of(parts: Parts) -> str | None:
    """The layout of a weight; None: as it is stored."""
    return next((layout for layout in LAYOUTS.values() if layout in parts), None)


@dataclass(frozen=True)
class Ops:
    """The ops of a format on weights in a layout; all take a weight as `LaidOut.weight` gives it."""

    linear: dict[str, OpOverload]
    """By layout: the product with floating-point tokens."""
    quantized: dict[str, OpOverload]
    """By layout: the product with quantised tokens."""
    layer: OpOverload
    """See `ptq.ops.layer_ops`."""
    tokens: OpOverload | None = None
    """For tiles: the product with tokens that it quantises itself. None: the format has no such op."""
    experts: OpOverload | None = None
    """See `ptq.ops.expert_ops`. None: the format has no such op."""
    all_experts: OpOverload | None = None
    """The same."""
    takes_input_bits: tuple[str, ...] = ()
    """Layouts for which `quantized` takes the bits that the integers of the tokens have."""


class LaidOut(Format):
    """A format whose weights are laid out for ops: as tiles for the CPU, as fragments for a GPU. A subclass names the
    ops and what they take; how they are called is here. Methods that do several things in one call give the numbers of
    the single steps, or None where they cannot."""

    ops: ClassVar[Ops]
    scale_parts: ClassVar[tuple[str, ...]] = ("scale",)
    """What the ops take behind the codes: these parts of a weight, None for one that it does not have."""
    row_part: ClassVar[str] = "codes"
    """A stored part that has the rows of W."""
    group_size: int = 0
    """Columns that share a scale; 0: all of a row."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """The options of the format as its ops take them."""
        ...

    @abstractmethod
    def lay_out(self, parts: Parts, layout: str) -> Parts:
        """Stored parts as "tiles" or "fragments", on the device where they are, with an empty part `shape` [n, k, 0]
        that says what they were made from."""
        ...

    def check_values(self, parts: Parts) -> None:
        """Raise InputError where parts, stored or of a layout, hold numbers that kernels have no room for. Asked when a
        weight is laid out; what multiplies with stored parts needs no such room."""

    def prepack(self, parts: Parts, device: torch.device | str) -> Parts:
        """What the kernels of the device read, from stored parts or another layout: on a CPU tiles, on a GPU fragments.
        Elsewhere, and where these do not fit the groups, the stored parts."""
        layout = LAYOUTS.get(torch.device(device).type)
        if layout in parts:
            return parts
        stored = {part: tensor.to(device).contiguous() for part, tensor in self.unprepack(parts).items()}
        return stored if layout is None else self.laid_out(stored, layout)

    def laid_out(self, stored: Parts, layout: str) -> Parts:
        """`lay_out`; where the layout does not fit the groups, the stored parts."""
        return self.lay_out(stored, layout) if FITS[layout](self.group_size) else stored

    def weight(self, parts: Parts, layout: str, bias: Tensor | None) -> tuple[Any, ...]:
        """A weight in a layout as the ops take it: codes, scales, bias, n and numbers."""
        scales = map(parts.get, self.scale_parts)
        return parts[layout], *scales, bias, parts["shape"].shape[0], *self.numbers

    def linear(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None = None) -> Float[Tensor, "*t n"]:
        """x Wᵀ + bias, in the dtype of x."""
        if (layout := of(parts)) is None:
            return self.linear_stored(x, parts, bias)
        return call(self.ops.linear[layout], x, *self.weight(parts, layout, bias))

    def linear_stored(self, x: Float[Tensor, "*t k"], parts: Parts, bias: Tensor | None) -> Float[Tensor, "*t n"]:
        """`linear` with stored parts."""
        w = self.dequantize(parts, parts[self.row_part].shape[0], x.shape[-1])
        return torch.nn.functional.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)

    def linear_quantized(
        self,
        q: Int8[Tensor, "*t k"],
        q_scale: Float32[Tensor, "*t"],
        parts: Parts,
        bias: Tensor | None,
        dtype: torch.dtype,
        input_bits: int = 8,
    ) -> Float[Tensor, "*t n"]:
        """(q_scale * q) Wᵀ + bias, in `dtype`. Made for weights in a layout; others go a slow way."""
        if "shape" not in parts:
            parts = self.prepack(parts, q.device)
            if q.is_cuda:  # one more kernel in between: products read weights while the one ahead of them ends
                q = q.clone()
        if (layout := of(parts)) is None:
            return self.quantized_stored(q, q_scale, parts, bias).to(dtype)
        told = (input_bits,) if layout in self.ops.takes_input_bits else ()
        return call(self.ops.quantized[layout], q, q_scale, *self.weight(parts, layout, bias), *told, dtype)

    def quantized_stored(
        self, q: Int8[Tensor, "*t k"], q_scale: Float32[Tensor, "*t"], parts: Parts, bias: Tensor | None
    ) -> Float32[Tensor, "*t n"]:
        """`linear_quantized` with stored parts, in float32: here of the numbers that the tokens stand for."""
        return self.linear_stored(q.float() * q_scale[..., None], parts, bias)

    def linear_tokens(
        self, x: Float[Tensor, "*t k"], activation: Activation, parts: Parts, bias: Tensor | None, dtype: torch.dtype
    ) -> Float[Tensor, "*t n"] | None:
        """`linear_quantized` of the quantised x; None where no one op does both: without tiles."""
        if self.ops.tokens is None or "tiles" not in parts:
            return None
        weight = self.weight(parts, "tiles", bias)
        return call(self.ops.tokens, x, *weight, activation.bits, activation.clip, dtype)

    def linears(
        self, x: Float[Tensor, "*t k"], parts: Sequence[Parts], biases: Sequence[Tensor | None]
    ) -> list[Tensor] | None:
        """`linear` for several weights of one input."""
        return None

    def linears_quantized(
        self,
        q: Int8[Tensor, "*t k"],
        q_scale: Float32[Tensor, "*t"],
        parts: Sequence[Parts],
        biases: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> list[Tensor] | None:
        """`linear_quantized` for several weights of one input."""
        return None

    def layer_op(self, parts: Sequence[Parts]) -> LayerOp | None:
        """The op of `ptq.ops.layer_ops` for the weights of a decoder layer, or of its attention."""
        held = listed(parts, "tiles", *self.scale_parts)
        return None if held is None else (self.ops.layer, (*held, *self.numbers))

    def experts(
        self,
        x: Float[Tensor, "t k"],
        rows: ExpertRows,
        weights: Listed,
        signs: Signs | None,
        width: int,
        steps: ExpertSteps,
    ) -> Float[Tensor, "t k"] | None:
        """Several experts (`ptq.ops.expert_ops`); None where no op computes them. `weights`: those of all gates, all
        ups, all downs; `width`: rows of a gate. `signs`: None where the input is not transformed; otherwise linears
        have signs and transforms on both sides (QuIP#): the products of gate and up go back through the transform of
        the input of down, those of down through that of the input of gate and up; these are the signs of the input of
        gates and ups, then of each down's, and those of all products."""
        given = self._of_experts(weights, signs, width, steps)
        return None if given is None or self.ops.experts is None else self.ops.experts(x, *rows, *given)

    def all_experts(self, weights: Listed, signs: Signs | None, width: int, steps: ExpertSteps) -> Tensor | None:
        """What stands for all experts of a block, as `experts` takes them; signs as they are stored."""
        given = self._of_experts(weights, signs, width, steps)
        return None if given is None or self.ops.all_experts is None else self.ops.all_experts(*given)

    def _of_experts(
        self, weights: Listed, signs: Signs | None, width: int, steps: ExpertSteps
    ) -> tuple[Any, ...] | None:
        """What ops on experts take of these; None for what they do not take."""
        if signs is not None or "tiles" not in weights:
            return None
        gate, down, biases, clamped = steps
        held = [weights.get(part, []) for part in ("tiles", *self.scale_parts)]
        treatments = gate.bits, gate.clip, down.factors, down.order, down.bits, down.clip
        return *held, width, *self.numbers, *treatments, biases, clamped
