"""Parts of a model that run alone: the embedding, one decoder block, the head.

Each is the transformers model of that family, built on the meta device, in which all other blocks pass on what they are
given, so that masks, rotary tables, multipliers and norms are exactly the model's own. Only the part's tensors are ever
in memory.

Blocks may need more than hidden states: what travels from one to the next is then a *state*, which has the hidden
states in front (`ptq.models.state`).
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ptq.errors import refused
from ptq.fast import fast_decode, fast_steps
from ptq.hf import experts, fused
from ptq.kv.kv_cache import CacheQuantization, attach
from ptq.layers.linear import QuantLinear, swap
from ptq.layers.packed_weight import PackedWeight, frozen
from ptq.models.family import Family
from ptq.models.state import Layout, given, recorded
from ptq.ops import matmul
from ptq.ops.activations import Activation

UNBUILT = "config.json: transformers makes no model of it"
UNRUN = "config.json: the model that transformers makes of it does not run"


class _FastLinear(nn.Linear):
    """A plain linear layer, in float32 on a CPU through the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        return matmul.linear(input, self.weight, self.bias)


class _Splice(nn.Module):
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


class _Pass(nn.Module):
    """Stands in for a decoder block in front of the one that runs."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.pair else hidden_states


class Part:
    """A transformers model with one decoder block, of which only some modules are filled.

    `layer` picks the block; None leaves all of them out, for the embedding and the head. Fill the part with `load`,
    then call `embed`, `run` or `logits`.
    """

    def __init__(self, config: Any, family: Family, layer: int | None, device: torch.device) -> None:
        self.family, self.layer, self.device = family, layer, device
        self.layout = Layout.of(config)
        self.splice = _Splice(None, family.returns_pair)
        self.model = _meta_model(config, family, self.splice, layer, device)
        self.prefix = f"{family.layers}.{layer}." if layer is not None else ""

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
            kept = as_stored and leaf == "weight" and isinstance(module, _FastLinear)
            tensor = tensor.float() if tensor.is_floating_point() and not kept else tensor
            if tensor.shape[:1] == (1,):
                tensor = tensor.clone()  # the last bits of a product with one row depend on where in memory it lies
            module._parameters[leaf] = frozen(tensor.to(self.device))
        for owner in {self.family.module_name(name).rpartition(".")[0] for name in tensors}:
            if isinstance(module := self.module(owner), PackedWeight):
                module.prepack()  # as it is after loading, so that numbers are the same to the bit

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
        _put(self.block, self._inside(name), module)

    def quantize_input(self, name: str, activation: Activation) -> None:
        """Quantise the input of a packed or dense `QuantLinear` from now on."""
        module = self.module(name)
        assert isinstance(module, QuantLinear), name
        module.online = replace(module.online, activation=activation)

    def quantize_cache(self, settings: CacheQuantization | None) -> None:
        """Quantise keys and values from now on, as the cache of the whole model does; None: leave them alone."""
        if settings is not None:
            attach(self.model, settings)

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
        with recorded(self.model) as inputs:
            self._body(input_ids=ids)
        assert self.splice.entered is not None
        return self.layout.first(self.splice.entered, inputs)

    @torch.no_grad()
    def run(self, state: Float[Tensor, "batch t k"]) -> Float[Tensor, "batch t left"]:
        """The state that leaves the block."""
        assert self.layer is not None
        hidden, others = self.layout.split(state, self.layer)
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
        if not head:
            self._without_norm()
            parent, _, _ = self.family.layers.rpartition(".")
            module = self.model.get_submodule(parent)
            named = {name.removeprefix(f"{parent}."): tensor for name, tensor in named.items()}
        inputs = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
        found = torch.func.functional_call(module, named, (), {**inputs, "use_cache": False})
        left = found.logits if head else self.splice.entered if hidden is None else self.splice.left
        assert left is not None
        self.splice.entered = self.splice.left = None  # they hold the graph
        return left

    def _body(self, **inputs: Any) -> None:
        self._without_norm()
        parent, _, _ = self.family.layers.rpartition(".")
        self.model.get_submodule(parent)(**inputs, use_cache=False)

    def _without_norm(self) -> None:
        """Leave out the last norm, where the part has none."""
        norm = self.model.get_submodule(self.family.final_norm)
        if any(parameter.is_meta for parameter in norm.parameters()):
            parent, _, name = self.family.final_norm.rpartition(".")
            setattr(self.model.get_submodule(parent), name, nn.Identity())


def _meta_model(
    config: Any, family: Family, splice: _Splice, layer: int | None, device: torch.device
) -> PreTrainedModel:
    """The model of a config without weights, and with no block but the one that the splice is given; tables that are
    computed, not stored, are real."""
    config = copy.deepcopy(config)
    config.output_router_logits = False  # for a loss of the training, over the routers of all blocks
    with refused(UNBUILT), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parent, _, name = family.layers.rpartition(".")
    body = model.get_submodule(parent)
    if layer is not None:
        splice.block = getattr(body, name)[layer]
    stand_ins = [*(_Pass(splice.pair) for _ in range(layer or 0)), splice]
    for stand_in, block in zip(stand_ins, getattr(body, name), strict=False):  # a model may ask for a block's kind
        vars(stand_in).update({key: value for key, value in vars(block).items() if isinstance(value, str)})
    setattr(body, name, nn.ModuleList(stand_ins))
    if family.experts is not None:
        experts.separate(model, family.experts.linears, fused.Layout.of(family.experts))
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            fast = _FastLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
            _put(model, name, fast)
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # a part may hold few rows, and that of padding concerns gradients alone
            module.padding_idx = None
    with refused(UNBUILT):
        for name, module in list(_rotary_tables(model)):
            _put(model, name, type(module)(config=module.config).to(device))  # a table may have one of its own
    for module in model.modules():
        _fill_buffers(model, module, device)
    fast_steps.install(model)  # as it is in a loaded model, so that numbers are the same to the bit
    fast_decode.install_attention(model)
    return model.eval()


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _rotary_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            yield name, module


def _fill_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Compute the buffers of a module that are no rotary tables, such as the scale of an embedding, as transformers
    does it for a model that was built on the meta device."""
    empty = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    for name, buffer in empty.items():
        unset = torch.nan if buffer.is_floating_point() else 0
        module._buffers[name] = torch.full_like(buffer, unset, device=device)  # NaN is found by every proof
    if empty:
        with refused(UNBUILT), torch.random.fork_rng(devices=[]):  # weights on the meta device are drawn, too
            model._init_weights(module)
