"""The transformers model of a family around one decoder block, without weights.

It is built on the meta device, and all other blocks pass on what they are given, so that masks, rotary tables,
multipliers and norms are exactly the model's own.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ptq.errors import refused
from ptq.fast import module_forwards
from ptq.fast.attention import attention_function
from ptq.hf import experts, fused
from ptq.hf.without_weights import UNBUILT, without_weights
from ptq.models.family import Family
from ptq.ops import matmul


class FastLinear(nn.Linear):
    """A plain linear layer, in float32 on a CPU through the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        return matmul.linear(input, self.weight, self.bias)


class Splice(nn.Module):
    """Stands in for a decoder block: records the hidden states that enter, and puts others in their place."""

    def __init__(self, block: nn.Module | None, pair: bool) -> None:
        super().__init__()
        self.block, self.pair = block, pair
        self.replacement: Tensor | None = None
        self.entered: Tensor | None = None
        self.left: Tensor | None = None
        self.shared: Any = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.entered = hidden_states
        x = hidden_states if self.replacement is None else self.replacement
        if self.block is not None:
            found = self.block(x, *args, **kwargs)
            x = found[0] if self.pair else found
        self.left, self.shared = x, kwargs.get("shared_kv_states")
        return (x, None) if self.pair else x


class Pass(nn.Module):
    """Stands in for a decoder block in front of the one that runs."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.pair else hidden_states


class NoPositions(nn.Module):
    """Stands in for a table of positions: adds nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def model_around(
    config: Any, family: Family, splice: Splice, layer: int | None, device: torch.device
) -> PreTrainedModel:
    """The model of a config without weights, and with no block but the one that the splice is given; tables that are
    computed, not stored, are real."""
    whole = _whole(Settings.of(config))
    parent, _, name = family.layers.rpartition(".")
    away = [block for index, block in enumerate(getattr(whole.get_submodule(parent), name)) if index != layer]
    model = copy.deepcopy(whole, {id(block): block for block in away})  # these are left out below, and not copied
    body = model.get_submodule(parent)
    blocks = list(getattr(body, name))
    others = {module for block in away for module in block.modules()}
    _fill_buffers(model, others, device)  # while all blocks are there: a model may compute what they hold
    if layer is not None:
        splice.block = blocks[layer]
    stand_ins = [*(Pass(splice.pair) for _ in range(layer or 0)), splice]
    for stand_in, block in zip(stand_ins, blocks, strict=False):  # a model may ask for a block's kind
        vars(stand_in).update({key: value for key, value in vars(block).items() if isinstance(value, str)})
    setattr(body, name, nn.ModuleList(stand_ins))
    if family.experts is not None:
        experts.separate(model, family.experts.linears, fused.FusedLayout.of(family.experts))
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear  # making another one would take longer than all the rest here
        if isinstance(module, nn.Embedding):  # a part may hold few rows, and that of padding concerns gradients alone
            module.padding_idx = None
    with refused(UNBUILT):
        for name, module in list(_rotary_tables(model)):
            model.set_submodule(name, type(module)(config=module.config).to(device))  # a table may have one of its own
    module_forwards.install(model)  # as it is in a loaded model, so that numbers are the same to the bit
    attention_function.install(model)
    return model.eval()


@dataclass(frozen=True)
class Settings:
    """A config, equal to another one of the same content."""

    kind: type
    content: str
    attention: str | None
    config: Any = field(compare=False)

    @classmethod
    def of(cls, config: Any) -> "Settings":
        return cls(type(config), config.to_json_string(use_diff=False), config._attn_implementation, config)


@functools.lru_cache(maxsize=2)
def _whole(settings: Settings) -> PreTrainedModel:
    """The model of a config on the meta device. The more blocks it has the longer that takes, and a run wants a model
    around every block several times."""
    config = copy.deepcopy(settings.config)
    config.output_router_logits = False  # for a loss of the training, over the routers of all blocks
    return without_weights(config)


def _rotary_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            yield name, module


def _fill_buffers(model: PreTrainedModel, others: set[nn.Module], device: torch.device) -> None:
    """Compute the buffers that are no rotary tables, such as the scale of an embedding, as transformers does it for a
    model that was built on the meta device: a module's own, or all that the base model has a hand in. Not those of
    `others`."""
    unset = []
    for module in (module for module in model.modules() if module not in others):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and not name.endswith("inv_freq"):
                value = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, value, device=device)  # NaN is found by every proof
                unset.append((module, name))
    if not unset:
        return
    with refused(UNBUILT), torch.random.fork_rng(devices=[]):  # weights on the meta device are drawn, too
        for module in dict.fromkeys(module for module, _ in unset):
            model._init_weights(module)
        if any(module._buffers[name].isnan().any() for module, name in unset):
            model._init_weights(model.base_model)
