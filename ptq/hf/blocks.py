"""Parts of a model that run alone: the embedding, one decoder block, the head.

Each is the transformers model of that family around it (`ptq.hf.spliced`). Only the part's tensors are ever in memory.

Blocks may need more than hidden states: what travels from one to the next is then a *state*, which has the hidden
states in front (`ptq.models.state`).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from ptq.hf.spliced import FastLinear, NoPositions, Splice, model_around
from ptq.kv import key_centers
from ptq.kv.attention import attach, straight_through
from ptq.kv.kv_cache import CacheQuantization
from ptq.layers.linear import QuantLinear, swap
from ptq.layers.packed_weight import PackedWeight, frozen
from ptq.models.family import Family
from ptq.models.state import StateLayout, given, recorded_inputs
from ptq.ops.activations import Activation

UNRUN = "config.json: the model that transformers makes of it does not run"


class PartialModel:
    """A transformers model with one decoder block, of which only some modules are filled.

    `layer` picks the block; None leaves all of them out, for the embedding and the head. Fill the part with `load`,
    then call `embed`, `run` or `logits`.
    """

    def __init__(self, config: Any, family: Family, layer: int | None, device: torch.device) -> None:
        self.family, self.layer, self.device = family, layer, device
        self.layout = StateLayout.of(config)
        self.splice = Splice(None, family.returns_pair)
        self.model = model_around(config, family, self.splice, layer, device)
        self.prefix = f"{family.layers}.{layer}." if layer is not None else ""
        self.cache: CacheQuantization | None = None

    def __del__(self) -> None:
        """Modules with a method of our own hold themselves, a model too: without this a block would stay until the
        garbage collector comes by, and it does not see how large it is."""
        for module in self.model.modules() if "model" in vars(self) else ():
            held = vars(module)
            for name in [name for name, value in held.items() if isinstance(value, functools.partial)]:
                del held[name]

    @property
    def block(self) -> nn.Module:
        """The decoder block itself."""
        assert self.splice.block is not None
        return self.splice.block

    def load(self, tensors: dict[str, Tensor], as_stored: bool = False) -> None:
        """Put tensors, named as in the whole model, into the part; floating ones in float32, in which it computes.
        `as_stored`: plain linears keep their weight's dtype, which saves memory and time where tokens are few."""
        for name, tensor in tensors.items():
            owner, _, leaf = self.family.module_name(name).rpartition(".")
            module = self.module(owner)
            if leaf in module._buffers:
                module._buffers[leaf] = (tensor.float() if tensor.is_floating_point() else tensor).to(self.device)
                continue
            assert leaf in module._parameters, name
            kept = as_stored and leaf == "weight" and isinstance(module, FastLinear) and not self._is_read(name)
            tensor = tensor.float() if tensor.is_floating_point() and not kept else tensor
            if tensor.shape[:1] == (1,):
                tensor = tensor.clone()  # the last bits of a product with one row depend on where in memory it lies
            module._parameters[leaf] = frozen(tensor.to(self.device))
        for owner in {self.family.module_name(name).rpartition(".")[0] for name in tensors}:
            if isinstance(module := self.module(owner), PackedWeight):
                module.prepack()  # as it is after loading, so that numbers are the same to the bit

    def _is_read(self, name: str) -> bool:
        """Whether the model reads the weight of a linear by itself, so that it must have the dtype of the rest."""
        return any(self._inside(name) in mixer.kept for mixer in self.family.mixers)

    def parameter(self, name: str) -> Tensor:
        """The tensor that is called `name` in the whole model."""
        owner, _, leaf = name.rpartition(".")
        tensor = self.module(owner)._parameters[leaf]
        assert tensor is not None, name
        return tensor.detach()

    def holds(self, name: str) -> bool:
        """Whether the part has a place for a tensor."""
        owner, _, leaf = name.rpartition(".")
        return self.module(owner)._parameters.get(leaf) is not None

    def take(self, name: str) -> Tensor:
        """The tensor that is called `name` in the whole model; the part does not hold it any more."""
        owner, _, leaf = name.rpartition(".")
        tensor = self.parameter(name)
        self.module(owner)._parameters[leaf] = frozen(tensor.to("meta"))
        return tensor

    def pack(self, entries: dict[str, dict[str, Any]]) -> None:
        """Put packed linears in the place of plain ones: `quantization_config` entries by name in the whole model."""
        for name, entry in entries.items():
            if name.startswith(self.prefix):
                swap(self.block if self.prefix else self.model, self._inside(name), entry)

    def put(self, name: str, module: nn.Module) -> None:
        """Put a module in the place of the one that is called `name` in the whole model."""
        self.block.set_submodule(self._inside(name), module)

    def quantize_input(self, name: str, activation: Activation) -> None:
        """Quantise the input of a packed or dense `QuantLinear` from now on."""
        module = self.module(name)
        assert isinstance(module, QuantLinear), name
        module.online = replace(module.online, activation=activation)

    def quantize_cache(self, settings: CacheQuantization | None) -> None:
        """Quantise keys and values from now on, as the cache of the whole model does; None: leave them alone. Where
        keys are centred, the block has a place for the centres."""
        self.cache = settings
        if settings is not None:
            if settings.centered:
                key_centers.add_places([self.block], self.model.config)
            attach(self.model, settings)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, neither inputs of linears nor keys and values are quantised."""
        linears = [module for module in self.block.modules() if isinstance(module, QuantLinear)]
        online, settings = [linear.online for linear in linears], self.cache
        for linear in linears:
            linear.online = replace(linear.online, activation=None)
        if settings is not None:
            attach(self.model, replace(settings, key_bits=16, value_bits=16, sinks=0, hadamard=None, centered=False))
        try:
            yield
        finally:
            for linear, before in zip(linears, online, strict=True):
                linear.online = before
            self.quantize_cache(settings)

    def module(self, name: str) -> nn.Module:
        """The module that is called `name` in the whole model."""
        if self.prefix:
            return self.block.get_submodule(self._inside(name))
        return self.model.get_submodule(name)

    def _inside(self, name: str) -> str:
        """What the block calls what has `name` in the whole model's files; of itself, nothing."""
        return f"{self.family.module_name(name)}.".removeprefix(self.prefix)[:-1]

    @torch.no_grad()
    def embed(self, ids: Int[Tensor, "batch t"]) -> Float[Tensor, "batch t k"]:
        """The state that enters the first block."""
        with recorded_inputs(self.model) as inputs:
            self._body(input_ids=ids)
        assert self.splice.entered is not None
        return self.layout.first(self.splice.entered, inputs)

    @torch.no_grad()
    def run(
        self, state: Float[Tensor, "batch t k"], positions: Int64[Tensor, "batch t"] | None = None
    ) -> Float[Tensor, "batch t left"]:
        """The state that leaves the block. `positions` of the tokens: one behind another where they are not given."""
        assert self.layer is not None
        hidden, others = self.layout.split(state, self.layer)
        others = others if positions is None else {**others, "position_ids": positions}
        self.splice.replacement = hidden
        with given(self.model):
            self._body(inputs_embeds=hidden, **others)
        assert self.splice.left is not None
        return self.layout.next(self.splice.left, state, self.splice.shared)

    @torch.no_grad()
    def logits(self, state: Float[Tensor, "batch t k"]) -> Float[Tensor, "batch t vocab"]:
        """Logits from the state that leaves the last block."""
        hidden, others = self.layout.split(state, 0)
        self.splice.replacement = hidden
        self._leave_out_unfilled()
        with given(self.model):
            return self.model(inputs_embeds=hidden, use_cache=False, **others).logits

    def differentiated(
        self,
        tensors: dict[str, Tensor],
        *,
        ids: Int[Tensor, "batch t"] | None = None,
        hidden: Float[Tensor, "batch t k"] | None = None,
        head: bool = False,
    ) -> Float[Tensor, "batch t out"]:
        """`embed` of ids, `run` on hidden states or, with `head`, their `logits`, with gradient, and with `tensors`,
        named as in the whole model, in the place of the part's own."""
        self.splice.replacement = hidden
        inside = f"{self.family.layers}.{self.layer}.block."
        named = {
            inside + self._inside(name) if self.prefix else self.family.module_name(name): tensor
            for name, tensor in tensors.items()
        }
        module: nn.Module = self.model
        self._leave_out_unfilled()
        if not head:
            parent, _, _ = self.family.layers.rpartition(".")
            module = self.model.get_submodule(parent)
            named = {name.removeprefix(f"{parent}."): tensor for name, tensor in named.items()}
        inputs = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
        with straight_through():
            found = torch.func.functional_call(module, named, (), {**inputs, "use_cache": False})
        left = found.logits if head else self.splice.entered if hidden is None else self.splice.left
        assert left is not None
        self.splice.entered = self.splice.left = None  # they hold the graph
        return left

    def _body(self, **inputs: Any) -> None:
        self._leave_out_unfilled()
        parent, _, _ = self.family.layers.rpartition(".")
        self.model.get_submodule(parent)(**inputs, use_cache=False)

    def _leave_out_unfilled(self) -> None:
        """Leave out the last norm and the table of positions, where the part has none."""
        for name, stand_in in ((self.family.final_norm, nn.Identity()), (self.family.positions, NoPositions())):
            if name and any(parameter.is_meta for parameter in self.model.get_submodule(name).parameters()):
                self.model.set_submodule(name, stand_in)


def row_by_row(part: PartialModel, state: Float[Tensor, "rows t k"]) -> Float[Tensor, "rows t left"]:
    """One row at a time, as the proof of the written checkpoint does: in a larger batch the last bit of a product may
    differ."""
    return torch.cat([part.run(row) for row in state.split(1)])
