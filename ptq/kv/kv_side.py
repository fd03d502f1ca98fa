"""Keys or values of one layer as the packed cache holds them, and what is done to them before."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ptq.kv.kv_cache import CacheQuantization
from ptq.ops import hadamard, kv_ops
from ptq.ops.kv_ops import CHUNK


def rotate(x: Float[Tensor, "b h t d"], settings: CacheQuantization) -> Float[Tensor, "b h t d"]:
    """R3 on queries or keys."""
    return x if settings.hadamard is None else hadamard.apply(x, None, settings.hadamard)


class Side:
    """Keys or values of one layer: packed, or in 16 bits as they are."""

    def __init__(self, like: Float[Tensor, "b h t d"], bits: int, clip: float, channel_major: bool) -> None:
        self.bits, self.clip, self.channel_major = bits, clip, channel_major
        self.batch, self.heads, _, self.d = like.shape
        self.dtype, self.device = like.dtype, like.device
        self.tensors = self._empty(0)

    def _empty(self, chunks: int) -> list[Tensor]:
        """Zeros, with the chunks on axis 0 and the batch on axis 1."""
        if self.bits == 16:
            shape = (chunks, self.batch, self.heads, CHUNK, self.d)
            return [torch.zeros(shape, dtype=self.dtype, device=self.device)]
        return list(kv_ops.empty_chunks(chunks, self.batch, self.heads, self.d, self.bits, self.device))

    def reserve(self, tokens: int, exactly: bool = False) -> None:
        """Make room for so many tokens. What is stored stays."""
        chunks, held = -(-tokens // CHUNK), len(self.tensors[0])
        if chunks > held:
            chunks += 0 if exactly else chunks // 32
            rooms = [x.new_empty(chunks, *x.shape[1:]) for x in self.tensors]
            for room, x in zip(rooms, self.tensors, strict=True):  # torch.cat would ask autocast for a dtype
                room[:held] = x
                room[held:].zero_()
            self.tensors = rooms

    def append(self, x: Float[Tensor, "b h t d"], start: int | Tensor) -> None:
        """Store t tokens behind the first `start`; where that is a tensor, there is room for them already."""
        if isinstance(start, int):
            self.reserve(start + x.shape[2])
        if self.bits < 16:
            op = torch.ops.ptq.kv_append if isinstance(start, int) else torch.ops.ptq.kv_append_at
            op(*self.tensors, x, start, self.bits, self.clip, self.channel_major)
            return
        if is_frozen(self.tensors[0]):
            self.tensors = [self.tensors[0].clone()]
        at = torch.arange(x.shape[2], device=self.device) + start
        self.tensors[0][at // CHUNK, :, :, at % CHUNK] = x.permute(2, 0, 1, 3)

    def read(self, length: int) -> Float[Tensor, "b h length d"]:
        """What the first `length` tokens stand for, in the model's dtype."""
        if self.bits < 16:
            codes, scales = self.tensors
            x = torch.ops.ptq.kv_dequantize(codes, scales, length, self.d, self.bits, self.channel_major)
            return x.to(self.dtype)
        return self.tensors[0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]

    def select(self, rows: Int64[Tensor, " rows"]) -> None:
        """Keep these rows of the batch, in this order."""
        self.tensors = [x.index_select(1, rows.to(x.device)) for x in self.tensors]
        self.batch = len(rows)


def is_frozen(held: Tensor) -> bool:
    """Whether a tensor of a cache was made in inference mode, and may not be written to outside of it."""
    if torch.compiler.is_compiling():  # a graph cannot ask, and writes to a cache that was made before it
        return False
    return held.is_inference() and not torch.is_inference_mode_enabled()


def row_starts(mask: Tensor) -> Int64[Tensor, " b"]:
    """The first token of every row that any query sees; the number of tokens where there is none.

    `mask` is [b, tokens], or [b, 1, queries, tokens] as torch's attention takes it: bool, or float and added.
    """
    if mask.dim() == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = seen.flatten(1, 2).any(1)
    else:
        seen = mask != 0
    return torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
