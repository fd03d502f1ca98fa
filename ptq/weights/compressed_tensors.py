"""Weights as compressed-tensors stores them: the checkpoints that vLLM, SGLang and others read.

Its integers are rows of bit streams, as ours are, in words of 32 bits; its MXFP6 and MXFP4 are our bytes. So nothing is
rounded again: a format that can be `Exportable` gives the same codes and scales other names.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from ptq.weights.formats import Parts


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint of compressed-tensors says of a weight."""

    format: str
    """Its name of the byte layout."""
    weights: dict[str, Any]
    """Its `QuantizationArgs`."""
    quantized_input: bool = False
    """Whether inputs are integers of 8 bits."""


@runtime_checkable
class Exportable(Protocol):
    """A format whose weights compressed-tensors can hold."""

    def compressed_scheme(self, quantized_input: bool) -> Scheme:
        """How it describes such weights, whose inputs are integers of 8 bits, or are left alone. Raises InputError,
        saying which options it can hold, for others."""
        ...

    def compress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        """The tensors that it stores, by their names behind `<linear>.`, from the stored parts of W[n, k]."""
        ...

    def decompress(self, parts: Parts, n: int, k: int, scheme: Scheme) -> Parts:
        """Exact inverse of `compress`."""
        ...


def to_words(rows: UInt8[Tensor, "n bytes"]) -> Int32[Tensor, "n words"]:
    """Rows of bytes as little-endian words; zeros behind the last byte."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4)).contiguous().view(torch.int32)


def to_bytes(words: Int32[Tensor, "n words"], size: int) -> UInt8[Tensor, "n {size}"]:
    """The first `size` bytes of every row."""
    return words.contiguous().view(torch.uint8)[:, :size].contiguous()
