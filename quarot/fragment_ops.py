"""Integer weights in the layout that the CUDA kernels read: ops, with references in PyTorch. Not on disk.

**Fragments** (`ptq.fragments`), and beside them scales and zeros as for tiles (`ptq.tiles.tile_scales`):

- `fragments` uint8 [row tiles, blocks, 128 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)

The products are those of `quarot.tiled_ops`: `integer_linear_fragments` for floats, whose kernels differ from the
reference in the last bits, and `integer_quantized_fragments` for quantised tokens, the same to the bit.
"""

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from ptq import native
from ptq.fragments import unpack
from ptq.tiles import untile_scales
from quarot import tiled_ops

SCHEMAS = {
    "integer_linear_fragments": "(Tensor x, Tensor fragments, Tensor scale, Tensor? zero, Tensor? bias, int n, "
    "int bits, int group_size) -> Tensor",
    "integer_quantized_fragments": "(Tensor q, Tensor q_scale, Tensor fragments, Tensor scale, Tensor? zero, "
    "Tensor? bias, int n, int bits, int group_size, ScalarType dtype) -> Tensor",
}


def dequantize(
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    n: int,
    bits: int,
    group_size: int,
    k: int | torch.SymInt,
) -> Float32[Tensor, "n k"]:
    """The weight that fragments stand for."""
    number = untile_scales(scale, n).view(torch.bfloat16).float()
    code = unpack(fragments, n, bits, k).float().view(*number.shape, group_size or k)
    offset = 2 ** (bits - 1) if zero is None else untile_scales(zero, n)[..., None].float()
    return ((code - offset) * number[..., None]).view(n, k)


def linear(
    x: Float[Tensor, "*t k"],
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
) -> Float[Tensor, "*t n"]:
    """x Wᵀ + bias; float32 inside, the result in x's dtype. Native kernels differ from it in the last bits."""
    w = dequantize(fragments, scale, zero, n, bits, group_size, x.shape[-1])
    return torch.nn.functional.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)


def quantized(
    q: Int8[Tensor, "*t k"],
    q_scale: Float32[Tensor, "*t"],
    fragments: UInt8[Tensor, "tiles blocks size"],
    scale: Int16[Tensor, "tiles g 16"],
    zero: UInt8[Tensor, "tiles g 16"] | None,
    bias: Float[Tensor, " n"] | None,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`tiled_ops.product` with a weight in fragments."""
    codes = unpack(fragments, n, bits, q.shape[-1])
    flat = None if zero is None else untile_scales(zero, n)
    return tiled_ops.product(q, q_scale, codes, untile_scales(scale, n), flat, bias, bits, group_size, dtype)


def _linear_setup(ctx, inputs, output) -> None:
    x, fragments, scale, zero, bias, n, bits, group_size = inputs
    ctx.save_for_backward(fragments, scale, zero)
    ctx.weight = (n, bits, group_size, x.shape[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx, grad: Tensor):
    """Weights are frozen: gradients of x and of the bias only."""
    fragments, scale, zero = ctx.saved_tensors
    n, bits, group_size, k = ctx.weight
    w = dequantize(fragments, scale, zero, n, bits, group_size, k)
    to_x = (grad.float() @ w).to(grad.dtype) if ctx.needs_input_grad[0] else None
    to_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
    return to_x, None, None, None, to_bias, None, None, None


REFERENCES = {"integer_linear_fragments": linear, "integer_quantized_fragments": quantized}
FAKES = {
    "integer_linear_fragments": lambda x, fragments, scale, zero, bias, n, bits, group_size: x.new_empty(
        *x.shape[:-1], n
    ),
    "integer_quantized_fragments": lambda q, q_scale, fragments, scale, zero, bias, n, bits, group_size, dtype: (
        q.new_empty(*q.shape[:-1], n, dtype=dtype)
    ),
}

for op, schema in SCHEMAS.items():
    torch.library.define(f"ptq::{op}", schema)
    torch.library.impl(f"ptq::{op}", "CompositeExplicitAutograd")(REFERENCES[op])
    torch.library.register_fake(f"ptq::{op}")(FAKES[op])
torch.library.register_autograd("ptq::integer_linear_fragments", _linear_backward, setup_context=_linear_setup)
native.load()
