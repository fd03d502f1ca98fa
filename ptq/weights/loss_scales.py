"""Scales chosen by the loss of LDLQ itself.

A codebook fits scales to the weight alone. LDLQ rounds something else: the weight plus the feedback of errors behind,
which is larger, and what is clipped there is fed back again. So of a few scales around those that were fitted, the ones
with the least loss are taken: for a codebook with one scale, on some rows of the weight; where rows have scales of
their own, the loss is a sum over rows, and each takes those that are best for itself.
"""

import torch

from ptq.weights.feedback import feedback, row_losses
from ptq.weights.formats import RowScaledCodebook, ScaledCodebook, Scales
from ptq.weights.sweeps import Problem

MULTIPLES = (0.95, 1.05, 1.1, 1.2)
"""What is tried beside the fitted scales of rows, in times these."""


def of_weight(part: Problem, scales: Scales) -> Scales:
    """The scale with the least loss on some rows, among those that a `ScaledCodebook` proposes; any other codebook's
    as they are."""
    if not isinstance(part.codebook, ScaledCodebook):
        return scales
    return min(part.codebook.trials(scales), key=lambda trial: part.loss(feedback(part, trial)[1]))


def of_rows(problem: Problem, scales: Scales) -> Scales:
    """The scales of each row with the least loss, of a `RowScaledCodebook`; any other codebook's as they are."""
    codebook = problem.codebook
    if not isinstance(codebook, RowScaledCodebook):
        return scales
    multiples = [codebook.multiplied(scales, factor) for factor in MULTIPLES]
    tried = [scales, *(each for each in multiples if each is not None)]
    if len(tried) == 1:
        return scales
    losses = torch.stack([row_losses(problem, each) for each in tried])
    best = losses.nan_to_num(nan=torch.inf).argmin(0)  # where all are as good, what was fitted
    rows = torch.arange(len(best), device=best.device)
    return {part: torch.stack([each[part] for each in tried])[best, rows] for part in scales}
