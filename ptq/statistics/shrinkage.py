"""Hessians from few tokens: an expert sees only those that are routed to it (docs/math.md, section 6).

Its H is drawn towards what it would be if the expert were like all others: shrinkage (Ledoit and Wolf 2004), with the
share that is best for tokens of one size. With many tokens nothing is left of it.
"""

import torch
from jaxtyping import Float32
from torch import Tensor

PIECE = 1024
"""Rows of H whose difference from another is held at once."""


def shrunk(
    h: Float32[Tensor, "k k"], tokens: int, pool: Float32[Tensor, "k k"] | None = None, pool_tokens: int = 0
) -> tuple[Float32[Tensor, "k k"] | None, float]:
    """H / tokens drawn towards the pool's mean, in H's place, and the share of the latter, 0 to 1.

    `h` is the sum of x xᵀ over the tokens, `pool` that over the tokens of all who read the like. Without a pool the
    target is the mean of H's diagonal times the identity. None where neither has seen a token.
    """
    if pool_tokens == 0:
        pool = None
    if tokens == 0:
        return (None, 1.0) if pool is None else (h.copy_(pool).div_(pool_tokens), 1.0)
    h /= tokens
    trace = float(h.diagonal().sum(dtype=torch.float64))
    mean = trace / len(h)
    away = 0.0
    for start in range(0, len(h), PIECE):
        piece = h[start : start + PIECE].clone()
        if pool is None:
            piece.diagonal(start).sub_(mean)
        else:
            piece.sub_(pool[start : start + PIECE], alpha=1 / pool_tokens)
        away += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
    share = min(1.0, trace**2 / (tokens * away)) if away > 0 else 0.0
    h *= 1 - share
    if pool is None:
        h.diagonal().add_(share * mean)
    else:
        h.add_(pool, alpha=share / pool_tokens)
    return h, share
