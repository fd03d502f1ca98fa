"""Adapters (LoRA) on packed linears, by peft: `get_peft_model(model, prepared(LoraConfig(...), model))`."""

import copy
import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from transformers import PreTrainedModel

from ptq.errors import InputError
from ptq.hf.experts import Experts
from ptq.layers.linear import QuantLinear

DRAWN = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` for which peft reads nothing of the weight beside the adapter."""
PLAIN = "make the weights plain numbers first: model.dequantize(), or `quantize dequantize`"


class PackedLora(lora.Linear):
    """peft's layer around a packed linear: y = W x + scale * B A x."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **options: Any) -> None:
        if config.use_dora or config.init_lora_weights not in DRAWN:
            what = "use_dora" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
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

    Raises InputError for a model that no gradient passes, for adapters on experts, and when it is used for what needs
    the weights themselves.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_trainable:
        raise InputError(
            "no gradient passes inputs of linears, or a KV cache, in few bits; quantise without --activation-bits and "
            f"--kv-bits (quip-sharp: --activation-bits 16), or {PLAIN}"
        )
    config = copy.copy(config)
    inside = {name for module in model.modules() if isinstance(module, Experts) for name in module.names}
    if config.target_modules == "all-linear":
        linears = (name for name, module in model.named_modules() if isinstance(module, QuantLinear))
        head = model.get_output_embeddings()
        found = {name for name in linears if model.get_submodule(name) is not head}
        config.target_modules = sorted(name for name in found if name.rpartition(".")[2] not in inside)
    elif inside:
        _refuse_experts(config.target_modules, inside)
    config._register_custom_module({QuantLinear: PackedLora})
    return config


def _refuse_experts(targets: Any, inside: set[str]) -> None:
    names = {targets} if isinstance(targets, str) else set(targets or ())
    for name in sorted(names):
        if isinstance(targets, str) or name.rpartition(".")[2] in inside:
            raise InputError(
                f"target_modules {name!r}: peft puts no adapter on experts that are packed one by one; name linears of "
                f"attention, such as q_proj, in a list, or {PLAIN}"
            )
