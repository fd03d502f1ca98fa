"""`quantize export --gguf`: the weights of a packed checkpoint in a GGUF, for llama.cpp."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float32, Num, UInt8
from torch import Tensor
from transformers import PreTrainedConfig

from ptq.commands.export import refuse_beside
from ptq.commands.verify import check_integrity
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.files.gguf_file import Entry, GgufFile
from ptq.files.lock import exclusive
from ptq.files.source import path_of
from ptq.hf.meta_model import packed_modules, transformers_config
from ptq.hf.packed_config import PtqConfig
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import PackedWeight
from ptq.models.families import FAMILIES, family_of
from ptq.models.family import Family
from ptq.weights.ggml import InGgml
from ptq.weights.prepacked import PrepackedFormat

PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
READERS = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up"), "output_norm": ("output",)}
"""The norms of a GGUF, and the linears that its gains may have been put into."""
PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Linears whose rows llama.cpp has in another order for some models, and the config's number of their heads: two
channels that rotary embedding turns together are neighbours there, and half a head apart in transformers."""
EXTRA = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a GGUF that are no tensors in transformers, but follow from the config."""
HEAD = "output.weight"
"""It is not there where the original's head is tied to the embedding."""
OTHER = "pass the GGUF that was made of the very model that was quantised"
DIFFERENCE = 0.25
"""Most by which the norm of a tensor may differ from the original's."""


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of the checkpoint that becomes one of the GGUF."""

    name: str
    """Without `.weight` where it is a packed one."""
    target: str
    module: PackedWeight | None

    @property
    def kind(self) -> str:
        """The name without block and `.weight`."""
        return self.target.rsplit(".", 2)[-2]


def export_gguf(checkpoint: Path, original: Path, out: Path) -> int:
    """Write `checkpoint`, made by `quantize`, to the file `out`: `original`, the GGUF of the model that it was made
    from, with the codes and scales of the checkpoint in the place of its weights, none of them rounded again (but
    scales below 1e-5, to multiples of 6e-8).

    Returns the number of packed weights. Raises InputError for what llama.cpp does not have, saying which option to
    quantise with, for a GGUF of another model and a file that exists. RunError for a full disk.
    """
    out = path_of(out).absolute()
    source, gguf = Checkpoint.open(checkpoint), GgufFile(original)
    packed = PtqConfig.of_checkpoint(source)
    if packed is None:
        raise InputError(f"{checkpoint}: no weight of it is quantised; run `quantize quarot --offline` first")
    refuse_beside(checkpoint, packed)
    config, family = transformers_config(source), family_of(source.config)
    if family.gguf is None:
        known = ", ".join(name for name, row in FAMILIES.items() if row.gguf is not None)
        raise InputError(f"{checkpoint}: GGUFs are written of {known}, not yet of {family.model_type}")
    if gguf.architecture != family.gguf:
        raise InputError(f"{original}: is of the architecture {gguf.architecture!r}, not {family.gguf!r}; {OTHER}")
    _check_free(out)
    check_integrity(checkpoint)
    sources = _sources(source, gguf, config, family, packed_modules(config, packed))
    entries = [_entry(source, x) for x in sources]
    is_permuted = _is_permuted(source, gguf, config, {x.target: x for x in sources})
    types = Counter(entry.type for entry, x in zip(entries, sources, strict=True) if x.module is not None)
    extra = [name for name in gguf.names if name in EXTRA]
    entries += [Entry(name, gguf.type(name), gguf.shape(name)) for name in extra]

    def data() -> Iterator[Tensor]:
        for x in sources:
            rows = _rows(source, x)
            yield _permuted(rows, config, x) if is_permuted and x.kind in PERMUTED else rows
        for name in extra:
            yield gguf.raw(name)

    with exclusive(out):
        _check_free(out)
        gguf.write(out, entries, types.most_common(1)[0][0], data())
    return types.total()


def _check_free(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: exists; nothing in it was touched. Name another file or remove it")


def _sources(
    source: Checkpoint, gguf: GgufFile, config: PreTrainedConfig, family: Family, modules: dict[str, PackedWeight]
) -> list[TensorMapping]:
    """Every tensor of the checkpoint and where it belongs. Raises InputError where one has no place of its shape, and
    for a place that is left."""
    shapes = {f"{name}.weight": (module.out_features, module.in_features) for name, module in modules.items()}
    plain = [name for name in source.tensors if name.endswith(".bias") or name.rpartition(".")[0] not in modules]
    shapes |= {name: source.tensors[name].shape for name in plain}
    found = []
    for name, shape in shapes.items():
        target = gguf.name_of(family.module_name(name), config.num_hidden_layers)
        module = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        there = gguf.shape(target) if target in gguf.names else None
        if target is None or there != (None if target == HEAD and there is None else tuple(shape)):
            held = "nothing" if there is None else f"shape {list(there)}"
            raise InputError(f"{gguf.path}: for {name} of shape {list(shape)} it has {held}; {OTHER}")
        found.append(TensorMapping(name if module is None else name.removesuffix(".weight"), target, module))
    left = {*gguf.names} - {x.target for x in found} - {*EXTRA} - ({HEAD} if config.tie_word_embeddings else set())
    if left:
        raise InputError(f"{gguf.path}: has a tensor {min(left)}, and {source.folder} has none for it; {OTHER}")
    return sorted(found, key=lambda x: gguf.names.index(x.target) if x.target in gguf.names else 0)


def _entry(source: Checkpoint, x: TensorMapping) -> Entry:
    """How a tensor is written. Raises InputError for a weight that llama.cpp cannot hold."""
    if x.module is None:
        info = source.tensors[x.name]
        return Entry(x.target, "F32" if len(info.shape) == 1 else PLAIN[info.dtype], tuple(info.shape))
    form, n, k = x.module.format, x.module.out_features, x.module.in_features
    if isinstance(x.module.file_format, PrepackedFormat):
        raise InputError(f"{source.folder}: is prepacked; pass the checkpoint that it was made from")
    if isinstance(x.module, QuantLinear) and 0 < x.module.online.input_bits < 8:
        raise InputError(
            f"{source.folder}: llama.cpp has inputs of 8 bits, by itself; quantise without --activation-bits"
        )
    if not isinstance(form, InGgml):
        raise InputError(f"{source.folder}: {x.name}: llama.cpp cannot hold the format {form.name}")
    with _naming(source, x):
        return Entry(x.target, form.ggml_type(k), (n, k))


def _rows(source: Checkpoint, x: TensorMapping) -> UInt8[Tensor, "n bytes"]:
    """The bytes of a tensor, row by row."""
    if x.module is None:
        tensor = source.read(x.name)
        return tensor.float()[:, None].view(torch.uint8) if tensor.dim() == 1 else tensor.view(torch.uint8)
    assert isinstance(x.module.format, InGgml)
    with _naming(source, x):
        return x.module.format.ggml_blocks(_parts(source, x), x.module.out_features, x.module.in_features)


def _parts(source: Checkpoint, x: TensorMapping) -> dict[str, Tensor]:
    assert x.module is not None
    names = x.module.file_format.buffers(x.module.out_features, x.module.in_features)
    return {part: source.read(f"{x.name}.weight_{part}") for part in names}


@contextmanager
def _naming(source: Checkpoint, x: TensorMapping) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{source.folder}: {x.name}: {error}") from error


def _permuted(rows: Num[Tensor, "n ..."], config: PreTrainedConfig, x: TensorMapping) -> Num[Tensor, "n ..."]:
    """Rows in the order of llama.cpp: within a head, those of the two halves in turn."""
    heads = getattr(config, PERMUTED[x.kind])
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


# --- is it the same model? ------------------------------------------------------------------------------------------


def _is_permuted(
    source: Checkpoint, gguf: GgufFile, config: PreTrainedConfig, sources: dict[str, TensorMapping]
) -> bool:
    """Whether llama.cpp has query and key of this model in its other order. Raises InputError where the weights of the
    GGUF are not those that the checkpoint was made from.

    What rotations and rounding leave nearly as it was is compared: norms of rows, of columns of `ffn_down`, of whole
    weights where both sides are rotated.
    """
    evidence = 0.0
    for x in sources.values():
        if not x.target.endswith(".weight") or len(gguf.shape(x.target) if x.target in gguf.names else ()) != 2:
            continue
        ours, theirs = _numbers(source, x), gguf.numbers(x.target) * _gain(source, gguf, x, sources)
        if x.kind == "ffn_down":
            ours, theirs = ours.T, theirs.T
        is_same = bool((ours.norm() / theirs.norm() - 1).abs() < DIFFERENCE)
        if x.kind not in ("attn_v", "attn_output"):
            orders = [ours.norm(dim=1)]
            if x.kind in PERMUTED:
                orders.append(_permuted(orders[0], config, x))
            found = [correlation(order, theirs.norm(dim=1)) for order in orders]
            is_same &= max(found) > least_correlation(len(ours))
            evidence += found[-1] - found[0]
        if not is_same:
            raise InputError(f"{gguf.path}: its {x.target} is another weight than {x.name} was made from; {OTHER}")
    return evidence > 0


def correlation(ours: Float32[Tensor, " n"], theirs: Float32[Tensor, " n"]) -> float:
    """Of the norms of rows with those of the original's."""
    return float(torch.corrcoef(torch.stack([ours, theirs]))[0, 1])


def least_correlation(n: int) -> float:
    """That of n rows with those they were made from: five standard errors of that with others, or a half. Wide rows of
    random weights in 2 bits have little more, as their norms hardly differ."""
    return min(0.5, 5 / n**0.5)


def _numbers(source: Checkpoint, x: TensorMapping) -> Float32[Tensor, "n k"]:
    if x.module is None:
        return source.read(x.name).float()
    return x.module.format.dequantize(_parts(source, x), x.module.out_features, x.module.in_features)


def _gain(
    source: Checkpoint, gguf: GgufFile, x: TensorMapping, sources: dict[str, TensorMapping]
) -> Float32[Tensor, " k"]:
    """What of the gains of a norm was put into a linear behind it."""
    for norm, readers in READERS.items():
        target = x.target.replace(x.kind, norm)
        if x.kind in readers and target in sources:
            return gguf.numbers(target) / source.read(sources[target].name).float()
    return torch.ones(1)
