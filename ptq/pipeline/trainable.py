"""What fine-tuning moves, and the layer through which its gradient passes.

Codes stand still. Scales of rows or groups in bfloat16, sign vectors, biases, norms, and weights that are not rounded
yet are trained, each in float32 and at a rate of its own; see `ptq.pipeline.finetune`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ptq.hf.blocks import PartialModel
from ptq.layers.linear import Online, config_entry, online_of
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, frozen, loaded_signs, stored_signs
from ptq.ops import activations, hadamard, matmul
from ptq.pipeline.job import Job, Model
from ptq.planning.plan import LinearPlan, Plan
from ptq.weights.formats import Format, Parts
from ptq.weights.grouped import SCALE, has_scales, loaded_scale, stored_scale

VECTOR_RATE = 0.016
"""Adam's steps for sign vectors, norms and biases, all of them near 1, and for scales, as a share of each; times the
relative error of the rounded weights: 0.005 at 2 bits, less at 4, where there is less to make up for. Tseng et al. take
5e-4 for sign vectors and 5e-5 for the rest, of models of 7 to 70 billion weights; steps that are too long are halved
(`finetune.PATIENCE`)."""
WEIGHT_RATE = 0.1
"""Adam's steps for weight matrices, relative to the root of their mean square, times the same."""

CODED = {
    INPUT_SIGNS: (stored_signs, loaded_signs),
    OUTPUT_SIGNS: (stored_signs, loaded_signs),
    SCALE: (stored_scale, loaded_scale),
}
"""What is stored as the bits of its numbers, by the last part of its name: how it is written, and read."""

Values = dict[str, Tensor]
"""Tensors by the name that they have in the model; an su that linears share has the name of the first of them."""


@dataclass(frozen=True)
class Trained:
    """How one tensor is trained."""

    start: Tensor
    dtype: torch.dtype
    """In which it will be written."""
    rate: float | Tensor
    """Adam's step, of all its numbers or of each."""


class TunedLinear(nn.Module):
    """A `QuantLinear` in training: its codes stand still, as the weight that they stand for, of `scale` 1 where that is
    trained. Scales, sign vectors and bias, which `PartialModel.differentiated` puts in their places, have gradients;
    so has the weight, under its `leaf`, of a linear that is not rounded yet. The rounding of its input, if any, has the
    gradient of the identity."""

    def __init__(
        self,
        weight: Float[Tensor, "n k"],
        scale: Float[Tensor, "n g"] | None,
        online: Online,
        bias: bool,
        leaf: str = "weight",
    ) -> None:
        super().__init__()
        self.online, self.leaf = online, leaf
        n, k = weight.shape
        self.register_parameter(leaf, frozen(weight))
        self.register_parameter(SCALE, None if scale is None else frozen(scale))
        if online.signs:
            self.register_parameter(INPUT_SIGNS, frozen(weight.new_ones(k)))
            self.register_parameter(OUTPUT_SIGNS, frozen(weight.new_ones(n)))
        self.register_parameter("bias", frozen(weight.new_zeros(n)) if bias else None)

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """y = sv * H_nᵀ (Ŵ q(H_k (su * x))) + b, without what the layer has not."""
        signs, transformed = self.online.signs, self.online.input
        x = x * getattr(self, INPUT_SIGNS) if signs else x
        x = x if transformed is None else hadamard.apply(x, None, transformed)
        if self.online.activation is not None:
            with torch.no_grad():
                error = activations.dequantize(*self.online.activation.quantize(x)) - x
            x = x + error
        y = matmul.linear(x, self._scaled(), None)
        y = y if self.online.output is None else hadamard.apply(y, None, self.online.output, transpose=True)
        y = y * getattr(self, OUTPUT_SIGNS) if signs else y
        bias = self._parameters["bias"]
        return y if bias is None else y + bias

    def _scaled(self) -> Float[Tensor, "n k"]:
        weight, scale = getattr(self, self.leaf), self._parameters[SCALE]
        if scale is None:
            return weight
        return (weight.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


def freeze(part: PartialModel, linears: Iterable[LinearPlan], tensors: Values) -> None:
    """Put the written weights of linears, which are among `tensors`, into a part, for training around them."""
    for linear in linears:
        assert linear.format is not None, linear.name
        n, k = linear.n, linear.k
        names = {leaf: f"{linear.name}.weight_{leaf}" for leaf in linear.format.buffers(n, k)}
        parts = {leaf: tensors[name].to(part.device) for leaf, name in names.items()}
        online, bias = online_of(config_entry(linear), k, n), part.holds(f"{linear.name}.bias")
        part.put(linear.name, TunedLinear(*unscaled(linear.format, parts, n, k), online, bias))


def thaw(part: PartialModel, linear: LinearPlan, name: str) -> None:
    """Empty the place of a weight that is called `name` and not rounded yet, for its training: its input is rounded as
    it will be, unless it is rounded behind a transform that the weight has not been through."""
    leaf = name.rpartition(".")[2]
    weight = part.take(name).to("meta")
    if linear.activation is not None and (linear.online is None or not linear.undone):
        online, bias = online_of(config_entry(linear), linear.k, linear.n), part.holds(f"{linear.name}.bias")
        part.put(linear.name, TunedLinear(weight, None, online, bias, leaf))


def unscaled(
    format: Format, parts: Parts, n: int, k: int
) -> tuple[Float32[Tensor, "n k"], Float32[Tensor, "n g"] | None]:
    """A weight without its scales, and these; None where it has none that can be trained."""
    if not has_scales(format):
        return format.dequantize(parts, n, k), None
    scale = loaded_scale(parts["scale"])
    return format.dequantize({**parts, "scale": stored_scale(torch.ones_like(scale))}, n, k), scale


def shared(linears: Iterable[LinearPlan], values: Values) -> Values:
    """`values` for modules: linears with the same input get the one su that is trained."""
    others = {f"{linear.name}.{INPUT_SIGNS}": f"{linear.statistics}.{INPUT_SIGNS}" for linear in linears}
    return values | {name: values[source] for name, source in others.items() if source in values}


def vectors(job: Job, linears: Iterable[LinearPlan], values: Values, share: float) -> dict[str, Trained]:
    """How the norms and biases among `values`, and the scales and sign vectors of these linears, are trained: at this
    share of VECTOR_RATE, scales relative to their own size."""
    dtypes = {name: info.dtype for name, info in job.checkpoint.tensors.items()}
    for linear in linears:
        dtypes |= {f"{linear.statistics}.{INPUT_SIGNS}": torch.float16, f"{linear.name}.{OUTPUT_SIGNS}": torch.float16}
        dtypes[f"{linear.name}.{SCALE}"] = torch.bfloat16
    moving, norms = (*CODED, "bias"), {*job.plan.kept, *job.plan.unit_norms}
    found = {}
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if name in dtypes and value.dim() and (leaf in moving or name in norms):  # no constants
            found[name] = Trained(value, dtypes[name], share * VECTOR_RATE * (value.abs() if leaf == SCALE else 1))
    return found


def matrix(w: Float[Tensor, "n k"], dtype: torch.dtype, share: float) -> Trained:
    """How a weight matrix is trained: at this share of WEIGHT_RATE."""
    return Trained(w, dtype, share * WEIGHT_RATE * float(w.square().mean(dtype=torch.float64).sqrt()))


def written(job: Job, values: Values) -> Values:
    """Values as they are written."""
    source, found = job.checkpoint.tensors, Values()
    for name, value in values.items():
        coded = CODED.get(name.rpartition(".")[2])
        like = name if name in source else job.head.source  # a head that the source ties to the embedding
        found[name] = value.to(source[like].dtype) if coded is None else coded[0](value)
    return found


def read(job: Job, tensors: Values) -> Values:
    """Inverse of `written`: float32 on the job's device."""
    found = Values()
    for name, tensor in tensors.items():
        coded = CODED.get(name.rpartition(".")[2])
        found[name] = (tensor.float() if coded is None else coded[1](tensor)).to(job.device)
    return found


def taught_by(plan: Plan) -> Model:
    """The model that the packed one is trained after: that one whose states mean the same."""
    fused = any(linear.rewritten and not linear.undone for linear in plan.linears)
    return "rotated" if fused or plan.online_residual is not None else "original"
