"""Finds the parts of a loaded model that an op can do, and installs them: RMSNorm (`ptq.fast.steps.rms_norm`), rotary
embedding (`ptq.fast.steps.rotary_embedding`), the gate of the MLP (`ptq.fast.steps.gated_mlp`); for few tokens also
attention (`ptq.fast.attention.decoded_attention`, `ptq.fast.attention.latent_attention`), the router of experts
(`ptq.fast.steps.dense_products`) and the steps of other mixers (`ptq.fast.mixers.mixer_forwards`).

No family is named. Each kind is tried on random numbers first, and where the op's reference does not give the same bits
as the model's own code (attention: up to rounding), that code is left alone. With gradients, other devices or dtypes
(`ptq.ops.matmul.ops_serve`), or under torch.compile, the model's own code runs.

Parts of models that run alone (`ptq.hf.blocks`) get the same, so that proofs may compare bits. A part gets a `forward`
of its own in the instance, as accelerate does it: nothing in transformers is changed.
"""

from typing import Any

from torch import nn

from ptq.fast.attention import decoded_attention, latent_attention
from ptq.fast.mixers import mixer_forwards
from ptq.fast.steps import dense_products, gated_mlp, rms_norm, rotary_embedding
from ptq.fast.watched import InPlace


def install(model: nn.Module) -> None:
    """Make the norms, rotary embeddings, attention and gates of a model fast where they are what the ops compute."""
    for module in model.modules():
        if "forward" in vars(module):
            continue  # somebody has put another one there
        kind = rms_norm.kind_of(module)
        if kind is not None:
            module.forward = InPlace(rms_norm.forward, module, *kind)
        elif (latent := latent_attention.kind_of(module)) is not None:
            module.forward = InPlace(latent_attention.forward, module, latent)
        elif (attention := decoded_attention.kind_of(module)) or rotary_embedding.with_fast_rotary(
            type(module).forward
        ):
            module.forward = InPlace(attention_forward, module, attention)
        elif (act := gated_mlp.gate_of(module)) is not None:
            module.forward = InPlace(gated_mlp.forward, module, act, gated_mlp.activation_of(module))
        elif dense_products.is_router(module):
            module.forward = InPlace(dense_products.forward, module)
        elif (forward := mixer_forwards.forward_of(module)) is not None:
            module.forward = forward


def attention_forward(
    module: nn.Module, kind: decoded_attention.AttentionKind | None, *args: Any, **kwargs: Any
) -> Any:
    """The forward of attention of this kind; None: any other that turns as `ptq::rotary` does."""
    if kind is not None and not args:
        found = decoded_attention.decoded(module, kind, **kwargs)
        if found is not None:
            return found, None
    return rotary_embedding.forward(module, *args, **kwargs)
