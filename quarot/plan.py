"""Where QuaRot's rotations go (Ashkboos et al. 2024, section 4; R1 to R4 as SpinQuant names them).

- R1 turns the residual stream: fused into the embedding, into every linear that reads the stream (with the norm's gain)
  and into every linear that writes it.
- R2 turns each value head: fused into v_proj's output and, per query head, into o_proj's input. One per layer: its
  signs are the same in every head, so grouped-query attention needs no special case.
- R3 turns queries and keys after RoPE, when the model runs, and only where keys are cached in few bits: nothing of it
  is in the weights.
- R4 turns the input of down_proj. Its Hadamard part runs online, its signs vanish into up_proj: act(gate) * (s up).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch

from ptq import formats, hadamard
from ptq.activations import Activation
from ptq.errors import InputError
from ptq.families import Family, ModelShape
from ptq.kv_cache import CacheQuantization, key_rotation
from ptq.plan import Balance, LinearPlan, Plan, Rotation
from ptq.recipe import Recipe

CLIP = {4: 0.9, 6: 0.95, 8: 1.0}
"""Clip of activations by their bits. Cutting the largest numbers pays where steps are coarse; at 8 bits a clip of 0.9
doubles the error of a Gaussian token of 576 channels (docs/math.md, section 8)."""
CACHE_CLIP = {2: 0.9, 3: 0.95, 4: 0.95, 6: 1.0, 8: 1.0, 16: 1.0}
"""Clip of keys and values by the fewer bits of the two, for the same reason."""


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
    """Also the rotations that cannot vanish into the weights: R3 and R4."""
    activation_bits: int = 16
    """Bits of the inputs of the quantised linears, per token; 16 leaves them alone."""
    activation_clip: float | None = None
    """Share of a token's largest magnitude that the integers reach; None: `CLIP`."""
    key_bits: int = 16
    """Bits of the keys in the KV cache; 16 leaves them alone."""
    value_bits: int = 16
    cache_clip: float | None = None
    """Share of the range of keys and values that is kept; None: `CACHE_CLIP`."""
    cache_sinks: int = 0
    """Tokens at the start of a sequence whose keys and values stay in 16 bits: attention sinks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_bits not in (4, 6, 8, 16):
            raise InputError(
                f"activation bits must be 4, 6 or 8, or 16 to leave activations alone; found {self.activation_bits}"
            )
        if self.activation_clip is not None:
            Activation(8, self.activation_clip)
        clip = 1.0 if self.cache_clip is None else self.cache_clip
        CacheQuantization(self.key_bits, self.value_bits, clip, self.cache_sinks)
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
        cache=_cache(shape, recipe),
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


def _cache(shape: ModelShape, recipe: QuarotRecipe) -> CacheQuantization | None:
    if recipe.key_bits == 16 and recipe.value_bits == 16:
        return None
    rotated = recipe.rotate and recipe.online and recipe.key_bits < 16
    return CacheQuantization(
        key_bits=recipe.key_bits,
        value_bits=recipe.value_bits,
        clip=CACHE_CLIP[min(recipe.key_bits, recipe.value_bits)] if recipe.cache_clip is None else recipe.cache_clip,
        sinks=recipe.cache_sinks,
        hadamard=key_rotation(shape.head_dim) if rotated else None,
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
    def reader(
        part: str, n: int, norm: str | None, first: str, output: Rotation | None = None, **more: Any
    ) -> LinearPlan:
        gain = f"{block}.{norm}.weight" if norm and rotations.residual else None
        statistics = f"{block}.{first}"
        name = f"{block}.{part}"
        sides = {"input": rotations.residual, "output": output}
        return _linear(name, n, shape.hidden, norm=gain, statistics=statistics, **sides, **more)

    def writer(part: str, k: int, **more: Any) -> LinearPlan:
        name = f"{block}.{part}"
        return _linear(name, shape.hidden, k, output=rotations.residual, statistics=name, **more)

    balance = Balance(f"{block}.{family.up}.weight", f"{block}.{family.down}.weight") if rotations.online else None
    query_width, value_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = family.attention_norm, family.mlp_norm
    return [
        reader(family.query, query_width, attention, family.query),
        reader(family.key, value_width, attention, family.query),
        reader(family.value, value_width, attention, family.query, rotations.value),
        writer(family.attention_output, query_width, input=rotations.attention_output),
        reader(family.gate, shape.intermediate, mlp, family.gate),
        reader(family.up, shape.intermediate, mlp, family.gate, rotations.up, balance=balance),
        writer(family.down, shape.intermediate, input=rotations.down, online=rotations.online, balance=balance),
    ]


def _norms(shape: ModelShape, family: Family) -> list[str]:
    inside = [norm for norm in (family.attention_norm, family.mlp_norm) if norm]
    blocks = [f"{family.layers}.{index}.{norm}.weight" for index in range(shape.blocks) for norm in inside]
    return [*blocks, f"{family.final_norm}.weight"]


def _with_format(
    linear: LinearPlan, linears: list[LinearPlan], recipe: QuarotRecipe, dtypes: dict[str, torch.dtype]
) -> LinearPlan:
    touched = linear.statistics is not None and not any(fnmatch(linear.name, pattern) for pattern in recipe.skip)
    if touched and recipe.activation_bits < 16:
        clip = CLIP[recipe.activation_bits] if recipe.activation_clip is None else recipe.activation_clip
        linear = replace(linear, activation=Activation(recipe.activation_bits, clip))
    if not touched or recipe.weight_bits == 16:
        # What happens to the input when the model runs needs our linear layer, also with a weight that stays as it is.
        dtype = str(dtypes.get(linear.source, torch.float32)).removeprefix("torch.")
        dense = formats.get("dense", dtype=dtype) if linear.online or linear.activation else None
        return replace(linear, statistics=None, format=dense)
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
