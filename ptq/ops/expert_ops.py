"""What the ops `ptq::..._experts` of the formats have in common: the chosen experts of a block on few tokens.

x [t, k]. `tokens` names a token for every row that is computed, those of one expert one after another: `counts[e]` rows
for the expert e of the lists, none of which may be 0. Lists of weights hold all gates, then all ups, then all downs;
`width` is the number of a gate's outputs. Row by row:

    total[tokens[i]] += shares[i] * down_e(silu(gate_e x) * up_e x)

with product and sum rounded to x's dtype each. `biases` are empty, or one for each weight. `clamped`, where it is not
empty, is alpha and limit of `ptq::clamped_swiglu`, which then stands in the place of silu(gate) * up. The input of gate
and up is quantised to `input_bits` (0: it is not); that of down goes through a Hadamard transform of `order` (0: none),
and has bits of its own. All is done by the functions of the ops that do one step: the numbers are theirs to the bit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ptq.ops.input_steps import Treatment, treated
from ptq.ops.op_declarations import declare, like_first

ROWS = "Tensor x, int[] tokens, int[] counts, float[] shares"
TREATMENTS = "int input_bits, float clip, Tensor[] factors, int order, int down_bits, float down_clip"
INSIDE = "Tensor[] biases, float[] clamped"


class ExpertSteps(NamedTuple):
    """What experts do besides multiplying, the same for all of them but for biases and for signs, which are not here:
    each down has its own."""

    gate_input: Treatment
    """Of the input that gate and up share."""
    down_input: Treatment
    biases: list[Tensor]
    """Empty, or one for each weight."""
    clamped: Sequence[float]
    """Alpha and limit of `ptq::clamped_swiglu`; empty: silu(gate) * up."""


def gated(gate: Tensor, up: Tensor, clamped: Sequence[float]) -> Tensor:
    """What is between the products of an expert."""
    return torch.ops.ptq.clamped_swiglu(gate, up, *clamped) if clamped else torch.ops.ptq.silu_mul(gate, up)


def declare_experts(
    op: str, weights: str, numbers: str, floats: Callable[..., Tensor], integers: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Declare `ptq::<op>(x, tokens, counts, shares, weights ..., width, numbers ..., treatments ..., biases, clamped)`.
    `weights` and `numbers` are the parts of the schema that name the lists of tensors and the numbers of the format.
    `floats(x, weight ..., bias, n, numbers ...)` and `integers(q, q_scale, weight ..., bias, n, numbers ..., dtype)`
    give one product. Returns the reference."""
    lists, count = weights.count("Tensor[]"), numbers.count(",") + 1

    def reference(x, tokens, counts, shares, *rest):
        parts, width, format = rest[:lists], rest[lists], rest[lists + 1 : lists + 1 + count]
        input_bits, clip, factors, order, down_bits, down_clip, biases, clamped = rest[lists + 1 + count :]
        gate_input = Treatment(None, [], 0, input_bits, clip)
        down_input = Treatment(None, factors, order, down_bits, down_clip)
        total, row = torch.zeros_like(x), 0

        def product(into: tuple[Tensor, ...], place: int, n: int) -> Tensor:
            weight = [part[place] if part else None for part in (*parts, biases)]
            return (
                floats(*into, *weight, n, *format) if len(into) == 1 else integers(*into, *weight, n, *format, x.dtype)
            )

        for expert, rows in enumerate(counts):
            here = tokens[row : row + rows]
            into = treated(x[here], *gate_input)
            gate, up = (product(into, place, width) for place in (expert, len(counts) + expert))
            into = treated(gated(gate, up, clamped), *down_input)
            y = product(into, 2 * len(counts) + expert, x.shape[1])
            for token, each, share in zip(here, y, shares[row : row + rows], strict=True):
                total[token] += (each.float() * share).to(x.dtype)
            row += rows
        return total

    schema = f"({ROWS}, {weights}, int width, {numbers}, {TREATMENTS}, {INSIDE}) -> Tensor"
    declare(op, schema, reference, like_first)
    return reference
