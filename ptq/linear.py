"""`QuantLinear`, the only quantised module, and the entry of config.json that describes one."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq import formats, hadamard
from ptq.errors import InputError
from ptq.formats import Format
from ptq.plan import LinearPlan

GUARD = "weight"
"""Name of the one-element tensor that every packed layer stores where a plain layer has its weight.

Without this package, transformers would find no `weight`, warn, and go on with random numbers. It finds one of the
wrong size instead, and refuses to load.
"""


class QuantLinear(nn.Module):
    """A linear layer y = x Wᵀ + b whose W[n, k] is stored in a format, with an optional Hadamard transform of x.

    Its parameters are `weight_<part>` for every part of the format, a one-element `weight` (see GUARD) and `bias`.
    """

    def __init__(self, k: int, n: int, bias: bool, format: Format, construction: str | None = None) -> None:
        """`construction`: the Hadamard matrix applied to x, as `hadamard.construction` writes it; None for none."""
        super().__init__()
        self.in_features, self.out_features = k, n
        self.format = format
        self.construction = construction
        self.register_parameter(GUARD, frozen(guard()))
        for part, (shape, dtype) in format.buffers(n, k).items():
            self.register_parameter(f"weight_{part}", frozen(torch.empty(shape, dtype=dtype)))
        self.register_parameter("bias", frozen(torch.empty(n)) if bias else None)

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors of the weight, by part."""
        names = self.format.buffers(self.out_features, self.in_features)
        return {part: getattr(self, f"weight_{part}") for part in names}

    def transform(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """The input as the weight sees it."""
        return x if self.construction is None else hadamard.apply(x, None, self.construction)

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """x Wᵀ + b, in the dtype of x."""
        return self.format.linear(self.transform(x), self.parts(), self._parameters["bias"])

    def extra_repr(self) -> str:
        online = f", hadamard={self.construction}" if self.construction else ""
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, {self.format}{online}"


def guard() -> Tensor:
    """The tensor stored in a packed layer's `weight`."""
    return torch.zeros(1, dtype=torch.uint8)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient. Parameters rather than buffers, so that accelerate can spill them to disk."""
    return nn.Parameter(tensor, requires_grad=False)


def describe(linear: LinearPlan) -> dict[str, Any]:
    """The entry of `quantization_config` for one linear: everything that loading needs, and nothing by reference."""
    assert linear.format is not None, linear.name
    entry = {"format": linear.format.name, "version": linear.format.version, **linear.format.options()}
    if linear.online is not None:
        entry["hadamard"] = hadamard.construction(linear.online.order)
    return entry


def build(entry: Any, name: str, k: int, n: int, bias: bool) -> QuantLinear:
    """The module that an entry describes, on the current default device.

    Raises InputError, naming the linear, for a format, version, option or Hadamard matrix that does not exist or fit.
    """
    if not isinstance(entry, dict):
        raise InputError(f"config.json: quantization_config of {name}: expected an object, found {entry!r}")
    options = {key: value for key, value in entry.items() if key not in ("format", "version", "hadamard")}
    try:
        format = formats.get(str(entry.get("format")), **options)
        format.buffers(n, k)
        construction = entry.get("hadamard")
        if not isinstance(construction, str | None):
            raise InputError(f"hadamard must be a string, found {construction!r}")
        if construction is not None and k % hadamard.order_of(construction):
            raise InputError(f"the Hadamard matrix {construction} does not divide its {k} input channels")
    except InputError as error:
        raise InputError(f"config.json: quantization_config of {name}: {error}") from error
    if entry.get("version") != format.version:
        raise InputError(
            f"config.json: quantization_config of {name}: {format.name} has layout version {entry.get('version')!r}, "
            f"this package reads version {format.version}; install the version of ptq that wrote the checkpoint"
        )
    return QuantLinear(k, n, bias, format, construction)


def swap(root: nn.Module, name: str, entry: Any) -> QuantLinear:
    """Put the module that an entry describes in the place of a linear. Raises InputError where there is none."""
    parent, _, leaf = name.rpartition(".")
    try:
        linear = root.get_submodule(name)
    except AttributeError as error:
        raise InputError(f"config.json: quantization_config names {name}, which the model does not have") from error
    if not isinstance(linear, nn.Linear):
        raise InputError(
            f"config.json: quantization_config names {name}, which is a {type(linear).__name__}, no Linear"
        )
    with torch.device("meta"):
        module = build(entry, name, linear.in_features, linear.out_features, linear.bias is not None)
    setattr(root.get_submodule(parent), leaf, module)
    return module
