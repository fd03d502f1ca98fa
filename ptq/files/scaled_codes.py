"""Weights that files hold as codes of FP8 or FP4 with a factor for every block of them, as plain numbers."""

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from ptq.errors import InputError

ROWS = 128
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([MAGNITUDES, -MAGNITUDES])
PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1)
"""The two numbers of a byte that holds two e2m1 codes, the first one in its low bits."""


def dequantize(
    codes: Shaped[Tensor, "n c"], scale: Float32[Tensor, "..."], block: tuple[int, int], dtype: torch.dtype
) -> Float[Tensor, "n k"]:
    """A weight from its codes, FP8 or two of 4 bits in a byte, and one factor for each `block`: the product in float32,
    cast once to `dtype`."""
    pairs = codes.dtype == torch.uint8
    n, k, (rows, columns) = len(codes), codes.shape[1] * (2 if pairs else 1), block
    grid = scale.view(-(-n // rows), -(-k // columns))
    result = torch.empty(n, k, dtype=dtype)
    for some in torch.arange(n).split(ROWS):  # the float32 numbers of few rows stay in the cache
        piece = slice(int(some[0]), int(some[-1]) + 1)
        numbers = PAIRS[codes[piece].int()].flatten(1) if pairs else codes[piece].float()
        result[piece] = numbers * grid[some // rows].repeat_interleave(columns, dim=1)[:, :k]
    return result


def check_scale(name: str, scale: Float32[Tensor, "..."]) -> None:
    """Raise InputError for factors of weights of which one is NaN, Inf or negative."""
    wrong = scale[~(scale.isfinite() & (scale >= 0))]
    if wrong.numel():
        raise InputError(
            f"tensor {name!r} holds {wrong.numel()} scales that are negative or not finite, the first is "
            f"{wrong[0].item():g}; the checkpoint is damaged: fetch it again"
        )
