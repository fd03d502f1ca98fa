"""The packed KV cache: a transformers `Cache` that stores codes instead of keys and values.

Each layer (`ptq.kv.packed_layer`) has two sides, keys and values. Both grow by chunks of 256 tokens: one chunk at a
time up to 8192 tokens (so at 4096 tokens at most 6 % of the memory is spare), then by 1/32 of what there is; or all
chunks are there from the start (`max_length`, "static").
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import Cache

from ptq.errors import InputError
from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.kv_side import row_starts
from ptq.kv.packed_layer import PackedLayer
from ptq.models.families import family_or_default
from ptq.models.model_shape import shape_of


@dataclass(frozen=True)
class Signature:
    """What a cache and a model must agree on."""

    layers: int
    kv_heads: int
    head_dim: int
    settings: CacheQuantization

    @classmethod
    def of(cls, config: Any, settings: CacheQuantization) -> "Signature":
        """The signature of caches for a transformers config."""
        shape = shape_of(config)
        return cls(shape.blocks, shape.kv_heads, shape.head_dim, settings)

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in asdict(self.settings).items())
        return f"{self.layers} layers of {self.kv_heads} key-value heads of size {self.head_dim}, {settings}"


class PackedCache(Cache):
    """The packed KV cache of a whole model.

    `config`: the model's transformers config. `max_length`: memory for so many tokens at once, and no more than them;
    None grows, beyond the model's max_position_embeddings too, of which `generate` warns, unless there is a table of
    positions. Raises InputError where the settings don't fit the model.
    """

    layer_class: type[PackedLayer] = PackedLayer

    def __init__(self, config: Any, settings: CacheQuantization, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise InputError(f"PackedCache: max_length must be positive, found {max_length}")
        self.settings, self.max_length = settings, max_length
        self.signature = Signature.of(config, settings)
        self.positions: int | None = config.max_position_embeddings if family_or_default(config).positions else None
        self.starts: Tensor | None = None
        super().__init__(layers=[self.layer_class(self) for _ in range(self.signature.layers)])

    def __repr__(self) -> str:
        bits = f"key_bits={self.settings.key_bits}, value_bits={self.settings.value_bits}"
        return f"PackedCache({len(self.layers)} layers, {self.get_seq_length()} tokens, {bits})"

    def __iter__(self) -> Any:
        return self.layers[0].refuse()  # pyright: ignore[reportAttributeAccessIssue]

    def check_room(self, tokens: int) -> None:
        """Raises InputError where so many tokens are too many."""
        if self.max_length is not None and tokens > self.max_length:
            raise InputError(f"the KV cache was made for {self.max_length} tokens, {tokens} are needed")
        if self.positions is not None and tokens > self.positions:
            raise InputError(f"{tokens} tokens of context: the model has positions for {self.positions}")

    def begin_rows(self, mask: Tensor | None) -> None:
        """Note where the rows begin, behind their left padding. `mask` covers cached and new tokens."""
        if mask is not None and self.settings.sinks:
            if self.starts is None or bool((self.starts >= self.get_seq_length()).any()):
                self.starts = row_starts(mask)

    def starts_of(self, batch: int, device: torch.device) -> Int64[Tensor, " batch"]:
        """The first token of every row."""
        if self.starts is None:
            self.starts = torch.zeros(batch, dtype=torch.long, device=device)  # no copy, which a capture forbids
        return self.starts.to(device).expand(batch)

    def memory(self) -> int:
        """Bytes in use, spare room included."""
        return sum(layer.memory() for layer in self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self) -> None:
        super().reset()
        self.starts = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.starts = None if self.starts is None else self.starts[indices.to(self.starts.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.starts = None if self.starts is None else self.starts.repeat_interleave(repeats)
