"""Linear layers with small-float weights, beside a plain read of memory and torch: tables of `bench_ops.py`.

W6A16 takes and gives bfloat16; W6A8 takes and gives float32, and its time includes quantising them.
"""

import itertools
from collections.abc import Iterator

import torch
from bench_case import BATCHES, Case, Table, copies, dynamic_cases, pooled, prepacked_cases, read_case, torch_cases
from torch import Tensor

from fp6 import tiled_ops  # noqa: F401  (registers the ops)
from fp6.element import ELEMENTS
from ptq.ops.activations import Activation
from ptq.ops.op_declarations import call

SHAPES = ((4096, 4096), (4096, 14336))
WEIGHTS = {1: (("e2m3", 0), ("e2m3", 128), ("e3m2", 0), ("e3m2", 128), ("e2m2", 128), ("e2m1", 128), ("e3m3", 128))}
"""Elements and group sizes, by batch; others: `FEWER`."""
FEWER = (("e2m3", 0), ("e2m3", 128), ("e3m2", 0), ("e3m2", 128))


def minifloat_cases(n: int, k: int, x: Tensor, name: str, group: int) -> dict[str, Case]:
    """Random codes; as fast as any other."""
    element, activation, like, ops = ELEMENTS[name], Activation(8, 1.0), x.bfloat16(), torch.ops.ptq
    tiles = torch.randint(0, 256, (-(-n // 16), -(-k // 32), 64 * element.bits), dtype=torch.uint8)
    scale = torch.full((len(tiles), k // (group or k), 16), 0.01, dtype=torch.bfloat16).view(torch.int16)
    nbytes = tiles.nbytes + scale.nbytes
    weights = [(tiles.clone(), scale.clone()) for _ in range(copies(nbytes))]
    shape = n, element.exponent, element.mantissa, group

    def floats(weight: tuple[Tensor, Tensor]) -> Tensor:
        return call(ops.minifloat_linear_tiled.default, like, *weight, None, *shape)

    def quantized(weight: tuple[Tensor, Tensor]) -> Tensor:
        op = ops.minifloat_linear_tokens.default
        return call(op, x, *weight, None, *shape, activation.bits, activation.clip, x.dtype)

    title = f"{name} {f'group {group}' if group else 'per channel'}"
    cases = {f"{title}, bfloat16": Case(pooled(floats, weights), nbytes)}
    if element.int8_shift is not None:
        cases[f"{title}, INT8"] = Case(pooled(quantized, weights), nbytes)
    return cases


def cases(n: int, k: int, batch: int) -> dict[str, Case]:
    """y = x Wᵀ with W[n, k]."""
    x = torch.randn(batch, k)
    ours = {}
    for name, group in WEIGHTS.get(batch, FEWER):
        ours |= minifloat_cases(n, k, x, name, group)
    torchs = prepacked_cases(torch.randn(n, k, dtype=torch.bfloat16), x.bfloat16()) or torch_cases(n, k, x)
    if batch > 1:
        torchs |= dynamic_cases(n, k, x)
    return {"read": read_case(), **ours, **torchs}


def tables() -> Iterator[Table]:
    for (n, k), batch in itertools.product(SHAPES, BATCHES):
        yield f"minifloat [{n}, {k}] batch {batch}", "read", lambda n=n, k=k, batch=batch: cases(n, k, batch)
