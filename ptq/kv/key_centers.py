"""The centres of keys: a vector for each key-value head of a layer, which its keys lose before they are cached.

Keys of a head lie around a point that is far from zero: what a bias, or a channel that hardly turns with the position,
has in common for all tokens. One grid for a token spends its range on that point, and R3 spreads it over all channels.
A softmax does not see what is the same for all keys: q·(k - c) is q·k less a number of the query alone. So the centre c
goes before R3, and nothing takes its place. (SageAttention, Zhang et al. 2024, section 4.2, does it to the keys of one
prompt; here c is fitted to the calibration text, so that tokens can be cached one by one.)

The attention module of a block holds c as a buffer, `key_center` [kv_heads, head_dim], after RoPE and before R3.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.files.header import TensorInfo
from ptq.models.families import family_or_default
from ptq.models.family import Family
from ptq.models.model_shape import shape_of

if TYPE_CHECKING:
    from ptq.kv.packed_cache import PackedCache

KEY_CENTER = "key_center"


def attention_name(family: Family) -> str:
    """What a block calls its attention."""
    return family.query.rpartition(".")[0]


def tensor_name(family: Family, index: int) -> str:
    """What the centres of a block are called in files."""
    return f"{family.layers}.{index}.{attention_name(family)}.{KEY_CENTER}"


def add_places(blocks: Iterable[nn.Module], config: Any) -> None:
    """Give the attention of these blocks of a model a place for centres, zeros, where it has none yet."""
    shape, attention = shape_of(config), attention_name(family_or_default(config))
    for block in blocks:
        if KEY_CENTER in block.get_submodule(attention)._buffers:
            continue
        like = next(block.parameters())
        dtype = like.dtype if like.is_floating_point() else config.dtype
        zeros = torch.zeros(shape.kv_heads, shape.head_dim, dtype=dtype, device=like.device)
        block.get_submodule(attention).register_buffer(KEY_CENTER, zeros)


def check(
    config: Any, centered: bool, stored: Mapping[str, TensorInfo], folder: Path, naming: Callable[[str], str]
) -> None:
    """Check that files hold the centres of every block of a config in their shape (there may be more blocks in files
    than are loaded), or none at all; `naming` gives the key, among what is stored, of a tensor. Raises InputError."""
    family, shape = family_or_default(config), shape_of(config)
    names = [tensor_name(family, index) for index in range(shape.blocks if centered else 0)]
    size = [shape.kv_heads, shape.head_dim]
    for name in names:
        info = stored.get(naming(name))
        if info is None:
            raise InputError(f"{folder}: tensor {name!r} is missing; the checkpoint is damaged")
        if list(info.shape) != size or not info.dtype.is_floating_point:
            raise InputError(
                f"{folder}: tensor {name!r} is {dtype_name(info.dtype)} {list(info.shape)}, config.json promises "
                f"floating-point numbers {size}; the checkpoint is damaged"
            )
    for name in stored:
        if name.endswith(f".{KEY_CENTER}") and not centered:
            raise InputError(
                f"{folder}: holds tensor {name!r}, of which kv_cache of quantization_config in config.json says "
                "nothing: one of them is damaged"
            )


def blocks_of(body: nn.Module, config: Any) -> nn.ModuleList:
    """The decoder blocks of the module that holds them."""
    return getattr(body, family_or_default(config).layers.rpartition(".")[2])


def center_of(attention: nn.Module) -> Float[Tensor, "h d"]:
    """The centres of an attention module. Raises InputError where it has none."""
    center = attention._buffers.get(KEY_CENTER)
    if center is None:
        raise InputError("KV cache: centered: the model has no centres of keys, which its checkpoint would bring")
    return center


def give(body: nn.Module, config: Any, cache: "PackedCache") -> None:
    """Let a cache know the centres of the model that it is used with."""
    attention = attention_name(family_or_default(config))
    for block, layer in zip(blocks_of(body, config), cache.layers, strict=True):
        center = center_of(block.get_submodule(attention))
        if center.is_meta:
            raise InputError("KV cache: the centres of keys are not in memory: load the model without offload_buffers")
        if layer.center is center:  # pyright: ignore[reportAttributeAccessIssue]
            return  # and so do the others
        layer.center = center  # pyright: ignore[reportAttributeAccessIssue]


def without(key: Float[Tensor, "b h t d"], center: Float[Tensor, "h d"] | None) -> Float[Tensor, "b h t d"]:
    """Keys without their centre."""
    return key if center is None else key - center.to(key.dtype)[:, None]
