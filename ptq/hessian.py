"""Hessians of the layer-wise proxy loss: H = sum of x xᵀ over the inputs x of a linear layer."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ptq.blocks import Part
from ptq.linear import QuantLinear
from ptq.matmul import product

PANEL = 1024
"""Rows and columns of H that one product adds to: bounds its memory, and leaves half of H to symmetry."""


def observe(
    part: Part, names: Iterable[str], chunks: Iterable[Float[Tensor, "batch t k"]]
) -> dict[str, Float32[Tensor, "k k"]]:
    """Run a block on hidden states and sum x xᵀ over the inputs of the named linears, in the order of the chunks.

    Where a linear transforms its input online, x is taken after the transform, as its weight sees it. The sums are
    float32 and on the block's device.
    """
    sums: dict[str, Tensor] = {}
    handles = [_watch(part.module(name), name, sums) for name in names]
    try:
        for hidden in chunks:
            part.run(hidden)
    finally:
        for handle in handles:
            handle.remove()
    for h in sums.values():
        _mirror(h)
    return sums


def _watch(module: nn.Module, key: str, sums: dict[str, Tensor]) -> torch.utils.hooks.RemovableHandle:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = module.transform(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
        xt = x.reshape(-1, x.shape[-1]).float().T.contiguous()
        if key not in sums:
            sums[key] = torch.zeros(len(xt), len(xt), device=xt.device)
        del x
        for start in range(0, len(xt), PANEL):
            rows = xt[start : start + PANEL]
            for left in range(0, start + 1, PANEL):
                columns = xt[left : left + PANEL]
                sums[key][start : start + PANEL, left : left + PANEL] += product(rows, columns.T)

    return module.register_forward_pre_hook(add)


def _mirror(h: Float32[Tensor, "k k"]) -> None:
    """Copy the panels below the diagonal to the other side."""
    for start in range(0, len(h), PANEL):
        end = min(start + PANEL, len(h))
        h[:start, start:end] = h[start:end, :start].T
