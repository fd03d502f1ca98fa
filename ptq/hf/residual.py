"""R1 when the model runs: at the ends of a model whose head is its embedding.

Fused into both, R1 would make two matrices of the one, since the head takes the last norm's gain and the embedding does
not. So the weight stays as it is. The embedding turns the vectors that it gives, h = R1 e, and the last norm turns its
input back, R1ᵀ h: two Hadamard transforms per token. In between everything is rotated as elsewhere. Vectors for
`inputs_embeds` are what the embedding gives when it is called; the rows of its weight are not turned.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int16, Num
from torch import Tensor, nn
from transformers import PreTrainedModel

from ptq.errors import InputError
from ptq.fast.steps import rms_norm
from ptq.fast.watched import InPlace
from ptq.files.header import read_header
from ptq.layers.packed_weight import KeptSigns, kept_signs, loaded_signs, stored_signs
from ptq.models.families import family_of
from ptq.models.family import Family
from ptq.ops import hadamard
from ptq.planning.plan import Rotation

SIGNS = "residual_signs"
"""Buffer of the embedding and of the last norm: the signs of R1, as those of a linear are stored. No parameter, since
transformers gives those of an embedding that it resizes gradients."""
VERSION = 1


def config_entry(rotation: Rotation) -> dict[str, Any]:
    """The entry of `quantization_config`."""
    return {"version": VERSION, "hadamard": hadamard.construction(rotation.order)}


def parse(entry: Any) -> str:
    """The construction that an entry names. Raises InputError for anything that `config_entry` cannot have written."""
    where = "config.json: quantization_config: residual_rotation"
    if not isinstance(entry, dict) or entry.keys() != {"version", "hadamard"}:
        raise InputError(f"{where}: expected an object with `version` and `hadamard`, found {str(entry)[:80]!r}")
    if entry["version"] != VERSION or type(entry["version"]) is not int:
        raise InputError(
            f"{where} has version {entry['version']!r}, this package reads version {VERSION}; "
            "install the version of ptq that wrote the checkpoint"
        )
    if not isinstance(entry["hadamard"], str):
        raise InputError(f"{where}: hadamard must be a string, found {str(entry['hadamard'])[:80]!r}")
    if len(entry["hadamard"]) > 80:
        raise InputError(f"{where}: hadamard is no construction: {entry['hadamard'][:80]!r}...")
    hadamard.parse(entry["hadamard"])
    return entry["hadamard"]


def refuse_unread(files: Iterable[Path]) -> None:
    """Raise InputError where files hold signs that no entry of config.json speaks of: the model would be another."""
    for file in files:
        for name in read_header(file)[0]:
            if name.endswith(f".{SIGNS}"):
                raise InputError(
                    f"{file}: holds tensor {name!r}, but config.json: quantization_config has no residual_rotation; "
                    "the checkpoint is damaged"
                )


def check_loaded(model: PreTrainedModel) -> None:
    """Raise InputError where the loaded signs are no signs, or not the same at both ends."""
    stored = {name: module.get_buffer(SIGNS) for name, module in ends_of(model).items()}
    if any(signs.is_meta for signs in stored.values()):
        return
    first, *others = (loaded_signs(signs).cpu() for signs in stored.values())
    if not all(torch.equal(first, other) for other in others) or not (first.abs() == 1).all():
        raise InputError(
            f"{' and '.join(f'{name}.{SIGNS}' for name in stored)} must be the same numbers, 1 and -1; the "
            "checkpoint is damaged"
        )


def tensors(family: Family) -> tuple[str, str]:
    """Names of the signs in a checkpoint."""
    return f"{family.embedding}.{SIGNS}", f"{family.final_norm}.{SIGNS}"


def ends_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The embedding and the last norm of a model, by the names that a checkpoint of the whole model has for them."""
    family, prefix = family_of(model.config.to_dict()), f"{model.base_model_prefix}."
    names = family.embedding, family.final_norm
    if hasattr(model, model.base_model_prefix):
        return {name: model.get_submodule(name) for name in names}
    return {name: model.get_submodule(name.removeprefix(prefix)) for name in names}


def install(model: PreTrainedModel, construction: str) -> dict[str, nn.Module]:
    """Give the ends of a model room for the signs, on the current default device, and let them turn what they give and
    are given. Raises InputError where the Hadamard matrix does not fit."""
    size, ends = model.config.hidden_size, ends_of(model)
    if size % hadamard.order_of(construction):
        raise InputError(
            f"config.json: quantization_config: residual_rotation: the Hadamard matrix {construction} does not divide "
            f"hidden_size {size}"
        )
    for module in ends.values():
        module.register_buffer(SIGNS, stored_signs(torch.ones(size)))
    embedding, norm = ends.values()
    embedding.forward = functools.partial(_embed, embedding, construction, KeptSigns())
    kind = rms_norm.kind_of(norm)
    fast = None if kind is None else InPlace(rms_norm.forward, norm, *kind)
    norm.forward = functools.partial(_norm, norm, construction, KeptSigns(), fast)
    return ends


def set_input_embeddings(model: PreTrainedModel, value: nn.Module) -> None:
    """In the place of transformers' method: another embedding would not turn what it gives. Raises InputError."""
    if value is not model.get_input_embeddings():  # as when it is resized
        raise InputError(
            "the embedding of this model rotates what it gives, which another one would not; resize it by "
            "resize_token_embeddings, or make the model plain first: model.dequantize()"
        )


def _signs(module: nn.Module, kept: KeptSigns) -> Float32[Tensor, " k"]:
    stored = module._buffers[SIGNS]
    assert stored is not None
    return kept_signs(kept, SIGNS, stored)


def _embed(module: nn.Module, construction: str, kept: KeptSigns, x: Num[Tensor, "..."]) -> Float[Tensor, "..."]:
    y = type(module).forward(module, x)
    if x.is_floating_point():  # a packed embedding multiplies, for the head that is tied to it
        return y
    return hadamard.apply(y, _signs(module, kept), construction)


def _norm(
    module: nn.Module,
    construction: str,
    kept: KeptSigns,
    fast: InPlace | None,
    x: Float[Tensor, "*batch k"],
) -> Float[Tensor, "*batch k"]:
    back = hadamard.apply(x, _signs(module, kept), construction, transpose=True)
    return type(module).forward(module, back) if fast is None else fast(back)


def untied(
    rows: Float32[Tensor, "v k"],
    gain: Float[Tensor, " k"] | None,
    signs: Int16[Tensor, " k"],
    construction: str,
    norm_offset: float,
) -> tuple[Float32[Tensor, "v k"], Float32[Tensor, "v k"], Float[Tensor, " k"] | None]:
    """Embedding, head and last norm of a model whose ends do not turn, in the place of one matrix for ends that do: the
    rotation fused into both matrices, and what the norm multiplies with into the head. `gain` and `signs` are as they
    are stored, the gain None where the norm has none."""
    vector = loaded_signs(signs)
    embedding = hadamard.apply(rows, vector, construction)
    if gain is None:
        return embedding, embedding.clone(), None
    head = hadamard.apply(rows * (gain.float() + norm_offset), vector, construction)
    return embedding, head, torch.full_like(gain, 1 - norm_offset)
