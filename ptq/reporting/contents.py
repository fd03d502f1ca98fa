"""What is inside a checkpoint: formats, rotations and true sizes, read from its headers alone."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ptq.errors import InputError, in_folder
from ptq.files import published
from ptq.files.checkpoint import Checkpoint
from ptq.hf import packed_tensors, residual
from ptq.hf.meta_model import packed_modules, transformers_config
from ptq.hf.packed_config import PtqConfig
from ptq.kv import key_centers
from ptq.models.families import family_of
from ptq.reporting.report_schema import PAGE


@dataclass(frozen=True)
class Group:
    """The linears that are stored in the same way."""

    scheme: dict[str, Any]
    linears: tuple[str, ...]
    weights: int
    nbytes: int
    """Everything stored for these weights: codes, scales, zero-points, sign vectors, padding."""

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
    """Summarise a checkpoint; one that was published in few bits as plain. Raises InputError where it is quantised by
    another package."""
    with in_folder(checkpoint.folder):
        return _summary(checkpoint)


def _summary(checkpoint: Checkpoint) -> Contents:
    packed = None if published.form(checkpoint.config) is not None else PtqConfig.parse(checkpoint.config)
    page = checkpoint.folder / PAGE
    report = str(page) if page.is_file() else None
    if packed is None:
        return Contents((), checkpoint.nbytes, checkpoint.nbytes, report=report)
    modules = packed_modules(transformers_config(checkpoint), packed)
    stored: dict[str, int] = {}
    family = family_of(checkpoint.config)
    for tensor, info in checkpoint.tensors.items():
        owner = _packed_owner(family.file_name(tensor))
        stored[owner] = stored.get(owner, 0) + info.nbytes
    groups = []
    for name, scheme in packed.schemes.items():
        named = [linear for linear, used in packed.linears.items() if used == name]
        if not named:
            raise InputError(
                f"{checkpoint.folder / 'config.json'}: quantization_config: no linear uses scheme {name!r}"
            )
        linears = tuple(linear for linear in named if linear in modules)  # not those of blocks that were cut off
        if not linears:
            continue
        weights = sum(modules[linear].out_features * modules[linear].in_features for linear in linears)
        if not weights:
            raise InputError(f"config.json: {linears[0]} has no weights by its sizes")
        groups.append(Group(scheme, linears, weights, sum(stored.get(linear, 0) for linear in linears)))
    packed_bytes = sum(group.nbytes for group in groups)
    plain_bytes = checkpoint.nbytes - packed_bytes
    return Contents(tuple(groups), plain_bytes, checkpoint.nbytes, packed.kv_cache, packed.residual(), report)


def check_packed(checkpoint: Checkpoint) -> None:
    """Raise InputError where the files of a packed checkpoint do not hold the tensors that its config.json speaks of,
    or hold others of the same linears."""
    packed = PtqConfig.of_checkpoint(checkpoint)
    assert packed is not None, checkpoint.folder
    family = family_of(checkpoint.config)
    inside = partial(packed_tensors.inside, family=family, prefix=family.layers.partition(".")[0])
    config, cache = transformers_config(checkpoint), packed.cache()
    modules = packed_modules(config, packed)
    stored = {inside(name): info for name, info in checkpoint.tensors.items()}
    for name in residual.tensors(family) if packed.residual() else ():
        stored.pop(inside(name), None)
    if f"{family.embedding}.weight" not in checkpoint.tensors and inside(f"{family.head}.weight") not in stored:
        modules.pop(family.head, None)  # AutoModel saved it, without the head
    packed_tensors.check(modules, stored, checkpoint.folder, inside)
    key_centers.check(config, cache is not None and cache.centered, stored, checkpoint.folder, inside)


def _packed_owner(tensor: str) -> str:
    """The linear that a packed tensor, `<linear>.weight_<part>` or the guard `<linear>.weight`, belongs to."""
    owner, _, leaf = tensor.rpartition(".")
    return owner if leaf.startswith("weight") else ""
