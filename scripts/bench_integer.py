"""Linear layers with integer weights, beside a plain read of memory and torch: tables of `bench_ops.py`."""

import itertools
from collections.abc import Iterator

import torch
from bench_case import BATCHES, SHAPES, Case, Table, copies, pooled, read_case, torch_cases
from torch import Tensor

from ptq.ops.activations import Activation
from quarot.integer import IntegerFormat
from quarot.integer_scales import encode


def integer_cases(n: int, k: int, x: Tensor, group: int, scale: str = "bfloat16") -> dict[str, Case]:
    """Random 4-bit weights; as fast as any other. Rows in and out are float32, or bfloat16 where the name says so."""
    format = IntegerFormat(bits=4, group_size=group, scale=scale)
    parts = {
        part: torch.randint(0, 128, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        .view(dtype)
        .view(shape)
        for part, (shape, dtype) in format.buffers(n, k).items()
    }
    parts["scale"] = encode(torch.full((n, k // (group or k)), 2.0**-7), scale)
    nbytes = sum(part.nbytes for part in parts.values())
    weights = [
        format.prepack({name: part.clone() for name, part in parts.items()}, "cpu") for _ in range(copies(nbytes))
    ]
    name, like = f"group {group}" if group else "per channel", x.bfloat16()
    name += ", integer scales" * (scale == "integer")
    cases = {f"{name}, bfloat16": Case(pooled(lambda weight: format.linear(like, weight), weights), nbytes)}
    for bits in (8, 4):
        activation = Activation(bits, 0.9)

        def run(weight, activation=activation):
            return format.linear_tokens(x, activation, weight, None, x.dtype)

        cases[f"{name}, INT{bits}"] = Case(pooled(run, weights), nbytes)
    return cases


def cases(n: int, k: int, batch: int) -> dict[str, Case]:
    """y = x Wᵀ with W[n, k]."""
    x = torch.randn(batch, k)
    return {
        "read": read_case(),
        **integer_cases(n, k, x, 128),
        **integer_cases(n, k, x, 128, "integer"),
        **integer_cases(n, k, x, 0),
        **torch_cases(n, k, x),
    }


def tables() -> Iterator[Table]:
    for (n, k), batch in itertools.product(SHAPES, BATCHES):
        yield f"linear [{n}, {k}] batch {batch}", "read", lambda n=n, k=k, batch=batch: cases(n, k, batch)
