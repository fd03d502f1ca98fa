"""Where QuaRot's rotations go (Ashkboos et al. 2024, section 4; R1, R2, R4 as SpinQuant names them).

- R1 turns the residual stream: fused into the embedding, into every linear that reads the stream (with the norm's gain)
  and into every linear that writes it.
- R2 turns each value head: fused into v_proj's output and, per query head, into o_proj's input. One per layer: its
  signs are the same in every head, so grouped-query attention needs no special case.
- R4 turns the input of down_proj. Its Hadamard part runs online, its signs vanish into up_proj: act(gate) * (s up).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch

from ptq import formats, hadamard
from ptq.errors import InputError
from ptq.families import Family, ModelShape
from ptq.plan import LinearPlan, Plan, Rotation
from ptq.recipe import Recipe


@dataclass(frozen=True)
class QuarotRecipe(Recipe):
    """Recipe of `quantize quarot` and, with 16-bit weights and no online rotation, of `quantize rotate`."""

    method: ClassVar[str] = "quarot"

    weight_bits: int = 4
    group_size: int = 0
    """Columns that share a scale; 0: one scale per output channel."""
    symmetric: bool = True
    rotate: bool = True
    online: bool = True
    """Also the rotations that cannot vanish into the weights: R4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_bits not in (*range(2, 9), 16):
            raise InputError(f"weight bits must be 2 to 8, or 16 to leave the weights alone; found {self.weight_bits}")
        if self.group_size < 0:
            raise InputError(f"group size must be 0 (per output channel) or positive, found {self.group_size}")


@dataclass(frozen=True)
class _Rotations:
    """The rotations of one block; None where the recipe or the family rules one out."""

    residual: Rotation | None = None
    value: Rotation | None = None
    attention_output: Rotation | None = None
    up: Rotation | None = None
    down: Rotation | None = None
    online: Rotation | None = None


def plan(shape: ModelShape, family: Family, recipe: QuarotRecipe, dtypes: dict[str, torch.dtype]) -> Plan:
    """The plan of a model whose tensors have these dtypes. Raises InputError where an option does not fit a layer."""
    residual = None
    if recipe.rotate and family.rotate_residual:
        residual = Rotation(shape.hidden, hadamard.largest_block(shape.hidden), "R1")
    linears = [_embedding(shape, family, residual)]
    for index in range(shape.blocks):
        linears += _block(f"{family.layers}.{index}", shape, family, _rotations(index, shape, recipe, residual))
    untied = shape.tied and residual is not None
    if untied or not shape.tied:
        linears.append(_head(shape, family, residual, untied))
    _check_skip(recipe, linears)
    norms = _norms(shape, family)
    block_prefixes = [f"{family.layers}.{index}" for index in range(shape.blocks)]
    stored_head = {f"{family.head}.weight"} if shape.tied else set()
    return Plan(
        method=recipe.method,
        layers=family.layers,
        blocks=shape.blocks,
        linears=tuple(_with_format(linear, linears, recipe, dtypes) for linear in linears),
        unit_norms=tuple(norms) if residual else (),
        kept=(*(() if residual else norms), *(f"{block}.{name}" for block in block_prefixes for name in family.kept)),
        unused=tuple(
            sorted(
                dtypes.keys()
                & (stored_head | {f"{block}.{name}" for block in block_prefixes for name in family.unused})
            )
        ),
        untied=untied,
        signs=_sign_lengths(shape, recipe, residual),
        notes=tuple(_notes(shape, family, recipe)),
    )


def _rotations(index: int, shape: ModelShape, recipe: QuarotRecipe, residual: Rotation | None) -> _Rotations:
    if not recipe.rotate:
        return _Rotations()
    head_order = hadamard.largest_block(shape.head_dim)
    fused = _Rotations(
        residual=residual,
        value=Rotation(shape.kv_heads * shape.head_dim, head_order, f"R2.{index}"),
        attention_output=Rotation(shape.heads * shape.head_dim, head_order, f"R2.{index}"),
    )
    if not recipe.online:
        return fused
    order = hadamard.largest_block(shape.intermediate)
    return replace(
        fused,
        up=Rotation(shape.intermediate, 1, f"R4.{index}"),
        down=Rotation(shape.intermediate, order, f"R4.{index}"),
        online=Rotation(shape.intermediate, order),
    )


def _linear(name: str, n: int, k: int, **changes: Any) -> LinearPlan:
    return LinearPlan(name=name, n=n, k=k, source=f"{name}.weight", **changes)


def _embedding(shape: ModelShape, family: Family, residual: Rotation | None) -> LinearPlan:
    """Rows of the embedding are residual vectors e -> R e: the input side of a [vocab, hidden] matrix."""
    return _linear(family.embedding, shape.vocab, shape.hidden, input=residual)


def _head(shape: ModelShape, family: Family, residual: Rotation | None, untied: bool) -> LinearPlan:
    norm = f"{family.final_norm}.weight" if residual else None
    head = _linear(family.head, shape.vocab, shape.hidden, norm=norm, input=residual)
    return replace(head, source=f"{family.embedding}.weight") if untied else head


def _block(block: str, shape: ModelShape, family: Family, rotations: _Rotations) -> list[LinearPlan]:
    def reader(part: str, n: int, norm: str | None, first: str, output: Rotation | None = None) -> LinearPlan:
        gain = f"{block}.{norm}.weight" if norm and rotations.residual else None
        statistics = f"{block}.{first}"
        name = f"{block}.{part}"
        return _linear(name, n, shape.hidden, norm=gain, input=rotations.residual, output=output, statistics=statistics)

    def writer(part: str, k: int, **rotation: Rotation | None) -> LinearPlan:
        name = f"{block}.{part}"
        return _linear(name, shape.hidden, k, output=rotations.residual, statistics=name, **rotation)

    query_width, value_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = family.attention_norm, family.mlp_norm
    return [
        reader(family.query, query_width, attention, family.query),
        reader(family.key, value_width, attention, family.query),
        reader(family.value, value_width, attention, family.query, rotations.value),
        writer(family.attention_output, query_width, input=rotations.attention_output),
        reader(family.gate, shape.intermediate, mlp, family.gate),
        reader(family.up, shape.intermediate, mlp, family.gate, rotations.up),
        writer(family.down, shape.intermediate, input=rotations.down, online=rotations.online),
    ]


def _norms(shape: ModelShape, family: Family) -> list[str]:
    inside = [norm for norm in (family.attention_norm, family.mlp_norm) if norm]
    blocks = [f"{family.layers}.{index}.{norm}.weight" for index in range(shape.blocks) for norm in inside]
    return [*blocks, f"{family.final_norm}.weight"]


def _with_format(
    linear: LinearPlan, linears: list[LinearPlan], recipe: QuarotRecipe, dtypes: dict[str, torch.dtype]
) -> LinearPlan:
    inside_block = linear.statistics is not None
    if not inside_block or recipe.weight_bits == 16 or any(fnmatch(linear.name, pattern) for pattern in recipe.skip):
        # A rotation at run time needs our linear layer, also where the weight is not quantised.
        dtype = str(dtypes.get(linear.source, torch.float32)).removeprefix("torch.")
        return replace(linear, statistics=None, format=formats.get("dense", dtype=dtype) if linear.online else None)
    if recipe.group_size and linear.k % recipe.group_size:
        common = math.gcd(*(other.k for other in linears if other.statistics))
        divisors = [group for group in (128, 64, 32, 16, 8) if common % group == 0]
        remedy = f"--group-size {divisors[0]}" if divisors else "--group-size 0"
        raise InputError(
            f"{linear.name}: its {linear.k} input channels cannot be cut into groups of {recipe.group_size}; "
            f"try {remedy}, or leave the layer out with --skip"
        )
    format = formats.get(
        "quarot/integer", bits=recipe.weight_bits, group_size=recipe.group_size, symmetric=recipe.symmetric
    )
    return replace(linear, format=format)


def _check_skip(recipe: QuarotRecipe, linears: list[LinearPlan]) -> None:
    for pattern in recipe.skip:
        if not any(fnmatch(linear.name, pattern) for linear in linears if linear.statistics):
            example = next(linear.name for linear in linears if linear.statistics)
            raise InputError(f"--skip {pattern!r} matches no linear that would be quantised; names look like {example}")


def _sign_lengths(shape: ModelShape, recipe: QuarotRecipe, residual: Rotation | None) -> dict[str, int]:
    lengths = {"R1": shape.hidden} if residual else {}
    for index in range(shape.blocks if recipe.rotate else 0):
        lengths[f"R2.{index}"] = shape.head_dim
        if recipe.online:
            lengths[f"R4.{index}"] = shape.intermediate
    return lengths


def _notes(shape: ModelShape, family: Family, recipe: QuarotRecipe) -> Iterator[str]:
    if not recipe.rotate:
        return
    if not family.rotate_residual:
        yield f"{family.model_type}: its blocks end in a norm, so R1 (the residual rotation) is left out"
    widths = {"hidden_size": shape.hidden, "head_dim": shape.head_dim}
    if recipe.online:
        widths["intermediate_size"] = shape.intermediate
    for name, width in widths.items():
        order = hadamard.largest_block(width)
        if order != width:
            blocks = f"{width // order} of {order}"
            yield f"{name} {width}: no Hadamard matrix of that order can be built, so {blocks} are used"
