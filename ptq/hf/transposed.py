"""Models whose linears hold a weight as [k, n], in files and in transformers, where they are `Conv1D` (GPT-2). Here
they are linears like all others: read as [n, k], written so, and put in the place of the model's own when it is loaded.
"""

from collections.abc import Mapping

from torch import nn
from transformers.pytorch_utils import Conv1D

from ptq.errors import InputError
from ptq.files.header import TensorInfo
from ptq.models.family import Family
from ptq.planning.plan import Plan


def as_read(tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of files with the weights of blocks as [n, k]: the same bytes, read in another order."""
    if not family.transposed:
        return dict(tensors)
    linears = (family.query, family.key, family.value, family.attention_output, family.gate, family.up, family.down)
    ends = tuple(f".{name}.weight" for name in linears if name)
    return {
        name: info.part(0, info.shape[::-1], stride=(1, info.shape[1]))
        if name.startswith(f"{family.layers}.") and name.endswith(ends) and len(info.shape) == 2 and info.scale is None
        else info
        for name, info in tensors.items()
    }


def as_linears(model: nn.Module) -> None:
    """Put linears without weights in the place of every `Conv1D` of a model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf, device="meta", dtype=module.weight.dtype)
            model.set_submodule(name, linear.train(module.training))


def check_loadable(plan: Plan, family: Family) -> None:
    """Raise InputError for a plain model: transformers would take its weights for [k, n]."""
    if family.transposed and not any(plan.packed_linears()):
        raise InputError(
            f"{family.model_type}: some linears must be quantised: this package writes weights as [n, k], and "
            "transformers alone reads those of this family as [k, n]"
        )
