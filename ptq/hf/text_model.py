"""The text model inside of a model that also reads images or sound, as a checkpoint of its own.

Such a checkpoint has the config of its text model as `text_config`, and in its files the text model's tensors behind a
prefix. Only the names are looked at; no tensor is copied.

Some text models have positions of three numbers, for time, height and width. A token of text has the same number three
times, and then the model is one of a plain family: as that it is taken.
"""

from dataclasses import replace
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ptq.errors import InputError, refused
from ptq.files.checkpoint import QUANTISATION, Checkpoint
from ptq.hf.meta_model import transformers_config
from ptq.models.families import FAMILIES, FOR_TEXT

CONFIG, TIED, HEAD = "text_config", "tie_word_embeddings", "lm_head.weight"
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    **{f"model.{name}.": f"model.{name}." for name in ("embed_tokens", "layers", "norm")},  # of older files
}
"""What stands in front of the text model's tensors in files, and what it calls them alone."""
INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", *QUANTISATION)
"""Taken from the whole model's config where the text model's own does not say it."""


def alone(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """A checkpoint of the text model alone, and a sentence for the user; the checkpoint itself where there is nothing
    else in it. Raises InputError where the text model is of an unknown family, or cannot be found in the files."""
    whole = checkpoint.config
    if whole["model_type"] in FOR_TEXT:
        text = _plain(checkpoint)
    elif whole["model_type"] in FAMILIES or not isinstance(whole.get(CONFIG), dict):
        return checkpoint, ()
    else:
        text = whole[CONFIG]
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type {whole['model_type']!r} has a text model of type {model_type!r} inside, which is "
            f"not supported; known are {', '.join(sorted(FAMILIES))}. A new one is one row of a table: "
            "see docs/add-a-family.md"
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
    if HEAD not in tensors:
        _check_tied(checkpoint, text)
    inherited = {key: whole[key] for key in INHERITED if whole.get(key) is not None and text.get(key) is None}
    config = {
        **text,
        **inherited,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        TIED: HEAD not in tensors,
    }
    found = replace(checkpoint, config=config, tensors=tensors)
    left = len(checkpoint.tensors) - len(tensors)
    return found, (
        f"{whole['model_type']}: the text model alone is taken ({model_type}); {left} tensors of other parts "
        f"({(checkpoint.nbytes - found.nbytes) / 1e6:.0f} MB) are left out",
    )


def _check_tied(checkpoint: Checkpoint, text: dict[str, Any]) -> None:
    """A text model without a head of its own takes its embedding for one. Raises InputError where config.json says that
    it has one: then the files call it something else. What the text model does not say, its family does: the whole may
    speak of itself, and transformers 4 left out what is the family's default."""
    own = checkpoint.config.get(CONFIG)
    said = own.get(TIED) if isinstance(own, dict) else None
    tied = CONFIG_MAPPING[text["model_type"]]().tie_word_embeddings if said is None else said
    if not tied and checkpoint.config.get(TIED) is not True:
        near = sorted(name for name in checkpoint.tensors if name.endswith("head.weight"))
        raise InputError(
            f"{checkpoint.folder}: config.json says that the text model's head is not its embedding ({TIED}), but no "
            f"tensor of the files is called {' or '.join(p + 'weight' for p in PREFIXES if p.endswith('lm_head.'))}; "
            f"tensors that may be it: {', '.join(near[:5]) or 'none'}"
        )


@refused("config.json: its text model makes no sense")
def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of a text model as that of the family that it belongs to for text. It may be spread over the whole
    model's, so transformers reads it. Raises InputError where it refuses."""
    text = transformers_config(checkpoint).get_text_config().to_dict()
    model_type = FOR_TEXT[checkpoint.config["model_type"]]
    known = vars(CONFIG_MAPPING[model_type]())
    rope = {key: value for key, value in text["rope_parameters"].items() if not key.startswith("mrope")}
    given = {key: text[key] for key in known if text.get(key) is not None and key[0] != "_"}
    return {**given, "model_type": model_type, "rope_parameters": rope}
