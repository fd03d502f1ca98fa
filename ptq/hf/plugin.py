"""The transformers plug-in: `import ptq`, and `AutoModelForCausalLM.from_pretrained` loads a packed checkpoint."""

import copy
import functools
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ptq.errors import InputError
from ptq.fast import whole_model
from ptq.files.dtypes import dtype_name
from ptq.files.header import TensorInfo, read_header
from ptq.hf import dequantized, experts, packed_tensors, residual, transposed
from ptq.hf.packed_config import QUANT_METHOD, PtqConfig
from ptq.kv import key_centers
from ptq.kv.attention import attach, body_of
from ptq.layers import embedding
from ptq.layers.linear import swap
from ptq.layers.packed_weight import GUARD, PackedWeight
from ptq.models.families import family_or_default
from ptq.ops import huge_pages

ADJUST = "_adjust_missing_and_unexpected_keys"
"""The method with which a transformers model decides what it says is missing in files."""


class PtqQuantizer(HfQuantizer):
    """Puts a `QuantLinear` in the place of every linear that the config lists, and a `PackedEmbedding` in that of the
    embedding; transformers then loads the bytes."""

    requires_calibration = True  # packed checkpoints are made by `quantize`, never by from_pretrained
    separated = False
    """Whether the experts of the model are linears of their own."""
    narrow: Mapping[str, torch.dtype] = {}
    """Dtypes in the files of tensors in which transformers has more places than in the rest, as those of some routers.
    """
    on_cpu = False
    """Whether the model comes to lie there, and stays: nothing else is there, or it is told to."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        self.on_cpu = not torch.accelerator.is_available() or {str(device) for device in devices} == {"cpu"}

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32 for float16 on a CPU: it holds the same numbers, and is what a run measures there. So it is saved."""
        if dtype != torch.float16 or not self.on_cpu:
            return dtype
        warnings.warn(
            "ptq: float16 is slow on a CPU, so the model is loaded in float32; with dtype=torch.bfloat16 it is fastest",
            stacklevel=2,
        )
        return torch.float32

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        assert isinstance(self.quantization_config, PtqConfig)
        entries = self.quantization_config.entries_in(model.config)
        transposed.as_linears(model)
        self.separated = experts.separate(model, experts.names_in(entries))
        if self.separated:
            model._can_compile_fullgraph = False  # which experts there are to run is asked of the tokens
        replaced = {name: swap(model, own, entries[name]) for name, own in own_names(model, entries).items()}
        cache = self.quantization_config.cache()
        centered = cache is not None and cache.centered
        if centered:
            key_centers.add_places(key_centers.blocks_of(body_of(model), model.config), model.config)
        embedding.tie(model)
        if isinstance(model.get_input_embeddings(), embedding.PackedEmbedding):
            model.resize_token_embeddings = MethodType(embedding.resize_token_embeddings, model)
        ends, turned = {}, self.quantization_config.residual()
        if turned is not None:
            ends = residual.install(model, turned)  # already, so that accelerate's hooks come around it
            model.set_input_embeddings = MethodType(residual.set_input_embeddings, model)
        files = kwargs.get("checkpoint_files")
        if files:
            paths = [Path(file) for file in files]
            stored = stored_in(paths, model)
            packed_tensors.check(replaced | ends, stored, paths[0].parent, lambda name: _inside(name, model))
            key_centers.check(model.config, centered, stored, paths[0].parent, lambda name: _inside(name, model))
            _refuse_other_numbers(model, stored, paths[0].parent)
            _warn_of_others(self.quantization_config.linears.keys() - entries.keys(), stored, model)
            self.narrow = {name: info.dtype for name, info in stored.items() if info.dtype == model.config.dtype}
            _refuse_missing(model, paths[0].parent)
            if turned is None:
                residual.refuse_unread(paths)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        assert isinstance(self.quantization_config, PtqConfig)
        if self.quantization_config.residual() is not None:
            residual.check_loaded(model)
        cache = self.quantization_config.cache()
        if cache is not None:
            attach(model, cache)
        prefix = f"{model.base_model_prefix}."
        found = {name: (x.dtype, self.narrow.get(name.removeprefix(prefix))) for name, x in model.state_dict().items()}
        self.narrow = {name: stored for name, (dtype, stored) in found.items() if stored not in (None, dtype)}
        _leave_plain_steps(model)
        whole_model.install(model)
        for own in own_names(model, self.quantization_config.entries_in(model.config)).values():
            module = model.get_submodule(own)
            assert isinstance(module, PackedWeight), own
            try:
                module.prepack()  # one after the other, so that no two copies of the model are ever in memory
            except InputError as error:
                raise InputError(f"{own}: {error}") from None
        huge_pages.take_out_of_files(m for m in model.modules() if isinstance(m, (nn.Linear, PackedWeight)))
        huge_pages.use(model.parameters())
        _keep_forks_alive()

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """What transformers does to tensors between files and model: nothing is merged into experts that are apart."""
        if not self.separated:
            return weight_conversions
        return [conversion for conversion in weight_conversions if not isinstance(conversion, WeightConverter)]

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What is saved: the dtypes that were stored."""
        state = model.state_dict()
        state.update({name: state[name].to(dtype) for name, dtype in self.narrow.items() if name in state})
        return state, {}

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        assert isinstance(self.quantization_config, PtqConfig) and dtype is not None
        plain = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # `save_pretrained` leaves a word in config
        return dequantized.make_plain(model, self.quantization_config, plain)

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on the model: no gradient passes inputs in few bits, nor such a cache."""
        assert isinstance(self.quantization_config, PtqConfig)
        schemes = self.quantization_config.schemes.values()
        return self.quantization_config.kv_cache is None and not any("activation" in scheme for scheme in schemes)


register_quantizer(QUANT_METHOD)(PtqQuantizer)


def _refuse_other_numbers(model: PreTrainedModel, stored: Mapping[str, TensorInfo], folder: Path) -> None:
    """Raise InputError for a plain tensor of integers or complex numbers where the model has real ones: transformers
    would leave it as it is."""
    for name, parameter in model.state_dict().items():
        info = stored.get(_inside(name, model))
        if info is not None and parameter.is_floating_point() and not info.dtype.is_floating_point:
            packed = name.endswith(f".{GUARD}") and info.shape == (1,)
            said = "it is packed, and config.json does not list it: one of them" if packed else "the checkpoint"
            wanted = dtype_name(parameter.dtype)
            found = dtype_name(info.dtype)
            raise InputError(f"{folder}: tensor {name!r} is {found}, expected {wanted}; {said} is damaged")


def _warn_of_others(linears: Iterable[str], stored: Mapping[str, TensorInfo], model: PreTrainedModel) -> None:
    """Say that files hold these linears of blocks that the model does not have."""
    if any(_inside(f"{name}.{GUARD}", model) in stored for name in linears):
        blocks = model.config.num_hidden_layers
        warnings.warn(f"ptq: the model has {blocks} blocks, and its files more: those are left out", stacklevel=2)


def _refuse_missing(model: PreTrainedModel, folder: Path) -> None:
    """Let loading end in an InputError where the files lack a plain tensor of the model, which transformers would fill
    with random numbers. A head of another kind than that of the checkpoint begins so, and is let through."""
    adjust = getattr(model, ADJUST, None)
    if adjust is None:
        warnings.warn(
            f"ptq: this version of transformers does not say which tensors it misses: check {folder} with "
            "`quantize verify`",
            stacklevel=2,
        )
        return

    def adjusted(info: Any) -> None:
        del vars(model)[ADJUST]
        adjust(info)
        known = family_or_default(model.config)
        parts = known.layers, known.embedding, known.final_norm, known.head
        ours = tuple(_inside(f"{part}.", model) for part in parts)
        missing = sorted(name for name in info.missing_keys if _inside(name, model).startswith(ours))
        if missing:
            raise InputError(f"{folder}: tensor {missing[0]!r} is missing; the checkpoint is damaged")

    vars(model)[ADJUST] = adjusted


def own_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """What a model calls the packed modules of its checkpoint, by their names there. `AutoModel`'s names begin behind
    "model."; a model that makes no logits has no use for the entry of the head, the one that is not in there."""
    family, prefix = family_or_default(model.config), f"{model.base_model_prefix}."
    found = {name: family.module_name(name) for name in names}
    outside = [name for name, own in found.items() if not own.startswith(prefix)]
    if model.get_output_embeddings() is None and len(outside) == 1:
        del found[outside[0]]
    if hasattr(model, model.base_model_prefix):
        return found
    return {name: own.removeprefix(prefix) for name, own in found.items()}


@functools.cache
def _keep_forks_alive() -> None:
    """Let processes that are forked off from now on run on one thread: to load a model takes several, which are not in
    the copy, and OpenMP would wait for them for ever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def _leave_plain_steps(model: PreTrainedModel) -> None:
    """Jamba's mixer, in a model that is quantised, adds the bias of dt_proj and takes it off again, lest it read packed
    weights. Ours are never packed."""
    for module in model.modules():
        if isinstance(module._modules.get("dt_proj"), nn.Linear) and hasattr(module, "config"):
            module.config = copy.copy(module.config)
            vars(module.config).pop("_is_quantized", None)


def _inside(name: str, model: PreTrainedModel) -> str:
    return packed_tensors.inside(name, family_or_default(model.config), model.base_model_prefix)


def stored_in(files: Iterable[Path], model: PreTrainedModel) -> dict[str, TensorInfo]:
    """The tensors of a model's files, by what its base calls them."""
    return {_inside(name, model): info for file in files for name, info in read_header(file)[0].items()}
