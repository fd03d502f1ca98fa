"""What a loaded packed model does faster than transformers on the CPU when it decodes few tokens.

`install` changes no parameter and nothing that is saved. (1) Plain linear layers read their weight at the speed of
memory (`ptq::dense_linear`). (2) Attention of one token, with fewer heads of keys than of queries: torch's grouped
attention is slow on the CPU; the queries that share a head of keys are handed to it as tokens of that head instead,
which is the same sum.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ptq import fast_layer, fast_steps, matmul, shared_input
from ptq.fast_attention import ATTENTION


class FewTokensLinear(nn.Linear):
    """A plain linear layer with another `forward`, for few tokens."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if matmul.is_decode(input, weight, bias):
            return torch.ops.ptq.dense_linear(input, weight, bias)
        return torch.nn.functional.linear(input, weight, bias)


def install(model: PreTrainedModel) -> None:
    """Make the plain linear layers and "sdpa" attention of a model fast. Another attention is left alone."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokensLinear
    shared_input.attach(model)
    fast_steps.install(model)
    fast_layer.install(model)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)


def attention(
    module: nn.Module,
    query: Float[Tensor, "b q_heads t d"],
    key: Float[Tensor, "b h s d"],
    value: Float[Tensor, "b h s d"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t q_heads d"], None]:
    """The attention function "sdpa" of transformers, with a faster way for one token without a mask."""
    batch, heads, tokens, d = query.shape
    grouped = tokens == 1 and heads != key.shape[1] and query.device.type == "cpu"
    plain = attention_mask is None and not dropout and kwargs.get("position_bias") is None
    if not (grouped and plain) or kwargs.get("cache") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    packed = query.reshape(batch, key.shape[1], -1, d)
    y = torch.nn.functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
    return y.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
