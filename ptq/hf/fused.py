"""The tensors in which transformers holds all experts of a block, and how they are taken apart: into tensors in memory,
and into parts of files that are read one by one."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from ptq.errors import InputError
from ptq.files.header import TensorInfo
from ptq.models.family import ExpertNames, Family
from ptq.planning.plan import OF_ANOTHER, Plan

PARTS = {"gate_up_proj": slice(-3, -1), "up_proj": slice(-2, -1), "down_proj": slice(-1, None)}
"""Parameters of a module of fused experts: [experts, 2 width, hidden] or, without a gate, [experts, width, hidden], and
[experts, hidden, width], or `FusedLayout`; and which of gate, up, down of every expert each holds."""
GATED, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")
BIASES = {f"{name}_bias": part for name, part in PARTS.items()}
"""Those that it may have besides: [experts, 2 width] and so on."""


@dataclass(frozen=True)
class FusedLayout:
    """How gate, up and down lie in fused tensors: see `ptq.models.family.ExpertNames`."""

    transposed: bool = False
    interleaved: bool = False

    @classmethod
    def of(cls, names: ExpertNames) -> "FusedLayout":
        """The layout of a family's experts."""
        return cls(names.transposed, names.interleaved)


def is_fused_parameter(name: str) -> bool:
    """Whether this is a tensor in which transformers holds all experts of a block."""
    owner, _, leaf = name.rpartition(".")
    return (leaf in PARTS or leaf in BIASES) and owner.endswith(".experts")


def check_loadable(plan: Plan, family: Family) -> None:
    """Raise InputError where the experts of a plan, written one by one, would be nothing to transformers."""
    formats = [linear.format for linear in plan.linears if linear.expert is not None]
    if family.experts is not None and family.experts.fused and formats and not any(formats):
        raise InputError(
            f"the experts of {family.model_type} must be quantised, some of them at least: as plain weights they are "
            "written one by one, and transformers reads them only from one tensor for a whole block"
        )


def take_apart(
    fused: Mapping[str, Float[Tensor, "e ..."]], layout: FusedLayout, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of experts 0, 1, ..., whose linears have these names, from the fused ones."""
    found = {}
    for leaf, tensor in fused.items():
        bias, own = leaf in BIASES, names[(PARTS | BIASES)[leaf]]
        rows = tensor if bias or not layout.transposed else tensor.transpose(1, 2)
        both = [rows[:, part::2] for part in range(2)] if layout.interleaved else rows.chunk(2, dim=1)
        for name, part in zip(own, both if len(own) == 2 else [rows], strict=True):
            for number, one in enumerate(part):
                found[f"{number}.{name}.{'bias' if bias else 'weight'}"] = one
    return found


def as_published(tensors: Mapping[str, TensorInfo], family: Family, experts: int) -> dict[str, TensorInfo]:
    """The tensors of files with one matrix for each linear of an expert, as most models are published. Where files hold
    all `experts` of a block in one tensor, those are the same bytes under names of their own. Raises InputError for one
    that holds another number of them, or has no two halves."""
    names, found = family.experts, {}
    if names is None:
        return dict(tensors)
    inside = f".{names.experts}"
    for name, info in tensors.items():
        owner, _, leaf = name.rpartition(".")
        axes = 3 if leaf in PARTS else 2 if leaf in BIASES else 0
        if not (owner.endswith(inside) and axes and len(info.shape) == axes and info.nbytes):
            found[name] = info
            continue
        if info.shape[0] != experts:  # before there is a name for each
            raise InputError(
                f"tensor {name!r} has shape {list(info.shape)}, but config.json says {experts} experts: {OF_ANOTHER}"
            )
        block, parts = owner.removesuffix(inside), names.linears[(PARTS | BIASES)[leaf]]
        kind = "weight" if axes == 3 else "bias"
        for number, place, piece in _pieces(name, info, names, len(parts)):
            found[f"{block}.{names.experts}.{number}.{parts[place]}.{kind}"] = piece
    return found


def _pieces(name: str, info: TensorInfo, names: ExpertNames, parts: int) -> Iterator[tuple[int, int, TensorInfo]]:
    """The parts of a fused tensor with outputs of so many linears: number of the expert, which linear, its tensor."""
    transposed = names.transposed and len(info.shape) == 3 and info.scale is None
    outputs = info.shape[2 if transposed else 1]
    if outputs % parts:
        raise InputError(f"tensor {name!r} has shape {list(info.shape)}: {outputs} rows are not those of gate and up")
    for number, place in itertools.product(range(info.shape[0]), range(parts)):
        first, step = (place, parts) if names.interleaved else (place * (outputs // parts), 1)
        if transposed:
            inputs = info.shape[1]
            shape, stride = (outputs // parts, inputs), (step, outputs)
            yield number, place, info.part(number * inputs * outputs + first, shape, stride)
        else:
            yield number, place, _rows(info, number, slice(first, first + step * (outputs // parts), step))


def _rows(info: TensorInfo, number: int, rows: slice) -> TensorInfo:
    """Some rows of one expert's matrix, or of its bias; of codes those, and their scales."""
    if info.scale is not None:
        codes, scales = (_rows(part, number, rows) for part in (info.scale.codes, info.scale.info))
        shape = (*codes.shape[:-1], info.shape[-1])
        nbytes = info.nbytes // info.shape[0] // info.shape[1] * shape[0]
        scale = replace(info.scale, codes=codes, info=scales)
        return replace(info, shape=shape, offset=codes.offset, nbytes=nbytes, scale=scale)
    _, outputs, *others = info.shape
    columns = others[0] if others else 1
    count, first = len(range(*rows.indices(outputs))), (number * outputs + rows.start) * columns
    stride = None if rows.step == 1 else (rows.step * columns, *(1 for _ in others))
    return info.part(first, (count, *others), stride)
