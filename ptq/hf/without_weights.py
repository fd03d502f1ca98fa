"""The transformers model of a config on the meta device, where it has no weights."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ptq.errors import refused
from ptq.hf import transposed
from ptq.models.families import UNLISTED

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(UNLISTED)
UNBUILT = "config.json: transformers makes no model of it"


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The model, whose linears are all `nn.Linear`. Raises InputError where transformers makes none."""
    with refused(UNBUILT), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    transposed.as_linears(model)
    return model
