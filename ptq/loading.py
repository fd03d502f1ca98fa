"""Load a model to run it, plain or packed, with errors for people."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import ptq.hf  # noqa: F401  (registers the plug-in that loads packed checkpoints)
from ptq import source
from ptq.errors import InputError, RunError


def load_model(
    model: str | Path, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> PreTrainedModel:
    """A causal language model from a folder, a hub name or `demo`, in `dtype` or the stored one; with whatever else
    there is in the files, where they are those of a model that also reads images (`ptq.text_model`).

    Stored float16 becomes float32 on a CPU, where float16 products are hundreds of times slower. Safetensors only, no
    code from the checkpoint. Raises InputError where it cannot be loaded; also for a tensor that is missing, which
    transformers would fill with random numbers.
    """
    folder = source.resolve(str(model))
    config = load_config(folder)
    stored, alone = config.dtype, type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if dtype is None and stored == torch.float16 and (device is None or device.type == "cpu"):
        dtype = torch.float32
    try:
        loaded: Any = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_pretrained(
            folder,
            dtype=dtype or "auto",
            device_map=None if device is None or device.type == "cpu" else {"": device},  # kernels' layouts differ
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, KeyError) as error:
        raise _error(str(model), error) from error
    loaded, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{model}: {len(missing)} tensors of the model are not in its files, the first is {missing[0]!r}"
        )
    return loaded


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name or `demo`. Raises InputError where it cannot be loaded."""
    return _from_pretrained(AutoTokenizer, model, "tokenizer")


def load_config(model: str | Path) -> Any:
    """The transformers config of a folder, a hub name or `demo`. Raises InputError where it cannot be loaded."""
    return _from_pretrained(AutoConfig, model, "config")


def _from_pretrained(kind: Any, model: str | Path, what: str) -> Any:
    try:
        return kind.from_pretrained(source.resolve(str(model)), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise _error(f"the {what} of {model}", error) from error


def _error(what: str, error: Exception) -> InputError | RunError:
    if isinstance(error, InputError | RunError):
        return error
    return InputError(f"{what} could not be loaded: {' '.join(str(error).split())}")
