"""Hadamard transforms, alone and with quantising, beside a copy of the same bytes: tables of `bench_ops.py`."""

import itertools
from collections.abc import Iterator

import torch
from bench_case import DTYPES, Case, Table

from ptq.ops import hadamard
from ptq.ops.activations import Activation

ORDERS = {4096: (64, 64), 11008: (344, 32), 14336: (112, 128)}
"""Widths, and two Hadamard orders whose product each is: the best form in plain torch."""
BATCHES = (1, 512)


def cases(width: int, batch: int, dtype: torch.dtype) -> dict[str, Case]:
    """The transform of every row of x[batch, width]."""
    x = torch.randn(batch, width, dtype=dtype)
    outer, inner = (hadamard.matrix(order).to(dtype) for order in ORDERS[width])
    nbytes, y = 2 * x.nbytes, torch.empty_like(x)

    def kronecker() -> torch.Tensor:
        return (outer @ (x.view(batch, len(outer), len(inner)) @ inner.T)).view(batch, width)

    cases = {
        "copy": Case(lambda: y.copy_(x), nbytes),
        "ptq::hadamard": Case(lambda: hadamard.apply(x, None, width), nbytes, peer=True),
        "torch, two factors": Case(kronecker, nbytes, peer=True),
    }
    for bits in (8, 4):
        fused, construction = Activation(bits, 0.9), hadamard.construction(width)
        cases[f"ptq::hadamard_quantize INT{bits}"] = Case(
            lambda fused=fused, construction=construction: fused.quantize(x, construction), nbytes
        )
    if batch == 1:
        dense = hadamard.matrix(width).to(dtype)
        cases["torch, dense"] = Case(lambda: x @ dense.T, nbytes, peer=True)
    return cases


def tables() -> Iterator[Table]:
    for name, dtype in DTYPES.items():
        for width, batch in itertools.product(ORDERS, BATCHES):
            title = f"hadamard {name} [{batch}, {width}]"
            yield title, "copy", lambda width=width, batch=batch, dtype=dtype: cases(width, batch, dtype)
