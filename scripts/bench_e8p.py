"""Linear layers with E8P weights, beside a plain read of memory, torch's bfloat16 and our INT4: tables of
`bench_ops.py`. Rows in and out are float32, or bfloat16 where the name says so; INT8 includes quantising them. The
Hadamard transforms around such a layer are not in it (`hadamard_quantize` has tables of its own).
"""

import itertools
from collections.abc import Iterator

import torch
from bench_case import BATCHES, Case, Table, copies, pooled, prepacked_cases, read_case, torch_cases
from bench_integer import integer_cases
from torch import Tensor

from ptq.ops.activations import Activation
from ptq.ops.op_declarations import call
from quip_sharp import tiled_ops  # noqa: F401  (registers the ops)

SHAPES = ((4096, 4096), (4096, 14336))


def e8p_cases(n: int, k: int, x: Tensor, bits: int) -> dict[str, Case]:
    """Random codes; as fast as any other."""
    codes = torch.randint(0, 256, (bits, n, k // 8), dtype=torch.uint8)
    scale = torch.tensor([0.01]).view(torch.int32)
    weights = [torch.ops.ptq.e8p_prepack(codes) for _ in range(copies(codes.nbytes))]
    activation, like, ops = Activation(8, 1.0), x.bfloat16(), torch.ops.ptq

    def quantized(tiles: Tensor) -> Tensor:
        return ops.e8p_linear_quantized(*activation.quantize(x), tiles, scale, None, n, bits, x.dtype)

    def floats(tiles: Tensor) -> Tensor:
        return call(ops.e8p_linear_tiled.default, like, tiles, scale, None, n, bits)

    return {
        f"{bits} bits, INT8": Case(pooled(quantized, weights), codes.nbytes),
        f"{bits} bits, bfloat16": Case(pooled(floats, weights), codes.nbytes),
    }


def cases(n: int, k: int, batch: int) -> dict[str, Case]:
    """y = x Wᵀ with W[n, k]."""
    x = torch.randn(batch, k)
    ours = {name: case for bits in (2, 3, 4) for name, case in e8p_cases(n, k, x, bits).items()}
    int4 = integer_cases(n, k, x, 128)["group 128, INT8"]
    return {
        "read": read_case(),
        **ours,
        "INT4 group 128, INT8": Case(int4.run, int4.nbytes, peer=True),
        **(prepacked_cases(torch.randn(n, k, dtype=torch.bfloat16), x.bfloat16()) or torch_cases(n, k, x)),
    }


def tables() -> Iterator[Table]:
    for (n, k), batch in itertools.product(SHAPES, BATCHES):
        yield f"e8p [{n}, {k}] batch {batch}", "read", lambda n=n, k=k, batch=batch: cases(n, k, batch)
