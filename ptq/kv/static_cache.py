"""The packed KV cache for one graph per model: its length is a tensor, so that a decode step which was compiled
(`torch.compile(fullgraph=True)`) or captured as a CUDA graph once serves every later step.

All memory is there from the start, attention is asked for all of it, and the mask hides what is not in use (CUDA
kernels skip chunks of 256 tokens that no query sees). Fill it with the prompt before the step is compiled:

    cache = StaticPackedCache(model.config, settings, max_length=4096)
    model(prompt, cache=cache)  # past_key_values=cache, before transformers 5.24
    step = torch.compile(lambda ids, position: model(ids, position_ids=position, cache=cache).logits)

Before a step is captured as a CUDA graph it must have run once outside of the capture: CUDA loads a kernel at its first
call, which a capture does not allow.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.kv_side import row_starts
from ptq.kv.packed_cache import PackedCache
from ptq.kv.packed_layer import PackedLayer


class StaticPackedLayer(PackedLayer):
    """A layer with room for `length` tokens, of which `position` are there."""

    is_compileable = True

    def __init__(self, owner: PackedCache) -> None:
        super().__init__(owner)
        assert owner.max_length is not None
        self.length = owner.max_length
        self.position = torch.zeros((), dtype=torch.long)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.position = self.position.to(self.device)
        if not torch.compiler.is_compiling():
            held = (*self.key.tensors, *self.value.tensors, self.key_sinks, self.value_sinks, self.position)
            for tensor in held:
                torch._dynamo.mark_static_address(tensor)

    def _room_for(self, tokens: int) -> int | Tensor:
        """Only a CPU is asked for the length: a GPU would have to be waited for."""
        if self.position.device.type == "cpu" and not torch.compiler.is_compiling():
            self.owner.check_room(int(self.position) + tokens)
        return self.position

    def advance(self, tokens: int) -> None:
        self.position.add_(tokens)

    def attend(self, query: Float[Tensor, "b q_heads t d"], mask: Bool[Tensor, "b 1 t length"] | None, scaling: float):
        if mask is None:  # one query token, which sees all that are there
            mask = (torch.arange(self.length, device=self.device) < self.position).view(1, 1, 1, -1)
        return super().attend(query, mask, scaling)

    def decode(
        self,
        q: Float[Tensor, "b t q_width"],
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        scaling: float,
        mask: Bool[Tensor, "_ 1 t length"] | None,
    ) -> Float[Tensor, "b t q_width"]:
        start, (bits, *others) = self._room_for(q.shape[1]), self.numbers()
        if mask is None:  # one query token, which sees itself and all before it
            mask = (torch.arange(self.length, device=self.device) <= start).view(1, 1, 1, -1)
        op = torch.ops.ptq.kv_decode_attention_at.default
        held = *self.key.tensors, *self.value.tensors
        return op(q, k, v, *cos_sin, *held, start, *bits, *others, scaling, mask, self.center)

    @property
    def decodes(self) -> bool:
        return self.is_initialized and self.packed and not self.owner.settings.sinks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> Any:
        return self.position if self.is_initialized else 0

    def reset(self) -> None:
        self.position.zero_()
        self.starts = None


class StaticPackedCache(PackedCache):
    """The packed KV cache of a whole model, of a fixed size. `max_length`: the tokens that it has room for; on a GPU
    nothing says so where there are more. Raises InputError where the settings or the length don't fit the model."""

    layer_class = StaticPackedLayer

    def __init__(self, config: Any, settings: CacheQuantization, max_length: int) -> None:
        super().__init__(config, settings, max_length)
        self.check_room(max_length)

    def begin_rows(self, mask: Tensor | None) -> None:
        """Note where the rows begin, behind their left padding, at the first call after `reset`."""
        if mask is not None and self.settings.sinks and self.starts is None:
            self.starts = row_starts(mask)
