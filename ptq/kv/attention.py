"""Attention over quantised keys and values, as an attention function of transformers.

`attach` uses transformers' own doors. (1) An attention function of ours, under a name that spells the settings, with
the masks of "sdpa" (AttentionInterface, AttentionMaskInterface): every model of the table calls it after RoPE. It
quantises and dequantises plain keys and values (no cache, or somebody else's), and reads a `PackedCache` directly. (2)
A forward hook in front of the module that holds the blocks makes a `PackedCache` where a cache is wanted and none is
given, and checks the one that is given. (3) `generate` makes its cache before the first forward: the model object (not
its class) gets a `_prepare_cache_for_generation` of its own that puts a `PackedCache` in the place of what transformers
made. If a later transformers should stop calling it, results stay the same and only memory is lost, because of (1).

The same codes are seen on every way: a plain tensor goes through the ops that fill the cache.
"""

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ptq.errors import InputError
from ptq.kv import key_centers, supported
from ptq.kv.key_centers import center_of, without
from ptq.kv.kv_cache import CacheQuantization
from ptq.kv.kv_side import Side, rotate, row_starts
from ptq.kv.packed_cache import PackedCache, Signature
from ptq.kv.packed_layer import PackedStates
from ptq.models.families import family_or_default
from ptq.ops import kv_ops, prefill_attention
from ptq.ops.op_declarations import refuse_forward_derivative, takes_forward_derivatives, wants_gradient

MAX_DECODE = 8
"""So many query tokens are decoded over the packed cache; for more, it is dequantised once, for attention over
plain keys and values."""

SETTINGS = "ptq_cache_settings"
"""Attribute of the module that holds the blocks: its `CacheQuantization`."""
SIGNATURE = "ptq_cache_signature"
"""The same: the `Signature` of the cache that it was given last. Working it out takes as long as a small layer."""

STRAIGHT_THROUGH = ContextVar("STRAIGHT_THROUGH", default=False)
"""Whether keys and values are differentiated as if they were not rounded."""

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What forwards of transformers call the cache that they are given: the latter before 5.24."""


def attach(model: Any, settings: CacheQuantization) -> None:
    """Make a transformers model see quantised keys and values everywhere: with its cache, with another, without any.

    `generate` and `forward(use_cache=True)` then make a `ptq.kv.packed_cache.PackedCache` by themselves. Call it again
    to change the settings. Raises InputError where the settings do not fit the model.
    """
    config = model.config
    supported.check(config, settings)
    _register(settings)
    model.set_attn_implementation(implementation(settings))
    body = body_of(model)
    if not hasattr(body, SETTINGS):
        _, *arguments = inspect.signature(type(body).forward).parameters
        body.register_forward_pre_hook(functools.partial(_before_forward, arguments), with_kwargs=True)
    setattr(body, SETTINGS, settings)
    vars(body).pop(SIGNATURE, None)
    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = functools.partial(_prepare_cache_for_generation, model)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = _refuse_continuous_batching


def body_of(model: Any) -> torch.nn.Module:
    """The module that holds the blocks of a model. `AutoModel`'s names begin behind the first part of the row's."""
    first, *inside, _ = family_or_default(model.config).layers.split(".")
    return model.get_submodule(".".join([first, *inside] if hasattr(model, first) else inside))


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> None:
    raise InputError(
        "continuous batching has a KV cache of its own, in 16 bits, and the model's is quantised: use generate, or a "
        "checkpoint that was made without --kv-bits, --key-bits and --value-bits"
    )


def _register(settings: CacheQuantization) -> None:
    """Let transformers know the attention function for these settings."""
    name = implementation(settings)
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, functools.partial(forward, settings))
        AttentionMaskInterface.register(name, sdpa_mask)


def implementation(settings: CacheQuantization) -> str:
    """The name of the attention function for these settings."""
    rotation = "none" if settings.hadamard is None else settings.hadamard.replace(":", "_").replace(",", "_")
    sides = (f"{settings.key_bits}_{settings.key_clip!r}", f"{settings.value_bits}_{settings.value_clip!r}")
    centered = "_centered" if settings.centered else ""
    return f"ptq_k{sides[0]}_v{sides[1]}_{settings.sinks}_{rotation}{centered}"


def forward(
    settings: CacheQuantization,
    module: torch.nn.Module,
    query: Float[Tensor, "b q_heads t d"],
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t q_heads d"], None]:
    """The attention function. `key` and `value` are tensors, or both the `PackedStates` of a `PackedCache`."""
    inputs = (query, *(key.new if isinstance(key, PackedStates) else (key, value)))
    if takes_forward_derivatives():
        refuse_forward_derivative(*inputs)
    if wants_gradient(*inputs) and not STRAIGHT_THROUGH.get():
        with torch.no_grad():
            found, _ = forward(settings, module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return _NoGradient.apply(found, *inputs), None  # pyright: ignore[reportReturnType]
    query = rotate(query, settings)
    if not isinstance(key, PackedStates):
        made = _straight if STRAIGHT_THROUGH.get() else quantized
        center = center_of(module) if settings.centered else None
        key, value = made(without(key, center), value, settings, attention_mask)
    else:
        layer = key.layer
        if layer.packed and query.shape[2] <= MAX_DECODE and _is_simple(attention_mask, query.shape[2]):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return layer.attend(query, attention_mask, scale), None
        key, value = layer.read()
    return prefill_attention.forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _straight(
    key: Float[Tensor, "b h t d"], value: Float[Tensor, "b h t d"], settings: CacheQuantization, mask: Tensor | None
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t d"]]:
    """`quantized`, with the gradients of what is rounded."""
    plain, seen = (rotate(key, settings), value), quantized(key.detach(), value.detach(), settings, mask)
    return seen[0] + (plain[0] - plain[0].detach()), seen[1] + (plain[1] - plain[1].detach())


@contextmanager
def straight_through() -> Iterator[None]:
    """Inside, for training, the rounding of keys and values has the gradient of the identity."""
    token = STRAIGHT_THROUGH.set(True)
    try:
        yield
    finally:
        STRAIGHT_THROUGH.reset(token)


class _NoGradient(torch.autograd.Function):
    """The result of attention over quantised keys and values. Rounding has no gradient; what would come out without it
    is a gradient that lacks keys and values, and nobody would notice."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *inputs: Tensor) -> Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("ptq: there is no gradient through a quantised KV cache; take it through the original model")


def _is_simple(mask: Tensor | None, tokens: int) -> bool:
    return tokens == 1 if mask is None else mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1


def quantized(
    key: Float[Tensor, "b h t d"],
    value: Float[Tensor, "b h t d"],
    settings: CacheQuantization,
    mask: Tensor | None,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t d"]]:
    """Keys, which have lost their centre, with R3, and values as a cache would give them back."""
    batch = key.shape[0]
    starts = key.new_zeros(batch, dtype=torch.long) if mask is None else row_starts(mask).expand(batch)
    result = []
    for x, bits, clip, channel_major in (
        (rotate(key, settings), settings.key_bits, settings.key_clip, False),
        (value, settings.value_bits, settings.value_clip, True),
    ):
        seen = x
        if bits < 16:
            side = Side(x, bits, clip, channel_major)
            side.append(x, 0)
            seen = side.read(x.shape[2])
            if settings.sinks:
                column = starts[:, None] + torch.arange(settings.sinks, device=x.device)
                index = column.clamp(max=x.shape[2] - 1)[:, None, :, None]
                sinks = x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).float()
                seen = kv_ops.place_sinks(seen, starts, sinks)
        result.append(seen)
    return result[0], result[1]


def _before_forward(arguments: list[str], body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make or check the cache of a forward that takes these arguments."""
    config, settings = body.config, getattr(body, SETTINGS)
    if config._attn_implementation != implementation(settings):
        raise InputError(
            f"the attention implementation was changed to {config._attn_implementation!r}: the model has a quantised "
            f"KV cache and needs its own; model.set_attn_implementation({implementation(settings)!r}) brings it back"
        )
    if not torch.compiler.is_compiling():
        _register(settings)  # a model that was pickled has come to another process
    kwargs = {**dict(zip(arguments, args, strict=False)), **kwargs}
    if kwargs.get("output_attentions"):
        raise InputError(
            "output_attentions: attention over a KV cache of few bits gives no weights; load a checkpoint made "
            "without --kv-bits, --key-bits and --value-bits"
        )
    # The forward itself takes the old name, too, and prefers the new one.
    name = CACHE if CACHE in kwargs or "past_key_values" not in kwargs else "past_key_values"
    cache, use_cache = kwargs.get(name), kwargs.get("use_cache")
    if cache is None and (config.use_cache if use_cache is None else use_cache):
        cache = kwargs[name] = PackedCache(config, settings)
    if isinstance(cache, PackedCache):
        if not torch.compiler.is_compiling() and cache.signature != vars(body).get(SIGNATURE):
            wanted = Signature.of(config, settings)
            if cache.signature != wanted:
                raise InputError(f"the PackedCache was made for another model, {cache.signature}; this one is {wanted}")
            setattr(body, SIGNATURE, wanted)
        if settings.centered:
            key_centers.give(body, config, cache)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, dict):  # by kind of attention, as `generate` makes it for a static cache
            mask = next(iter(mask.values()))
        cache.begin_rows(mask)
    elif cache is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f"ptq: this cache, a {type(cache).__name__}, holds keys and values as numbers; where none is given, the "
            "model makes one that holds them in few bits",
            stacklevel=2,  # a line of torch's, so that it is said once
        )
    return (), kwargs


def _prepare_cache_for_generation(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
) -> None:
    """As transformers does it, then a `PackedCache` in the place of a plain cache that nobody asked for by name."""
    if generation_config.cache_implementation == "quantized":
        raise InputError("the model's KV cache is quantised already: leave out cache_implementation='quantized'")
    own = type(model)._prepare_cache_for_generation
    own(model, generation_config, model_kwargs, mode, batch_size, max_cache_length)
    made = model_kwargs.get(CACHE)
    if getattr(made, "_is_user_defined", False) or getattr(made, "offloading", False):
        return
    settings = getattr(body_of(model), SETTINGS)
    if type(made) is DynamicCache:
        model_kwargs[CACHE] = PackedCache(model.config, settings)
    elif type(made) is StaticCache:
        length = max(made.get_max_length(), max_cache_length)  # the former is a window's where all layers have one
        model_kwargs[CACHE] = PackedCache(model.config, settings, length)
