"""The attention function of transformers that takes the place of "sdpa" in a loaded packed model.

Torch's grouped attention is slow on the CPU for one token with fewer heads of keys than of queries: the queries that
share a head of keys are handed to it as tokens of that head instead, which is the same sum. Other attention goes
through `ptq.ops.prefill_attention`, where that serves it.
"""

import functools
import inspect
import re
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ptq.fast.attention import sinks
from ptq.fast.attention.decoding import ATTENTION, WITHOUT_SDPA
from ptq.layers.packed_weight import version
from ptq.ops import matmul, prefill_attention


def install(model: Any) -> None:
    """Put `attention` in the place of "sdpa", or of what takes sinks; not where the model's own code asks by name."""
    own = model.config._attn_implementation
    if (own == "sdpa" or (own == "eager" and sinks.serves(model))) and not _asks_by_name(type(model)):
        model.set_attn_implementation(ATTENTION if own == "sdpa" else WITHOUT_SDPA)
        if hasattr(model, "init_continuous_batching"):
            model.init_continuous_batching = functools.partial(_init_continuous_batching, model)


def _init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As transformers does it, which takes no attention but its own: the model has that until the manager stops."""
    own = model.config._attn_implementation
    theirs = {ATTENTION: "sdpa", WITHOUT_SDPA: "eager"}
    if own in theirs:
        model.set_attn_implementation(theirs[own])
    manager = type(model).init_continuous_batching(model, *args, **kwargs)
    if own in theirs:
        manager._original_attn_impl = own
    return manager


@functools.cache
def _asks_by_name(cls: type[PreTrainedModel]) -> bool:
    """Whether the source of a model compares the name of its attention: DeepSeek V3.2 leaves out the mask of its
    indexer for every attention that it does not know. Also where there is no source to look at."""
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):
        return True
    return re.search(r"_attn_implementation\s*(==|!=|in\b|not in\b)", source) is not None


def attention(
    module: nn.Module,
    query: Float[Tensor, "b q_heads t d"],
    key: Float[Tensor, "b h s d"],
    value: Float[Tensor, "b h s value_d"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t q_heads value_d"], Tensor | None]:
    """The attention function "sdpa" of transformers, with faster ways for one token without a mask and for many."""
    if kwargs.get("s_aux") is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = _additive(attention_mask, query.dtype, getattr(module, "layer_idx", None))
        return sinks.forward(module, query, key, value, mask, scale, dropout, **kwargs)
    batch, heads, tokens, d = query.shape
    grouped = tokens == 1 and heads != key.shape[1] and query.device.type == "cpu"
    plain = attention_mask is None and not dropout and kwargs.get("position_bias") is None
    if not (grouped and plain) or kwargs.get("cache") is not None or kwargs.get("softcap") is not None:
        mask = _additive(attention_mask, query.dtype, getattr(module, "layer_idx", None))
        return prefill_attention.forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    packed = query.reshape(batch, key.shape[1], -1, d)
    y = torch.nn.functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
    return y.reshape(batch, 1, heads, value.shape[-1]), None


@dataclass
class _Made:
    """What was made of the mask that was seen last, and the layer that was given it last."""

    mask: "weakref.ref[Tensor]"
    version: int
    numbers: Tensor
    layer: int


_LAST: list[_Made] = []


def _additive(mask: Tensor | None, dtype: torch.dtype, layer: int | None) -> Tensor | None:
    """On a GPU, 0 and -inf in the place of a mask of bools: torch would make them anew for each layer, in three
    launches. Layers of one forward are given the same tensor. The first one makes the numbers, also where the mask is
    known: it may have been changed, and a graph that is captured must hold this step."""
    if mask is None or mask.dtype != torch.bool or layer is None or not matmul.lies_on_gpu(mask):
        return mask
    for made in _LAST:
        if made.mask() is mask and made.version == version(mask) and made.layer < layer and made.numbers.dtype == dtype:
            made.layer = layer
            return made.numbers
    numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    _LAST[:] = [_Made(weakref.ref(mask, _forget), version(mask), numbers, layer)]
    return numbers


def _forget(gone: "weakref.ref[Tensor]") -> None:
    _LAST[:] = [made for made in _LAST if made.mask is not gone]


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of "sdpa"; none for one token on the CPU that sees all others, as where a window is full."""
    made = sdpa_mask(*args, **kwargs)
    if made is None or made.shape[2] != 1 or made.device.type != "cpu" or torch.compiler.is_compiling():
        return made
    return None if bool(made.all()) else made


for _name in (ATTENTION, WITHOUT_SDPA):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, mask)
