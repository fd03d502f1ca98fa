"""Adapters (LoRA) on packed linears, by peft: `get_peft_model(model, prepared(LoraConfig(...), model))`."""

import copy
import re
import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from transformers import PreTrainedModel

from ptq.errors import InputError
from ptq.hf.experts import Experts
from ptq.layers.linear import QuantLinear

READING = ("use_dora", "kasa_config")
"""Settings with which peft reads the weight beside the adapter."""
DRAWN = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` for which peft reads nothing of the weight beside the adapter."""
PLAIN = "make the weights plain numbers first: model.dequantize(), or `quantize dequantize`"


class PackedLora(lora.Linear):
    """peft's layer around a packed linear: y = W x + scale * B A x."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **options: Any) -> None:
        own = next((name for name in READING if getattr(config, name, None)), None)
        if own or config.init_lora_weights not in DRAWN:
            what = own or f"init_lora_weights={config.init_lora_weights!r}"
            raise InputError(f"{what} reads the weight beside the adapter, which is packed; {PLAIN}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # this class is what supports it
            super().__init__(base_layer, adapter_name, config, **options)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raises InputError: codes cannot take up an adapter."""
        raise InputError(f"an adapter cannot be merged into packed weights; {PLAIN}, and load the adapter onto that")


def prepared(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """A copy of a LoraConfig that peft takes for a packed model: `get_peft_model` that of a new adapter, and
    `PeftModel.from_pretrained(..., config=)` that of a trained one. `target_modules="all-linear"` means its packed
    linears; of a model with experts those outside of MLPs, as peft knows experts in the form of transformers alone.

    Raises InputError for a model without packed linears, or that no gradient passes, for adapters on experts, and when
    it is used for what needs the weights themselves.
    """
    linears = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()
               if isinstance(module, QuantLinear) and module is not model.get_output_embeddings()}  # fmt: skip
    if not linears:
        raise InputError("no linear of the model is packed: give the LoraConfig to peft as it is")
    if not isinstance(config, LoraConfig):
        found = type(config).__name__
        if getattr(config, "is_prompt_learning", False):
            raise InputError(f"a {found} asks nothing of linears: give it to peft as it is")
        raise InputError(f"packed linears take adapters of a LoraConfig, found a {found}; {PLAIN}")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_trainable:
        raise InputError(
            "no gradient passes inputs of linears, or a KV cache, in few bits; quantise without --activation-bits and "
            f"--kv-bits (quip-sharp: --activation-bits 16), or {PLAIN}"
        )
    if quantizer is not None and quantizer.quantization_config.residual() is not None and _adapts_ends(config, model):
        warnings.warn(
            "ptq: what is trained of embedding, norm or head fits this packed model alone: both ends are turned in the "
            "plain one that model.dequantize() makes, so do not merge it there; quantise with --offline for that",
            stacklevel=2,
        )
    config = copy.copy(config)
    inside = {name for module in model.modules() if isinstance(module, Experts) for name in module.names}
    if config.target_modules == "all-linear":
        config.target_modules = sorted(name for name in linears if name.rpartition(".")[2] not in inside)
    for name in linears:
        if name.rpartition(".")[2] in inside and _means(config.target_modules, name):
            raise InputError(
                f"target_modules {config.target_modules!r} mean {name}: peft puts no adapter on experts that are "
                f"packed one by one, nor on what has their names; name linears of attention, such as q_proj, or {PLAIN}"
            )
    config._register_custom_module({QuantLinear: PackedLora})
    return config


def _adapts_ends(config: LoraConfig, model: PreTrainedModel) -> bool:
    """Whether more is trained than adapters between the ends of a model: modules, tokens, classes, or its ends."""
    ends = [name for name, module in model.named_modules()
            if module in (model.get_input_embeddings(), model.get_output_embeddings())]  # fmt: skip
    more = config.modules_to_save or getattr(config, "trainable_token_indices", None)
    classes = str(config.task_type).rpartition(".")[2] in ("SEQ_CLS", "TOKEN_CLS")
    return bool(more) or classes or any(_means(config.target_modules, name) for name in ends)


def _means(targets: Any, name: str) -> bool:
    """Whether peft takes a linear to be among these target modules: a pattern, or names or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())
