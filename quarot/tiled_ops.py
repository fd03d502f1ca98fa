"""Integer weights in the layout that the CPU kernels read: ops, with references in PyTorch. Not on disk.

**Tiles**, layout version 1 (`csrc/integer_tiled/layout.h`): W[n, k] padded with zeros to super-blocks of 16 rows and 32
columns. A code's bits are cut into planes (`PLANES`), the widest first, which holds the lowest bits. A plane of width p
is p vectors of 64 bytes; byte 4 r + j of a vector (row r, j = 0..3) holds 8 / p fields, lowest bits first; field i of
vector v belongs to column (v (8 / p) + i) 4 + j. So one instruction multiplies four neighbouring columns of sixteen
rows with four activations, and a thread reads its rows as one stream.

- `tiles` uint8 [row tiles, super-blocks, 64 bits]
- `scale` int16 [row tiles, g, 16]: bits of bfloat16; `zero` uint8 likewise, or None where it is 2^(bits - 1)

**Quantised tokens.** q int8 [*, k] and q_scale float32 [*] stand for x = q_scale * q. `integer_linear_quantized` is
defined to the bit: per output and group I = sum of q (code - zero), an exact integer; in float32, group after group,
acc = acc + scale * I, each operation rounded; y = acc * q_scale, then + bias, then the cast to the dtype asked for.
"""

import torch
from jaxtyping import Float, Float32, Int8, Int16, UInt8
from torch import Tensor

from ptq import native
from quarot import integer_ops

ROWS, COLUMNS = 16, 32
PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the planes of a code, from its lowest bits up."""

SCHEMAS = {
    "integer_prepack": "(Tensor codes, int bits, int k) -> Tensor",
    "integer_unprepack": "(Tensor tiles, int n, int bits, int k) -> Tensor",
    "integer_linear_tiled": "(Tensor x, Tensor tiles, Tensor scale, Tensor? zero, Tensor? bias, int n, int bits, "
    "int group_size) -> Tensor",
    "integer_linear_quantized": "(Tensor q, Tensor q_scale, Tensor tiles, Tensor scale, Tensor? zero, Tensor? bias, "
    "int n, int bits, int group_size, ScalarType dtype) -> Tensor",
}


def applies(group_size: int) -> bool:
    """Whether a weight with groups of this size can be tiled: no super-block may lie in two groups."""
    return group_size % COLUMNS == 0


def tile_scales(scale: Tensor) -> Tensor:
    """[n, g] to [row tiles, g, 16], padded with zeros: for scales and zeros."""
    n, g = scale.shape
    tiles = -(-n // ROWS)
    return torch.nn.functional.pad(scale, (0, 0, 0, tiles * ROWS - n)).view(tiles, ROWS, g).transpose(1, 2).contiguous()


def untile_scales(scale: Tensor, n: int | torch.SymInt) -> Tensor:
    """Inverse of `tile_scales`."""
    return scale.transpose(1, 2).flatten(0, 1)[:n].contiguous()


def prepack(codes: UInt8[Tensor, "n bytes"], bits: int, k: int) -> UInt8[Tensor, "tiles blocks size"]:
    """Tiles from the packed rows of `integer_ops.pack`."""
    code = integer_ops.unpack(codes, bits, k)
    tiles, blocks = -(-code.shape[0] // ROWS), -(-k // COLUMNS)
    code = torch.nn.functional.pad(code, (0, blocks * COLUMNS - k, 0, tiles * ROWS - code.shape[0]))
    planes, shift = [], 0
    for width in PLANES[bits]:
        fields = ((code >> shift) & (2**width - 1)).view(tiles, ROWS, blocks, width, 8 // width, 4)
        byte = fields[..., 0, :].clone()
        for i in range(1, 8 // width):
            byte |= fields[..., i, :] << (i * width)
        planes.append(byte.permute(0, 2, 3, 1, 4).reshape(tiles, blocks, width * 64))
        shift += width
    return torch.cat(planes, 2)


def unpack(tiles: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt) -> UInt8[Tensor, "n k"]:
    """The codes, one in a byte."""
    count, blocks = tiles.shape[:2]
    code, shift, start = tiles.new_zeros(count, ROWS, blocks, COLUMNS), 0, 0
    for width in PLANES[bits]:
        byte = tiles[:, :, start * 64 : (start + width) * 64].reshape(count, blocks, width, 1, ROWS, 4)
        fields = [(byte >> (i * width)) & (2**width - 1) for i in range(8 // width)]
        code |= torch.cat(fields, 3).permute(0, 4, 1, 2, 3, 5).reshape(code.shape) << shift
        shift, start = shift + width, start + width
    return code.view(count * ROWS, blocks * COLUMNS)[:n, :k]


def unprepack(
    tiles: UInt8[Tensor, "tiles blocks size"], n: int, bits: int, k: int | torch.SymInt
) -> UInt8[Tensor, "n bytes"]:
    """Exact inverse of `prepack`."""
    return integer_ops.pack(unpack(tiles, n, bits, k).contiguous(), bits)


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
    "integer_prepack": prepack,
    "integer_unprepack": unprepack,
    "integer_linear_tiled": linear_tiled,
    "integer_linear_quantized": linear_quantized,
}
FAKES = {
    "integer_prepack": lambda codes, bits, k: codes.new_empty(-(-codes.shape[0] // ROWS), -(-k // COLUMNS), 64 * bits),
    "integer_unprepack": lambda tiles, n, bits, k: tiles.new_empty(n, integer_ops.packed_size(k, bits)),
    "integer_linear_tiled": lambda x, tiles, scale, zero, bias, n, bits, group_size: x.new_empty(*x.shape[:-1], n),
    "integer_linear_quantized": lambda q, q_scale, tiles, scale, zero, bias, n, bits, group_size, dtype: q.new_empty(
        *q.shape[:-1], n, dtype=dtype
    ),
}

for op, schema in SCHEMAS.items():
    torch.library.define(f"ptq::{op}", schema)
    torch.library.impl(f"ptq::{op}", "CompositeExplicitAutograd")(REFERENCES[op])
    torch.library.register_fake(f"ptq::{op}")(FAKES[op])
torch.library.register_autograd("ptq::integer_linear_tiled", _linear_backward, setup_context=_linear_setup)
native.load()
