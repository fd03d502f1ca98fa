"""Sums of the products of channels, Xᵀ X: `ptq::add_gram_`.

A sum is a panel of rows of the symmetric matrix: [rows, end] has the products of channels [end - rows, end) with those
in front of `end`. What is right of the diagonal need not be right. Sums are float32; where `rounded`, the channels are
first brought to bfloat16, which is twice as fast where the CPU has products of it. Their last bits depend on that, not
on the number of threads.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from ptq.ops.op_declarations import declare


def reference(sums: Sequence[Float32[Tensor, "_ _"]], x: Float32[Tensor, "t k"], rounded: bool) -> None:
    """`ptq::add_gram_` in plain torch."""
    x = x.bfloat16().float() if rounded else x
    for panel in sums:
        rows, end = panel.shape
        panel.addmm_(x[:, end - rows : end].T, x[:, :end])


declare(
    "add_gram_",
    "(Tensor(a!)[] sums, Tensor x, bool rounded) -> ()",
    reference=reference,
    fake=lambda sums, x, rounded: None,
)

add_gram_ = torch.ops.ptq.add_gram_.default
