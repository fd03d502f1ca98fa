"""The tensors of packed modules in the files of a checkpoint: every one is there, fits, and is spoken of."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.files.header import TensorInfo
from ptq.layers.packed_weight import GUARD
from ptq.models.family import Family

Naming = Callable[[str], str]
"""The key, among what is stored, of a tensor of a module."""


def inside(name: str, family: Family, prefix: str) -> str:
    """What the base of a model, which is called `prefix` in it, calls a tensor of the model's files, which may also
    have the name that it has in the model."""
    return family.module_name(name.removeprefix(f"{prefix}."))


def check(modules: Mapping[str, nn.Module], stored: Mapping[str, TensorInfo], folder: Path, naming: Naming) -> None:
    """Check that files hold every tensor of these modules in its shape and dtype, and no other of them: transformers
    would fill a missing tensor with random numbers, and leave out one that it does not expect. Raises InputError."""
    claimed, owners = set[str](), {naming(owner) for owner in modules}
    for owner, module in modules.items():
        for leaf, parameter in module.state_dict().items():
            name = f"{owner}.{leaf}"
            claimed.add(naming(name))
            info = stored.get(naming(name))
            if info is None:
                raise InputError(f"{folder}: tensor {name!r} is missing; the checkpoint is damaged")
            shape = getattr(module, "out_features", 0), getattr(module, "in_features", 0)
            if leaf == GUARD and tuple(info.shape) == shape:
                raise InputError(
                    f"{folder}: tensor {name!r} holds plain numbers, and config.json says that they are packed: remove "
                    "its quantization_config if the model is a plain one"
                )
            if tuple(info.shape) != tuple(parameter.shape):
                raise InputError(
                    f"{folder}: tensor {name!r} has shape {list(info.shape)}, config.json says "
                    f"{list(parameter.shape)}; the checkpoint is damaged"
                )
            packed = not (parameter.is_floating_point() and info.dtype.is_floating_point)
            if packed and info.dtype != parameter.dtype:
                raise InputError(
                    f"{folder}: tensor {name!r} is {dtype_name(info.dtype)}, expected {dtype_name(parameter.dtype)}; "
                    "the checkpoint is damaged"
                )
    for name in stored:
        if name not in claimed and name.rpartition(".")[0] in owners:
            raise InputError(
                f"{folder}: holds tensor {name!r}, of which quantization_config in config.json says nothing: one of "
                "them is damaged"
            )
