"""Whether the forward of a model calls its decoder layers one behind another (`ptq.fast.layers.layer_runs`), as a trial
tells with stand-ins for all its parts."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ptq.fast.trials import bare_copy, trial
from ptq.kv.attention import CACHE

LAYERS = "layers"


class _Layer(nn.Module):
    """Remembers how it is called."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        assert not hasattr(self, "given"), "called twice"
        self.given, self.others, self.result = hidden_states, kwargs, self.act(hidden_states)
        return self.result


class _Other(nn.Module):
    """Stands for a norm, whose input is one tensor, or for a rotary embedding."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (torch.ones(()), torch.ones(())) if args or kwargs else x


def calls_in_turn(model: Any, layers: list[nn.Module]) -> bool:
    """Whether a model's forward calls each layer with what the one before gave, of a prompt and of a token behind it,
    and with nothing besides that depends on what layers give; False where it does something else between layers."""
    for tokens in (3, 1):
        found = [_others_in_turn(model, len(layers), tokens, act) for act in (torch.sin, torch.cos)]
        if not found[0] or not _is_equal(*found):
            return False
    return True


def _is_equal(a: Any, b: Any) -> bool:
    """Of what two forwards give their layers: numbers, in dicts and sequences; of anything else the type."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(x, b[name]) for name, x in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return True


@trial()
def _others_in_turn(
    model: Any, count: int, tokens: int, act: Callable[[Tensor], Tensor]
) -> list[dict[str, Any]] | None:
    """What each layer is called with besides its input; None where that is not what the one before gave."""
    alone = bare_copy(model).eval()
    for name in model._modules:
        setattr(alone, name, _Other())
    layers = [_Layer(act) for _ in range(count)]
    setattr(alone, LAYERS, nn.ModuleList(layers))
    mask = torch.tensor([[0, 1, 1]])  # so that the model makes tensors of it
    try:
        alone.config = copy.copy(model.config)
        alone.config._attn_implementation = "sdpa"
        cache, before = DynamicCache(config=alone.config), torch.zeros(1, 1, 3 - tokens, 8)
        for i in range(count):
            if i >= len(cache.layers) or isinstance(cache.layers[i], DynamicLayer):  # others have states
                cache.update(before, before, i)
        x = torch.randn(1, tokens, alone.config.hidden_size, generator=torch.Generator().manual_seed(0))
        type(model).forward(alone, inputs_embeds=x, attention_mask=mask, use_cache=True, **{CACHE: cache})
        in_turn = all(b.given is a.result for a, b in pairwise(layers))
    except Exception:  # whatever a forward raises where it wants something else
        return None
    return [layer.others for layer in layers] if in_turn else None
