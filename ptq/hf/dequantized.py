"""A packed model as a plain one: of every weight the numbers that it stands for, with all rotations in them."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ptq.errors import InputError
from ptq.hf import residual
from ptq.hf.packed_config import PtqConfig
from ptq.layers.embedding import TiedHead
from ptq.layers.linear import plain_weight
from ptq.layers.packed_weight import GUARD, PackedWeight
from ptq.models.families import row_of
from ptq.models.family import Family


def check(family: Family) -> None:
    """Raise InputError for a family whose plain weights transformers reads in another form than this package's."""
    if family.transposed or (family.experts is not None and family.experts.fused):
        raise InputError(
            f"{family.model_type}: a plain model cannot be made of it: transformers reads its weights in another form "
            "than this package has them; the original model has them"
        )


def plain_model(model: PreTrainedModel, packed: PtqConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The plain model that computes what a packed one does, but for the rounding of inputs, keys and values; it shares
    tensors with that. Raises InputError for a family that `check` refuses."""
    family = row_of(model.config)
    check(family)
    weights, turned = dict(model.state_dict()), packed.residual()
    for name, module in model.named_modules():
        if isinstance(module, TiedHead):
            del weights[f"{name}.{GUARD}"]
        elif isinstance(module, PackedWeight):
            leaves = [leaf for leaf in module.state_dict() if leaf not in ("bias", residual.SIGNS)]
            stored = {leaf: weights.pop(f"{name}.{leaf}") for leaf in leaves}
            weights[f"{name}.weight"] = plain_weight(module, stored).to(dtype)
    config = copy.deepcopy(model.config)
    delattr(config, "quantization_config")
    if turned is not None:
        _untie(model, weights, family, turned, dtype)
        config.tie_word_embeddings = False
    made: PreTrainedModel = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return made.train(model.training)


def _untie(
    model: PreTrainedModel, weights: dict[str, Tensor], family: Family, construction: str, dtype: torch.dtype
) -> None:
    """Replace the tensors of ends that turn by those of ends that do not. Raises InputError for a model without a head,
    whose last norm would give other vectors."""
    head = model.get_output_embeddings()
    if head is None:
        raise InputError("a model without its head cannot be made plain here; load it with AutoModelForCausalLM")
    names = {module: name for name, module in model.named_modules()}
    embedding, norm = (names[module] for module in residual.ends_of(model).values())
    signs, gain = weights.pop(f"{embedding}.{residual.SIGNS}"), weights.get(f"{norm}.weight")
    del weights[f"{norm}.{residual.SIGNS}"]
    rows = weights[f"{embedding}.weight"].float()
    factor = torch.ones(rows.shape[1]) if gain is None else gain.float() + family.norm_offset
    matrices = residual.untied(rows, factor.to(rows.device), signs, construction)
    for name, matrix in zip((embedding, names[head]), matrices, strict=True):
        weights[f"{name}.weight"] = matrix.to(dtype)
    if gain is not None:
        weights[f"{norm}.weight"] = torch.full_like(gain, 1 - family.norm_offset)
