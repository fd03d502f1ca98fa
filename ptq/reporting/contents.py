"""What is inside a checkpoint: formats, rotations and true sizes, read from its headers alone."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ptq.errors import InputError, refused
from ptq.files import fp8_source
from ptq.files.checkpoint import Checkpoint
from ptq.hf import experts
from ptq.hf.blocks import UNBUILT
from ptq.hf.plugin import PtqConfig
from ptq.layers import embedding
from ptq.layers.linear import swap
from ptq.layers.packed_weight import PackedWeight
from ptq.models.model_shape import ModelShape
from ptq.planning.plan import OF_ANOTHER, Plan
from ptq.reporting.report_schema import PAGE


@dataclass(frozen=True)
class Group:
    """The linears that are stored in the same way."""

    scheme: dict[str, Any]
    linears: tuple[str, ...]
    weights: int
    nbytes: int
    """Everything stored for these weights: codes, scales, zero-points, padding."""

    @property
    def bits_per_weight(self) -> float:
        """True bits per weight."""
        return 8 * self.nbytes / self.weights


@dataclass(frozen=True)
class Contents:
    """Summary of a checkpoint."""

    groups: tuple[Group, ...]
    plain_bytes: int
    """Bytes of the tensors that are not packed: embedding, head, norms, biases."""
    nbytes: int
    cache: dict[str, Any] | None = None
    """How the KV cache is quantised, as config.json says it; None: not at all."""
    residual: str | None = None
    """The Hadamard matrix of an R1 that acts when the model runs (`ptq.hf.residual`); None: there is none."""
    report: str | None = None
    """The page that the run wrote about itself; None where there is none."""

    @property
    def bits_per_weight(self) -> float | None:
        """True bits per weight over all quantised linears; None where there are none."""
        rounded = [group for group in self.groups if group.scheme["format"] != "dense"]
        weights = sum(group.weights for group in rounded)
        return 8 * sum(group.nbytes for group in rounded) / weights if weights else None


def summary(checkpoint: Checkpoint) -> Contents:
    """Summarise a checkpoint; one that was published in FP8 as plain. Raises InputError where it is quantised by
    another package."""
    packed = None if fp8_source.stated(checkpoint.config) is not None else PtqConfig.parse(checkpoint.config)
    page = checkpoint.folder / PAGE
    report = str(page) if page.is_file() else None
    if packed is None:
        return Contents((), checkpoint.nbytes, checkpoint.nbytes, report=report)
    modules = packed_modules(transformers_config(checkpoint), packed)
    stored: dict[str, int] = {}
    for tensor, info in checkpoint.tensors.items():
        stored[_packed_owner(tensor)] = stored.get(_packed_owner(tensor), 0) + info.nbytes
    groups = []
    for name, scheme in packed.schemes.items():
        linears = tuple(linear for linear, used in packed.linears.items() if used == name)
        if not linears:
            raise InputError(
                f"{checkpoint.folder / 'config.json'}: quantization_config: no linear uses scheme {name!r}"
            )
        weights = sum(modules[linear].out_features * modules[linear].in_features for linear in linears)
        groups.append(Group(scheme, linears, weights, sum(stored.get(linear, 0) for linear in linears)))
    packed_bytes = sum(group.nbytes for group in groups)
    plain_bytes = checkpoint.nbytes - packed_bytes
    return Contents(tuple(groups), plain_bytes, checkpoint.nbytes, packed.kv_cache, packed.residual(), report)


def transformers_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The transformers config of a checkpoint; never code that it may name. Raises InputError where it is refused."""
    content = {key: _floats(value) for key, value in checkpoint.config.items() if key != "auto_map"}
    if content["model_type"] not in CONFIG_MAPPING:
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: transformers knows no model_type {content['model_type']!r}"
        )
    with refused(f"{checkpoint.folder / 'config.json'}: transformers refuses it"):
        return CONFIG_MAPPING[content["model_type"]].from_dict(content)


def _floats(value: Any) -> Any:
    """JSON has no infinity: transformers writes it as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _floats(item) for key, item in value.items()}


def _packed_owner(tensor: str) -> str:
    """The linear that a packed tensor, `<linear>.weight_<part>` or the guard `<linear>.weight`, belongs to."""
    owner, _, leaf = tensor.rpartition(".")
    return owner if leaf.startswith("weight") else ""


def packed_modules(config: PreTrainedConfig, packed: PtqConfig) -> dict[str, PackedWeight]:
    """The packed linears, and the embedding where it is, of the model built without weights. Raises InputError for what
    does not fit."""
    model, entries = _without_weights(config), packed.entries()
    experts.separate(model, experts.names_in(entries))
    found = {name: swap(model, experts.module_name(name), entry) for name, entry in entries.items()}
    embedding.tie(model)
    return found


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model of a config, and of every other tensor that its files hold."""
    return {name: tuple(tensor.shape) for name, tensor in _without_weights(config).state_dict().items()}


def as_turned(shape: ModelShape, config: PreTrainedConfig) -> ModelShape:
    """The shape with as many turned channels as the rotary table of the model has: many a model leaves
    `partial_rotary_factor` unread, and turns whole heads."""
    if shape.rotary == shape.head_dim:
        return shape
    tables = (getattr(module, "inv_freq", None) for module in _without_weights(config).modules())
    return replace(shape, rotary=next((2 * len(table) for table in tables if table is not None), shape.rotary))


def check_promised(plan: Plan, tensors: Collection[str], promised: Collection[str]) -> None:
    """Check that the source has those tensors of blocks, and those biases of linears, that the model of its config has;
    `promised` are the names of that model's tensors. Raises InputError.

    transformers would fill a missing one with random numbers, and leave out one that the config does not promise.
    """
    held = {experts.module_name(name) for name in tensors}
    plain = [linear for linear in plan.linears if linear.expert is None]
    biases = {f"{linear.name}.bias" for linear in plain}
    claimed = {linear.source for linear in plain} | biases | {*plan.unit_norms, *plan.kept}
    wanted = [name for name in promised if name.startswith(f"{plan.layers}.") and not experts.is_fused_parameter(name)]
    for name in (*wanted, *sorted(biases & {*promised})):
        if name not in held:
            raise InputError(f"the checkpoint has no tensor {name!r}, but its config.json promises it: {OF_ANOTHER}")
    for name in sorted(claimed & {*tensors}):
        if experts.module_name(name) not in promised:
            raise InputError(
                f"the checkpoint holds tensor {name!r}, but its config.json does not promise it: {OF_ANOTHER}"
            )


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with refused(UNBUILT), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
