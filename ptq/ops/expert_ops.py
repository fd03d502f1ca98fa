"""What the ops `ptq::..._experts` of the formats have in common: the chosen experts of a block on few tokens;
and `ptq::..._all_experts`, which hold all experts of a block for a router (`ptq.ops.moe_ops`).

x [t, k]. `tokens` names a token for every row that is computed, those of one expert one after another: `counts[e]` rows
for the expert e of the lists, none of which may be 0. Lists of weights hold all gates, then all ups, then all downs;
`width` is the number of a gate's outputs. Row by row:

    total[tokens[i]] += shares[i] * down_e(silu(gate_e x) * up_e x)

with product and sum rounded to x's dtype each. `biases` are empty, or one for each weight. `clamped`, where it is not
empty, is alpha and limit of `ptq::clamped_swiglu`, which then stands in the place of silu(gate) * up. The input of gate
and up is quantised to `input_bits` (0: it is not); that of down goes through a Hadamard transform of `order` (0: none),
and has bits of its own. All is done by the functions of the ops that do one step: the numbers are theirs to the bit.

What holds all experts is a handle, as those of `ptq.ops.layer_ops`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
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


ExpertRows = tuple[list[int], list[int], list[float]]
"""The tokens of every expert one after the other, how many each expert has, and the share of each in its token's sum:
`tokens`, `counts` and `shares`."""


def gated(gate: Tensor, up: Tensor, clamped: Sequence[float]) -> Tensor:
    """What is between the products of an expert."""
    return torch.ops.ptq.clamped_swiglu(gate, up, *clamped) if clamped else torch.ops.ptq.silu_mul(gate, up)


def summed(
    x: Float[Tensor, "t k"],
    tokens: list[int],
    counts: list[int],
    shares: list[float],
    expert: Callable[[int, Tensor], Tensor],
) -> Float[Tensor, "t k"]:
    """What every token gets of its experts. `expert(number, rows of x)` gives what one makes of its tokens."""
    total, row = torch.zeros_like(x), 0
    for number, rows in enumerate(counts):
        here = tokens[row : row + rows]
        y = expert(number, x[here])
        for token, each, share in zip(here, y, shares[row : row + rows], strict=True):
            total[token] += (each.float() * share).to(x.dtype)
        row += rows
    return total


def declare_experts(
    format: str, weights: str, numbers: str, floats: Callable[..., Tensor], integers: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Declare `ptq::<format>_experts(x, tokens, counts, shares, weights ..., width, numbers ..., treatments ...,
    biases, clamped)`, and `ptq::<format>_all_experts(weights ..., and so on)`, a handle.
    `weights` and `numbers` are the parts of the schema that name the lists of tensors and the numbers of the format.
    `floats(x, weight ..., bias, n, numbers ...)` and `integers(q, q_scale, weight ..., bias, n, numbers ..., dtype)`
    give one product. Returns their references."""
    lists, sizes = weights.count("Tensor[]"), numbers.count(",") + 1

    def reference(x, tokens, counts, shares, *rest):
        parts, width, format = rest[:lists], rest[lists], rest[lists + 1 : lists + 1 + sizes]
        input_bits, clip, factors, order, down_bits, down_clip, biases, clamped = rest[lists + 1 + sizes :]
        gate_input = Treatment(None, [], 0, input_bits, clip)
        down_input = Treatment(None, factors, order, down_bits, down_clip)
        count = len(counts)

        def product(into: tuple[Tensor, ...], place: int, n: int) -> Tensor:
            weight = [part[place] if part else None for part in (*parts, biases)]
            return (
                floats(*into, *weight, n, *format) if len(into) == 1 else integers(*into, *weight, n, *format, x.dtype)
            )

        def expert(number: int, here: Tensor) -> Tensor:
            into = treated(here, *gate_input)
            gate, up = (product(into, place, width) for place in (number, count + number))
            into = treated(gated(gate, up, clamped), *down_input)
            return product(into, 2 * count + number, x.shape[1])

        return summed(x, tokens, counts, shares, expert)

    def compute(x, experts, rows, *rest):
        *others, biases, clamped = rest[lists:]
        parts = [of_experts(part, experts) for part in rest[:lists]]
        return reference(x, *rows, *parts, *others, of_experts(biases, experts), clamped)

    arguments = f"{weights}, int width, {numbers}, {TREATMENTS}, {INSIDE}"
    declare(f"{format}_experts", f"({ROWS}, {arguments}) -> Tensor", reference, like_first)
    return reference, declare_all_experts(f"{format}_all_experts", arguments, compute)


def declare_all_experts(op: str, arguments: str, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Declare `ptq::<op>(arguments ...)`, a handle. `compute(x, experts, rows, arguments ...)` gives what the experts
    of those numbers make of their rows. Returns the reference."""

    def held(*rest):
        handle, (tiles, *_) = torch.empty(1, dtype=torch.uint8), rest
        if not tiles or len(tiles) % 3:
            raise RuntimeError("experts: expected three weights for each of them")
        vars(handle)["experts"] = len(tiles) // 3, lambda x, experts, rows: compute(x, experts, rows, *rest)
        return handle

    declare(op, f"({arguments}) -> Tensor", held, lambda *rest: torch.empty(1, dtype=torch.uint8))
    return held


def rows_of(chosen: list[list[int]], weighed: list[list[float]]) -> tuple[list[int], ExpertRows]:
    """The experts that tokens have chosen, those of low numbers first, and their rows; of what every token has chosen,
    and their weights."""
    rows = sorted((number, token, place) for token, row in enumerate(chosen) for place, number in enumerate(row))
    counts = Counter(number for number, *_ in rows)
    shares = [weighed[token][place] for _, token, place in rows]
    return list(counts), ([token for _, token, _ in rows], list(counts.values()), shares)


def of_experts(weights: list[Tensor], experts: list[int]) -> list[Tensor]:
    """Of all gates, all ups and all downs, those of some experts; nothing of an empty list."""
    count = len(weights) // 3
    return [weights[role * count + expert] for role in range(3) for expert in experts] if weights else []
