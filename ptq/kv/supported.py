"""Whether a model can cache keys and values in few bits."""

from typing import Any

from ptq.errors import InputError
from ptq.kv.kv_cache import CacheQuantization
from ptq.models.families import FAMILIES
from ptq.models.model_shape import shape_of
from ptq.ops import hadamard


def check(config: Any, settings: CacheQuantization) -> None:
    """Raise InputError where the settings do not fit the model of a config."""
    shape, family = shape_of(config), FAMILIES.get(config.model_type)
    if settings.hadamard is not None and shape.head_dim % hadamard.order_of(settings.hadamard):
        raise InputError(f"KV cache: the Hadamard matrix {settings.hadamard} does not divide head_dim {shape.head_dim}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise InputError("KV cache: the model caps the logits of its attention, which the packed cache cannot do")
    if family is not None and not family.plain_attention:
        raise InputError("KV cache: the model's attention has sinks of its own, which the packed cache cannot do")
    if family is not None and family.mixers:
        raise InputError(
            f"KV cache: not all blocks of {config.model_type} have plain attention alone, with the rows of queries, of "
            "keys and of values in one piece each, and the packed cache can do nothing else; leave --kv-bits, "
            "--key-bits and --value-bits out"
        )
    for name, ahead in (("use_bidirectional_attention", True), ("is_causal", False)):
        if getattr(config, name, None) is ahead:  # the former may be "vision": for images alone
            raise InputError(
                f"KV cache: {name} {ahead} in config.json: what a cache holds changes with tokens to come; leave "
                "--kv-bits, --key-bits and --value-bits out"
            )
    if settings.sinks and _window(config) is not None:
        raise InputError(
            "KV cache: sinks do not go with sliding-window or chunked attention, where the first tokens drop out"
        )


def _window(config: Any) -> int | None:
    """The sliding window, or the chunk, None where no context that the model is made for outgrows it."""
    kinds = getattr(config, "layer_types", None)
    chunked = "chunked_attention" in (kinds or ())
    if kinds is not None and "sliding_attention" not in kinds and not chunked:
        return None
    window = getattr(config, "attention_chunk_size" if chunked else "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else window
