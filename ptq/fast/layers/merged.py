"""Weights that multiply the same input, one under the other in memory: on a GPU one launch multiplies them all.

Fragments are rows of tiles of 16 rows: those of several weights, one after the other, are those of the matrix whose
rows are all their rows. `merge` makes that matrix, and the weights themselves become pieces of it: they need no more
memory, and go on as they were. A weight that was replaced or moved since is noticed (`is_whole`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import synchronize
from ptq.weights.formats import Format, IntegerInput, Parts

TILE = 16  # rows


@dataclass(frozen=True)
class Merged:
    """Several weights as one."""

    format: Format
    parts: Parts
    bias: Tensor | None
    input_bits: int
    rows: tuple[int, ...]
    pieces: tuple[tuple[Tensor, int], ...]
    """The parameters of the weights, and where in memory they should be."""

    def is_whole(self) -> bool:
        """Whether the weights are still pieces of the matrix."""
        return all(piece.data_ptr() == address for piece, address in self.pieces)

    def products(self, seen: Sequence[Tensor], dtype: torch.dtype) -> tuple[Float[Tensor, "*t _n"], ...]:
        """The product with each weight, of an input as `QuantLinear.product_of` takes it; slices of one tensor."""
        if len(seen) == 2:
            form = cast(IntegerInput, self.format)
            y = form.linear_quantized(seen[0], seen[1], self.parts, self.bias, dtype, self.input_bits)
        else:
            y = self.format.linear(seen[0], self.parts, self.bias).to(dtype)
        return y.split(self.rows, -1)


@torch.inference_mode(False)
@torch.no_grad()
def merge(linears: Sequence[QuantLinear]) -> Merged | None:
    """The weights as one matrix, whose pieces they become; None where their layout does not allow it: no fragments,
    numbers that belong to a whole weight, an output transform, rows that don't fill their tiles."""
    format, all_parts = linears[0].format, [linear.parts() for linear in linears]
    if any(linear.format != format or linear.online.output is not None for linear in linears):
        return None
    inputs = {(linear.in_features, linear.online.input_bits) for linear in linears}
    if len(inputs) > 1 or "fragments" not in all_parts[0]:
        return None
    for linear, parts in zip(linears, all_parts, strict=True):
        tiles = {tensor.shape[0] for name, tensor in parts.items() if name != "shape" and tensor.dim() == 3}
        if linear.out_features % TILE or tiles != {linear.out_features // TILE} or len(parts) != len(all_parts[0]):
            return None
    held = {name: [parts[name] for parts in all_parts] for name in all_parts[0] if name != "shape"}
    biases = [linear._parameters["bias"] for linear in linears]
    given = [bias for bias in biases if bias is not None]
    if any(tensor.dim() != 3 for tensors in held.values() for tensor in tensors) or len(given) not in (0, len(biases)):
        return None
    pieces: list[tuple[Tensor, int]] = []
    whole = {name: _joined(tensors, pieces) for name, tensors in held.items()}
    n, k = sum(linear.out_features for linear in linears), linears[0].in_features
    synchronize(whole)
    whole["shape"] = all_parts[0]["shape"].new_empty(n, k, 0)
    rows = tuple(linear.out_features for linear in linears)
    bias = _joined(given, pieces) if given else None
    return Merged(format, whole, bias, linears[0].online.input_bits, rows, tuple(pieces))


def _joined(tensors: Sequence[Tensor], pieces: list[tuple[Tensor, int]]) -> Tensor:
    """The tensors one after the other; they become pieces of that, and are noted."""
    joined = torch.cat(list(tensors))
    for tensor, piece in zip(tensors, joined.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = piece
        pieces.append((tensor, piece.data_ptr()))
    return joined
