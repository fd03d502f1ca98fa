"""The outline of a model: the plan in which nothing happens to any tensor. Methods fill it in.

Every linear has its `role` in it, which is the field of `Family` that names it: `embedding`, `query`, `key`, `value`,
`attention_output`, `gate`, `up`, `down`, `head`; the linears of an expert, and of the shared MLP beside experts, have
those of an MLP, `router` chooses among experts, `latent_input` and `latent_output` stand in front of all experts and
behind their sum, and `shared_gate` weighs the shared MLP. Those of a mixer
(`ptq.models.family.Mixer`) are `mixer_input`, `mixer_inside`, `mixer_output` and `mixer_gate`; where blocks have inputs
of their own (`ptq.models.family.LayerInputs`), these come from the `layer_embedding`, and are worked in by two of role
`layer_input`. The linears of the blocks have `statistics`, so they may be rounded; routers and both kinds of gates have
none.

Where a family names one fused linear in several fields, the outline has an entry of that name for every role, so that
whoever puts something onto the plan thinks of roles alone. `chosen` makes one linear of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.models.family import ExpertNames, Family, LayerInputs, Mixer
from ptq.models.model_shape import ModelShape
from ptq.planning.patterns import skipped
from ptq.planning.plan import LinearPlan, Plan
from ptq.recipe import Recipe
from ptq.weights import formats


@runtime_checkable
class StoredTensor(Protocol):
    """What a plan must know of a tensor of the source."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, StoredTensor]
"""The tensors of the source by name."""

MLP = ("gate", "up", "down")
"""Roles of an MLP."""
SHARED_INPUTS = {"key": "query", "value": "query", "up": "gate"}
"""Roles that read the input of another one, under whose name its statistics are taken."""


def outline(method: str, shape: ModelShape, family: Family, tensors: Tensors) -> Plan:
    """The plan of a model with these tensors. Raises InputError where a mixer lacks one, or it is no matrix."""
    blocks = [f"{family.layers}.{index}" for index in range(shape.blocks)]
    taken = [block for index, block in enumerate(blocks) if not shape.has_keys(index)]
    unread = {f"{block}.{name}" for block in blocks for name in family.unused}
    unread |= {f"{block}.{name}" for block in taken for name in family.own_keys}
    unread |= (behind := _behind(shape, family, tensors))
    inputs = family.layer_inputs if shape.layer_input else None
    read = tensors.keys() - unread
    mixers = {block: mixer for block in blocks if (mixer := _mixer(block, family, read))}
    linears = [_linear("embedding", family.embedding, shape.vocab, shape.hidden)]
    if inputs is not None:
        linears.append(
            _linear("layer_embedding", inputs.embedding, shape.layer_vocab, shape.blocks * shape.layer_input)
        )
    for index, block in enumerate(blocks):
        mixer = mixers.get(block)
        inside = [] if mixer is None else [*_mixing(block, mixer, tensors)]
        inside += _block(index, shape, family, attention=mixer is None or mixer.beside)
        inside += [] if inputs is None else _layer_input(block, inputs, shape)
        linears += (replace(linear, block=index) for linear in inside)
    if not shape.tied:
        linears.append(_linear("head", family.head, shape.vocab, shape.hidden))
    others = family.experts.kept if family.experts else ()
    sparse = [block for index, block in enumerate(blocks) if shape.has_experts(index)]
    if shape.tied:
        unread.add(f"{family.head}.weight")
    return Plan(
        method=method,
        layers=family.layers,
        blocks=shape.blocks,
        linears=tuple(linears),
        unit_norms=(),
        kept=(
            *family.norms(shape.blocks),
            *(name for norm in family.norms(shape.blocks) if (name := f"{norm.removesuffix('weight')}bias") in tensors),
            *((f"{family.head}.bias",) if shape.tied and f"{family.head}.bias" in tensors else ()),
            *(f"{block}.{name}" for block in blocks for name in (*family.kept, *(inputs.kept if inputs else ()))),
            *family.beside_embedding(inputs is not None),
            *(f"{block}.{name}" for block in sparse for name in others),
            *(name for block, mixer in mixers.items() for name in _kept(block, mixer, tensors)),
        ),
        unused=tuple(sorted(tensors.keys() & unread)),
        norm_offset=family.norm_offset,
        notes=(f"{len(behind)} tensors for multi-token prediction are left out: the result cannot generate with it",)
        if behind
        else (),
    )


def _behind(shape: ModelShape, family: Family, names: Iterable[str]) -> set[str]:
    """The tensors of blocks for multi-token prediction: in a place of their own, or behind the last block, where the
    config speaks of such blocks."""

    def is_behind(name: str) -> bool:
        block = family.block_of(name)
        return block is not None and 0 <= block - shape.blocks < shape.unread

    return {name for name in names if name.startswith(("mtp.", "model.mtp.", "model.mtp_")) or is_behind(name)}


def _sizes(shape: ModelShape, index: int = 0) -> dict[str, tuple[int, int]]:
    """n and k of the linears of a block without experts, by role; in the order of their rows where they are fused."""
    queries, values, width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.width(index)
    return {
        "query": (queries, shape.hidden),
        "key": (values, shape.hidden),
        "value": (values, shape.hidden),
        "attention_output": (shape.hidden, queries),
        "gate": (width, shape.hidden),
        "up": (width, shape.hidden),
        "down": (shape.hidden, width),
    }


def first_row(role: str, shape: ModelShape, family: Family) -> int:
    """Where the rows of a role begin in its linear: behind those of the roles before it that name the same one."""
    rows, name = 0, getattr(family, role)
    for other, (n, _) in _sizes(shape).items():
        if other == role:
            return rows
        rows += n if getattr(family, other) == name else 0
    raise AssertionError(role)


def _block(index: int, shape: ModelShape, family: Family, attention: bool) -> Iterator[LinearPlan]:
    """The linears of a block, with those of plain attention or without."""
    block, sparse = f"{family.layers}.{index}", family.experts is not None and shape.has_experts(index)
    plain = {True: shape.has_plain_mlp(index), False: shape.has_mixer(index) and attention}
    for role, (n, k) in _sizes(shape, index).items():
        name = getattr(family, role)
        if name is None or not plain[role in MLP]:
            continue
        statistics = f"{block}.{getattr(family, SHARED_INPUTS.get(role, role)) or name}"
        yield replace(_linear(role, f"{block}.{name}", n, k), statistics=statistics)
    if sparse and family.experts is not None:
        yield from _experts(block, shape, family.experts)


def _layer_input(block: str, names: LayerInputs, shape: ModelShape) -> Iterator[LinearPlan]:
    """The linears that work a block's own input in; each has statistics of its own."""
    for name, n, k in ((names.gate, shape.layer_input, shape.hidden), (names.output, shape.hidden, shape.layer_input)):
        yield replace(_linear("layer_input", f"{block}.{name}", n, k), statistics=f"{block}.{name}")


def _mixer(block: str, family: Family, names: Set[str]) -> Mixer | None:
    """What a block has in the place of plain attention, or beside it, by the tensors that are read; None where it has
    plain attention alone."""
    return next((mixer for mixer in family.mixers if f"{block}.{mixer.readers[0]}.weight" in names), None)


def _kept(block: str, mixer: Mixer, tensors: Tensors) -> Iterator[str]:
    """The other tensors of a mixer: of the optional ones those that are there."""
    yield from (f"{block}.{name}" for name in mixer.kept)
    yield from (name for end in mixer.optional if (name := f"{block}.{end}") in tensors)


def _mixing(block: str, mixer: Mixer, tensors: Tensors) -> Iterator[LinearPlan]:
    """The linears of a mixer; those on the norm's output share statistics."""

    def linear(role: str, name: str, statistics: str | None) -> LinearPlan:
        weight = f"{block}.{name}.weight"
        if weight not in tensors:
            raise InputError(f"the checkpoint has no tensor {weight!r}, which its config.json promises")
        if len(shape := tensors[weight].shape) != 2 or 0 in shape:
            raise InputError(f"tensor {weight!r} has shape {list(shape)}, but it is the matrix of a linear layer")
        n, k = shape
        statistics = None if statistics is None else f"{block}.{statistics}"
        return replace(_linear(role, f"{block}.{name}", n, k), statistics=statistics)

    yield from (linear("mixer_input", name, mixer.readers[0]) for name in mixer.readers)
    yield from (linear("mixer_gate", name, None) for name in mixer.gates)
    yield from (linear("mixer_inside", name, name) for name in mixer.inside)
    yield linear("mixer_output", mixer.output, mixer.output)


def _experts(block: str, shape: ModelShape, names: ExpertNames) -> Iterator[LinearPlan]:
    """The router, the linears of the experts one after the other, between those of a latent space where there is one,
    those of the shared MLP, and what weighs it. Each MLP has statistics of its own, up those of gate, whose input it
    reads."""

    own = names.gate, names.up, names.down

    def mlp(owner: str, linears: tuple[str | None, str, str], hidden: int, width: int) -> Iterator[LinearPlan]:
        gate, up, _ = linears
        for role, name, n, k in zip(MLP, linears, (width, width, hidden), (hidden, hidden, width), strict=True):
            if name is not None:
                read = gate if gate and name == up else name
                yield replace(_linear(role, f"{owner}.{name}", n, k), statistics=f"{owner}.{read}")

    yield _linear("router", f"{block}.{names.router}", shape.experts, shape.hidden)
    into, out = (f"{block}.{name}" for name in names.latent)
    if shape.latent:
        yield replace(_linear("latent_input", into, shape.latent, shape.hidden), statistics=into)
    for number in range(shape.experts):
        for linear in mlp(f"{block}.{names.experts}.{number}", own, shape.latent or shape.hidden, shape.expert_width):
            yield replace(linear, expert=number)
    if shape.latent:
        yield replace(_linear("latent_output", out, shape.hidden, shape.latent), statistics=out)
    if names.shared is not None and shape.shared_width:
        yield from mlp(f"{block}.{names.shared}", names.shared_linears or own, shape.hidden, shape.shared_width)
    if names.shared_gate is not None:
        yield _linear("shared_gate", f"{block}.{names.shared_gate}", 1, shape.hidden)


def _linear(role: str, name: str, n: int, k: int) -> LinearPlan:
    return LinearPlan(name=name, n=n, k=k, source=f"{name}.weight", role=role)


def pooled_statistics(linear: LinearPlan, plan: Plan) -> tuple[str, ...]:
    """For a gate or up of an expert: the statistics of all gates and ups of the block's experts, whose inputs are some
    of the same tokens. Empty for other linears: the input of a down is that of its expert alone."""
    if linear.expert is None or linear.role == "down":
        return ()
    block = (x for x in plan.linears if x.block == linear.block and x.expert is not None and x.role != "down")
    return tuple(dict.fromkeys(other.statistics for other in block if other.statistics))


def input_name(linear: LinearPlan) -> str | None:
    """The name of a linear's input, the same for the linears that share it and for all experts of a block. None for a
    linear without statistics."""
    return None if linear.statistics is None else of_any_expert(linear.statistics).replace(".*.", ".")


def of_any_expert(text: str) -> str:
    """A text with names of linears in it, with * for the numbers of experts."""
    return re.sub(r"(?<=\.experts\.)\d+(?=\.)", "*", text)


def chosen(
    plan: Plan, recipe: Recipe, tensors: Tensors, change: Callable[[LinearPlan], LinearPlan]
) -> tuple[LinearPlan, ...]:
    """The linears of a plan, fused ones as one, those that may be rounded as `change` makes them; where it gives no
    format, and where a pattern of `recipe.skip` matches, the weight stays in the source's dtype.

    Raises InputError for a pattern that decides nothing (`ptq.planning.patterns`).
    """
    linears = joined(plan.linears)
    alone = skipped([linear.name for linear in linears if linear.statistics], recipe)
    first: dict[str, str] = {}  # of the linears that share an input, the first that is not skipped
    for linear in linears:
        if linear.statistics and linear.name not in alone:
            first.setdefault(linear.statistics, linear.name)

    def treated(linear: LinearPlan) -> LinearPlan:
        if not linear.statistics:
            return linear
        if linear.name in alone:
            return _or_plain(linear, tensors)
        return _or_plain(change(replace(linear, statistics=first[linear.statistics])), tensors)

    return tuple(treated(linear) for linear in linears)


def joined(linears: Iterable[LinearPlan]) -> tuple[LinearPlan, ...]:
    """Neighbours of one name as one linear, with `parts` where something happens to the rows of one of them alone. Its
    role is all of theirs: `gate+up`."""
    return tuple(_joined(tuple(same)) for _, same in groupby(linears, lambda linear: linear.name))


def _joined(parts: tuple[LinearPlan, ...]) -> LinearPlan:
    if len(parts) == 1:
        return parts[0]
    n, role = sum(part.n for part in parts), "+".join(part.role for part in parts)
    whole = {replace(part, n=n, role=role, output=None, balance=None) for part in parts}
    assert len(whole) == 1, whole  # what is not a matter of rows is the same for all
    alike = not any(part.output or part.balance for part in parts)
    return replace(whole.pop(), parts=() if alike else tuple(replace(part, statistics=None) for part in parts))


def _or_plain(linear: LinearPlan, tensors: Tensors) -> LinearPlan:
    if linear.format is not None:
        return linear
    # What happens to the input or the product when the model runs needs our linear layer, also with a plain weight.
    stored = tensors.get(linear.source)
    dtype = "float32" if stored is None else dtype_name(stored.dtype)
    dense = formats.get("dense", dtype=dtype) if linear.acts_online else None
    return replace(linear, statistics=None, format=dense)
