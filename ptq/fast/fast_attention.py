"""Attention of one decoded token (of each row of a batch) in three steps: products, what lies between, output product.

No family is named. `kind_of` tries an attention module on random numbers first: only where the steps below give what
its own forward gives, up to rounding, does `decoded` take the place of that, and only for one token behind others in a
plain or packed cache, without a mask. Everything else goes through the module's own code.
"""

import copy
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ptq.fast.trials import hollow, numbers_of, trial
from ptq.kv.attention import forward, implementation
from ptq.kv.growing_cache import GrowingLayer, growing_layer
from ptq.kv.packed_cache import PackedCache
from ptq.kv.packed_layer import PackedLayer
from ptq.layers.shared_input import products
from ptq.ops.matmul import is_few

ATTENTION = "ptq_sdpa"
"""Name of the attention function of transformers that takes the place of "sdpa" (`ptq.fast.fast_decode`)."""

INPUTS, OUTPUT, NORMS = ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm")

KINDS = ("", "heads", "whole")
"""What is normed before the rotary embedding: nothing, each head of queries and keys, or all heads as one vector."""


def decoded(module: Any, kind: str, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """The attention of a decoded token, as a module of this kind computes it; None where it must do so itself."""
    layer = cache_layer(module, hidden_states, **others)
    if layer is None:
        return None
    parts = module._modules
    q, k, v = products([parts[name] for name in INPUTS], hidden_states)
    if q.dtype != hidden_states.dtype:  # autocast
        return None
    return parts[OUTPUT](attend(module, kind, q, k, v, others["position_embeddings"], layer))


def cache_layer(
    module: Any,
    hidden_states: Float[Tensor, "b t k"],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    floats: tuple[Tensor, ...] = (),
    **others: Any,
) -> GrowingLayer | PackedLayer | None:
    """The layer of the cache that a decoded token goes to; None where this is something else than decoding without a
    mask, a cache of another kind, or nothing for the ops for few tokens (`floats`: what else they would take)."""
    if attention_mask is not None or position_embeddings is None or past_key_values is None or module.training:
        return None
    if hidden_states.shape[1] != 1 or position_embeddings[0].dim() != 3:
        return None
    if position_embeddings[0].shape[2] != module.head_dim:  # a part of every head is not turned
        return None
    if not is_few(hidden_states.shape[0], hidden_states, *position_embeddings, *floats):
        return None
    if type(past_key_values) is PackedCache:
        layer = past_key_values.layers[module.layer_idx]
        assert isinstance(layer, PackedLayer)
        wanted = implementation(past_key_values.settings)
    else:
        layer, wanted = growing_layer(past_key_values, module.layer_idx), ATTENTION
    if layer is None or not layer.get_seq_length() or _implementation(module.config) != wanted:
        return None
    return layer


def _implementation(config: Any) -> str | None:
    """The config's `_attn_implementation`, without its slow way through `__getattribute__` where that can be done."""
    return vars(config).get("_attn_implementation_internal") or config._attn_implementation


def attend(
    module: Any,
    kind: str,
    q: Float[Tensor, "b 1 q_width"],
    k: Float[Tensor, "b 1 width"],
    v: Float[Tensor, "b 1 width"],
    turns: tuple[Tensor, Tensor],
    layer: GrowingLayer | PackedLayer,
) -> Float[Tensor, "b 1 q_width"]:
    """Attention of the products of a decoded token, whose key and value go to the cache. `turns`: cos and sin."""
    d = module.head_dim
    if kind:
        norms = (module._modules[name] for name in NORMS)
        q, k = (_normed(norm, y, d if kind == "heads" else -1) for norm, y in zip(norms, (q, k), strict=True))
    if isinstance(layer, GrowingLayer):
        shape = k.shape[0], k.shape[2] // d, 1, d
        keys, values, before = layer.reserve(shape, shape, k)
        y = torch.ops.ptq.decode_attention.default(q, k, v, *turns, keys, values, before, module.scaling)
        layer.advance(1)
        return y
    if layer.decodes and layer.key.batch == k.shape[0]:
        return layer.decode(q, k, v, turns, module.scaling)
    q, k, v = (y.unflatten(2, (-1, d)).transpose(1, 2) for y in (q, k, v))
    q, k = torch.ops.ptq.rotary.default(q, k, *turns)
    states, _ = layer.update(k, v)
    return forward(layer.owner.settings, module, q, states, states, None, scaling=module.scaling)[0].flatten(2)


def _normed(norm: nn.Module, x: Float[Tensor, "b t width"], d: int) -> Float[Tensor, "b t width"]:
    return norm(x) if d < 0 else norm(x.unflatten(2, (-1, d))).flatten(2)


# --- the trial ------------------------------------------------------------------------------------------------------

_KINDS: dict[Any, str | None] = {}


def kind_of(module: nn.Module) -> str | None:
    """Which of KINDS an attention module is; None for any other module."""
    if not {*INPUTS, OUTPUT} <= module._modules.keys() or not {"config", "head_dim", "scaling"} <= vars(module).keys():
        return None
    key = numbers_of(module)
    if key not in _KINDS:
        _KINDS[key] = next((kind for kind in KINDS if _gives_its_numbers(module, kind)), None)
    return _KINDS[key]


@trial()
def _gives_its_numbers(module: Any, kind: str) -> bool:
    if bool(kind) != all(name in module._modules for name in NORMS):
        return False
    generator, hidden, d = torch.Generator().manual_seed(0), 24, module.head_dim
    heads, kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    alone = _small_copy(module, hidden, heads * d, kv_heads * d, generator)
    before = [torch.randn(2, kv_heads, 5, d, generator=generator) for _ in range(2)]
    x, cos, sin = (torch.randn(shape, generator=generator) for shape in ((2, 1, hidden), (2, 1, d), (2, 1, d)))
    results = []
    for own in (True, False):
        cache = DynamicCache()
        cache.update(before[0].clone(), before[1].clone(), 0)
        inputs = {"position_embeddings": (cos, sin), "attention_mask": None, "past_key_values": cache}
        try:
            if own:
                results.append(type(module).forward(alone, hidden_states=x, **inputs)[0])
            else:
                layer = growing_layer(cache, 0)
                assert layer is not None
                q, k, v = (alone.get_submodule(name)(x) for name in INPUTS)
                results.append(alone.o_proj(attend(alone, kind, q, k, v, (cos, sin), layer)))
        except (RuntimeError, TypeError, AttributeError, IndexError, ValueError):
            return False  # it wants something else
        layer = cast(DynamicLayer, cache.layers[0])
        results.extend((layer.keys, layer.values))
    pairs = zip(results[:3], results[3:], strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _small_copy(module: Any, hidden: int, width: int, kv_width: int, generator: torch.Generator) -> Any:
    """The module with all its numbers, but with small linears of random weights."""
    alone = hollow(module)
    alone.config = copy.copy(module.config)
    alone.config._attn_implementation = "sdpa"
    alone.layer_idx = 0
    for name, n, k in zip(
        (*INPUTS, OUTPUT), (width, kv_width, kv_width, hidden), (hidden,) * 3 + (width,), strict=True
    ):
        setattr(alone, name, nn.utils.skip_init(nn.Linear, k, n, bias=False))
        getattr(alone, name).weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
    for name in NORMS:
        if name in module._modules:
            norm = copy.deepcopy(module._modules[name]).to_empty(device="cpu").float()
            norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
            setattr(alone, name, norm)
    return alone.eval()
