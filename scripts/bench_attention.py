"""Causal attention, torch's and ours: tables of `bench_ops.py`. Of a prompt: the limit is oneDNN's product of two
bfloat16 matrices with as many multiplications. Of a decoded token: a plain read of keys and values. Ours then has the
rotary embedding, and stores the token, in its time (packed: transformed and quantised); torch's has not."""

from collections.abc import Callable, Iterator

import torch
from bench_case import DTYPES, Case, Table, can_prepack, copies, pooled, read_case
from torch import nn

from ptq.ops import hadamard, kv_ops, kv_step, prefill_attention, steps  # noqa: F401 (registers the ops)

HEADS = {"32 heads of 64, 4 of keys": (32, 4, 64), "32 heads of 128, 8 of keys": (32, 8, 128)}
"""Of a 1.1 B and an 8 B Llama."""
FAR_APART = 30.0
"""Standard deviation of scores with which many weights are too small for float32's normal numbers."""
PROMPTS = [*((f"{t} tokens", t, 1.0) for t in (128, 512, 2048)), ("512 tokens, scores far apart", 512, FAR_APART)]
DECODE_HEADS = HEADS | {"4 heads of 256, 1 of keys": (4, 1, 256)}
"""Those of a Gemma 3 of 1 B, too."""
BEFORE = (512, 4000)
BITS = 4


def cases(heads: int, kv_heads: int, d: int, t: int, deviation: float) -> dict[str, Case]:
    """Bytes are those of queries, keys, values and results in bfloat16, everywhere. `deviation`: of scores."""
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
        q *= deviation

        def torch_run(q=q, k=k, v=v) -> torch.Tensor:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return y.transpose(1, 2).contiguous()

        def run(q=q, k=k, v=v) -> torch.Tensor:
            return torch.ops.ptq.prefill_attention(q, k, v, None, True, scaling)

        found[f"torch {name}"] = Case(torch_run, nbytes, peer=True)
        found[f"ptq {name}"] = Case(run, nbytes)
    return found


def decode_cases(heads: int, kv_heads: int, d: int, before: int) -> dict[str, Case]:
    """Each call has another cache."""
    nbytes, scaling, found = 2 * kv_heads * before * d * 2, d**-0.5, {"read": read_case()}
    q, k, v = (torch.randn(1, 1, n * d, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
    cos_sin = [torch.randn(1, 1, d, dtype=torch.bfloat16) for _ in range(2)]
    rooms = [torch.randn(2, 1, kv_heads, before + 1, d, dtype=torch.bfloat16) for _ in range(copies(nbytes))]
    query = q.view(1, heads, 1, d)

    def torch_run(room: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, room[0], room[1], scale=scaling, enable_gqa=True)

    def run(room: torch.Tensor) -> torch.Tensor:
        return torch.ops.ptq.decode_attention(q, k, v, *cos_sin, *room, before, scaling)

    found["torch bfloat16"] = Case(pooled(torch_run, rooms), nbytes, peer=True)
    found["ptq bfloat16"] = Case(pooled(run, rooms), nbytes)
    sides = []
    for channel_major, states in zip((False, True), rooms[0], strict=True):
        codes, scales = kv_ops.empty_chunks(before // kv_ops.CHUNK + 1, 1, kv_heads, d, BITS, torch.device("cpu"))
        kv_ops.append(codes, scales, states[:, :, :before], 0, BITS, 1.0, channel_major)
        sides.extend((codes, scales))
    r3 = hadamard.dense_factors(d, torch.device("cpu"))

    center = torch.randn(kv_heads, d, dtype=torch.bfloat16)

    def packed_run(cache: list[torch.Tensor], center: torch.Tensor | None = None) -> torch.Tensor:
        numbers = before, BITS, BITS, [1.0, 1.0], *r3, scaling, None, None, None, None, center
        return torch.ops.ptq.kv_decode_attention(q, k, v, *cos_sin, *cache, *numbers)

    packed = sum(side.nbytes for side in sides)
    caches = [[side.clone() for side in sides] for _ in range(copies(packed))]
    found[f"ptq {BITS} bits"] = Case(pooled(packed_run, caches), packed)
    found[f"ptq {BITS} bits, centred keys"] = Case(pooled(lambda cache: packed_run(cache, center), caches), packed)
    return found


def tables() -> Iterator[Table]:
    for title, shape in DECODE_HEADS.items():
        for t in BEFORE:
            make: Callable[[], dict[str, Case]] = lambda shape=shape, t=t: decode_cases(*shape, t)  # noqa: E731
            yield f"decode attention {title}, behind {t}", "read", make
    for title, shape in HEADS.items():
        for tokens, t, deviation in PROMPTS:
            make: Callable[[], dict[str, Case]] = lambda of=(*shape, t, deviation): cases(*of)  # noqa: E731
            yield f"attention {title}, {tokens}", "products", make
