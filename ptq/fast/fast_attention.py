"""Attention of few decoded tokens (of each row of a batch) in three steps: products, what lies between, output product.

No family is named. `kind_of` tries an attention module on random numbers first: only where the steps below give what
its own forward gives, up to rounding, does `decoded` take the place of that, and only for tokens behind others in a
plain or packed cache; on a GPU also in a static one. Everything else goes through the module's own code.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from ptq.fast.trials import MISFIT, hollow, tried_once
from ptq.kv.attention import CACHE, MAX_DECODE, forward, implementation
from ptq.kv.growing_cache import GrowingLayer, growing_layer
from ptq.kv.packed_cache import PackedCache
from ptq.kv.packed_layer import PackedLayer
from ptq.kv.static_cache import StaticPackedCache
from ptq.layers.shared_input import products
from ptq.ops.matmul import cpu_ops_serve, gpu_ops_serve
from ptq.ops.op_declarations import wants_gradient

ATTENTION = "ptq_sdpa"
"""Name of the attention function of transformers that takes the place of "sdpa" (`ptq.fast.fast_decode`)."""

INPUTS, FUSED, OUTPUT, NORMS = ("q_proj", "k_proj", "v_proj"), "qkv_proj", "o_proj", ("q_norm", "k_norm")
NORMED = ("", "heads", "whole")

CacheLayer = GrowingLayer | PackedLayer | StaticLayer

MOST_GPU_CHANNELS = 256
"""Of a head, that the CUDA kernels take."""

MOST_TOKENS = 16
"""Of a row, such as those that assisted generation has guessed; over a packed cache at most `MAX_DECODE`."""


class Kind(NamedTuple):
    """What a module does."""

    normed: str
    """What is normed before the rotary embedding: nothing, each head of queries and keys, or all as one vector."""
    in_part: bool
    """Whether it may turn the first channels of every head, and leave the others as they are."""
    gated: bool
    """Whether a gate of what is attended stands behind the queries of every head, in the same product."""


def decoded(module: Any, kind: Kind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """The attention of decoded tokens, as a module of this kind computes it; None where it must do so itself."""
    layers = cache_layers([(module, kind)], hidden_states, **others)
    if layers is None or (torch.is_grad_enabled() and wants_gradient(*module.parameters())):
        return None
    *first, output = linears_of(module)
    if len(first) == 1:
        q, k, v = first[0](hidden_states).split(rows_of(module), -1)
    else:
        q, k, v = products(first, hidden_states)
    if any(y.dtype != hidden_states.dtype for y in (q, k, v)):  # autocast
        return None
    if wants_gradient(q, k, v):  # somebody listens, and has added to them
        return None
    turns, mask = others["position_embeddings"], others.get("attention_mask")
    return output(attend(module, kind, q, k, v, turns, layers[0], mask))


def linears_of(module: nn.Module) -> list[Any]:
    """The linears of queries, keys and values, or one whose rows are theirs, and that of the output."""
    parts = module._modules
    return [parts[name] for name in ((FUSED,) if FUSED in parts else INPUTS) + (OUTPUT,)]


def rows_of(module: Any) -> list[int]:
    """How many rows of its weights are of queries, of keys and of values."""
    config, d = module.config, module.head_dim
    return [config.num_attention_heads * d * (1 + is_gated(module)), *(config.num_key_value_heads * d,) * 2]


def is_gated(module: Any) -> bool:
    """Whether the linear of queries has twice their rows."""
    linear = module._modules.get(INPUTS[0])
    return getattr(linear, "out_features", 0) == 2 * module.config.num_attention_heads * module.head_dim


def cache_layers(
    attentions: Sequence[tuple[Any, Kind]],
    hidden_states: Float[Tensor, "b t k"],
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    floats: Iterable[Tensor] = (),
    **others: Any,
) -> list[CacheLayer] | None:
    """The layers of the cache that decoded tokens go to, one for each attention module; None where this is something
    else than decoding, a cache or a mask of another kind, or nothing for the ops (`floats`: what else they would take).
    """
    cache = others.get(CACHE)
    if position_embeddings is None or cache is None:
        return None
    batch, tokens = hidden_states.shape[:2]
    if not batch or not are_decoded(tokens, attention_mask) or position_embeddings[0].dim() != 3:
        return None
    turned = position_embeddings[0].shape[2]
    given = hidden_states, *position_embeddings, *floats
    find = _layer_on_cpu if cpu_ops_serve(*given) else _layer_on_gpu if gpu_ops_serve(*given) else None
    if find is None:
        return None
    layers = []
    for module, kind in attentions:
        if module.training or (turned != module.head_dim and not (kind.in_part and turned < module.head_dim)):
            return None
        layer, wanted = find(module, cache, hidden_states)
        if layer is None or attention_name(module.config) != wanted or not fits(attention_mask, hidden_states, layer):
            return None
        if torch.is_grad_enabled() and not isinstance(layer, PackedLayer) and wants_gradient(layer.keys, layer.values):
            return None  # a learned prefix
        layers.append(layer)
    return layers


def _layer_on_cpu(module: Any, cache: Any, x: Float[Tensor, "b t k"]) -> tuple[CacheLayer | None, str]:
    """The layer of a cache that the ops serve, behind whose tokens x comes, and the attention it belongs to."""
    if type(cache) is PackedCache:
        layer, wanted = _packed_layer(module, cache, x.shape[1]), implementation(cache.settings)
    else:
        layer, wanted = growing_layer(cache, module.layer_idx), ATTENTION
    return layer if layer is not None and layer.get_seq_length() else None, wanted


def _layer_on_gpu(module: Any, cache: Any, x: Float[Tensor, "b t k"]) -> tuple[CacheLayer | None, str]:
    """What `_layer_on_cpu` gives, on a GPU, which is not asked how many tokens a static cache has."""
    batch, tokens, d = *x.shape[:2], cast(int, module.head_dim)
    if type(cache) in (PackedCache, StaticPackedCache):
        layer, wanted = _packed_layer(module, cache, tokens), implementation(cache.settings)
        serves = layer is not None and layer.decodes and layer.key.batch == batch and not layer.numbers()[2]
    else:
        growing, static = growing_layer(cache, module.layer_idx), _static_layer(cache, module.layer_idx, x)
        layer, wanted = growing or static, ATTENTION
        serves = x.dtype.itemsize == 2 and d % 8 == 0 and (growing is None or growing.get_seq_length() > 0)
    return layer if serves and d <= MOST_GPU_CHANNELS else None, wanted


def _static_layer(cache: Any, index: int, x: Float[Tensor, "b t k"]) -> StaticLayer | None:
    """A layer of a static cache that holds all tokens, and as many rows as x."""
    if type(cache) is not StaticCache or cache.offloading or not 0 <= index < len(cache.layers):
        return None
    layer = cache.layers[index]
    if type(layer) is not StaticLayer or layer.keys is None:
        return None
    return layer if layer.keys.dtype == x.dtype and layer.keys.shape[0] == x.shape[0] else None


def _packed_layer(module: Any, cache: PackedCache, tokens: int) -> PackedLayer | None:
    layer = cache.layers[module.layer_idx]
    assert isinstance(layer, PackedLayer)
    return layer if tokens <= MAX_DECODE else None


def are_decoded(tokens: int, mask: Any) -> bool:
    """Whether so many tokens of a row may be behind others: several then come with a mask."""
    return tokens == 1 or (1 < tokens <= MOST_TOKENS and mask is not None)


def fits(mask: Any, x: Float[Tensor, "b t k"], layer: CacheLayer) -> bool:
    """Whether the ops take a mask, which may be None: of bools, for tokens behind those that the layer has."""
    batch, tokens = x.shape[:2]
    if mask is None:
        return not isinstance(layer, StaticLayer)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[0] not in (1, batch):
        return False
    return mask.device == x.device and mask.shape[1:] == (1, tokens, layer.get_mask_sizes(tokens)[0])


def attention_name(config: Any) -> str | None:
    """The config's `_attn_implementation`, without its slow way through `__getattribute__` where that can be done."""
    return vars(config).get("_attn_implementation_internal") or config._attn_implementation


def attend(
    module: Any,
    kind: Kind,
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    turns: tuple[Tensor, Tensor],
    layer: CacheLayer,
    mask: Tensor | None = None,
) -> Float[Tensor, "b t attended"]:
    """Attention of the products of decoded tokens, whose keys and values go to the cache. `turns`: cos and sin."""
    d = module.head_dim
    if kind.gated:
        q, gate = (half.flatten(2) for half in q.unflatten(2, (-1, 2, d)).unbind(3))
        y = attend(module, kind._replace(gated=False), q, k, v, turns, layer, mask)
        return torch.ops.ptq.sigmoid_mul(gate, y) if y.is_cpu else y * gate.sigmoid()
    if kind.normed:
        norms = (module._modules[name] for name in NORMS)
        q, k = (_normed(norm, y, d if kind.normed == "heads" else -1) for norm, y in zip(norms, (q, k), strict=True))
    if isinstance(layer, GrowingLayer):
        return layer.decode(q, k, v, turns, d, module.scaling, mask)
    if isinstance(layer, StaticLayer):
        room, start = (layer.keys, layer.values), layer.cumulative_length
        return torch.ops.ptq.decode_attention_at.default(q, k, v, *turns, *room, start, module.scaling, mask)
    if layer.decodes and layer.key.batch == k.shape[0]:
        return layer.decode(q, k, v, turns, module.scaling, mask)
    q, k, v = (y.unflatten(2, (-1, d)).transpose(1, 2) for y in (q, k, v))
    q, k = torch.ops.ptq.rotary.default(q, k, *turns)
    states, _ = layer.update(k, v)
    return forward(layer.owner.settings, module, q, states, states, mask, scaling=module.scaling)[0].flatten(2)


def _normed(norm: nn.Module, x: Float[Tensor, "b t width"], d: int) -> Float[Tensor, "b t width"]:
    return norm(x) if d < 0 else norm(x.unflatten(2, (-1, d))).flatten(2)


# --- the trial ------------------------------------------------------------------------------------------------------

HIDDEN = 24
"""Width of what the trial gives a module."""


def kind_of(module: nn.Module) -> Kind | None:
    """What an attention module does; None for any other module."""
    names = module._modules.keys()
    known = {*INPUTS, OUTPUT} <= names or {FUSED, OUTPUT} <= names
    if not known or not {"config", "head_dim", "scaling"} <= vars(module).keys():
        return None
    return _tried(module)


@tried_once
def _tried(module: Any) -> Kind | None:
    kinds = (Kind(normed, False, is_gated(module)) for normed in NORMED)
    kind = next((kind for kind in kinds if _gives_its_numbers(module, kind, module.head_dim)), None)
    part = module.head_dim // 4 * 2
    return None if kind is None else kind._replace(in_part=part > 0 and _gives_its_numbers(module, kind, part))


def _gives_its_numbers(module: Any, kind: Kind, turned: int) -> bool:
    if bool(kind.normed) != all(name in module._modules for name in NORMS):
        return False
    generator = torch.Generator().manual_seed(0)
    alone = _small_copy(module, HIDDEN, generator)
    return all(_gives_those_of(module, alone, kind, turned, tokens, generator) for tokens in (1, 3))


def _gives_those_of(module: Any, alone: Any, kind: Kind, turned: int, tokens: int, generator: torch.Generator) -> bool:
    """Whether the steps give what the forward of a module gives for so many tokens. `alone`: a small copy."""
    rows, d = rows_of(module), module.head_dim
    before = [torch.randn(2, rows[1] // d, 5, d, generator=generator) for _ in range(2)]
    shapes = (2, tokens, HIDDEN), (2, tokens, turned), (2, tokens, turned)
    x, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    seen = torch.ones(tokens, 5 + tokens, dtype=torch.bool).tril(5)
    seen[0, -1] = True  # a mask may let tokens see those after them
    mask = None if tokens == 1 else torch.stack([seen, seen & (torch.arange(5 + tokens) > 1)])[:, None]
    results = []
    for own in (True, False):
        cache = DynamicCache()
        cache.update(before[0].clone(), before[1].clone(), 0)
        inputs = {"position_embeddings": (cos, sin), "attention_mask": mask, CACHE: cache}
        try:
            if own:
                results.append(type(module).forward(alone, hidden_states=x, **inputs)[0])
            else:
                layer = growing_layer(cache, 0)
                assert layer is not None
                *first, output = linears_of(alone)
                q, k, v = torch.cat([linear(x) for linear in first], -1).split(rows, -1)
                results.append(output(attend(alone, kind, q, k, v, (cos, sin), layer, mask)))
        except MISFIT:
            return False
        layer = cast(DynamicLayer, cache.layers[0])
        results.extend((layer.keys, layer.values))
    pairs = zip(results[:3], results[3:], strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _small_copy(module: Any, hidden: int, generator: torch.Generator) -> Any:
    """The module with all its numbers, but with small linears of random weights."""
    alone = hollow(module)
    alone.config = copy.copy(module.config)
    alone.config._attn_implementation = "sdpa"
    alone.layer_idx = 0
    rows, attended = rows_of(module), module.config.num_attention_heads * module.head_dim
    shapes = dict(zip(INPUTS, ((n, hidden) for n in rows), strict=True)) | {OUTPUT: (hidden, attended)}
    if FUSED in module._modules:
        shapes = {FUSED: (sum(rows), hidden), OUTPUT: shapes[OUTPUT]}
    for name, (n, k) in shapes.items():
        setattr(alone, name, nn.utils.skip_init(nn.Linear, k, n, bias=False))
        getattr(alone, name).weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
    for name in NORMS:
        if name in module._modules:
            norm = copy.deepcopy(module._modules[name]).to_empty(device="cpu").float()
            for gain in norm.parameters():
                gain.copy_(torch.rand(gain.shape, generator=generator) + 0.5)
            setattr(alone, name, norm)
    return alone.eval()
