"""Room for more tokens in transformers' own cache of keys and values.

Its `DynamicCache` copies all keys and values for every token that is appended. A `GrowingLayer` keeps spare memory
behind them and writes new ones there. `keys` and `values` are views of the tokens alone, so everything else that is
done to a layer (crop, reorder, select) works as it is; what it puts in their place is copied to new room once.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ptq.errors import InputError
from ptq.kv.kv_side import is_frozen
from ptq.ops.op_declarations import wants_gradient

CHUNK = 256
"""The room is a multiple of so many tokens, and an eighth more than was needed when it was made."""


class GrowingLayer(DynamicLayer):
    """A layer of a `DynamicCache` that does not copy what it has for every new token."""

    _held: dict[str, tuple[Tensor | None, int | None]]
    """`keys` and `values`: a tensor with room and the tokens that are there; None: the tensor as it was given."""

    def reserve(self, key: tuple[int, ...], value: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values [b, h, room, d] with room for new ones of these shapes, [b, h, t, d], and the number of
        tokens before them. Raises InputError for another number of rows."""
        (keys, before), (values, others) = self._held["keys"], self._held["values"]
        if keys is not None and values is not None and before is not None and before == others:  # the usual case
            size = min(keys.shape[2], values.shape[2]) if keys.shape[0] == key[0] else 0
            if before + key[2] <= size and not (is_frozen(keys) or is_frozen(values)):
                return keys, values, before
        if not self.is_initialized:
            self.lazy_initialization(like, like)
        held = self.keys if self._seen("keys") else None
        if held is not None and held.shape[0] != key[0]:
            raise InputError(f"the KV cache holds {held.shape[0]} rows, the input has {key[0]}")
        before = 0 if held is None else held.shape[2]
        rooms = [
            _with_room(self._get(name) if before else None, before, shape, like)
            for name, shape in (("keys", key), ("values", value))
        ]
        self._held = {"keys": (rooms[0], before), "values": (rooms[1], before)}
        return rooms[0], rooms[1], before

    def decode(
        self,
        q: Float[Tensor, "b t q_width"],
        k: Float[Tensor, "b t width"],
        v: Float[Tensor, "b t width"],
        cos_sin: tuple[Tensor, Tensor],
        d: int,
        scaling: float,
        mask: Bool[Tensor, "_ 1 t length"] | None,
        sinks: Float[Tensor, " q_heads"] | None = None,
    ) -> Float[Tensor, "b t q_width"]:
        """Attention of t more tokens, before rotary embedding, whose keys and values are appended. `d`: channels
        of a head."""
        shape = k.shape[0], k.shape[2] // d, k.shape[1], d
        keys, values, before = self.reserve(shape, shape, k)
        y = torch.ops.ptq.decode_attention.default(q, k, v, *cos_sin, keys, values, before, scaling, mask, sinks)
        self.advance(k.shape[1])
        return y

    def advance(self, tokens: int) -> None:
        """So many tokens have been written into the room."""
        for name in ("keys", "values"):
            room, length = self._held[name]
            assert length is not None
            self._held[name] = room, length + tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns all of them."""
        if wants_gradient(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values, before = self.reserve(key_states.shape, value_states.shape, key_states)
        after = before + key_states.shape[2]
        keys[:, :, before:after].copy_(key_states)
        values[:, :, before:after].copy_(value_states)
        self.advance(after - before)
        held = keys[:, :, :after], values[:, :, :after]
        if torch.is_grad_enabled():  # queries alone may want one, and it keeps what the next token would write beside
            return held[0].clone(), held[1].clone()
        return held

    def __copy__(self) -> "GrowingLayer":
        """A layer that goes on by itself: what it has so far is copied to room of its own with its next token."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), _held={})
        made.keys, made.values = self._get("keys"), self._get("values")
        return made

    def get_seq_length(self) -> int:
        return self._seen("keys") if self.is_initialized else 0

    def _seen(self, name: str) -> int:
        x, length = self._held[name]
        return length if length is not None else x.shape[2] if x is not None and x.dim() == 4 else 0

    def _get(self, name: str) -> Tensor | None:
        x, length = self._held[name]
        return x if x is None or length is None else x.narrow(2, 0, length)

    keys = property(lambda self: self._get("keys"), lambda self, x: self._held.update(keys=(x, None)))
    values = property(lambda self: self._get("values"), lambda self, x: self._held.update(values=(x, None)))


class GrowingWindowLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """A `GrowingLayer` with a sliding window, which goes through the room: its keys and values are those before
    the next token that this one sees. `update` is transformers' own."""

    update: Any = DynamicSlidingWindowLayer.update
    get_seq_length: Any = DynamicSlidingWindowLayer.get_seq_length

    def reserve(self, key: tuple[int, ...], value: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, int]:
        keys, values, before = super().reserve(key, value, like)
        gone = self._gone(before)
        return (keys[:, :, gone:], values[:, :, gone:], before - gone) if gone else (keys, values, before)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self.cumulative_length += tokens

    def _get(self, name: str) -> Tensor | None:
        x, length = super()._get(name), self._held[name][1]
        return x if x is None or length is None else x[:, :, self._gone(length) :]

    def _gone(self, length: int) -> int:
        return max(length - self.sliding_window + 1, 0)


GROWING = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindowLayer}


def growing_layer(cache: Any, index: int) -> GrowingLayer | None:
    """A layer of a plain `DynamicCache`, which grows in place from now on. None for any other cache, and for a window
    that remembers what it has passed (`activate_past_recording`)."""
    if type(cache) is not DynamicCache or cache.offloading or not 0 <= index < len(cache.layers):
        return None
    layer = cache.layers[index]
    if isinstance(layer, DynamicSlidingWindowLayer) and getattr(layer, "record_past", False):
        return None
    growing = GROWING.get(type(layer))
    if growing is not None:
        held = {name: (vars(layer).pop(name), None) for name in ("keys", "values")}
        layer.__class__ = growing
        vars(layer)["_held"] = held
    return layer if isinstance(layer, GrowingLayer) else None


def _with_room(x: Float[Tensor, "b h before d"] | None, before: int, new: tuple[int, ...], like: Tensor) -> Tensor:
    after = before + new[2]
    size = -(-(after + after // 8) // CHUNK) * CHUNK
    room = like.new_empty(*new[:2], size, new[3])
    if x is not None:
        room[:, :, :before].copy_(x)
    return room
