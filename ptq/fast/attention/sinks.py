"""Attention with sinks: each head has one more score, without a value (GPT-OSS, arXiv 2508.10925).

Transformers' own code makes the scores of all tokens at once, as no other attention of it takes sinks on the CPU. Here
`ptq::prefill_attention` does it. No family is named: an attention function is given sinks as `s_aux`. `serves` tries
all attention modules of a model first, whose own function is what `forward` falls back to.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ptq.fast.attention import decoded_attention
from ptq.fast.attention.decoded_attention import SINKS
from ptq.fast.attention.decoding import ATTENTION
from ptq.fast.trials import HIDDEN, TRIAL_ERRORS, innermost, is_close, tried_once
from ptq.kv.attention import CACHE
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve
from ptq.ops.op_declarations import wants_gradient
from ptq.ops.prefill_attention import is_simple

OWN = "eager_attention_forward"
"""What files of transformers call the attention function of their models."""


def forward(
    module: nn.Module,
    query: Float[Tensor, "b q_heads t d"],
    key: Float[Tensor, "b h s d"],
    value: Float[Tensor, "b h s value_d"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t q_heads value_d"], Tensor | None]:
    """Attention with the sinks `s_aux`, [q_heads], with a mask of bools."""
    tokens, length, sinks, config = query.shape[2], key.shape[2], kwargs["s_aux"], cast(Any, module.config)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True) if causal is None else causal
    causal = bool(causal) and attention_mask is None and tokens > 1
    asked = kwargs.get("output_attentions") or config.output_attentions
    plain = not dropout and not asked and sinks.dtype in FEW_DTYPES and sinks.is_cpu
    if plain and is_simple(attention_mask, len(query), tokens, length) and not wants_gradient(sinks):
        if query.numel() and cpu_ops_serve(query, key, value) and (not causal or tokens == length):
            given = query, key, value, attention_mask, causal, scaling, sinks
            return torch.ops.ptq.prefill_attention.default(*given), None
    own, mask = _own(module), _added(attention_mask, query, length, causal)
    assert own is not None  # or `serves` had said no
    return own(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)


def _own(module: nn.Module) -> Callable[..., Any] | None:
    """The attention function that a module's forward finds by itself."""
    forward = innermost(type(module).forward)
    return None if forward is None else forward.__globals__.get(OWN)


def _added(mask: Tensor | None, query: Float[Tensor, "b q_heads t d"], length: int, causal: bool) -> Tensor | None:
    """What a function that adds its mask is given."""
    tokens = query.shape[2]
    if mask is None:
        if not causal:
            return None
        mask = torch.ones(1, 1, tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    if mask.dtype != torch.bool:
        return mask
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, hidden)


def serves(model: nn.Module) -> bool:
    """Whether all attention of a model has sinks, and `forward` gives the numbers of its own function."""
    modules = [m for m in model.modules() if {"config", "is_causal", "scaling"} <= vars(m).keys()]
    return bool(modules) and all(m._parameters.get(SINKS) is not None and _own(m) and _tried(m) for m in modules)


@tried_once
def _tried(module: Any) -> bool:
    try:
        return any(_matches(module, rotary_dim) for rotary_dim in (module.head_dim, module.head_dim // 2))
    except TRIAL_ERRORS:
        return False


def _matches(module: Any, rotary_dim: int) -> bool:
    """Of a prompt and of a token behind it, with a mask and without. `rotary_dim`: numbers of cos and sin."""
    generator = torch.Generator().manual_seed(0)
    alone = decoded_attention.small_copy(module, generator)
    for tokens, masked in ((5, False), (5, True), (1, False)):
        x, cos, sin = (torch.randn(2, tokens, n, generator=generator) for n in (HIDDEN, rotary_dim, rotary_dim))
        before = torch.randn(2, 2, module.config.num_key_value_heads, 5 - tokens, module.head_dim, generator=generator)
        seen = torch.ones(1, 1, tokens, 5, dtype=torch.bool).tril(5 - tokens)
        seen[..., 1] &= not masked or tokens == 1
        found = []
        for name in ("eager", ATTENTION):
            alone.config = copy.copy(module.config)
            alone.config._attn_implementation = name
            cache = DynamicCache()
            cache.update(before[0].clone(), before[1].clone(), 0)
            added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            mask = added if name == "eager" else seen if masked else None
            given = {"position_embeddings": (cos, sin), "attention_mask": mask, CACHE: cache}
            try:
                found.append(type(module).forward(alone, hidden_states=x, **given)[0])
            except TRIAL_ERRORS:
                return False
        if not is_close(*found):
            return False
    return True
