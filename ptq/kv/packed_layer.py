"""One layer of the packed KV cache, and what stands for its keys and values in a call of attention.

A layer has two sides, keys and values, in the layout of `ptq.ops.kv_ops`; a side of 16 bits stays in the model's dtype.
Sinks, the first tokens of every row behind its left padding, are stored beside, in float32, and override the codes.

`update` returns no tensors but a `PackedStates` twice: our attention function (ptq.kv.attention) reads the cache
through it, and any other one stops at it.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ptq.errors import InputError
from ptq.kv.key_centers import without
from ptq.kv.kv_side import Side, is_frozen, rotate
from ptq.ops import hadamard, kv_ops
from ptq.ops import kv_step as _kv_step  # noqa: F401 (registers the op)

if TYPE_CHECKING:
    from ptq.kv.packed_cache import PackedCache

CPU = torch.device("cpu")


class PackedLayer(CacheLayerMixin):
    """The cache of one layer. `key_sinks`, `value_sinks` are float32 [batch, heads, sinks, head_dim]."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # a window is in the mask; no token is thrown away

    def __init__(self, owner: "PackedCache") -> None:
        super().__init__()
        self.owner = owner
        self.length = 0
        self.starts: Tensor | None = None
        self.center: Tensor | None = None
        """What keys lose before R3, where the settings say so: `ptq.kv.key_centers.give` puts it here."""
        self._sinks_end: tuple[Tensor | None, int] = None, 0  # behind the last sink, for these starts

    def refuse(self) -> Any:
        """Raise InputError: no keys and values are here to be given."""
        raise InputError(
            "a PackedCache holds codes, and no keys and values that another cache could be made of: copy it as it is; "
            "`read()` of a layer gives what its codes stand for, keys behind the rotation R3"
        )

    keys: Any = property(refuse, lambda self, nothing: None)  # transformers sets it to None
    values: Any = keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        owner, settings = self.owner, self.owner.settings
        heads, head_dim = owner.signature.kv_heads, owner.signature.head_dim
        found = key_states.shape[1], key_states.shape[3]
        if found != (heads, head_dim):
            raise InputError(
                f"this PackedCache is for {heads} key-value heads of size {head_dim}, the model has {found[0]} of size "
                f"{found[1]}: make one with PackedCache(model.config, settings)"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key = Side(key_states, settings.key_bits, settings.key_clip, False)
        self.value = Side(value_states, settings.value_bits, settings.value_clip, True)
        shape = (key_states.shape[0], heads, settings.sinks, head_dim)
        self.key_sinks, self.value_sinks = (
            torch.zeros(shape, dtype=torch.float32, device=self.device) for _ in range(2)
        )
        if owner.max_length is not None:
            for side in (self.key, self.value):
                side.reserve(owner.max_length, exactly=True)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append keys, after RoPE and before R3, and values. Returns the same `PackedStates` twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, count, _ = key_states.shape
        if batch != self.key.batch:
            raise InputError(f"the PackedCache holds {self.key.batch} rows, the input has {batch}")
        start = self._room_for(count)
        if self.owner.settings.centered and self.center is None:
            raise InputError("the PackedCache has no centres of keys: give it to the model, which has them")
        rotated = rotate(without(key_states, self.center), self.owner.settings).detach()
        value = value_states.detach()
        self.key.append(rotated, start)
        self.value.append(value, start)
        if self.owner.settings.sinks:
            self._keep_sinks(rotated, value, start)
        self.advance(count)
        states = PackedStates(self, (key_states, value_states))
        return states, states

    def _room_for(self, tokens: int) -> int | Tensor:
        """Where new tokens go. Raises InputError where they are too many."""
        self.owner.check_room(self.length + tokens)
        return self.length

    def advance(self, tokens: int) -> None:
        """So many tokens have been stored."""
        self.length += tokens

    def _keep_sinks(self, key: Tensor, value: Tensor, start: int | Tensor) -> None:
        starts = self.owner.starts_of(key.shape[0], self.device)
        self.starts = starts
        column = starts[:, None] + torch.arange(self.key_sinks.shape[2], device=self.device) - start
        new = (column >= 0) & (column < key.shape[2])
        if isinstance(start, Tensor) or new.any():
            if is_frozen(self.key_sinks):
                self.key_sinks, self.value_sinks = self.key_sinks.clone(), self.value_sinks.clone()
            for kept, x in ((self.key_sinks, key), (self.value_sinks, value)):
                index = column.clamp(0, key.shape[2] - 1)[:, None, :, None].expand(kept.shape)
                kept.copy_(torch.where(new[:, None, :, None], x.float().gather(2, index), kept))

    def read(self) -> tuple[Float[Tensor, "b h length d"], Float[Tensor, "b h length d"]]:
        """Keys, with R3 applied, and values as attention sees them."""
        result = []
        for side, sinks in ((self.key, self.key_sinks), (self.value, self.value_sinks)):
            x = side.read(self.length)
            result.append(x if self.starts is None or side.bits == 16 else kv_ops.place_sinks(x, self.starts, sinks))
        return result[0], result[1]

    def attend(self, query: Float[Tensor, "b q_heads t d"], mask: Bool[Tensor, "b 1 t length"] | None, scaling: float):
        """Attention of a few query tokens, R3 applied: [b, t, q_heads, d]. Both sides must be packed."""
        sinks = (None,) * 3 if self.starts is None else (self.starts, self.key_sinks, self.value_sinks)
        return torch.ops.ptq.kv_attend(
            query, *self.key.tensors, *self.value.tensors, self.length, self.key.bits, self.value.bits, scaling, mask,
            *sinks,
        )  # fmt: skip

    def decode(
        self,
        q: Float[Tensor, "b t q_width"],
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        scaling: float,
        mask: Bool[Tensor, "_ 1 t length"] | None,
    ) -> Float[Tensor, "b t q_width"]:
        """Attention of t more tokens, before rotary embedding, whose keys and values are appended. For a layer that
        `decodes`."""
        room, (bits, *others) = self.room(q.shape[1]), self.numbers()
        sinks = room[4:7] if self.starts is not None else (None, None, None)
        op = torch.ops.ptq.kv_decode_attention.default
        y = op(q, k, v, *cos_sin, *room[:4], self.length, *bits, *others, scaling, *sinks, mask, self.center)
        self.advance(q.shape[1])
        return y

    def room(self, tokens: int) -> list[Tensor]:
        """Codes and scales of keys and values with room for so many more; then starts, sink keys and sink values, if
        there are sinks; then the centres of keys, if there are any."""
        self.owner.check_room(self.length + tokens)
        for side in (self.key, self.value):
            side.reserve(self.length + tokens)
        sinks = [] if self.starts is None else [self.starts, self.key_sinks, self.value_sinks]
        centers = [] if self.center is None else [self.center]
        return [*self.key.tensors, *self.value.tensors, *sinks, *centers]

    def numbers(self) -> tuple[list[int], list[float], list[Tensor], int]:
        """Bits and clips of keys and values, dense factors and order of R3 (0: none)."""
        factors, order = hadamard.dense_factors(self.owner.settings.hadamard, CPU)
        return [self.key.bits, self.value.bits], [self.key.clip, self.value.clip], factors, order

    @property
    def decodes(self) -> bool:
        """Whether `decode` serves this layer: it has tokens, all of them packed, and all its sinks."""
        if not self.is_initialized or not self.packed or (self.owner.settings.sinks and self.starts is None):
            return False
        if self._sinks_end[0] is not self.starts:
            end = 0 if self.starts is None else int(self.starts.max()) + self.key_sinks.shape[2]
            self._sinks_end = self.starts, end
        return self.length >= self._sinks_end[1]

    @property
    def packed(self) -> bool:
        """Whether both sides are packed."""
        return self.key.bits < 16 and self.value.bits < 16

    def memory(self) -> int:
        """Bytes in use, spare room included."""
        if not self.is_initialized:
            return 0
        held = [*self.key.tensors, *self.value.tensors, self.key_sinks, self.value_sinks]
        return sum(x.numel() * x.element_size() for x in held)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.owner.max_length is None else self.owner.max_length

    def reset(self) -> None:
        self.length, self.starts = 0, None

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last -tokens_to_remove tokens. Assisted generation may give the number as a tensor."""
        tokens_to_remove, held = int(tokens_to_remove), int(self.get_seq_length())
        if not -held <= tokens_to_remove <= 0:
            raise InputError(f"crop: expected 0 to {-held} (minus the tokens to remove), found {tokens_to_remove}")
        self.advance(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.key.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(self.key.batch)[indices.cpu()]
        if torch.equal(rows, torch.arange(self.key.batch)):
            return
        for side in (self.key, self.value):
            side.select(rows)
        rows = rows.to(self.device)
        self.key_sinks, self.value_sinks = self.key_sinks[rows], self.value_sinks[rows]
        self.starts = None if self.starts is None else self.starts[rows]

    def offload(self) -> None:
        raise InputError("a PackedCache cannot be offloaded; it is small: leave out offloading")

    prefetch = offload


class PackedStates:
    """Stands for the keys and values of a layer in a call of attention. `new` are those that were just appended."""

    def __init__(self, layer: PackedLayer, new: tuple[Tensor, Tensor]) -> None:
        self.layer, self.new = layer, new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            "a PackedCache was given to a model without a quantised KV cache, or whose attention implementation was "
            "changed: use it only with the model that it was made for"
        )
