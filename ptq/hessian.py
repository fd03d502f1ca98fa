"""Hessians of the layer-wise proxy loss: H = sum of x xᵀ over the inputs x of a linear layer."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ptq.blocks import Part
from ptq.linear import QuantLinear


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
    return sums


def _watch(module: nn.Module, key: str, sums: dict[str, Tensor]) -> torch.utils.hooks.RemovableHandle:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = module.transform(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
        x = x.reshape(-1, x.shape[-1]).float()
        if key not in sums:
            sums[key] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        sums[key].addmm_(x.T, x)

    return module.register_forward_pre_hook(add)
