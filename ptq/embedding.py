"""The embedding and the head in few bits: what a plan says of them, and the modules that read them.

A packed embedding looks up rows of codes. Where the head is the embedding's own weight, it multiplies with the same
bytes; elsewhere it is a `QuantLinear` like any other.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from ptq import formats
from ptq.errors import InputError
from ptq.formats import Format, Parts
from ptq.packed_weight import GUARD, PackedWeight, format_of, frozen, guard
from ptq.plan import Plan

GROUPS = {8: (128, 64, 32), 6: (128, 64, 32), 4: (32,)}
"""Group sizes by the bits: the first that divides the rows is taken; where none does, rows have one scale each. At 4
bits smaller groups pay (docs/results.md)."""


@runtime_checkable
class RowFormat(Format, Protocol):
    """A format of which single rows can be read."""

    def rows(
        self, parts: Parts, index: Int64[Tensor, " u"], k: int, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "u k"]:
        """The numbers that some rows stand for, of stored parts or of a layout, rounded to `dtype`. Raises IndexError
        or RuntimeError for a row that does not exist."""
        ...


@dataclass(frozen=True)
class Matrix:
    """The weight of the embedding or the head, plain or packed."""

    tensors: dict[str, Tensor]
    """By the last part of their names: `weight`, and `weight_<part>` of a packed one."""
    entry: dict[str, Any] | None = None
    """That of `quantization_config`; None: the weight is plain."""

    def rows(self, index: Int64[Tensor, " u"], k: int) -> Float[Tensor, "u k"]:
        """Some rows of k numbers, as the embedding looks them up."""
        if self.entry is None:
            weight = self.tensors["weight"]
            return weight[index.to(weight.device)]
        parts = {leaf.removeprefix("weight_"): t for leaf, t in self.tensors.items() if leaf != GUARD}
        format = _row_format(self.entry, "the embedding", len(parts["codes"]), k)
        return format.rows(parts, index.to(parts["codes"].device), k)


def plain(weight: Float[Tensor, "v k"]) -> Matrix:
    """A weight as it is."""
    return Matrix({"weight": weight})


def packed(plan: Plan, bits: int) -> Plan:
    """The plan in which embedding and head have integers of so many bits, rounded to the nearest; 16: as they are."""
    if bits == 16:
        return plan
    ends = {linear.name for linear in plan.ends()}

    def group(k: int) -> int:
        return next((size for size in GROUPS[bits] if k % size == 0), 0)

    return replace(
        plan,
        linears=tuple(
            replace(linear, format=formats.get("quarot/integer", bits=bits, group_size=group(linear.k)))
            if linear.name in ends
            else linear
            for linear in plan.linears
        ),
    )


class PackedEmbedding(PackedWeight):
    """An embedding whose W[n, k] is stored in a format; its rows are decoded as they are looked up.

    `dtype` is what it gives, until the model is cast; `scale` is what its rows are multiplied with, rounded to that.
    """

    def __init__(self, n: int, k: int, format: RowFormat, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__(n, k, format)
        self.num_embeddings, self.embedding_dim, self.scale = n, k, scale
        self.decode = format.rows  # asked once: what a format can is a slow question
        self.in_layout = False
        """Whether the weight is put into the layout of the kernels, since a head multiplies with it."""
        self.register_buffer("factor", torch.ones((), dtype=dtype), persistent=False)  # casts of the model reach it
        self.make_room()

    def prepack(self) -> None:
        factor = cast(Tensor, self._buffers["factor"])
        if not factor.is_meta:
            factor.fill_(1.0 if self.scale is None else self.scale)  # transformers does not keep such buffers
        if self.in_layout:
            super().prepack()

    def forward(self, ids: Int[Tensor, "*batch t"]) -> Float[Tensor, "*batch t k"]:
        """The rows of tokens."""
        factor = cast(Tensor, self._buffers["factor"])
        rows = self.decode(self.parts(), ids.flatten().long(), self.embedding_dim, factor.dtype)
        rows = rows.view(*ids.shape, self.embedding_dim)
        return rows if self.scale is None else rows * factor

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


class TiedHead(nn.Module):
    """The head of a model whose packed embedding is also that."""

    def __init__(self, embedding: PackedEmbedding) -> None:
        super().__init__()
        embedding.in_layout = True
        self._embedding = (embedding,)  # no submodule: its tensors would be listed twice
        self.register_parameter(GUARD, frozen(guard()))  # transformers ties it to the embedding's

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """x Wᵀ."""
        embedding = self._embedding[0]
        return embedding.format.linear(x, embedding.parts()).to(x.dtype)


def build(module: nn.Embedding, entry: Any, name: str) -> PackedEmbedding:
    """The packed embedding that an entry of config.json describes, in the place of a plain one; on the current default
    device.

    Raises InputError for an entry that does not exist or fit, and for an embedding that does more than look up.
    """
    n, k = module.num_embeddings, module.embedding_dim
    scale = getattr(module, "scalar_embed_scale", None)
    if scale is None and type(module).forward is not nn.Embedding.forward:
        raise InputError(f"{name} is a {type(module).__name__}, whose rows this package cannot decode")
    if isinstance(entry, dict) and (idle := sorted(entry.keys() & {"hadamard", "output_hadamard", "activation"})):
        raise InputError(f"config.json: quantization_config of {name}: an embedding has no {idle[0]}")
    return PackedEmbedding(n, k, _row_format(entry, name, n, k), module.weight.dtype, scale)


def tie(model: nn.Module, head: nn.Module, embedding: PackedEmbedding) -> None:
    """Put a `TiedHead` in the place of a model's plain head."""
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, TiedHead(embedding))


def _row_format(entry: Any, name: str, n: int, k: int) -> RowFormat:
    format = format_of(entry, name, n, k)
    if not isinstance(format, RowFormat):
        raise InputError(f"config.json: quantization_config of {name}: no rows can be read from {format.name}")
    return format
