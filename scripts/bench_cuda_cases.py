"""What `bench_cuda.py` measures of E8P weights, the packed KV cache and steps between products: random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ptq.ops import hadamard, input_steps, kv_ops  # noqa: F401 (the ops of input_steps)
from ptq.ops.activations import Activation
from quip_sharp.e8p_format import E8PFormat

HEADS, GROUPS, HEAD_DIM = 8, 4, 128  # those of Llama 3 8B
LENGTHS = (1024, 4096, 32768)
Call = Callable[[dict[str, Tensor]], Any]


def e8p_weight(bits: int, n: int, k: int) -> dict[str, Tensor]:
    """Fragments of random codes."""
    form = E8PFormat(bits)
    parts = {
        name: torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        for name, (shape, _) in form.buffers(n, k).items()
    }
    scale = torch.full((1,), 0.01, device="cuda").view(torch.int32)
    return form.prepack({**parts, "scale": scale}, "cuda")


def e8p_calls(bits: int, rows: int, k: int) -> dict[str, Call]:
    """bfloat16 and quantised tokens times a weight."""
    form, x = E8PFormat(bits), torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    q, scale = Activation(8, 1.0).quantize(x)
    return {
        f"E8P W{bits}A16": lambda w: form.linear(x, w),
        f"E8P W{bits}A8": lambda w: form.linear_quantized(q, scale, w, None, torch.bfloat16),
    }


def cache(bits: int, length: int) -> dict[str, Tensor]:
    """Keys and values of one layer and row."""
    sides = {}
    for side in ("k", "v"):
        codes, scales = kv_ops.empty_chunks(-(-length // 256), 1, HEADS, HEAD_DIM, bits, torch.device("cuda"))
        sides |= {f"{side}_codes": codes.random_(0, 256), f"{side}_scales": scales.uniform_(0.1, 0.2)}
    return sides


def _decoded() -> tuple[Tensor, ...]:
    """Queries, keys and values of one token, and its cos and sin."""
    widths = (HEADS * GROUPS * HEAD_DIM, HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM)
    return tuple(torch.randn(1, 1, width, device="cuda", dtype=torch.bfloat16) for width in widths)


def cache_calls(bits: int, length: int) -> dict[str, Call]:
    """Attention of one token over `length` cached ones, and that with all that stands before it: rotary embedding, R3
    and appending."""
    q = torch.randn(1, HEADS * GROUPS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    given, none = _decoded(), (None,) * 4
    numbers = (length - 1, bits, bits, [0.95, 0.95], [], HEAD_DIM, 0.09)
    return {
        f"KV{bits} attend": lambda c: torch.ops.ptq.kv_attend(q, *c.values(), length, bits, bits, 0.09, *none),
        f"KV{bits} decode": lambda c: torch.ops.ptq.kv_decode_attention(*given, *c.values(), *numbers, *none),
    }


def plain_cache(length: int) -> dict[str, Tensor]:
    """The same in bfloat16."""
    return {s: torch.randn(1, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for s in "kv"}


def plain_calls(length: int) -> dict[str, Call]:
    """torch's own attention, and ours with rotary embedding and appending."""
    q = torch.randn(1, HEADS * GROUPS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    given, sdpa = _decoded(), torch.nn.functional.scaled_dot_product_attention
    return {
        "SDPA bf16": lambda c: sdpa(q, c["k"], c["v"], enable_gqa=True),
        "bf16 decode": lambda c: torch.ops.ptq.decode_attention(*given, c["k"], c["v"], length - 1, 0.09, None),
    }


def step_calls(k: int) -> dict[str, tuple[int, Callable[[Tensor], Any]]]:
    """The steps between products, of x[0] and x[1] in [2, rows, k]: bytes from and to memory per number, and a call."""
    gain = torch.ones(k, dtype=torch.bfloat16, device="cuda")
    factors, order = hadamard.dense_factors(hadamard.construction(k), gain.device)
    norm = (gain, 1e-5, 0.0, True, None, factors)
    ops = torch.ops.ptq
    return {
        "rms_norm": (4, lambda x: ops.rms_norm(x[0], *norm[:4])),
        "silu_mul": (6, lambda x: ops.silu_mul(x[0], x[1])),
        "norm_input, sum": (8, lambda x: ops.norm_input(x[0], x[1], *norm, 0, 0, 1.0)),
        "norm_input, sum, INT8": (7, lambda x: ops.norm_input(x[0], x[1], *norm, 0, 8, 1.0)),
        "gate_input, Hadamard": (6, lambda x: ops.gate_input(x[0], x[1], None, factors, order, 0, 1.0)),
        "gate_input, Hadamard, INT8": (5, lambda x: ops.gate_input(x[0], x[1], None, factors, order, 8, 1.0)),
    }
