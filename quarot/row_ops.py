"""Single rows of an integer weight as numbers: what a packed embedding looks up. Schemas, fakes and references; native
kernels (`csrc/integer_rows`) override them.

`index` holds numbers of rows; one that does not exist raises IndexError, and RuntimeError in the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ptq.ops import fragments, tiles
from ptq.ops.op_declarations import declare, reference_of
from ptq.ops.tiles import ROWS, untile_scales
from quarot.integer_ops import dequantize
from quarot.integer_scales import Stored, Tiled


def _fake(codes: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor, *numbers: Any) -> Tensor:
    *_, k, dtype = numbers
    return codes.new_empty(index.shape[0], k, dtype=dtype)


@reference_of(
    "integer_rows",
    "(Tensor codes, Tensor scale, Tensor? zero, Tensor index, int bits, int group_size, int k, "
    "ScalarType dtype) -> Tensor",
    _fake,
)
def rows(
    codes: UInt8[Tensor, "n bytes"],
    scale: Stored,
    zero: UInt8[Tensor, "n g"] | None,
    index: Int64[Tensor, " u"],
    bits: int,
    group_size: int,
    k: int,
    dtype: torch.dtype,
) -> Float[Tensor, "u k"]:
    """Rows of the stored parts (`quarot.integer`)."""
    zero = None if zero is None else zero.index_select(0, index)
    codes, scale = codes.index_select(0, index), scale.index_select(0, index)
    return dequantize(codes, scale, zero, bits, group_size, k).to(dtype)


def rows_of_row_tiles(
    unprepack: Callable[[Tensor, int, int, int], Tensor],
    codes: UInt8[Tensor, "tiles blocks size"],
    scale: Tiled,
    zero: UInt8[Tensor, "tiles g 16"] | None,
    index: Int64[Tensor, " u"],
    n: int,
    bits: int,
    group_size: int,
    k: int,
    dtype: torch.dtype,
) -> Float[Tensor, "u k"]:
    """The same of a weight in a layout of tiles of 16 rows, which `unprepack` undoes: those that the rows lie in are
    unpacked."""
    index = torch.arange(n, device=index.device).index_select(0, index)  # the last tile may have room for more rows
    tile, whole = index // ROWS, ROWS * len(index)
    stored = unprepack(codes.index_select(0, tile), whole, bits, k)
    scale = untile_scales(scale.index_select(0, tile), whole)
    zero = None if zero is None else untile_scales(zero.index_select(0, tile), whole)
    within = index % ROWS + torch.arange(0, whole, ROWS, device=index.device)
    return rows(stored, scale, zero, within, bits, group_size, k, dtype)


rows_tiled = functools.partial(rows_of_row_tiles, tiles.unprepack)
rows_of_fragments = functools.partial(rows_of_row_tiles, fragments.unprepack)
"""It has no kernel of its own."""

declare(
    "integer_rows_tiled",
    "(Tensor tiles, Tensor scale, Tensor? zero, Tensor index, int n, int bits, int group_size, int k, "
    "ScalarType dtype) -> Tensor",
    rows_tiled,
    _fake,
)
