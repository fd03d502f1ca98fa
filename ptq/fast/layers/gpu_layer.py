"""A decoder layer on a GPU in few launches: what stands before its products is one op each (`ptq.ops.input_steps`).

No family is named: `ptq.fast.layers.decoder_layer` tries first whether a layer computes y = x + attention(norm(x)), and
then y + mlp(norm(y)). Attention is the module's own forward (of decoded tokens:
`ptq.fast.attention.decoded_attention`), in which its linears find their products ready; the numbers are those of the
single ops. Any number of tokens, any cache and mask: what a GPU saves at one token in launches, it saves at many in
memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast.attention import decoded_attention
from ptq.fast.layers.merged import Merged, merge
from ptq.fast.steps import gated_mlp, rms_norm
from ptq.layers.linear import QuantLinear
from ptq.layers.ready_products import ReadyProducts
from ptq.layers.replaceable import stays_on_gpu, treat_input_alike
from ptq.ops import matmul

Norm = tuple[Tensor, float, float, bool]
"""The gain and `rms_norm.RmsNormKind`."""


@dataclass(frozen=True)
class Steps:
    """A layer, cut at its inputs."""

    attention: nn.Module
    first: tuple[QuantLinear, ...]
    """What attention multiplies its input with."""
    gated: tuple[QuantLinear, QuantLinear]
    down: QuantLinear
    norms: tuple[Norm, Norm]
    merged: tuple[Merged | None, Merged | None]
    """The weights of `first` and `gated`."""

    def is_over(self) -> bool:
        """Whether merged weights are no longer those of the linears: a model that was moved has others."""
        return not all(merged is None or merged.is_whole() for merged in self.merged)


MERGED_ROWS = (64, 1)
"""Up to so many tokens are multiplied with merged weights. Products of several tokens are then slices of rows:
attention takes these, but the gate would copy them."""


def steps_of(attention: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module | None]) -> Steps | None:
    """The steps of a layer of these parts; None where they are not of the known kinds, or packed on one GPU. `norms`:
    as in `ptq.fast.layers.found_layer.layer_of`; there must be the first two alone."""
    before = [norm for norm in norms[:2] if norm is not None]
    kinds = [kind for norm in before if (kind := rms_norm.kind_of(norm)) is not None]
    if len(kinds) < 2 or any(norm is not None for norm in norms[2:]):
        return None
    if decoded_attention.kind_of(attention) is None or gated_mlp.gate_of(mlp) != gated_mlp.SILU:
        return None
    (*first, _), (*gated, down) = decoded_attention.linears_of(attention), gated_mlp.linears_of(mlp)
    if len(first) == 1 or len(gated) == 1:  # fused: halves of several tokens would be copied
        return None
    if not all(stays_on_gpu(linear) for linear in (*first, *gated, down)):
        return None
    linears = cast(list[QuantLinear], [*first, *gated])
    if not all(treat_input_alike(linears[0], x) for x in linears[1:3]) or not treat_input_alike(linears[3], linears[4]):
        return None
    gains = [cast(Tensor, norm._parameters["weight"]) for norm in before]  # no Parameter under functional_call
    full = [(gain, kind.eps, kind.offset, kind.round_first) for gain, kind in zip(gains, kinds, strict=True)]
    merged = merge(linears[:3]), merge(linears[3:])
    return Steps(
        attention, tuple(linears[:3]), (linears[3], linears[4]), cast(QuantLinear, down), (full[0], full[1]), merged
    )


def run(
    steps: Steps, x: Float[Tensor, "b t k"], added: Float[Tensor, "b t k"] | None, others: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """What the layer makes of x (+ added), with what else it was called with: two tensors whose sum it is, which the
    next layer's norm adds up. None where the layer's own code must do that."""
    (first_norm, second_norm), attention = steps.norms, steps.attention
    inputs = (x,) if added is None else (x, added)
    if torch.is_grad_enabled() or not matmul.gpu_ops_serve(*inputs, first_norm[0], second_norm[0]):
        return None  # attention alone may have what wants a gradient: a cache, an adapter
    seen = torch.ops.ptq.norm_input(x, added, *first_norm, *steps.first[0].treatment())
    if added is not None:
        x, *seen = seen
    first = products(steps.first, steps.merged[0], seen, x, MERGED_ROWS[0])
    with ReadyProducts(x, dict(zip(steps.first, first, strict=True))):
        attended = attention(hidden_states=x, **others)[0]
    total, *seen = torch.ops.ptq.norm_input(x, attended, *second_norm, *steps.gated[0].treatment())
    gated = products(steps.gated, steps.merged[1], seen, x, MERGED_ROWS[1])
    gate, up = (linear.output_of(y, x.dtype) for linear, y in zip(steps.gated, gated, strict=True))
    return total, gated_mlp.down(steps.down, gate, up)


def products(
    linears: Sequence[QuantLinear], merged: Merged | None, seen: Sequence[Tensor], x: Tensor, most: int
) -> Sequence[Tensor]:
    """`QuantLinear.product_of` of each linear: of up to `most` tokens in one launch, where the weights are merged."""
    if merged is not None and x.numel() <= most * x.shape[-1]:
        return merged.products(seen, x.dtype)
    return [linear.product_of(seen, x.dtype) for linear in linears]
