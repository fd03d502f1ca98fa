"""Integer weights in the layout that the CPU kernels read: ops, with references in PyTorch. Not on disk.

**Tiles** (`ptq.tiles`), and beside them:

- `tiles` uint8 [row tiles, super-blocks, 64 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)

**Quantised tokens.** q int8 [*, k] and q_scale float32 [*] stand for x = q_scale * q. `integer_linear_quantized` is
defined to the bit: per output and group I = sum of q (code - zero), an exact integer; in float32, group after group,
acc = acc + scale * I, each operation rounded; y = acc * q_scale, then + bias, then the cast to the dtype asked for.

**Several weights**, one input: `integer_linears_...` give the same numbers as one call for each, and wake the threads
once. The lists `zero` and `bias` are empty, or have one tensor for each weight. No gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from ptq import native
from ptq.tiles import REFERENCES as TILE_REFERENCES
from ptq.tiles import unpack, untile_scales

SCHEMAS = {
    "integer_linear_tiled": "(Tensor x, Tensor tiles, Tensor scale, Tensor? zero, Tensor? bias, int n, int bits, "
    "int group_size) -> Tensor",
    "integer_linear_quantized": "(Tensor q, Tensor q_scale, Tensor tiles, Tensor scale, Tensor? zero, Tensor? bias, "
    "int n, int bits, int group_size, ScalarType dtype) -> Tensor",
    "integer_linears_tiled": "(Tensor x, Tensor[] tiles, Tensor[] scale, Tensor[] zero, Tensor[] bias, int[] n, "
    "int bits, int group_size) -> Tensor[]",
    "integer_linears_quantized": "(Tensor q, Tensor q_scale, Tensor[] tiles, Tensor[] scale, Tensor[] zero, "
    "Tensor[] bias, int[] n, int bits, int group_size, ScalarType dtype) -> Tensor[]",
}


def dequantize(
    tiles: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    n: int,
    bits: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that tiles stand for."""
    number = untile_scales(scale, n).view(torch.bfloat16).float()
    code = unpack(tiles, n, bits, k).float().view(*number.shape, group_size or k)
    offset = 2 ** (bits - 1) if zero is None else untile_scales(zero, n)[..., None].float()
    return ((code - offset) * number[..., None]).view(n, k)


def linear_tiled(
    x: Float[Tensor, "*t k"],
    tiles: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
) -> Float[Tensor, "*t n"]:
    """x Wᵀ + bias; float32 inside, the result in x's dtype. Native kernels differ from it in the last bits."""
    w = dequantize(tiles, scale, zero, n, bits, group_size, x.shape[-1])
    return torch.nn.functional.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)


def product(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    codes: UInt8[Tensor, "n k"],
    scale: Int16[Tensor, "n g"],
    zero: UInt8[Tensor, "n g"] | None,
    bias: Float[Tensor, " n"] | None,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """The product of quantised tokens with codes, as the module docstring defines it. Float64 holds the integers."""
    n, k = codes.shape
    size = group_size or max(k, 1)
    tokens, number = q.reshape(-1, k), scale.view(torch.bfloat16).float()
    acc = q_scale.new_zeros(tokens.shape[0], n, dtype=torch.float32)
    for g in range(k // size):
        columns = slice(g * size, (g + 1) * size)
        offset = 2 ** (bits - 1) if zero is None else zero[:, g, None].double()
        whole = tokens[:, columns].double() @ (codes[:, columns].double() - offset).t()
        acc = acc + number[:, g] * whole.float()
    y = acc * q_scale.reshape(-1, 1)
    y = y if bias is None else y + bias.float()
    return y.to(dtype).view(*q.shape[:-1], n)


def linear_quantized(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    tiles: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`product` with a tiled weight."""
    codes = unpack(tiles, n, bits, q.shape[-1])
    flat = None if zero is None else untile_scales(zero, n)
    return product(q, q_scale, codes, untile_scales(scale, n), flat, bias, bits, group_size, dtype)


def linears(one: str, inputs: tuple[Tensor, ...], weights: Sequence[Sequence[Any]], *rest: Any) -> list[Tensor]:
    """One call of the op `one` for every weight: `weights` are the lists of tiles, scales, zeros, biases and n."""
    count = len(weights[0])
    each = zip(*(column or [None] * count for column in weights), strict=True)
    return [getattr(torch.ops.ptq, one)(*inputs, *weight, *rest) for weight in each]


def _linear_setup(ctx, inputs, output) -> None:
    x, tiles, scale, zero, bias, n, bits, group_size = inputs
    ctx.save_for_backward(tiles, scale, zero)
    ctx.weight = (n, bits, group_size, x.shape[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx, grad: Tensor):
    """Weights are frozen: gradients of x and of the bias only."""
    tiles, scale, zero = ctx.saved_tensors
    n, bits, group_size, k = ctx.weight
    w = dequantize(tiles, scale, zero, n, bits, group_size, k)
    to_x = (grad.float() @ w).to(grad.dtype) if ctx.needs_input_grad[0] else None
    to_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
    return to_x, None, None, None, to_bias, None, None, None


REFERENCES = {
    **TILE_REFERENCES,
    "integer_linear_tiled": linear_tiled,
    "integer_linear_quantized": linear_quantized,
    "integer_linears_tiled": lambda x, tiles, scale, zero, bias, n, *rest: linears(
        "integer_linear_tiled", (x,), (tiles, scale, zero, bias, n), *rest
    ),
    "integer_linears_quantized": lambda q, q_scale, tiles, scale, zero, bias, n, *rest: linears(
        "integer_linear_quantized", (q, q_scale), (tiles, scale, zero, bias, n), *rest
    ),
}
FAKES = {
    "integer_linear_tiled": lambda x, tiles, scale, zero, bias, n, bits, group_size: x.new_empty(*x.shape[:-1], n),
    "integer_linear_quantized": lambda q, q_scale, tiles, scale, zero, bias, n, bits, group_size, dtype: q.new_empty(
        *q.shape[:-1], n, dtype=dtype
    ),
    "integer_linears_tiled": lambda x, tiles, scale, zero, bias, n, bits, group_size: [
        x.new_empty(*x.shape[:-1], size) for size in n
    ],
    "integer_linears_quantized": lambda q, q_scale, tiles, scale, zero, bias, n, bits, group_size, dtype: [
        q.new_empty(*q.shape[:-1], size, dtype=dtype) for size in n
    ],
}

for op, schema in SCHEMAS.items():
    torch.library.define(f"ptq::{op}", schema)
    torch.library.impl(f"ptq::{op}", "CompositeExplicitAutograd")(REFERENCES[op])
    torch.library.register_fake(f"ptq::{op}")(FAKES[op])
torch.library.register_autograd("ptq::integer_linear_tiled", _linear_backward, setup_context=_linear_setup)
native.load()
