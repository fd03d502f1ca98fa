"""The text model inside of a model that also reads images or sound, as a checkpoint of its own.

Such a checkpoint has the config of its text model as `text_config`, and in its files the text model's tensors behind a
prefix. Only the names are looked at; no tensor is copied.
"""

from dataclasses import replace
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ptq.checkpoint import QUANTISATION, Checkpoint
from ptq.errors import InputError
from ptq.families import FAMILIES

CONFIG = "text_config"
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""What stands in front of the text model's tensors in files, and what it calls them alone."""
INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", *QUANTISATION)
"""Taken from the whole model's config where the text model's own does not say it."""


def alone(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """A checkpoint of the text model alone, and a sentence for the user; the checkpoint itself where there is nothing
    else in it. Raises InputError where the text model is of an unknown family, or cannot be found in the files."""
    whole = checkpoint.config
    if whole["model_type"] in FAMILIES or not isinstance(whole.get(CONFIG), dict):
        return checkpoint, ()
    text: dict[str, Any] = whole[CONFIG]
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type {whole['model_type']!r} has a text model of type {model_type!r} inside, which is "
            f"not supported; known are {', '.join(sorted(FAMILIES))}. A new one is a row of ptq/families.py: see "
            "docs/add-a-family.md"
        )
    tensors = {}
    for name, info in checkpoint.tensors.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            tensors[PREFIXES[prefix] + name.removeprefix(prefix)] = info
    if not tensors:
        raise InputError(
            f"{checkpoint.folder}: config.json speaks of a text model inside, but no tensor of the files is called "
            f"{' or '.join(f'{prefix}...' for prefix in PREFIXES)}"
        )
    inherited = {key: whole[key] for key in INHERITED if whole.get(key) is not None and text.get(key) is None}
    config = {
        **text,
        **inherited,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    found = replace(checkpoint, config=config, tensors=tensors)
    left = len(checkpoint.tensors) - len(tensors)
    return found, (
        f"{whole['model_type']}: the text model alone is taken ({model_type}); {left} tensors of other parts "
        f"({(checkpoint.nbytes - found.nbytes) / 1e6:.0f} MB) are left out",
    )
