"""Load a model to run it, plain or packed, with errors for people."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import ptq.hf.plugin  # noqa: F401  (registers the plug-in that loads packed checkpoints)
from ptq.errors import InputError, refused
from ptq.files import companions, published, source
from ptq.files.checkpoint import Checkpoint, read_config
from ptq.hf.meta_model import transformers_config
from ptq.models.model_shape import UNREAD
from ptq.planning.plan import OF_ANOTHER
from ptq.recipe import check_device


def load_model(
    model: str | Path, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> PreTrainedModel:
    """A causal language model from a folder, a hub name or `demo`, in `dtype` or the stored one; with whatever else
    there is in the files, where they are those of a model that also sees or hears (`ptq.hf.text_model`). Weights that
    were published in FP8 or MXFP4 are what `quantize` reads them as (`ptq.files.published`).

    Stored float16 becomes float32 on a CPU, where float16 products are hundreds of times slower. Safetensors only, no
    code from the checkpoint. Raises InputError where it cannot be loaded, and for float16 on a CPU; also for a tensor
    that is missing, which transformers would fill with random numbers, and for a block or a bias that is not in the
    model.
    """
    folder = source.resolve(str(model))
    config = load_config(folder)
    stored = config.dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype must be one of torch's, such as torch.bfloat16, found {dtype!r}")
    on_cpu = device is None or device.type == "cpu"
    if dtype == torch.float16 and on_cpu:
        raise InputError("float16 is hundreds of times slower on a CPU; ask for bfloat16, which is fastest, or float32")
    if dtype is None and stored == torch.float16 and on_cpu:
        dtype = torch.float32
    with refused(f"{model} could not be loaded"):
        kind, files = _files(folder, config)
        loaded: Any = kind.from_pretrained(
            **files,
            dtype=dtype or "auto",
            device_map=None if on_cpu else {"": device},  # kernels' layouts differ
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    loaded, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{model}: {len(missing)} tensors of the model are not in its files, the first is {missing[0]!r}"
        )
    _refuse_surplus(str(model), loaded, info["unexpected_keys"])
    return loaded


def _refuse_surplus(what: str, model: PreTrainedModel, unread: Iterable[str]) -> None:
    """Raise InputError for tensors of files that say the model is another one than its config: of blocks behind the
    last, and behind those for multi-token prediction, and biases of linears and norms that have none."""
    modules, config = dict(model.named_modules()), model.config.get_text_config()
    unread_blocks = next((count for key in UNREAD if (count := getattr(config, key, None))), 0)
    for name in sorted(unread):
        parts = name.split(".")
        lists = (modules.get(".".join(parts[:place])) for place in range(len(parts)))
        behind = any(
            isinstance(blocks, nn.ModuleList) and part.isdecimal() and int(part[:10]) >= len(blocks) + unread_blocks
            for blocks, part in zip(lists, parts, strict=True)
        )
        bias = parts[-1] == "bias" and hasattr(modules.get(".".join(parts[:-1])), "weight")
        if bias or behind:
            raise InputError(
                f"{what}: its files hold tensor {name!r}, but its config.json does not promise it: {OF_ANOTHER}"
            )


def _files(folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """The class of a model, which may be a text model `alone`, and what that class is to load: a folder; or config and
    weights, where they were published in few bits."""
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if published.form(read_config(folder)[0]) is None:
        kind = AutoModelForCausalLM if alone else AutoModelForMultimodalLM
        return kind, {"pretrained_model_name_or_path": folder, "config": config}
    checkpoint, _ = published.dequantized(Checkpoint.open(folder))
    config, weights = transformers_config(checkpoint), dict(_as_held(checkpoint))
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if alone else MODEL_FOR_MULTIMODAL_LM_MAPPING
    return classes[type(config)], {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


def _as_held(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint as transformers holds them. One for all experts of a block is published in MXFP4
    alone, and there it is transposed."""
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        yield name, tensor.transpose(1, 2) if info.scale is not None and tensor.dim() == 3 else tensor


def device_named(name: str) -> torch.device:
    """The device of an option `--device`; auto is a GPU where PyTorch sees one.

    Raises InputError for another name, and for a GPU that is not there.
    """
    check_device(name)
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def positions_of(config: Any) -> int | None:
    """The number of positions of a model; None: it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name or `demo`. Raises InputError where none is there or loads."""
    folder = source.resolve(str(model))
    if not companions.has_tokenizer(folder):
        raise InputError(
            f"{folder}: holds no tokenizer, without which a text cannot be read; put the model's tokenizer.json and "
            "tokenizer_config.json there"
        )
    missing = (
        "" if companions.has_vocabulary(folder) else " (it has settings alone: put the model's tokenizer.json there)"
    )
    with refused(f"the tokenizer of {folder} could not be loaded{missing}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_config(model: str | Path) -> Any:
    """The transformers config of a folder, a hub name or `demo`. Raises InputError where it cannot be loaded."""
    return transformers_config(Checkpoint.open(source.resolve(str(model))))
