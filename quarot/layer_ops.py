"""`ptq::integer_layer`: a decoder layer that is held for its tokens (`ptq.ops.layer_ops`), with integer weights in
tiles.

`zero` are empty, or one for each weight.
"""

from typing import Any

import torch
from torch import Tensor

from ptq.ops.layer_ops import declare_layer
from quarot import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

WEIGHTS = "Tensor[] tiles, Tensor[] scale, Tensor[] zero, int[] n, int bits, int group_size"


def products(
    seen: tuple[Tensor, ...], biases: list[Tensor], first: int, last: int, dtype: torch.dtype, *weights: Any
) -> list[Tensor]:
    """See `ptq.ops.held_layer.Products`."""
    tiles, scale, zero, n, *grid = weights
    lists = [part[first:last] for part in (tiles, scale, zero)]
    if len(seen) == 1:
        return torch.ops.ptq.integer_linears_tiled(*seen, *lists, biases, n[first:last], *grid)
    return torch.ops.ptq.integer_linears_quantized(*seen, *lists, biases, n[first:last], *grid, dtype)


layer = declare_layer("integer_layer", WEIGHTS, products)
