"""The ends of a model, its embedding and its head: their weights as a run reads them, and how they run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ptq.hf.blocks import PartialModel
from ptq.layers.embedding import RowFormat, row_format
from ptq.layers.packed_weight import GUARD
from ptq.models.family import Family
from ptq.ops.matmul import FEW_TOKENS
from ptq.weights.formats import Parts


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear outside of blocks (`Plan.ends`), plain or packed."""

    tensors: dict[str, Tensor]
    """Its tensors, by the last part of their names: `weight`, and `weight_<part>` of a packed one."""
    entry: dict[str, Any] | None = None
    """Its entry of `quantization_config`; None: the weight is plain."""

    def rows(self, index: Int64[Tensor, " u"], k: int) -> Float[Tensor, "u k"]:
        """Some rows of k numbers, as the embedding looks them up."""
        if self.entry is None:
            weight = self.tensors["weight"]
            return weight[index.to(weight.device)]
        format, parts = self._packed(k)
        return format.rows(parts, index.to(parts["codes"].device), k)

    def whole(self, k: int) -> Float[Tensor, "n k"]:
        """All rows."""
        if self.entry is None:
            return self.tensors["weight"]
        format, parts = self._packed(k)
        return format.dequantize(parts, len(parts["codes"]), k)

    def _packed(self, k: int) -> tuple[RowFormat, Parts]:
        parts = {leaf.removeprefix("weight_"): t for leaf, t in self.tensors.items() if leaf != GUARD}
        return row_format(self.entry, "the embedding", len(parts["codes"]), k), parts


def embed(
    part: PartialModel, ids: Int[Tensor, "rows t"], weights: Callable[[Int64[Tensor, " u"]], dict[str, Tensor]]
) -> Float[Tensor, "rows t w"]:
    """The state that enters the first block. `weights` makes the rows of the embedding for some tokens, by tensor name:
    it is asked for those that occur alone. One row of `ids` runs at a time: some models multiply here, and the last
    bits of a product may depend on how many rows it has."""
    used, places = ids.unique(return_inverse=True)
    part.load(weights(used))
    return torch.cat([part.embed(row) for row in places.to(part.device).split(1)])


def final_tensors(family: Family) -> tuple[str, ...]:
    """Names of the tensors behind the last block, beside the head's weight: those of the last norm, and the head's
    bias. Most models do not have all of them."""
    return f"{family.final_norm}.weight", f"{family.final_norm}.bias", f"{family.head}.bias"


def logits(
    part: PartialModel, matrix: Matrix, last: dict[str, Tensor], state: Float[Tensor, "rows t w"]
) -> Iterator[Float[Tensor, "1 t v"]]:
    """Logits of every row from the state that leaves the last block, the head's matrix and the tensors `last`."""
    head = part.family.head
    if matrix.entry is not None:
        part.pack({head: matrix.entry})
    tensors = {f"{head}.{leaf}": tensor for leaf, tensor in matrix.tensors.items()}
    part.load({**tensors, **last}, as_stored=state.shape[1] <= FEW_TOKENS)
    return (part.logits(row) for row in state.split(1))


def plain_matrix(weight: Float[Tensor, "v k"]) -> Matrix:
    """The matrix of a weight that is not packed."""
    return Matrix({"weight": weight})
