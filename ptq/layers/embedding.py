"""`PackedEmbedding`: an embedding that looks up rows of codes.

Where the head is the embedding's own weight, it multiplies with the same bytes (`TiedHead`); elsewhere it is a
`QuantLinear` like any other.
"""

from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64, Num
from torch import Tensor, nn
from transformers import PreTrainedModel

from ptq.errors import InputError
from ptq.layers.packed_weight import GUARD, PackedWeight, format_of, frozen, guard
from ptq.weights.formats import Format, Parts


@runtime_checkable
class RowFormat(Format, Protocol):
    """A format of which single rows can be read."""

    def rows(
        self, parts: Parts, index: Int64[Tensor, " u"], k: int, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "u k"]:
        """The numbers that some rows stand for, of stored parts or of a layout, rounded to `dtype`. Raises IndexError
        or RuntimeError for a row that does not exist."""
        ...


class PackedEmbedding(PackedWeight):
    """An embedding whose W[n, k] is stored in a format; its rows are decoded as they are looked up.

    `dtype` is what it gives, until the model is cast; `scale` is what its rows are multiplied with, rounded to that.
    """

    def __init__(self, n: int, k: int, format: RowFormat, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__(n, k, format)
        self.num_embeddings, self.embedding_dim, self.scale = n, k, scale
        self.decode = format.rows  # asked once: what a format can is a slow question
        self.multiplies = False
        """Whether a head is tied to it. The weight is then put into the layout of the kernels."""
        # A buffer, so that casts of the model reach it. transformers drops its value: `prepack` writes it again.
        self.register_buffer("factor", torch.ones((), dtype=dtype), persistent=False)
        self.make_room()

    def prepack(self) -> None:
        factor = cast(Tensor, self._buffers["factor"])
        if not factor.is_meta:
            factor.fill_(1.0 if self.scale is None else self.scale)
        if self.multiplies:
            super().prepack()

    def forward(self, x: Num[Tensor, "..."]) -> Float[Tensor, "..."]:
        """`rows` of tokens; `product` with floating-point x, for the head that is tied to it."""
        return self.product(x) if x.is_floating_point() else self.rows(x)

    def rows(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch k"]:
        """The vectors of tokens. Raises IndexError or RuntimeError for a token that does not exist."""
        factor = cast(Tensor, self._buffers["factor"])
        rows = self.decode(self.parts(), ids.flatten().long(), self.embedding_dim, factor.dtype)
        rows = rows.view(*ids.shape, self.embedding_dim)
        return rows if self.scale is None else rows * factor

    def product(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """x Wᵀ."""
        return self.format.linear(x, self.parts()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


class TiedHead(nn.Module):
    """The head of a model whose packed embedding is also that."""

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # no submodule: its tensors would be listed twice
        self.register_parameter("bias", bias)
        self.register_parameter(GUARD, frozen(guard()))  # transformers ties it to the embedding's

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """x Wᵀ + b. It is the embedding that multiplies, so that an offloaded weight is fetched."""
        y = self._embedding[0](x)
        return y if self.bias is None else y + self.bias


def build(module: nn.Embedding, entry: Any, name: str) -> PackedEmbedding:
    """The packed embedding that an entry of config.json describes, in the place of a plain one; on the current default
    device.

    Raises InputError for an entry that does not exist or fit, and for an embedding that does more than look up.
    """
    n, k = module.num_embeddings, module.embedding_dim
    scale = getattr(module, "scalar_embed_scale", None)
    if scale is None and type(module).forward is not nn.Embedding.forward:
        raise InputError(f"{name} is a {type(module).__name__}, whose rows this package cannot decode")
    idle = {"hadamard", "output_hadamard", "signs", "activation"} & (entry.keys() if isinstance(entry, dict) else set())
    if idle:
        raise InputError(f"config.json: quantization_config of {name}: an embedding has no {min(idle)}")
    return PackedEmbedding(n, k, row_format(entry, name, n, k), module.weight.dtype, scale)


def tie(model: PreTrainedModel) -> None:
    """Where the config of a model ties its head to the embedding, and that is packed, put a `TiedHead` in its place.
    Raises InputError where the head is packed by itself."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    if isinstance(head, PackedWeight):
        raise InputError("config.json: quantization_config lists the head, but tie_word_embeddings ties it")
    if isinstance(embedding, PackedEmbedding):
        embedding.multiplies = True
        name = next(name for name, module in model.named_modules() if module is head)
        bias = cast(nn.Parameter | None, getattr(head, "bias", None))
        model.set_submodule(name, TiedHead(embedding, bias))
        if bias is not None:
            setattr(model, "_adjust_bias", _leave)  # noqa: B010


def _leave(*_: Any) -> None:
    """In the place of the method by which transformers gives the bias of a tied head as many numbers as the embedding's
    `weight` has rows: the stored one has a single element."""


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *_: Any,
    **__: Any,
) -> nn.Module:
    """In the place of transformers' method: a packed embedding has the size that it has. Raises InputError."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    rows = embedding.num_embeddings if new_num_tokens is None else new_num_tokens
    rows += -rows % (pad_to_multiple_of or 1)
    if rows != embedding.num_embeddings:
        raise InputError(
            f"the embedding is packed, with {embedding.num_embeddings} rows, and cannot be given {rows}; add "
            "the tokens to the original model, and quantise that"
        )
    return embedding


def row_format(entry: Any, name: str, n: int, k: int) -> RowFormat:
    """The format of an entry of config.json, for an embedding [n, k]. Raises InputError, naming the module, for one
    that does not exist or fit, or has no rows."""
    format = format_of(entry, name, n, k)
    if not isinstance(format, RowFormat):
        raise InputError(f"config.json: quantization_config of {name}: no rows can be read from {format.name}")
    return format
