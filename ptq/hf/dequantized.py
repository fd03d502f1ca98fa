"""A packed model as a plain one: of every weight the numbers that it stands for, with all rotations in them."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ptq.errors import InputError
from ptq.hf import residual
from ptq.hf.packed_config import PtqConfig
from ptq.kv.key_centers import KEY_CENTER
from ptq.layers.embedding import TiedHead
from ptq.layers.linear import plain_weight
from ptq.layers.packed_weight import GUARD, PackedWeight
from ptq.models.families import family_or_default
from ptq.models.model_shape import shape_of

KEPT = ("generation_config", "name_or_path", "training")
"""Attributes of a model that are not those of its weights."""


def check(config: PreTrainedConfig) -> None:
    """Raise InputError for a model whose plain weights transformers reads in another form than this package's."""
    family = family_or_default(config)
    if family.transposed or (family.experts is not None and family.experts.fused and shape_of(config).experts):
        raise InputError(
            f"{family.model_type}: a plain model cannot be made of it: transformers reads its weights in another form "
            "than this package has them; the original model has them"
        )


def make_plain(model: PreTrainedModel, packed: PtqConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Turn a packed model, in place, into the plain one that computes what it does, but for the rounding of inputs,
    keys and values, and of the weights to `dtype`; returns it. Its parts are new modules, without the hooks of the old
    ones.

    Raises InputError for a model that `check` refuses, that has adapters which rename its tensors, or whose weights lie
    on a disk or on several devices; it is then as it was.
    """
    check(model.config)
    if len({parameter.device for parameter in model.parameters()} - {torch.device("meta")}) > 1:
        raise InputError("the model lies on several devices; use `quantize dequantize` on its checkpoint")
    weights, turned = _plain_weights(model, dtype), packed.residual()
    config = copy.deepcopy(model.config)
    delattr(config, "quantization_config")
    if str(config._attn_implementation).startswith("ptq"):  # for a cache of few bits, or for packed models
        config._attn_implementation = None
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
    made.config.name_or_path = model.config.name_or_path
    _take_parts(model, made.to(model.device))
    return model


def _take_parts(model: PreTrainedModel, made: PreTrainedModel) -> None:
    """Put the parts and settings of a plain model into a packed one, which keeps what others have set on it itself.
    What was frozen stays frozen; the weights that are new are so where everything was."""
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedWeight)}
    trained = {
        name: parameter.requires_grad
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in packed  # whose parts are never trained
    }
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained.get(name, any(trained.values())))
    for name, value in list(vars(model).items()):
        if _is_ours(value):
            delattr(model, name)
    for key, hook in list(model._forward_pre_hooks.items()):
        if _is_ours(hook):
            del model._forward_pre_hooks[key]
    stays = {name: value for name, value in vars(model).items() if name in KEPT or "hooks" in name}
    vars(model).update({**vars(made), **stays})
    model.train(model.training)


def _is_ours(value: Any) -> bool:
    """Whether an attribute or a hook is a function of this package, with a model bound to it or not."""
    function = getattr(value, "func", getattr(value, "__func__", value))
    return callable(value) and str(getattr(function, "__module__", "")).startswith("ptq.")


def _plain_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a model by name, with plain weights in the place of packed ones."""
    weights = {name: x for name, x in model.state_dict().items() if not name.endswith(f".{KEY_CENTER}")}
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
    first, last, unit = residual.untied(rows, gain, signs[0], construction, family_or_default(model.config).norm_offset)
    weights |= {f"{embedding}.weight": first.to(dtype), f"{names[head]}.weight": last.to(dtype)}
    weights |= {} if unit is None else {f"{norm}.weight": unit}
