"""Finds the parts of a loaded model that an op can do, and installs them: RMSNorm (`ptq.fast.rms_norm`), rotary
embedding (`ptq.fast.fast_rotary`), the gate of the MLP (`ptq.fast.gated_mlp`); for few tokens also attention
(`ptq.fast.fast_attention`, `ptq.fast.latent_attention`), the router of experts (`ptq.fast.dense_products`) and the
steps of other mixers (`ptq.fast.fast_mixers`).

No family is named. Each kind is tried on random numbers first, and where the op's reference does not give the same bits
as the model's own code (attention: up to rounding), that code is left alone. With gradients, other devices or dtypes
(`ptq.ops.matmul.ops_serve`), or under torch.compile, the model's own code runs.

Parts of models that run alone (`ptq.hf.blocks`) get the same, so that proofs may compare bits. A part gets a `forward`
of its own in the instance, as accelerate does it: nothing in transformers is changed.
"""

from typing import Any

from torch import nn

from ptq.fast import dense_products, fast_attention, fast_mixers, fast_rotary, gated_mlp, latent_attention, rms_norm
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
        elif (attention := fast_attention.kind_of(module)) or fast_rotary.with_fast_rotary(type(module).forward):
            module.forward = InPlace(attention_forward, module, attention)
        elif (act := gated_mlp.gate_of(module)) is not None:
            module.forward = InPlace(gated_mlp.forward, module, act, gated_mlp.activation_of(module))
        elif dense_products.is_router(module):
            module.forward = InPlace(dense_products.forward, module)
        elif (forward := fast_mixers.forward_of(module)) is not None:
            module.forward = forward


def attention_forward(module: nn.Module, kind: fast_attention.AttentionKind | None, *args: Any, **kwargs: Any) -> Any:
    """The forward of attention of this kind; None: any other that turns as `ptq::rotary` does."""
    if kind is not None and not args:
        found = fast_attention.decoded(module, kind, **kwargs)
        if found is not None:
            return found, None
    return fast_rotary.forward(module, *args, **kwargs)
