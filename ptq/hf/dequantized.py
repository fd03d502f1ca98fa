"""A packed model as a plain one: of every weight the numbers that it stands for, with all rotations in them."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ptq.errors import InputError
from ptq.hf import residual
from ptq.hf.packed_config import PtqConfig
from ptq.layers.embedding import TiedHead
from ptq.layers.linear import plain_weight
from ptq.layers.packed_weight import GUARD, PackedWeight
from ptq.models.families import row_of
from ptq.models.model_shape import shape_of


def check(config: PreTrainedConfig) -> None:
    """Raise InputError for a model whose plain weights transformers reads in another form than this package's."""
    family = row_of(config)
    if family.transposed or (family.experts is not None and family.experts.fused and shape_of(config).experts):
        raise InputError(
            f"{family.model_type}: a plain model cannot be made of it: transformers reads its weights in another form "
            "than this package has them; the original model has them"
        )


def make_plain(model: PreTrainedModel, packed: PtqConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Turn a packed model, in place, into the plain one that computes what it does, but for the rounding of inputs,
    keys and values, and of the weights to `dtype`; returns it.

    Raises InputError for a model that `check` refuses, that somebody has put adapters into, or whose weights lie on a
    disk; it is then as it was.
    """
    check(model.config)
    weights, turned = _plain_weights(model, dtype), packed.residual()
    config = copy.deepcopy(model.config)
    delattr(config, "quantization_config")
    config._attn_implementation = None  # ours is for a cache of few bits, or for packed models
    if turned is not None:
        _untie(model, weights, turned, dtype)
        config.tie_word_embeddings = False
    options: Any = dict(config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    loaded: Any = type(model).from_pretrained(None, **options)
    made, info = loaded
    if strange := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise InputError(
            f"the model has not the tensors of its config, such as {strange[0]!r}: adapters that were put into it must "
            "be taken out first (peft's `unload`), or load the checkpoint again"
        )
    if made.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    made.train(model.training)
    vars(model).clear()
    vars(model).update(vars(made))
    return model


def _plain_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a model by name, with plain weights in the place of packed ones."""
    weights = dict(model.state_dict())
    if any(tensor.is_meta for tensor in weights.values()):
        raise InputError("some weights of the model are not in memory; use `quantize dequantize` on its checkpoint")
    for name, module in model.named_modules():
        if isinstance(module, TiedHead):
            del weights[f"{name}.{GUARD}"]
        elif isinstance(module, PackedWeight):
            leaves = [leaf for leaf in module.state_dict() if leaf not in ("bias", residual.SIGNS)]
            stored = {leaf: weights.pop(f"{name}.{leaf}") for leaf in leaves}
            weights[f"{name}.weight"] = plain_weight(module, stored).to(dtype)
    return weights


def _untie(model: PreTrainedModel, weights: dict[str, Tensor], construction: str, dtype: torch.dtype) -> None:
    """Replace the tensors of ends that turn by those of ends that do not. Raises InputError for a model without a head,
    whose last norm would give other vectors."""
    head = model.get_output_embeddings()
    if head is None:
        raise InputError("a model without its head cannot be made plain here; load it with AutoModelForCausalLM")
    names = {module: name for name, module in model.named_modules()}
    embedding, norm = (names[module] for module in residual.ends_of(model).values())
    signs = [weights.pop(f"{name}.{residual.SIGNS}") for name in (embedding, norm)]
    rows, gain = weights[f"{embedding}.weight"].float(), weights.get(f"{norm}.weight")
    first, last, unit = residual.untied(rows, gain, signs[0], construction, row_of(model.config).norm_offset)
    weights |= {f"{embedding}.weight": first.to(dtype), f"{names[head]}.weight": last.to(dtype)}
    weights |= {} if unit is None else {f"{norm}.weight": unit}
