"""`ptq::integer_experts`: what chosen experts of a block make of few tokens, as one op, for integer weights in tiles.

x [t, k]. `tokens` names a token for every row that is computed, those of one expert one after another: `counts[e]` rows
for the expert e of the lists, none of which may be 0. `tiles`, `scale` and `zero` (empty, or as many) are those of all
gates, then of all ups, then of all downs; `width` is the number of a gate's outputs. Row by row:

    total[tokens[i]] += shares[i] * down_e(silu(gate_e x) * up_e x)

with product and sum rounded to x's dtype each. What is done to the inputs of the products, and in which order, is said
in `quarot.layer_ops`: the numbers are those of the ops that do one step, to the bit.
"""

from typing import Any

import torch
from torch import Tensor

from ptq import steps as _steps  # noqa: F401 (registers the ops)
from ptq.op_declarations import declare
from quarot.layer_ops import products

SCHEMA = (
    "(Tensor x, int[] tokens, int[] counts, float[] shares, Tensor[] tiles, Tensor[] scale, Tensor[] zero, int width, "
    "int bits, int group_size, int input_bits, float clip, Tensor[] factors, int order, int down_bits, "
    "float down_clip) -> Tensor"
)


def experts(
    x, tokens, counts, shares, tiles, scale, zero, width, bits, group_size, input_bits, clip, factors, order, down_bits,
    down_clip,
):  # fmt: skip
    """`ptq::integer_experts` step by step."""
    total, row, count = torch.zeros_like(x), 0, len(counts)

    def weights(n: int, *places: int) -> list[Any]:
        some = [[part[place] for place in places] if part else [] for part in (tiles, scale, zero)]
        return [*some, [], [n] * len(places)]

    for expert, rows in enumerate(counts):
        here = tokens[row : row + rows]
        gate_up = weights(width, expert, count + expert), (bits, group_size)
        gate, up = products(x[here], input_bits, clip, [], 0, *gate_up)
        down = weights(x.shape[1], 2 * count + expert), (bits, group_size)
        (y,) = products(torch.ops.ptq.silu_mul(gate, up), down_bits, down_clip, factors, order, *down)
        for token, each, share in zip(here, y, shares[row : row + rows], strict=True):
            total[token] += (each.float() * share).to(x.dtype)
        row += rows
    return total


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


declare("integer_experts", SCHEMA, experts, _fake)
