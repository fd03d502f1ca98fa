"""`ptq::e8p_experts` and `ptq::e8p_all_experts`: experts of a block, with E8P weights in tiles
(`quip_sharp.tiled_ops`). Tokens, counts, shares and the lists of weights are those of `ptq.ops.expert_ops`.

`su` are the signs of the input that gates and ups share, then those of the input of each down; `sv` those of all
products: float32, but of `ptq::e8p_all_experts` as they are stored (`ptq.layers.packed_weight`). `order` is that of the
Hadamard matrix for x's width, `width_order` of that for the width of an expert, each with its dense factors.
"""

from typing import Any

import torch
from torch import Tensor

from ptq.layers.packed_weight import loaded_signs
from ptq.ops.expert_ops import INSIDE, ROWS, declare_all_experts, gated, of_experts, summed
from ptq.ops.input_steps import treated
from ptq.ops.op_declarations import like_first, reference_of
from quip_sharp import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

ARGUMENTS = (
    "Tensor[] tiles, Tensor[] scale, Tensor[] su, Tensor[] sv, int width, int bits, int input_bits, float clip, "
    "int down_bits, float down_clip, Tensor[] factors, int order, Tensor[] width_factors, int width_order, "
    f"{INSIDE}"
)


@reference_of("e8p_experts", f"({ROWS}, {ARGUMENTS}) -> Tensor", like_first)
def experts(
    x, tokens, counts, shares, tiles, scale, su, sv, width, bits, input_bits, clip, down_bits, down_clip,
    factors, order, width_factors, width_order, biases, clamped,
):  # fmt: skip
    """The op step by step."""
    count = len(counts)

    def linear(into: tuple[Tensor, ...], place: int, n: int, back: list[Tensor], back_order: int) -> Tensor:
        weight = tiles[place], scale[place], None, n, bits
        if len(into) == 1:
            y = torch.ops.ptq.e8p_linear_tiled(*into, *weight)
        else:
            y = torch.ops.ptq.e8p_linear_quantized(*into, *weight, torch.float32)
        y = torch.ops.ptq.hadamard(y.float(), sv[place], back, back_order, -1, True)
        return (y + biases[place] if biases else y).to(x.dtype)

    def expert(number: int, here: Tensor) -> Tensor:
        into = treated(here, su[0], factors, order, input_bits, clip)
        gate, up = (linear(into, place, width, width_factors, width_order) for place in (number, count + number))
        into = treated(gated(gate, up, clamped), su[1 + number], width_factors, width_order, down_bits, down_clip)
        return linear(into, 2 * count + number, x.shape[1], factors, order)

    return summed(x, tokens, counts, shares, expert)


def _of_chosen(x, chosen, rows, tiles, scale, su, sv, *rest):
    *others, biases, clamped = rest
    into = [loaded_signs(su[0]), *(loaded_signs(su[1 + expert]) for expert in chosen)]
    back = [loaded_signs(each) for each in of_experts(sv, chosen)]
    weights: list[Any] = [of_experts(tiles, chosen), of_experts(scale, chosen), into, back]
    return experts(*(x, *rows, *weights, *others, of_experts(biases, chosen), clamped))


all_experts = declare_all_experts("e8p_all_experts", ARGUMENTS, _of_chosen)
"""The op that holds them step by step."""
