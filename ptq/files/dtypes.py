"""What a config.json says of the dtype of weights, and the same config without a word of how they were quantised."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ptq.files.checkpoint import QUANTISATION, Checkpoint

TEXT = "text_config"


def levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and that of the text model inside of it."""
    yield config
    if isinstance(text := config.get(TEXT), Mapping):
        yield text


def read_as(config: Mapping[str, Any], otherwise: torch.dtype = torch.bfloat16) -> torch.dtype:
    """What the config says, if that is a dtype of weights."""
    names = [level.get(key) for level in levels(config) for key in ("dtype", "torch_dtype")]
    known = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    return next((known[name] for name in names if isinstance(name, str) and name in known), otherwise)


def stored_as(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the plain weights of a checkpoint: what its config says, or what its first one has."""
    found = (info.dtype for info in checkpoint.tensors.values() if info.dtype.is_floating_point)
    return read_as(checkpoint.config, next(found, torch.bfloat16))


def plain(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config of the same model in this dtype, not quantised."""
    found = {key: value for key, value in config.items() if key not in QUANTISATION}
    for key in ("dtype", "torch_dtype"):
        if found.get(key) is not None:  # some say float8_e4m3fn
            found[key] = dtype_name(dtype)
    if isinstance(found.get(TEXT), dict):
        found[TEXT] = plain(found[TEXT], dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` and the like."""
    return str(dtype).removeprefix("torch.")
