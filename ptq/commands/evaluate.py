"""Perplexity by the papers' protocol, and the agreement of a model with its original.

In each window (`ptq.commands.windows`) every token but the first is predicted; perplexity is exp(mean token loss).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ptq.commands.windows import Windows, check_fit
from ptq.errors import InputError, RunError
from ptq.statistics.divergence import divergence, standard_error

# Positions whose log-softmax is held at once: 256 x 128k float32 logits are 128 MiB, whatever the context.
CHUNK = 256
_EXP_OVERFLOWS = 709.0

Progress = Callable[[int, int], None]
"""Called with how much is done, windows or blocks, and how much there is in all."""


@dataclass(frozen=True)
class Perplexity:
    """Mean loss in nats per predicted token.

    The standard error takes the windows, not the tokens, as independent samples, because neighbouring tokens are not;
    it is None for a single window.
    """

    loss: float
    loss_standard_error: float | None
    windows: int
    context: int

    @property
    def tokens(self) -> int:
        """Predicted tokens: all but the first of each window."""
        return self.windows * (self.context - 1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _EXP_OVERFLOWS else math.inf

    @property
    def standard_error(self) -> float | None:
        """Standard error of the perplexity, to first order: d exp(loss) = exp(loss) d loss."""
        return None if self.loss_standard_error is None else self.perplexity * self.loss_standard_error


@dataclass(frozen=True)
class Agreement:
    """How far `model` has moved from `original` on the same windows.

    kl: mean KL(original || model) in nats per predicted token. top1: share of those tokens where both models have the
    same most likely token. The standard errors take windows as samples, like Perplexity; the one of the loss increase
    is paired, so it is far smaller than that of either loss.
    """

    model: Perplexity
    original: Perplexity
    kl: float
    kl_standard_error: float | None
    top1: float
    loss_increase_standard_error: float | None

    @property
    def loss_increase(self) -> float:
        """Nats per token; exp of it is the ratio of the perplexities."""
        return self.model.loss - self.original.loss


def perplexity(model: PreTrainedModel, windows: Windows, *, progress: Progress | None = None) -> Perplexity:
    """Perplexity of `model` on `windows`; log-softmax in float32, sums in float64, one window of logits at a time.

    Raises InputError if the windows do not fit the model, RunError if the model gives a loss that is not finite.
    """
    check_fit(model.config, windows)
    means: list[float] = []
    with torch.inference_mode(), _evaluating(model):
        for row in windows.tokens:
            logits = _logits(model, row)
            targets = row[1:].to(logits.device)
            total = sum(_losses(_log_softmax(logits[chunk]), targets[chunk]).item() for chunk in _chunks(len(targets)))
            means.append(_finite(total / len(targets), len(means)))
            if progress:
                progress(len(means), len(windows))
    return _summary(means, windows.context)


def compare(
    model: PreTrainedModel, original: PreTrainedModel, windows: Windows, *, progress: Progress | None = None
) -> Agreement:
    """`compare_all` of one model."""
    [agreement] = compare_all([model], original, windows, progress=progress)
    return agreement


def compare_all(
    models: Sequence[PreTrainedModel], original: PreTrainedModel, windows: Windows, *, progress: Progress | None = None
) -> list[Agreement]:
    """Compare the predictions of each model with those of `original`, which sees every window once; the logits of two
    models for one window at a time.

    Raises InputError if the windows do not fit a model or the vocabularies differ, RunError for losses not finite.
    """
    rows: list[list[_Compared]] = [[] for _ in models]
    with torch.inference_mode(), ExitStack() as modes:
        for model in (*models, original):
            check_fit(model.config, windows)
            modes.enter_context(_evaluating(model))
        for index, row in enumerate(windows.tokens):
            theirs = _logits(original, row)
            for model, found in zip(models, rows, strict=True):
                found.append(_compare_window(_logits(model, row), theirs, row[1:], index))
            if progress:
                progress(index + 1, len(windows))
    return [_agreement(found, windows) for found in rows]


def compare_logits(
    pairs: Iterable[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"]]],
    windows: Windows,
) -> Agreement:
    """Compare the logits of a model and of its original that predict all but the first token of every window.

    Raises InputError if the vocabularies differ, RunError for losses not finite.
    """
    rows: list[_Compared] = []
    for (logits, original_logits), row in zip(pairs, windows.tokens, strict=True):
        rows.append(_compare_window(logits, original_logits, row[1:], len(rows)))
    return _agreement(rows, windows)


@dataclass(frozen=True)
class _Compared:
    """Means over the predicted tokens of one window."""

    loss: float
    original_loss: float
    kl: float
    top1: float


def _agreement(rows: Sequence[_Compared], windows: Windows) -> Agreement:
    return Agreement(
        model=_summary([row.loss for row in rows], windows.context),
        original=_summary([row.original_loss for row in rows], windows.context),
        kl=statistics.fmean(row.kl for row in rows),
        kl_standard_error=standard_error([row.kl for row in rows]),
        top1=statistics.fmean(row.top1 for row in rows),
        loss_increase_standard_error=standard_error([row.loss - row.original_loss for row in rows]),
    )


def _compare_window(
    logits: Float[Tensor, "t v"], original_logits: Float[Tensor, "t w"], targets: Int[Tensor, " t"], index: int
) -> _Compared:
    ours, theirs = logits.shape[-1], original_logits.shape[-1]
    if ours != theirs:
        raise InputError(f"the models do not share a vocabulary: {ours} logits against {theirs}")
    device, count = logits.device, len(targets)
    targets = targets.to(device)
    loss = original_loss = kl = same = 0.0
    for chunk in _chunks(count):
        log_q = _log_softmax(logits[chunk])
        log_p = _log_softmax(original_logits[chunk].to(device))
        loss += _losses(log_q, targets[chunk]).item()
        original_loss += _losses(log_p, targets[chunk]).item()
        kl += divergence(log_p, log_q).sum(dtype=torch.float64).item()
        same += (log_q.argmax(-1) == log_p.argmax(-1)).sum().item()
    return _Compared(
        loss=_finite(loss / count, index),
        original_loss=_finite(original_loss / count, index),
        kl=max(kl / count, 0.0),  # rounding of equal models gives -1e-9
        top1=same / count,
    )


def _logits(model: PreTrainedModel, row: Int[Tensor, " context"]) -> Float[Tensor, "t v"]:
    """Logits that predict row[1:]."""
    return model(input_ids=row[None].to(model.device), use_cache=False).logits[0, :-1]


def _log_softmax(logits: Float[Tensor, "t v"]) -> Float[Tensor, "t v"]:
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _losses(log_probabilities: Float[Tensor, "t v"], targets: Int[Tensor, " t"]) -> Float[Tensor, ""]:
    """Sum of the token losses, in float64."""
    return -log_probabilities.gather(1, targets[:, None]).sum(dtype=torch.float64)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, count, CHUNK))


def _summary(means: list[float], context: int) -> Perplexity:
    # Windows are equally long, so the mean of their means is the mean over all tokens.
    return Perplexity(statistics.fmean(means), standard_error(means), len(means), context)


def _finite(loss: float, index: int) -> float:
    if not math.isfinite(loss):
        raise RunError(f"the loss in window {index} is {loss}: the model computes NaN or infinite logits there")
    return loss


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode (no dropout), restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
