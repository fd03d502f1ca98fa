"""The state of a model between two blocks: hidden states, and behind them what blocks need beside these.

In most models that is nothing. In others blocks may take keys and values over from an earlier block, and may have an
input of their own for every token, made where the hidden states begin. The channels of a state are then

    [hidden | keys | values | ... of every kind of attention | inputs of the blocks to come]

so that whoever stores a state, or sends it through the next block, need not know.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

PROJECTION = "project_per_layer_inputs"
"""The method of transformers' models that makes the inputs of all blocks: of the embedded tokens, and of rows of a
table of its own."""


@dataclass(frozen=True)
class StateLayout:
    """Where in a state which channels are: hidden states, then keys and values that later blocks take over, then the
    inputs that blocks have of their own."""

    hidden: int
    blocks: int
    shared: tuple[tuple[str, int, int], ...] = ()
    """Kinds of attention whose keys and values later blocks take over, with their key-value heads and head_dim."""
    own: int = 0
    """Channels of the input that every block has of its own; 0: blocks have none."""

    @classmethod
    def of(cls, config: Any) -> "StateLayout":
        """The layout of the model of a transformers config."""
        shared = []
        if getattr(config, "num_kv_shared_layers", 0):
            for kind in sorted(set(config.layer_types)):
                sizes = config.per_layer_config[kind]
                shared.append((kind, sizes.num_key_value_heads, sizes.head_dim))
        own = getattr(config, "hidden_size_per_layer_input", 0) or 0
        return cls(config.hidden_size, config.num_hidden_layers, tuple(shared), own)

    @property
    def width(self) -> int:
        """Channels of a state as it enters the first block."""
        return self.hidden + self._shared_width + self.blocks * self.own

    @property
    def _shared_width(self) -> int:
        return sum(2 * heads * head_dim for _, heads, head_dim in self.shared)

    def first(
        self, hidden: Float[Tensor, "batch t k"], inputs: list[Float[Tensor, "batch t blocks own"]]
    ) -> Float[Tensor, "batch t w"]:
        """The state that enters the first block, from what `recorded_inputs` has found."""
        if self.width == self.hidden:
            return hidden
        nothing = hidden.new_zeros(*hidden.shape[:-1], self._shared_width)
        return torch.cat([hidden, nothing, *(each.flatten(-2) for each in inputs)], dim=-1)

    def split(self, state: Float[Tensor, "batch t w"], block: int) -> tuple[Float[Tensor, "batch t k"], dict[str, Any]]:
        """The hidden states that enter a block, and what else its model must be given."""
        given: dict[str, Any] = {}
        if self.shared:
            given["shared_kv_states"] = self._keys_and_values(state)
        if self.own:
            start = self.hidden + self._shared_width
            mine = state[..., None, start : start + self.own]
            given["per_layer_inputs"] = mine.expand(-1, -1, block + 1, -1)  # the model picks that of the block
        return state[..., : self.hidden], given

    def next(
        self, left: Float[Tensor, "batch t k"], state: Float[Tensor, "batch t w"], shared: Any
    ) -> Float[Tensor, "batch t v"]:
        """The state that leaves a block, from the hidden states that have left it, the state that entered, and the keys
        and values that the model then holds."""
        if state.shape[-1] == self.hidden:
            return left
        behind = state[..., self.hidden + self._shared_width + self.own :]
        kept = (x.transpose(1, 2).flatten(-2) for kind, _, _ in self.shared for x in shared[kind])
        return torch.cat([left, *kept, behind], dim=-1)

    def _keys_and_values(self, state: Float[Tensor, "batch t w"]) -> dict[str, tuple[Tensor, Tensor]]:
        """By the kind of attention, each [batch, heads, t, head_dim]; zeros where no block has stored any yet."""
        found, start = {}, self.hidden
        for kind, heads, head_dim in self.shared:
            size = heads * head_dim
            key, value = (
                state[..., first : first + size].unflatten(-1, (heads, head_dim)).transpose(1, 2)
                for first in (start, start + size)
            )
            found[kind], start = (key, value), start + 2 * size
        return found


@contextmanager
def recorded_inputs(model: Any) -> Iterator[list[Tensor]]:
    """Within it the blocks' own inputs that the model makes are added to the list that it yields. The list stays empty
    for a model whose blocks have none."""
    found: list[Tensor] = []

    def record(make: Callable[..., Tensor], *arguments: Any) -> Tensor:
        found.append(make(*arguments))
        return found[-1]

    with _instead(model, record):
        yield found


def given(model: Any) -> Any:
    """Within it the model uses the blocks' own inputs that it is given, and makes none of its own."""
    return _instead(model, lambda make, embedded, inputs: inputs)


@contextmanager
def _instead(model: Any, function: Callable[..., Tensor]) -> Iterator[None]:
    body = model.base_model
    make = getattr(body, PROJECTION, None)
    if make is None:
        yield
        return
    setattr(body, PROJECTION, lambda *arguments: function(make, *arguments))
    try:
        yield
    finally:
        delattr(body, PROJECTION)
