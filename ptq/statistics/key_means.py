"""The centre of every head's keys (`ptq.kv.key_centers`): their mean over a sample of the calibration text.

RoPE turns what keys have in common, the further the later a token stands, so the mean depends on the positions. Those
of a short text would put the centre where later keys of a long context are not. So the tokens of the sample are put at
positions that cover all that the model has, ever more thinly: about as many between 500 and 1000 as between 5000 and
10 000. A pair of channels that turns within some tokens gets the centre 0, one that hardly turns its mean, and those
between a part of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ptq.hf.blocks import PartialModel
from ptq.hf.loading import positions_of
from ptq.models.model_shape import ModelShape

NAME = "ptq_keys"
"""Of the attention function that ends a pass with its keys."""
POSITIONS = 4096
"""Of a model without a limit."""
NEAR = 64
"""Below it positions are spread evenly, above it evenly on a logarithmic scale. Measured: from 8 to 128 no number is
best for all models and bits."""


class _Keys(Exception):
    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key


def _stop(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise _Keys(key)


AttentionInterface.register(NAME, _stop)
AttentionMaskInterface.register(NAME, sdpa_mask)


def centers(part: PartialModel, states: Iterable[Float[Tensor, "batch t k"]]) -> Float64[Tensor, "h d"]:
    """The mean key of every head in a block, of the tokens in states that enter it."""
    limit, sums, tokens = reach(part.model.config), torch.zeros((), dtype=torch.float64), 0
    for state in states:
        rows, length, _ = state.shape
        key = _keys(part, state, spread(rows, length, limit).to(state.device))
        sums = sums + key.double().sum((0, 2)).cpu()
        tokens += key.shape[0] * key.shape[2]
    return sums / tokens


def _keys(
    part: PartialModel, state: Float[Tensor, "batch t k"], positions: Int64[Tensor, "batch t"]
) -> Float[Tensor, "batch h t d"]:
    """The keys of a block behind RoPE, its tokens at these positions."""
    before: Any = part.model.config._attn_implementation
    part.model.set_attn_implementation(NAME)
    try:
        part.run(state, positions)
    except _Keys as found:
        return found.key
    finally:
        part.model.set_attn_implementation(before)
    raise AssertionError("attention is not called through transformers' interface")


def reach(config: Any) -> int:
    """Over how many positions keys are spread: those of the model, of LongRoPE those before its factors change."""
    entry = getattr(config, "rope_parameters", None) or {}
    kinds = [entry, *(kind for kind in entry.values() if isinstance(kind, dict))]
    long = [kind for kind in kinds if kind.get("rope_type") == "longrope"]
    original = [kind.get("original_max_position_embeddings") for kind in long]
    original += [getattr(config, "original_max_position_embeddings", None)] if long else []
    return next((limit for limit in original if limit), positions_of(config) or POSITIONS)


def spread(rows: int, tokens: int, limit: int) -> Int64[Tensor, "rows tokens"]:
    """Positions p below `limit`, p + `NEAR` evenly on a logarithmic scale, in ascending order in every row."""
    count = rows * tokens
    share = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return ((1 + limit / NEAR) ** share * NEAR - NEAR).long().clamp(max=limit - 1).view(tokens, rows).T


def bias_left(model: nn.Module, shape: ModelShape, interleaved: bool) -> Float64[Tensor, " head_dim"]:
    """The share of a squared bias of keys that their centre leaves, by channel: nothing where RoPE turns nothing, all
    where a pair is turned around often. All, too, for a model with several tables of RoPE.

    At position p a pair is turned by p θ, and over all of them its bias lies around |mean exp(i p θ)| of itself.
    """
    left = torch.zeros(shape.head_dim, dtype=torch.float64)
    tables = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq") and "original" not in name}
    if len(tables) > 1:
        return left + 1
    for theta in tables.values():
        turns = torch.outer(spread(1, POSITIONS, reach(model.config))[0].double(), theta.double().cpu())
        share = (1 - turns.cos().mean(0).square() - turns.sin().mean(0).square()).clamp(min=0)
        left[: shape.rotary] = share.repeat_interleave(2) if interleaved else share.repeat(2)
    return left
