"""`QuantLinear`, the packed linear layer, and the entry of config.json that describes one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.layers import embedding
from ptq.layers.changes import ObservedModule
from ptq.layers.packed_weight import (
    INPUT_SIGNS,
    OUTPUT_SIGNS,
    KeptSigns,
    PackedWeight,
    format_of,
    frozen,
    kept_signs,
    loaded_signs,
    stored_signs,
)  # fmt: skip
from ptq.layers.ready_products import CURRENT, ProductSource
from ptq.ops import activations, hadamard, input_steps, matmul
from ptq.ops.activations import Activation
from ptq.ops.input_steps import Treatment
from ptq.planning.plan import LinearPlan
from ptq.weights.formats import Format, IntegerInput
from ptq.weights.layouts import LaidOut


@dataclass(frozen=True)
class Online:
    """What a layer does to its input and its product when the model runs; matrices as `hadamard.construction` writes
    them.

    y = sv * H_nᵀ (Ŵ q(H_k (su * x))) + b, with q the grid of `activation`. What is None is left out.
    """

    input: str | None = None
    """H_k."""
    output: str | None = None
    """H_n; its transpose is applied."""
    signs: bool = False
    """Whether there are vectors su [k] and sv [n]."""
    activation: Activation | None = None

    @property
    def input_bits(self) -> int:
        """Bits of the integers that the input is quantised to; 0: it is not."""
        return 0 if self.activation is None else self.activation.bits

    def treatment(self, signs: Float32[Tensor, " k"] | None, device: torch.device) -> Treatment:
        """What is done to the input, as ops on a device take it; `signs`: su."""
        factors, order = hadamard.dense_factors(self.input, device)
        clip = 1.0 if self.activation is None else self.activation.clip
        return Treatment(signs, factors, order, self.input_bits, clip)


class QuantLinear(ObservedModule, PackedWeight):
    """A linear layer y = x Wᵀ + b whose W[n, k] is stored in a format. Its input may be transformed by a Hadamard
    matrix and quantised per token before it is multiplied, its product transformed back after that (see `Online`).

    Its parameters are `weight_<part>` for every part of the format, a one-element `weight` (see GUARD), the vectors
    `weight_su` and `weight_sv`, if any, and `bias`.
    """

    def __init__(self, k: int, n: int, bias: bool, format: Format, online: Online = Online()) -> None:
        super().__init__(n, k, format)
        self.online = online
        self.takes_integers = isinstance(self.format, IntegerInput)  # asked once: such a question is slow
        self.is_laid_out = isinstance(self.format, LaidOut)
        self.shared: ProductSource | None = None  # set in a loaded model, see ptq/layers/shared_input.py
        if online.signs:
            self.register_parameter(INPUT_SIGNS, frozen(stored_signs(torch.ones(k))))
            self.register_parameter(OUTPUT_SIGNS, frozen(stored_signs(torch.ones(n))))
        self._signs = KeptSigns()
        self.register_parameter("bias", frozen(torch.empty(n)) if bias else None)
        self.make_room()

    def signs(self, name: str) -> Float32[Tensor, " size"] | None:
        """A sign vector as numbers, kept for the next call; None where there is none."""
        stored = self._parameters.get(name)
        return None if stored is None else kept_signs(self._signs, name, stored)

    def treatment(self) -> Treatment:
        """What is done to the input, as the ops of `ptq.ops.input_steps` take it."""
        return self.online.treatment(self.signs(INPUT_SIGNS), next(iter(self.parts().values())).device)

    def transformed_input(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """The input after signs and Hadamard transform, before it is quantised."""
        return x if self.online.input is None else hadamard.apply(x, self.signs(INPUT_SIGNS), self.online.input)

    def quantized_input(
        self, x: Float[Tensor, "*batch k"]
    ) -> tuple[Int8[Tensor, "*batch k"], Float32[Tensor, "*batch"]]:
        """Integers and scales of every token of the transformed input; for a layer with `activation`."""
        assert self.online.activation is not None
        return self.online.activation.quantize(x, self.online.input, self.signs(INPUT_SIGNS))

    def effective_input(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """The numbers that the weight multiplies: the transformed input, or what its integers stand for."""
        if self.online.activation is not None:
            return activations.dequantize(*self.quantized_input(x)).to(x.dtype)
        return self.transformed_input(x)

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """x Wᵀ + b, in the dtype of x."""
        return self.output_of(self._product(x), x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        for ready in (CURRENT.given if matmul.lies_on_gpu(x) else None, self.shared):
            found = None if ready is None else ready.product(self, x)
            if found is not None:
                return found
        integers = self.online.activation is not None and self.takes_integers
        if integers and self.is_laid_out and self.online.input is None:
            format, after = cast(LaidOut, self.format), self._bias_and_dtype(x.dtype)
            found = format.linear_tokens(x, cast(Activation, self.online.activation), self.parts(), *after)
            if found is not None:
                return found
        return self.product_of(self.quantized_input(x) if integers else (self.effective_input(x),), x.dtype)

    def product_of(self, seen: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The product with an input that was treated (`ptq.ops.input_steps.treated`): numbers, or integers and scales.
        Where there is an output transform, it is still to come: then without bias, in float32."""
        bias, dtype = self._bias_and_dtype(dtype)
        if len(seen) == 2:
            return cast(IntegerInput, self.format).linear_quantized(
                seen[0], seen[1], self.parts(), bias, dtype, self.online.input_bits
            )
        x = seen[0].bfloat16() if matmul.PRODUCTS.bfloat16 else seen[0]
        return self.format.linear(x, self.parts(), bias).to(dtype)

    def _bias_and_dtype(self, dtype: torch.dtype) -> tuple[Tensor | None, torch.dtype]:
        return (self._parameters["bias"], dtype) if self.online.output is None else (None, torch.float32)

    def output_of(self, product: Float[Tensor, "*batch n"], dtype: torch.dtype) -> Float[Tensor, "*batch n"]:
        """What the layer gives, from its product."""
        if self.online.output is None:
            return product
        bias, signs = self._parameters["bias"], self.signs(OUTPUT_SIGNS)
        if bias is None and matmul.gpu_ops_serve(product):
            return input_steps.transformed_back(product, signs, self.online.output, dtype)
        y = hadamard.apply(product, signs, self.online.output, transpose=True)
        return (y if bias is None else y + bias).to(dtype)

    def extra_repr(self) -> str:
        bias = self._parameters["bias"] is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, {self.format}, {self.online}"
        )


def config_entry(linear: LinearPlan) -> dict[str, Any]:
    """The entry of `quantization_config` for one linear: everything that loading needs, and nothing by reference."""
    assert linear.format is not None, linear.name
    entry = {"format": linear.format.name, "version": linear.format.version, **linear.format.options()}
    if linear.online is not None:
        entry["hadamard"] = hadamard.construction(linear.online.order)
    if linear.online_output is not None:
        entry["output_hadamard"] = hadamard.construction(linear.online_output.order)
        entry["signs"] = True
    if linear.activation is not None:
        entry["activation"] = asdict(linear.activation)
    return entry


def build(entry: Any, name: str, k: int, n: int, bias: bool) -> QuantLinear:
    """The module that an entry describes, on the current default device.

    Raises InputError, naming the linear, for a format, version, option or Hadamard matrix that does not exist or fit.
    """
    format = format_of(entry, name, n, k)
    try:
        online = online_of(entry, k, n)
    except InputError as error:
        raise InputError(f"config.json: quantization_config of {name}: {error}") from error
    return QuantLinear(k, n, bias, format, online)


def online_of(entry: dict[str, Any], k: int, n: int) -> Online:
    """What an entry says about input and product. Raises InputError for what does not exist or fit."""
    for key, size, side in (("hadamard", k, "input"), ("output_hadamard", n, "output")):
        construction = entry.get(key)
        if not isinstance(construction, str | None):
            raise InputError(f"{key} must be a string, found {construction!r}")
        if construction is not None and size % hadamard.order_of(construction):
            raise InputError(f"the Hadamard matrix {construction} does not divide its {size} {side} channels")
    signs = entry.get("signs", False)
    if type(signs) is not bool or (signs and not {"hadamard", "output_hadamard"} <= entry.keys()):
        raise InputError(f"signs must be true, beside hadamard and output_hadamard, or absent; found {signs!r}")
    activation = activations.parse(entry["activation"]) if "activation" in entry else None
    return Online(entry.get("hadamard"), entry.get("output_hadamard"), signs, activation)


def plain_weight(module: PackedWeight, stored: Mapping[str, Tensor]) -> Float32[Tensor, "n k"]:
    """The weight of a plain layer that computes what a packed one does, but for the rounding of its input:
    diag(sv) H_nᵀ Ŵ H_k diag(su), with the symbols of `Online`. `stored` are the module's tensors as in its
    `state_dict`."""
    shape = module.out_features, module.in_features
    parts = {part: stored[f"weight_{part}"] for part in module.file_format.buffers(*shape)}
    weight = module.format.dequantize(parts, *shape)
    if not isinstance(module, QuantLinear):
        return weight
    su, sv = (loaded_signs(stored[name]) if name in stored else None for name in (INPUT_SIGNS, OUTPUT_SIGNS))
    if module.online.input is not None:
        weight = hadamard.apply(weight, su, module.online.input, transpose=True)
    if module.online.output is not None:
        weight = hadamard.apply_columns(weight, sv, module.online.output, transpose=True)
    return weight


def swap(root: nn.Module, name: str, entry: Any) -> PackedWeight:
    """Put the module that an entry describes in the place of a linear or an embedding. Raises InputError where there is
    none."""
    try:
        linear = root.get_submodule(name)
    except AttributeError as error:
        raise InputError(f"config.json: quantization_config names {name}, which the model does not have") from error
    if not isinstance(linear, nn.Linear | nn.Embedding):
        raise InputError(
            f"config.json: quantization_config names {name}, which is a {type(linear).__name__}, no Linear or Embedding"
        )
    with torch.device("meta"):
        if isinstance(linear, nn.Embedding):
            module = embedding.build(linear, entry, name)
        else:
            module = build(entry, name, linear.in_features, linear.out_features, linear.bias is not None)
    root.set_submodule(name, module)
    return module
