"""What fine-tuning moves, and the layer through which its gradient passes.

Codes stand still. Sign vectors, biases, norms, and weights that are not rounded yet are trained, each in float32 and at
a rate of its own; see `ptq.pipeline.finetune`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.hf.blocks import PartialModel
from ptq.layers.linear import Online, config_entry, online_of
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, frozen, loaded_signs, stored_signs
from ptq.ops import activations, hadamard, matmul
from ptq.pipeline.job import Job
from ptq.planning.plan import LinearPlan

VECTOR_RATE = 0.016
"""Adam's steps for sign vectors, norms and biases, all of them near 1, times the relative error of the rounded weights:
0.005 at 2 bits, less at 4, where there is less to make up for. Tseng et al. take 5e-4 for sign vectors and 5e-5 for the
rest, of models of 7 to 70 billion weights; steps that are too long are halved (`finetune.PATIENCE`)."""
WEIGHT_RATE = 0.1
"""Adam's steps for weight matrices, relative to the root of their mean square, times the same."""

Values = dict[str, Tensor]
"""Tensors by the name that they have in the model; an su that linears share has the name of the first of them."""


@dataclass(frozen=True)
class Trained:
    """How one tensor is trained."""

    start: Tensor
    dtype: torch.dtype
    """In which it will be written."""
    rate: float
    """Adam's step."""


class TunedLinear(nn.Module):
    """A `QuantLinear` in training: its codes stand still, as the weight that they stand for; sign vectors and bias,
    which `PartialModel.differentiated` puts in their places, have gradients. The rounding of its input, if any, has the
    gradient of the identity."""

    def __init__(self, weight: Float[Tensor, "n k"], online: Online, bias: bool) -> None:
        super().__init__()
        assert online.input is not None and online.output is not None and online.signs
        self.input, self.output, self.activation = online.input, online.output, online.activation
        n, k = weight.shape
        self.weight = frozen(weight)
        self.register_parameter(INPUT_SIGNS, frozen(weight.new_ones(k)))
        self.register_parameter(OUTPUT_SIGNS, frozen(weight.new_ones(n)))
        self.register_parameter("bias", frozen(weight.new_zeros(n)) if bias else None)

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """y = sv * H_nᵀ (Ŵ q(H_k (su * x))) + b."""
        x = hadamard.apply(x * getattr(self, INPUT_SIGNS), None, self.input)
        if self.activation is not None:
            with torch.no_grad():
                error = activations.dequantize(*self.activation.quantize(x)) - x
            x = x + error
        y = hadamard.apply(matmul.linear(x, self.weight, None), None, self.output, transpose=True)
        y = y * getattr(self, OUTPUT_SIGNS)
        return y if self.bias is None else y + self.bias


def freeze(part: PartialModel, linears: Iterable[LinearPlan], tensors: Values) -> None:
    """Put the written weights of linears, which are among `tensors`, into a part, for training around them."""
    for linear in linears:
        assert linear.format is not None, linear.name
        online = online_of(config_entry(linear), linear.k, linear.n)
        names = {leaf: f"{linear.name}.weight_{leaf}" for leaf in linear.format.buffers(linear.n, linear.k)}
        parts = {leaf: tensors[name].to(part.device) for leaf, name in names.items()}
        weight = linear.format.dequantize(parts, linear.n, linear.k)
        part.put(linear.name, TunedLinear(weight, online, part.holds(f"{linear.name}.bias")))


def shared(linears: Iterable[LinearPlan], values: Values) -> Values:
    """`values` for modules: linears with the same input get the one su that is trained."""
    others = {f"{linear.name}.{INPUT_SIGNS}": f"{linear.statistics}.{INPUT_SIGNS}" for linear in linears}
    return values | {name: values[source] for name, source in others.items() if source in values}


def vectors(job: Job, linears: Iterable[LinearPlan], values: Values, share: float) -> dict[str, Trained]:
    """How the norms and biases among `values`, and the sign vectors of these linears, are trained: at this share of
    VECTOR_RATE."""
    dtypes = {name: info.dtype for name, info in job.checkpoint.tensors.items()}
    for linear in linears:
        dtypes |= {f"{linear.statistics}.{INPUT_SIGNS}": torch.float16, f"{linear.name}.{OUTPUT_SIGNS}": torch.float16}
    moving = (f".{INPUT_SIGNS}", f".{OUTPUT_SIGNS}", ".bias")
    return {
        name: Trained(value, dtypes[name], share * VECTOR_RATE)
        for name, value in values.items()
        if name in dtypes and value.dim() and (name.endswith(moving) or name in job.plan.kept)  # no constants
    }


def matrix(w: Float[Tensor, "n k"], dtype: torch.dtype, share: float) -> Trained:
    """How a weight matrix is trained: at this share of WEIGHT_RATE."""
    return Trained(w, dtype, share * WEIGHT_RATE * float(w.square().mean(dtype=torch.float64).sqrt()))


def written(job: Job, values: Values) -> Values:
    """Values as they are written."""
    signs = (f".{INPUT_SIGNS}", f".{OUTPUT_SIGNS}")
    return {
        name: stored_signs(value) if name.endswith(signs) else value.to(job.checkpoint.tensors[name].dtype)
        for name, value in values.items()
    }


def read(job: Job, tensors: Values) -> Values:
    """Inverse of `written`: float32 on the job's device."""
    signs = (f".{INPUT_SIGNS}", f".{OUTPUT_SIGNS}")
    numbers = {name: loaded_signs(value) if name.endswith(signs) else value.float() for name, value in tensors.items()}
    return {name: value.to(job.device) for name, value in numbers.items()}
