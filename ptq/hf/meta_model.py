"""The transformers model of a config.json, without its weights: what its tensors are, and which are packed."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ptq.errors import InputError, refused
from ptq.files.checkpoint import Checkpoint
from ptq.files.dtypes import levels
from ptq.hf import experts, fused
from ptq.hf.packed_config import PtqConfig
from ptq.hf.without_weights import without_weights
from ptq.layers import embedding
from ptq.layers.linear import swap
from ptq.layers.packed_weight import PackedWeight
from ptq.models.families import family_or_default
from ptq.models.family import Family
from ptq.models.model_shape import EXPERTS, ModelShape
from ptq.planning.plan import OF_ANOTHER, LinearPlan, Plan

IGNORED = ("auto_map", "attn_implementation", "_attn_implementation", "num_labels")
"""Entries of a config.json, and of those inside of it, that are left out: code, how somebody computed, and how many
classes there are, of each of which transformers makes a name."""


def transformers_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The transformers config of a checkpoint; never code that it may name. Raises InputError where it is refused."""
    for level in levels(checkpoint.config):  # configs make lists of that length
        _check_count("num_hidden_layers", level.get("num_hidden_layers"), len(checkpoint.tensors))
    content = _read(checkpoint.config)
    if content["model_type"] not in CONFIG_MAPPING:
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: transformers {transformers.__version__} knows no model_type "
            f"{content['model_type']!r}; a later one may: pip install --upgrade transformers"
        )
    with refused(f"{checkpoint.folder / 'config.json'}: transformers refuses it"):
        config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    text = config.get_text_config()
    _check_count("num_hidden_layers", getattr(text, "num_hidden_layers", 0), len(checkpoint.tensors))
    stacked = [info.shape[0] for info in checkpoint.tensors.values() if len(info.shape) > 2]  # all experts in one
    for key in EXPERTS:
        _check_count(key, getattr(text, key, 0), max(len(checkpoint.tensors), *stacked, 0))
    return config


def _check_count(key: str, count: Any, most: int) -> None:
    """Raise InputError for more blocks or experts than a checkpoint can hold, before anything is built that large."""
    if isinstance(count, int) and count > most:
        raise InputError(f"config.json: {key} {count}, but the checkpoint has {most} tensors")


def _read(value: Any) -> Any:
    """What transformers is given of a config.json. JSON has no infinity: it writes {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _read(item) for key, item in value.items() if key not in IGNORED}


def packed_modules(config: PreTrainedConfig, packed: PtqConfig) -> dict[str, PackedWeight]:
    """The packed linears, and the embedding where it is, of the model built without weights. Raises InputError for what
    does not fit."""
    model, entries = without_weights(config), packed.entries_in(config)
    experts.separate(model, experts.names_in(entries))
    family = family_or_default(config)
    found = {name: swap(model, family.module_name(name), entry) for name, entry in entries.items()}
    embedding.tie(model)
    return found


def plain_linears(config: PreTrainedConfig, packed: PtqConfig) -> list[str] | None:
    """Linears of the model that are not packed; None where it has experts."""
    model, entries = without_weights(config), packed.entries()
    if any(experts.is_fused(module) for module in model.modules()):
        return None
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in entries]


def check_whole(checkpoint: Checkpoint, family: Family) -> None:
    """Raise InputError for a checkpoint without its embedding under the name that a whole model has for it."""
    if f"{family.embedding}.weight" not in checkpoint.tensors:
        raise InputError(
            f"{checkpoint.folder}: has no tensor '{family.embedding}.weight'; if AutoModel saved it, without the head, "
            "load and save the model by AutoModelForCausalLM"
        )


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model of a config, and of every other tensor that its files hold."""
    return {name: tuple(tensor.shape) for name, tensor in without_weights(config).state_dict().items()}


def as_turned(shape: ModelShape, config: PreTrainedConfig) -> ModelShape:
    """The shape with as many turned channels as the rotary table of the model has: many a model leaves
    `partial_rotary_factor` unread, and turns whole heads."""
    if shape.rotary == shape.head_dim:
        return shape
    tables = (getattr(module, "inv_freq", None) for module in without_weights(config).modules())
    return replace(shape, rotary=next((2 * len(table) for table in tables if table is not None), shape.rotary))


def check_promised(plan: Plan, family: Family, tensors: Collection[str], promised: Collection[str]) -> None:
    """Check that the source has those tensors of blocks, and those biases of linears, that the model of its config has;
    `promised` are the names of that model's tensors. Raises InputError.

    transformers would fill a missing one with random numbers, and leave out one that the config does not promise.
    """
    held = {family.module_name(name) for name in tensors}
    plain = [linear for linear in plan.linears if linear.expert is None]
    biases = {f"{linear.name}.bias" for linear in plain}
    claimed = {linear.source for linear in plain} | biases | {*plan.unit_norms, *plan.kept}
    wanted = [name for name in promised if name.startswith(f"{plan.layers}.") and not fused.is_fused_parameter(name)]
    for name in (*wanted, *sorted(biases & {*promised})):
        if name not in held:
            raise InputError(f"the checkpoint has no tensor {name!r}, but its config.json promises it: {OF_ANOTHER}")
    for name in sorted(claimed & {*tensors}):
        if family.module_name(name) not in promised:
            raise InputError(
                f"the checkpoint holds tensor {name!r}, but its config.json does not promise it: {OF_ANOTHER}"
            )
    for linear in plan.linears:
        if linear.expert is not None:
            owner, _, _ = family.module_name(linear.name).rpartition(f".{linear.expert}.")
            _check_bias_of_expert(linear, owner, tensors, promised)


def _check_bias_of_expert(linear: LinearPlan, owner: str, tensors: Collection[str], promised: Collection[str]) -> None:
    """Raise InputError for a bias that is promised and not there, or the reverse. The model holds the linear together
    with those of other experts, in the module `owner`."""
    name = f"{linear.name}.bias"
    wholes = [f"{owner}.{leaf}" for leaf in fused.BIASES if leaf.startswith("down") == (linear.role == "down")]
    whole = next((name for name in wholes if name in promised), wholes[0])
    if whole in promised and name not in tensors:
        raise InputError(
            f"the checkpoint has no tensor {whole!r}, nor {name!r}, but its config.json promises it: {OF_ANOTHER}"
        )
    if whole not in promised and name in tensors:
        raise InputError(f"the checkpoint holds tensor {name!r}, but its config.json does not promise it: {OF_ANOTHER}")
