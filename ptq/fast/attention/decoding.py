"""Which layers of a cache the ops serve, and for which tokens: few behind others."""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer

from ptq.kv.attention import MAX_DECODE, implementation
from ptq.kv.growing_cache import GrowingLayer, growing_layer
from ptq.kv.packed_cache import PackedCache
from ptq.kv.packed_layer import PackedLayer
from ptq.kv.static_cache import StaticPackedCache
from ptq.ops.op_declarations import lasting

ATTENTION, WITHOUT_SDPA = "ptq_sdpa", "ptq_sinks"
"""Names of what takes the place of "sdpa" (`ptq.fast.attention.attention_function`). Models without that
refuse a name with it."""

CacheLayer = GrowingLayer | PackedLayer | StaticLayer

MOST_GPU_CHANNELS = 256
"""Of a head, that the CUDA kernels take."""

SCALED_QUERIES = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""What `rope_parameters` of a config call beta and the length of `query_factor`."""

MOST_DECODED = 16
"""Of a row, such as those that assisted generation has guessed; over a packed cache at most `MAX_DECODE`."""


def layer_on_cpu(module: Any, cache: Any, x: Float[Tensor, "b t k"]) -> tuple[CacheLayer | None, str]:
    """The layer of a cache that the ops serve, behind whose tokens x comes, and the attention it belongs to."""
    if type(cache) is PackedCache:
        layer, wanted = _packed_layer(module, cache, x.shape[1]), implementation(cache.settings)
    else:
        layer, wanted = growing_layer(cache, module.layer_idx), ATTENTION
    return layer if layer is not None and layer.get_seq_length() else None, wanted


def layer_on_gpu(module: Any, cache: Any, x: Float[Tensor, "b t k"]) -> tuple[CacheLayer | None, str]:
    """What `layer_on_cpu` gives, on a GPU, which is not asked how many tokens a static cache has."""
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
    return tokens == 1 or (1 < tokens <= MOST_DECODED and mask is not None)


def fits(mask: Any, x: Float[Tensor, "b t k"], layer: CacheLayer) -> bool:
    """Whether the ops take a mask, which may be None: of bools, for tokens behind those that the layer has."""
    batch, tokens = x.shape[:2]
    if mask is None:
        return not isinstance(layer, StaticLayer)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[0] not in (1, batch):
        return False
    return mask.device == x.device and mask.shape[1:] == (1, tokens, layer.get_mask_sizes(tokens)[0])


def scaled_by(config: Any) -> tuple[float, int] | None:
    """beta and the length of `query_factor`, where a config has them."""
    parameters = getattr(config, "rope_parameters", None)
    found = [parameters.get(name) if isinstance(parameters, dict) else None for name in SCALED_QUERIES]
    return None if None in found else cast(Any, tuple(found))


def query_factor(config: Any, position_ids: Tensor | None) -> float | None:
    """What queries behind many tokens are multiplied with, 1 + beta ln(1 + floor(position / length)) (Llama 4); None
    where it is not one for all of them, or not known."""
    scaled = scaled_by(config)
    if scaled is None or position_ids is None:
        return None
    beta, length = scaled
    reached = position_ids // length
    first = int(reached.flatten()[0])
    if position_ids.numel() > 1 and not bool((reached == first).all()):
        return None
    return 1 + beta * math.log(1 + first)


def scalings_of(attentions: Sequence[tuple[Any, Any]], others: dict[str, Any]) -> list[float] | None:
    """What the scores of each module, with its kind, are multiplied with; None where that is not one number for all of
    its queries."""
    found, factors = [], dict[int, float | None]()
    for module, kind in attentions:
        config = module.config
        if kind.scaled and id(config) not in factors:
            factors[id(config)] = query_factor(config, others.get("position_ids"))
        factor = factors[id(config)] if kind.scaled else 1.0
        if factor is None:
            return None
        found.append(module.scaling * factor)
    return found


def shapes_of(
    cached: Sequence[tuple[int, int]], x: Float[Tensor, "b t k"]
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Those of what tokens add to the two tensors of a cache, each of so many heads and channels."""
    batch, tokens = x.shape[:2]
    key, value = ((batch, heads, tokens, channels) for heads, channels in cached)
    return key, value


def distant_positions(module: Any, tokens: int) -> dict[str, Tensor]:
    """What a trial gives a module as the places of tokens of two rows, where that counts."""
    scaled = scaled_by(module.config)
    return {} if scaled is None else {"position_ids": torch.full((2, tokens), 3 * scaled[1] + 1)}


def attention_name(config: Any) -> str | None:
    """The config's `_attn_implementation`, without its slow way through `__getattribute__` where that can be done."""
    name = vars(config).get("_attn_implementation_internal") or config._attn_implementation
    return ATTENTION if name == WITHOUT_SDPA else name


@functools.lru_cache(maxsize=32)
def no_cos_sin(
    tokens: int, d: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "1 t d"], Float[Tensor, "1 t d"]]:
    """A cos and a sin that turn nothing."""
    with lasting():
        return (
            torch.ones(1, tokens, d, dtype=dtype, device=device),
            torch.zeros(1, tokens, d, dtype=dtype, device=device),
        )
