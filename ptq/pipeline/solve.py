"""Weights of a block rounded with what the calibration text says of their inputs: with its Hessians and, for GPTAQ, its
cross moments with the inputs in the model that is not quantised (`ptq.statistics.inputs`)."""

from dataclasses import replace

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.hf.blocks import PartialModel
from ptq.ops import memory
from ptq.ops.matmul import product
from ptq.pipeline.job import Job
from ptq.planning.plan import LinearPlan
from ptq.statistics.hessian import Hessians
from ptq.weights.formats import Codebook
from ptq.weights.rounding import Rounded, ldlq, nearest


def crossed_inputs(job: Job, index: int) -> list[str]:
    """The inputs of a block whose cross moments between the original and the quantised model are taken (GPTAQ): those
    of all linears that are rounded, but not of experts, to which the two models route different tokens."""
    if not job.recipe.gptaq_alpha:
        return []
    return list(dict.fromkeys(x.statistics for x in job.plan.block(index) if x.statistics and x.expert is None))


def round_with_hessian(
    job: Job, hessians: Hessians, linear: LinearPlan, part: PartialModel, key: str, codebook: Codebook
) -> Rounded:
    """A weight rounded with the Hessian of its input; to nearest, where no token of the text says what that is."""
    memory.give_back()
    drift = _drift(job, hessians, linear, part, key) if job.recipe.gptaq_alpha and linear.expert is None else None
    hessian, found = hessians.of(key, linear, job.plan)
    if hessian is None:
        return replace(nearest(take_weight(job, linear, part), codebook, name=linear.name), **found)
    rounded = ldlq(  # the weight is handed over, not kept: the solver frees it when it can
        take_weight(job, linear, part), hessian, codebook, drift=drift,
        damping=job.recipe.damping, sweeps=job.recipe.sweeps, name=linear.name,
    )  # fmt: skip
    return replace(rounded, **found)


def _drift(job: Job, hessians: Hessians, linear: LinearPlan, part: PartialModel, key: str) -> Float32[Tensor, "n k"]:
    """alpha W C, with the cross moments C of the input."""
    assert linear.statistics is not None, linear.name
    weight = weight_or_rewritten(job, linear, part.parameter(linear.dense_weight))
    return product(weight, hessians.cross(key, linear.statistics)).mul_(job.recipe.gptaq_alpha)


def take_weight(job: Job, linear: LinearPlan, part: PartialModel) -> Float[Tensor, "n k"]:
    """The rewritten weight of a linear, which the block then does not hold any more."""
    return weight_or_rewritten(job, linear, part.take(linear.dense_weight))


def weight_or_rewritten(job: Job, linear: LinearPlan, weight: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """A rewritten weight as a block held it, or made again where the block holds it no more."""
    return job.rewritten(linear, torch.float32) if weight.is_meta else weight
