"""Attention of a prompt over plain keys and values, on the CPU.

`ptq::prefill_attention`: softmax(scaling q Kᵀ) V for q [b, heads * groups, t, d], keys [b, heads, s, d] and values [b,
heads, s, value_d]; the result is [b, t, heads * groups, value_d]. `mask` is bool [b or 1, 1, t, s], False for what is
not seen; `causal`: token i sees keys 0 to i; `sinks` as in `ptq::decode_attention`. A row that sees nothing is 0.
Scores, softmax and sums are float32. The same for any number of threads. torch's own keeps to the speed of float32; on
a CPU with AMX or AVX-512 BF16 the op multiplies bfloat16 as such, and rounds the weights to it before they meet V, as
torch does it; on Intel's without AMX, where that is slow, long prompts are multiplied as float32. Below AVX2 the
reference, which is torch's own, is what runs.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ptq.ops import steps
from ptq.ops.matmul import cpu_ops_serve
from ptq.ops.op_declarations import reference_of

FEW_ROWS = 32
"""Query rows of a head of keys. For fewer, in float32, torch's attention is faster."""


@reference_of(
    "prefill_attention",
    "(Tensor q, Tensor keys, Tensor values, Tensor? mask, bool causal, float scaling, Tensor? sinks=None) -> Tensor",
    lambda q, keys, values, *rest: q.new_empty(q.shape[0], q.shape[2], q.shape[1], values.shape[3]),
)
def prefill_attention(
    q: Float[Tensor, "b q_heads t d"],
    keys: Float[Tensor, "b h s d"],
    values: Float[Tensor, "b h s value_d"],
    mask: Bool[Tensor, "_ 1 t s"] | None,
    causal: bool,
    scaling: float,
    sinks: Float[Tensor, " q_heads"] | None = None,
) -> Float[Tensor, "b t q_heads value_d"]:
    """`ptq::prefill_attention` in plain torch."""
    groups = q.shape[1] // keys.shape[1]
    if sinks is not None:
        seen = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device)
        seen = (seen.tril() if causal else seen)[None, None]
        y = steps.attended(q, keys, values, scaling, seen if mask is None else seen & mask, sinks)
        return y.unflatten(2, (q.shape[1], -1))
    keys, values = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (keys, values))
    if causal and mask is not None:  # torch takes one of them
        mask, causal = mask & torch.ones(mask.shape[2:], dtype=torch.bool).tril(), False
    y = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, is_causal=causal, scale=scaling)
    return y.transpose(1, 2).contiguous()


def forward(
    module: nn.Module,
    query: Float[Tensor, "b q_heads t d"],
    key: Float[Tensor, "_ h s d"],
    value: Float[Tensor, "_ h s value_d"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t q_heads value_d"], None]:
    """The attention function "sdpa" of transformers, through the op where that serves it."""
    others = dropout or any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if others or scale <= 0 or not _is_served(query, key, value, attention_mask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    tokens = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and tokens > 1
    if causal:  # a static cache has room behind the prompt
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    return torch.ops.ptq.prefill_attention.default(query, key, value, attention_mask, causal, scale), None


def _is_served(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    same = query.shape[0] == key.shape[0] and is_simple(mask, query.shape[0], query.shape[2], key.shape[2])
    return same and not _is_slow(query, key) and cpu_ops_serve(query, key, value)


def is_simple(mask: Tensor | None, batch: int, tokens: int, length: int) -> bool:
    """Whether the op takes a mask of so many rows, tokens and keys."""
    if mask is None:
        return True
    whole = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, tokens, length)
    return whole and mask.dtype == torch.bool and mask.is_cpu and mask.stride(3) == 1


def _is_slow(query: Tensor, key: Tensor) -> bool:
    """Whether there are too few rows for what it takes to bring keys and values into panels, as floats."""
    return query.dtype == torch.float32 and query.shape[2] * query.shape[1] // key.shape[1] < FEW_ROWS
