"""KL divergence of the next token's distributions: how far a model is from another; and how sure a mean is."""

import math
import statistics
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor


def divergence(log_p: Float[Tensor, "*t v"], log_q: Float[Tensor, "*t v"]) -> Float[Tensor, "*t"]:
    """KL(p || q) in nats, from the logarithms of both. A token that p rules out (log -inf) adds nothing, also where q
    does."""
    p = log_p.exp()
    # Masked in front of the product: 0 * inf would be NaN, and so would its gradient.
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)


def standard_error(samples: Sequence[float]) -> float | None:
    """That of the mean of some samples; None where there is but one."""
    return statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None
