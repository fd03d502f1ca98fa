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
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from ptq.fast.attention import decoding
from ptq.fast.attention.decoding import CacheLayer
from ptq.fast.trials import HIDDEN, TRIAL_ERRORS, bare_copy, is_close, mask_of, random_linear, random_norm, tried_once
from ptq.kv.attention import CACHE, forward
from ptq.kv.growing_cache import GrowingLayer, growing_layer
from ptq.kv.packed_layer import PackedLayer
from ptq.layers.shared_input import products
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve, gpu_ops_serve
from ptq.ops.op_declarations import wants_gradient

INPUTS, FUSED, OUTPUT, NORMS = ("q_proj", "k_proj", "v_proj"), "qkv_proj", "o_proj", ("q_norm", "k_norm")
NORMED, SINKS = ("", "heads", "whole"), "sinks"


class AttentionKind(NamedTuple):
    """What a module does."""

    normed: str
    """What is normed before the rotary embedding: nothing, each head of queries and keys, or all as one vector."""
    in_part: bool
    """Whether it may turn the first channels of every head, and leave the others as they are."""
    gated: bool
    """Whether a gate of what is attended stands behind the queries of every head, in the same product."""
    halved: bool = False
    """Whether cos and sin are given for one half of the channels that are turned."""
    sinks: bool = False
    """Whether each head has one more score, without a value (`ptq::decode_attention`)."""
    scaled: bool = False
    """Whether queries behind many tokens are multiplied with a number (`ptq.fast.attention.decoding.query_factor`)."""
    without_rope: bool = False
    """Whether it may be called without cos and sin, and turns nothing then."""

    def takes(self, module: Any, rotary_dim: int) -> bool:
        """Whether it turns so many channels of a head."""
        return rotary_dim == module.head_dim or (self.in_part and rotary_dim < module.head_dim)

    @property
    def tables(self) -> bool:
        """How cos and sin are given: layers that differ in it are not called with the same."""
        return self.halved

    def cos_sin(self, module: Any, given: Any, x: Float[Tensor, "b t k"]) -> tuple[Tensor, Tensor] | None:
        """cos and sin [b or 1, t, rotary_dim] as the op takes them; of nothing those that turn nothing, or None."""
        if given is None and self.without_rope and not torch.compiler.is_compiling():
            return decoding.no_cos_sin(x.shape[1], module.head_dim, x.dtype, x.device)
        if not isinstance(given, tuple) or given[0].dim() != 3:
            return None
        return (given[0].repeat(1, 1, 2), given[1].repeat(1, 1, 2)) if self.halved else given

    def sites(self, module: nn.Module) -> list[list[Any]]:
        """The linears of each input."""
        return [linears_of(module)[:-1], linears_of(module)[-1:]]

    def inner_norms(self, module: nn.Module) -> list[nn.Module | None]:
        """The norms of queries and of keys; None where there is none."""
        return [module.get_submodule(name) if self.normed else None for name in NORMS]

    def cached(self, module: Any) -> tuple[tuple[int, int], ...]:
        """Heads, and channels of each, of keys and of values."""
        *first, _ = linears_of(module)
        rows = rows_of(module)[1] if len(first) == 1 else first[1].out_features
        return ((rows // module.head_dim, module.head_dim),) * 2

    @staticmethod
    def cache_layers(
        attentions: Sequence[tuple[Any, "AttentionKind"]],
        cos_sin: tuple[Tensor, Tensor] | None,
        x: Float[Tensor, "b t k"],
        attention_mask: Tensor | None = None,
        floats: Iterable[Tensor] = (),
        **others: Any,
    ) -> list[CacheLayer] | None:
        """The layers of the cache that decoded tokens go to, one for each module; None where this is something else
        than decoding, a cache or a mask of another kind, or nothing for the ops (`floats`: what else they would take).
        """
        cache = others.get(CACHE)
        if cos_sin is None or cache is None or not len(x) or not decoding.are_decoded(x.shape[1], attention_mask):
            return None
        rotary_dim, given = cos_sin[0].shape[2], (x, *cos_sin, *floats)
        on_cpu = cpu_ops_serve(*given)
        if not on_cpu and not gpu_ops_serve(*given):
            return None
        find = decoding.layer_on_cpu if on_cpu else decoding.layer_on_gpu
        recorded = torch.is_grad_enabled()  # else keys and values, views of their room, need not be made
        layers = []
        for module, kind in attentions:
            if kind.scaled and not x.is_cpu:  # the positions would have to come from there
                return None
            if module.training or not kind.takes(module, rotary_dim):
                return None
            if kind.sinks and not _sinks_serve(module, others):
                return None
            layer, wanted = find(module, cache, x)
            if layer is None or decoding.attention_name(module.config) != wanted:
                return None
            if not decoding.fits(attention_mask, x, layer):
                return None
            if recorded and not isinstance(layer, PackedLayer) and wants_gradient(layer.keys, layer.values):
                return None  # a learned prefix
            layers.append(layer)
        return layers


def decoded(module: Any, kind: AttentionKind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """The attention of decoded tokens, as a module of this kind computes it; None where it must do so itself."""
    if not decoding.are_decoded(hidden_states.shape[1], others.get("attention_mask")):
        return None
    cos_sin = kind.cos_sin(module, others.get("position_embeddings"), hidden_states)
    layers = kind.cache_layers([(module, kind)], cos_sin, hidden_states, **others)
    scaling = None if layers is None else decoding.scalings_of([(module, kind)], others)
    if cos_sin is None or layers is None or scaling is None:
        return None
    if torch.is_grad_enabled() and wants_gradient(*module.parameters()):
        return None
    *first, output = linears_of(module)
    if len(first) == 1:
        q, k, v = first[0](hidden_states).split(rows_of(module), -1)
    else:
        q, k, v = products(first, hidden_states)
    if any(y.dtype != hidden_states.dtype for y in (q, k, v)) or wants_gradient(q, k, v):
        return None  # autocast, or somebody who listens, and has added to them
    return output(attend(module, kind, q, k, v, cos_sin, layers[0], scaling[0], others.get("attention_mask")))


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


def _sinks_serve(module: Any, others: dict[str, Any]) -> bool:
    """Whether the sinks are what the op takes, and nobody asks for weights, which transformers' own code has."""
    sinks = module._parameters.get(SINKS)
    asked = others.get("output_attentions") or module.config.output_attentions
    return sinks is not None and sinks.is_cpu and sinks.dtype in FEW_DTYPES and not asked


def attend(
    module: Any,
    kind: AttentionKind,
    q: Float[Tensor, "b t q_width"],
    k: Float[Tensor, "b t width"],
    v: Float[Tensor, "b t width"],
    cos_sin: tuple[Tensor, Tensor],
    layer: CacheLayer,
    scaling: float,
    mask: Tensor | None = None,
) -> Float[Tensor, "b t attended"]:
    """Attention of the products of decoded tokens, whose keys and values go to the cache."""
    d = module.head_dim
    if kind.gated:
        q, gate = (half.flatten(2) for half in q.unflatten(2, (-1, 2, d)).unbind(3))
        y = attend(module, kind._replace(gated=False), q, k, v, cos_sin, layer, scaling, mask)
        return torch.ops.ptq.sigmoid_mul(gate, y) if y.is_cpu else y * gate.sigmoid()
    if kind.normed:
        norms = (module._modules[name] for name in NORMS)
        q, k = (_normed(norm, y, d if kind.normed == "heads" else -1) for norm, y in zip(norms, (q, k), strict=True))
    if isinstance(layer, GrowingLayer):
        sinks = module._parameters[SINKS] if kind.sinks else None
        return layer.decode(q, k, v, cos_sin, d, scaling, mask, sinks)
    if isinstance(layer, StaticLayer):
        room, start = (layer.keys, layer.values), layer.cumulative_length
        return torch.ops.ptq.decode_attention_at.default(q, k, v, *cos_sin, *room, start, scaling, mask)
    if layer.decodes and layer.key.batch == k.shape[0]:
        return layer.decode(q, k, v, cos_sin, scaling, mask)
    q, k, v = (y.unflatten(2, (-1, d)).transpose(1, 2) for y in (q, k, v))
    q, k = torch.ops.ptq.rotary.default(q, k, *cos_sin)
    states, _ = layer.update(k, v)
    return forward(layer.owner.settings, module, q, states, states, mask, scaling=scaling)[0].flatten(2)


def _normed(norm: nn.Module, x: Float[Tensor, "b t width"], d: int) -> Float[Tensor, "b t width"]:
    return norm(x) if d < 0 else norm(x.unflatten(2, (-1, d))).flatten(2)


# --- the trial ------------------------------------------------------------------------------------------------------


def kind_of(module: nn.Module) -> AttentionKind | None:
    """What an attention module does; None for any other module."""
    names = module._modules.keys()
    known = {*INPUTS, OUTPUT} <= names or {FUSED, OUTPUT} <= names
    if not known or not {"config", "head_dim", "scaling"} <= vars(module).keys():
        return None
    try:
        rows_of(module)
    except TRIAL_ERRORS:  # layers of one config may differ in their heads
        return None
    return _tried(module)


@tried_once
def _tried(module: Any) -> AttentionKind | None:
    scaled = decoding.scaled_by(module.config) is not None
    more = is_gated(module), False, module._parameters.get(SINKS) is not None, scaled
    kinds = [AttentionKind(normed, False, *more) for normed in NORMED]
    kinds += [kind._replace(halved=True) for kind in kinds]
    kind = next((kind for kind in kinds if _matches(module, kind, module.head_dim)), None)
    part = module.head_dim // 4 * 2
    if kind is None:
        return None
    without_rope = kind._replace(without_rope=True)
    kind = without_rope if not kind.halved and _matches(module, without_rope, 0) else kind
    return kind._replace(in_part=part > 0 and _matches(module, kind, part))


def _matches(module: Any, kind: AttentionKind, rotary_dim: int) -> bool:
    """Whether the steps give what the forward of a module gives. `rotary_dim` 0: called without cos, sin."""
    if bool(kind.normed) != all(name in module._modules for name in NORMS):
        return False
    generator = torch.Generator().manual_seed(0)
    alone = small_copy(module, generator)
    return all(_gives_those_of(module, alone, kind, rotary_dim, tokens, generator) for tokens in (1, 3))


def _gives_those_of(
    module: Any, alone: Any, kind: AttentionKind, rotary_dim: int, tokens: int, generator: torch.Generator
) -> bool:
    """Whether the steps give what the forward of a module gives for so many tokens. `alone`: a small copy."""
    before = [torch.randn(2, h, 5, d, generator=generator) for h, d in kind.cached(module)]
    widths = HIDDEN, *(rotary_dim // (1 + kind.halved),) * 2
    x, cos, sin = (torch.randn(2, tokens, width, generator=generator) for width in widths)
    angles = (cos, sin) if rotary_dim else None
    mask = mask_of(tokens, 5)
    numbers = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    results = []
    for own in (True, False):
        cache = DynamicCache()
        cache.update(before[0].clone(), before[1].clone(), 0)
        given = numbers if kind.sinks else mask  # transformers has no other attention with sinks than one that adds it
        inputs = {"position_embeddings": angles, "attention_mask": given, CACHE: cache}
        inputs |= decoding.distant_positions(alone, tokens)
        try:
            if own:
                results.append(type(module).forward(alone, hidden_states=x, **inputs)[0])
            else:
                layer, cos_sin = growing_layer(cache, 0), kind.cos_sin(alone, angles, x)
                scaling = decoding.scalings_of([(alone, kind)], inputs)
                assert layer is not None and cos_sin is not None and scaling is not None
                *first, output = linears_of(alone)
                q, k, v = torch.cat([linear(x) for linear in first], -1).split(rows_of(module), -1)
                results.append(output(attend(alone, kind, q, k, v, cos_sin, layer, scaling[0], mask)))
        except TRIAL_ERRORS:
            return False
        layer = cast(DynamicLayer, cache.layers[0])
        results.extend((layer.keys, layer.values))
    return all(map(is_close, results[:3], results[3:]))


def small_copy(module: Any, generator: torch.Generator) -> Any:
    """The module with all its numbers, but with small linears of random weights."""
    alone = bare_copy(module)
    alone.config = copy.copy(module.config)
    sinks = module._parameters.get(SINKS)
    if sinks is not None:
        alone.register_parameter(SINKS, nn.Parameter(torch.randn(sinks.shape, generator=generator), False))
    alone.config._attn_implementation = "sdpa" if sinks is None else "eager"
    alone.layer_idx = 0
    rows, attended = rows_of(module), module.config.num_attention_heads * module.head_dim
    shapes = dict(zip(INPUTS, ((n, HIDDEN) for n in rows), strict=True)) | {OUTPUT: (HIDDEN, attended)}
    if FUSED in module._modules:
        shapes = {FUSED: (sum(rows), HIDDEN), OUTPUT: shapes[OUTPUT]}
    for name, (n, k) in shapes.items():
        setattr(alone, name, random_linear(n, k, generator))
    for name in NORMS:
        if name in module._modules:
            setattr(alone, name, random_norm(module._modules[name], generator))
    return alone.eval()
