"""Proofs that end every run: what was written is read again, run, and compared with what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ptq.errors import InputError, RunError
from ptq.files.checkpoint import Checkpoint
from ptq.hf.packed_config import PtqConfig
from ptq.pipeline.job import Job
from ptq.pipeline.streamed import Streamed
from ptq.statistics.divergence import divergence, standard_error

TOLERANCE = 1e-3
"""Relative float32 difference of states or logits above which a rotation is called wrong; right ones stay near 1e-6."""

REMEDY = "if files of this run were changed or damaged in between, --restart begins again; otherwise please report it"


@dataclass(frozen=True)
class ProbeAgreement:
    """How tokens of the probe come out of the three models."""

    rotation_error: float
    """Largest relative difference of a token's logits, the rotated model's from the original's."""
    kl: float
    """Mean KL divergence of the packed model from the original, nats per token."""
    top1: float
    """Share of probe tokens whose most likely successor is the same."""
    kl_standard_error: float | None = None
    """That of the mean over several rows."""


def over_rows(rows: Sequence[ProbeAgreement]) -> ProbeAgreement:
    """The agreement over rows of the same length."""
    count = len(rows)
    kl, top1 = sum(row.kl for row in rows) / count, sum(row.top1 for row in rows) / count
    return ProbeAgreement(max(row.rotation_error for row in rows), kl, top1, standard_error([row.kl for row in rows]))


def largest_error(found: Float[Tensor, "b t k"], expected: Float[Tensor, "b t k"]) -> float:
    """The largest relative difference of a token. Over all tokens at once, one with a massive activation, as the first
    often has, would hide the others."""
    found, expected = found.double(), expected.double()
    difference = (found - expected).norm(dim=-1)
    relative = difference / expected.norm(dim=-1)
    return relative.masked_fill(difference == 0, 0.0).max().item()  # zeros leave a block where a token's row is zeros


def compare(
    original: Float[Tensor, "b t v"], rotated: Float[Tensor, "b t v"], packed: Float[Tensor, "b t v"]
) -> ProbeAgreement:
    """Compare logits. Raises RunError where the rotated model is not the original, or the packed one is not finite;
    InputError where the original is not."""
    never = original.isneginf() & rotated.isneginf() & packed.isneginf()  # tokens that the model rules out
    if not (original.isfinite() | never).all():
        raise InputError(
            "the original model's logits are not finite: a number in config.json is wrong, or the weights are damaged"
        )
    error = largest_error(rotated.masked_fill(never, 0.0), original.masked_fill(never, 0.0))
    if not error < TOLERANCE:  # also where it is NaN
        raise RunError(
            f"the rotated model's logits differ from the original's by {error:.1e} (relative), so there is no result; "
            f"{REMEDY}"
        )
    if not (packed.isfinite() | never).all():
        raise RunError(f"the packed model's logits are not finite, so there is no result; {REMEDY}")
    p, q = original.double().log_softmax(-1), packed.double().log_softmax(-1)
    return ProbeAgreement(
        error, divergence(p, q).mean().item(), (original.argmax(-1) == packed.argmax(-1)).double().mean().item()
    )


def check_tensor_names(checkpoint: Checkpoint, expected: set[str]) -> None:
    """Check that a written checkpoint holds exactly the tensors that the plan promises. Raises RunError."""
    wrong = sorted(expected ^ set(checkpoint.tensors))
    if wrong:
        raise RunError(f"{checkpoint.folder}: the written checkpoint lacks, or has one too many of, {wrong[0]!r}")


def reload(checkpoint: Checkpoint, job: Job, ids: Int[Tensor, "b t"], logits: Float[Tensor, "b t v"]) -> None:
    """Run a written checkpoint part by part, from its own files and its own config.json, and compare its logits with
    those that the run measured, to the bit. Raises RunError."""
    kept = job.residual_signs() | job.beside_embedding()
    for name, tensor in kept.items():
        if not torch.equal(checkpoint.read(name), tensor):
            raise RunError(f"{checkpoint.folder}: the written tensor {name!r} is not that of the run; {REMEDY}")
    model = Streamed(checkpoint, job.config, job.family, PtqConfig.parse(checkpoint.config), device=job.device)
    state = model.embed(ids)
    for index in range(model.blocks):
        state = model.run(index, state)
    if not torch.equal(torch.cat(list(model.logits(state))), logits):
        raise RunError(
            f"{checkpoint.folder}: the written checkpoint does not give the logits that were measured; {REMEDY}"
        )
