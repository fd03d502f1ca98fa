"""What a decoder layer does to few tokens before and after its attention, each as one op, for integer weights in tiles.

- `ptq::integer_layer_start`: RMSNorm, and the products with q_proj, k_proj and v_proj.
- `ptq::integer_layer_end`: the product of o_proj added to the layer's input; then RMSNorm, gate_proj and up_proj,
  silu(gate) * up, down_proj, added again.

Products quantise their input to `input_bits` first (0: they don't); that of down_proj goes through a Hadamard transform
of `order` before (0: none) and has bits of its own. Lists hold one tensor for each weight, `zero` and `bias` may be
empty. Everything is done by the functions of the ops that do one step, in their order: the numbers are theirs to the
bit. (On a decoded token, calling fifteen ops takes as long as half of the products.)
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.op_declarations import declare_all

_NORM = "Tensor gain, float eps, float offset, bool round_first"
_WEIGHTS = "Tensor[] tiles, Tensor[] scale, Tensor[] zero, Tensor[] bias, int[] n, int bits, int group_size"
SCHEMAS = {
    "integer_layer_start": f"(Tensor x, {_NORM}, {_WEIGHTS}, int input_bits, float clip) -> Tensor[]",
    "integer_layer_end": f"(Tensor attended, Tensor x, {_NORM}, {_WEIGHTS}, int input_bits, float clip, "
    "Tensor[] factors, int order, int down_bits, float down_clip) -> Tensor",
}

Weights = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[int]]


def products(
    x: Float[Tensor, "*t k"], bits: int, clip: float, factors: list[Tensor], order: int, w: Weights, *grid: int
) -> list[Tensor]:
    """x, transformed and quantised if need be, times several weights."""
    if not bits:
        x = torch.ops.ptq.hadamard(x, None, factors, order, -1, False) if order else x
        return torch.ops.ptq.integer_linears_tiled(x, *w, *grid)
    if order:
        q, q_scale = torch.ops.ptq.hadamard_quantize(x, None, factors, order, bits, clip)
    else:
        q, q_scale = torch.ops.ptq.quantize_tokens(x, bits, clip)
    return torch.ops.ptq.integer_linears_quantized(q, q_scale, *w, *grid, x.dtype)


def start(x, gain, eps, offset, round_first, tiles, scale, zero, bias, n, bits, group_size, input_bits, clip):
    """`ptq::integer_layer_start` step by step."""
    normed = torch.ops.ptq.rms_norm(x, gain, eps, offset, round_first)
    return products(normed, input_bits, clip, [], 0, (tiles, scale, zero, bias, n), bits, group_size)


def end(
    attended, x, gain, eps, offset, round_first, tiles, scale, zero, bias, n, bits, group_size, input_bits, clip,
    factors, order, down_bits, down_clip,
):  # fmt: skip
    """`ptq::integer_layer_end` step by step."""
    output, gated, down = (
        (tiles[at], scale[at], zero[at], bias[at], n[at]) for at in (slice(0, 1), slice(1, 3), slice(3, 4))
    )
    grid = bits, group_size
    y = x + products(attended, input_bits, clip, [], 0, output, *grid)[0]
    normed = torch.ops.ptq.rms_norm(y, gain, eps, offset, round_first)
    gate, up = products(normed, input_bits, clip, [], 0, gated, *grid)
    return y + products(torch.ops.ptq.silu_mul(gate, up), down_bits, down_clip, factors, order, down, *grid)[0]


REFERENCES = {"integer_layer_start": start, "integer_layer_end": end}
FAKES = {
    "integer_layer_start": lambda x, gain, eps, offset, first, tiles, scale, zero, bias, n, *rest: [
        x.new_empty(*x.shape[:-1], size) for size in n
    ],
    "integer_layer_end": lambda attended, x, *rest: x.new_empty(x.shape),
}

declare_all(SCHEMAS, REFERENCES, FAKES)
