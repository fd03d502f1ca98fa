"""Causal attention of a prompt, torch's and ours: tables of `bench_ops.py`. The limit is oneDNN's product of two
bfloat16 matrices with as many multiplications."""

from collections.abc import Callable, Iterator

import torch
from bench_case import DTYPES, Case, Table, can_prepack
from torch import nn

from ptq.ops import prefill_attention  # noqa: F401 (registers the op)

HEADS = {"32 heads of 64, 4 of keys": (32, 4, 64), "32 heads of 128, 8 of keys": (32, 8, 128)}
"""Of a 1.1 B and an 8 B Llama."""
TOKENS = (128, 512, 2048)


def cases(heads: int, kv_heads: int, d: int, t: int) -> dict[str, Case]:
    """Bytes are those of queries, keys, values and results in bfloat16, everywhere."""
    nbytes, scaling = 2 * t * d * 2 * (heads + kv_heads), d**-0.5
    x, w = (torch.randn(t, heads * d, dtype=torch.bfloat16) for _ in "xw")
    if can_prepack():
        w = torch.ops.mkldnn._reorder_linear_weight(w, None)
        product = torch.ops.mkldnn._linear_pointwise
        found = {"products": Case(lambda: product(x, w, None, "none", [], ""), nbytes)}
    else:
        found = {"products": Case(lambda: nn.functional.linear(x, w), nbytes)}
    for name, dtype in DTYPES.items():
        q, k, v = (torch.randn(1, n, t, d, dtype=dtype) for n in (heads, kv_heads, kv_heads))

        def torch_run(q=q, k=k, v=v) -> torch.Tensor:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return y.transpose(1, 2).contiguous()

        def run(q=q, k=k, v=v) -> torch.Tensor:
            return torch.ops.ptq.prefill_attention(q, k, v, None, True, scaling)

        found[f"torch {name}"] = Case(torch_run, nbytes, peer=True)
        found[f"ptq {name}"] = Case(run, nbytes)
    return found


def tables() -> Iterator[Table]:
    for title, shape in HEADS.items():
        for t in TOKENS:
            make: Callable[[], dict[str, Case]] = lambda shape=shape, t=t: cases(*shape, t)  # noqa: E731
            yield f"attention {title}, {t} tokens", "products", make
