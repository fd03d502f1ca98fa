"""Sums of the products of channels, Xᵀ X: `ptq::add_gram_`.

A sum is a panel of rows of the symmetric matrix: [rows, end] has the products of channels [end - rows, end) with those
in front of `end`. What is right of the diagonal may hold anything. Sums are float32; with `bfloat16`, x is first
brought to that, which is twice as fast where the CPU has products of it (last bits then depend on the CPU level, but
never on the number of threads).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from ptq.ops.op_declarations import declare


def reference(sums: Sequence[Float32[Tensor, "_ _"]], x: Float32[Tensor, "t k"], bfloat16: bool) -> None:
    """`ptq::add_gram_` in plain torch."""
    x = x.bfloat16().float() if bfloat16 else x
    for panel in sums:
        rows, end = panel.shape
        panel.addmm_(x[:, end - rows : end].T, x[:, :end])


declare(
    "add_gram_",
    "(Tensor(a!)[] sums, Tensor x, bool bfloat16) -> ()",
    reference=reference,
    fake=lambda sums, x, bfloat16: None,
)

add_gram_ = torch.ops.ptq.add_gram_.default
