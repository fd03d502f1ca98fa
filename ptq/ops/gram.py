"""Sums of the products of channels: Xᵀ X, `ptq::add_gram_`, and Dᵀ X, `ptq::add_cross_`.

A sum of `add_gram_` is a panel of rows of the symmetric matrix: [rows, end] has the products of channels
[end - rows, end) with those in front of `end`. What is right of the diagonal may hold anything. `add_cross_` has one
sum, the whole matrix. Sums are float32; with `bfloat16`, d and x are first brought to that, which is two to five
times as fast where the CPU has products of it (last bits then depend on the CPU level, but never on the number of
threads).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from ptq.ops.op_declarations import reference_of


def _seen(x: Float32[Tensor, "t k"], bfloat16: bool) -> Float32[Tensor, "t k"]:
    return x.bfloat16().float() if bfloat16 else x


@reference_of("add_gram_", "(Tensor(a!)[] sums, Tensor x, bool bfloat16) -> ()", lambda *given: None)
def reference(sums: Sequence[Float32[Tensor, "_ _"]], x: Float32[Tensor, "t k"], bfloat16: bool) -> None:
    """`ptq::add_gram_` in plain torch."""
    x = _seen(x, bfloat16)
    for panel in sums:
        rows, end = panel.shape
        panel.addmm_(x[:, end - rows : end].T, x[:, :end])


@reference_of("add_cross_", "(Tensor(a!) sum, Tensor d, Tensor x, bool bfloat16) -> ()", lambda *given: None)
def reference_cross(
    sum: Float32[Tensor, "k k"], d: Float32[Tensor, "t k"], x: Float32[Tensor, "t k"], bfloat16: bool
) -> None:
    """`ptq::add_cross_` in plain torch."""
    sum.addmm_(_seen(d, bfloat16).T, _seen(x, bfloat16))


add_gram_ = torch.ops.ptq.add_gram_.default
add_cross_ = torch.ops.ptq.add_cross_.default
