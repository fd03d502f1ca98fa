"""`ptq::e8p_layer`: a decoder layer of a decoded token as one op (`ptq.layer_ops`), for E8P weights in tiles."""

from typing import Any

import torch
from torch import Tensor

from ptq.layer_ops import bias_of, declare_layer
from quip_sharp import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

WEIGHTS = "Tensor[] tiles, Tensor[] scale, int[] n, int bits"


def products(
    seen: tuple[Tensor, ...], biases: list[Tensor], first: int, last: int, dtype: torch.dtype, *weights: Any
) -> list[Tensor]:
    """See `ptq.layer_ops.Products`."""
    tiles, scale, n, *numbers = weights
    found = []
    for place, i in enumerate(range(first, last)):
        weight = tiles[i], scale[i], bias_of(biases, place), n[i], *numbers
        if len(seen) == 1:
            found.append(torch.ops.ptq.e8p_linear_tiled(*seen, *weight))
        else:
            found.append(torch.ops.ptq.e8p_linear_quantized(*seen, *weight, dtype))
    return found


layer = declare_layer("e8p_layer", WEIGHTS, products)
