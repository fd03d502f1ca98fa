"""The plan of QuaRot (Ashkboos et al. 2024): rotations, integer weights, integer activations, integer KV cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from ptq.errors import InputError
from ptq.kv.kv_cache import CacheQuantization, check_bits, check_clip, check_sinks, key_rotation
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape
from ptq.ops import hadamard
from ptq.ops.activations import LEAST_CLIP, Activation
from ptq.planning.finetuning import finetuned
from ptq.planning.outline import Tensors, chosen, input_name, outline
from ptq.planning.plan import LinearPlan, Plan, check_groups
from ptq.planning.rotations import check_rotated, keys_balanced, rotated
from ptq.recipe import Recipe
from ptq.weights import formats
from ptq.weights.grouped import check_group_size
from quarot.integer_scales import MOST_BITS, Scale, check_kind

CLIP = {4: 0.9, 6: 0.95, 8: 1.0}
"""Clip of activations by their bits. Cutting the largest numbers pays where steps are coarse; at 8 bits a clip of 0.9
doubles the error of a Gaussian token of 576 channels (docs/math.md, section 8)."""
SEARCH = "search"
"""In the place of a clip: it is found on the calibration text."""
CACHE_CLIP = {
    2: {8: 0.9, 16: 0.8, 32: 0.7, 64: 0.65, 128: 0.6, 256: 0.55},
    3: {8: 1.0, 16: 0.95, 32: 0.9, 64: 0.85, 128: 0.8, 256: 0.75},
    4: {8: 1.0, 16: 1.0, 32: 1.0, 64: 0.95, 128: 0.95, 256: 0.9},
}
"""Clip of keys and of values by their bits and, to the nearest power of two, the size of a head: the one with the least
squared error for Gaussian vectors (docs/math.md, section 9), which is what rotations make of them. 1 for more bits."""
UNTURNED_CLIP = {2: 0.9, 3: 0.95, 4: 0.95}
"""The same where nothing mixes all channels of a head: a few may be far larger than the others."""
WITHOUT_CENTERS = "KV cache: without --calibration, keys are cached with all that they have in common, at a loss"


@dataclass(frozen=True)
class QuarotRecipe(Recipe):
    """Recipe of `quantize quarot` and, with 16-bit weights and no online rotation, of `quantize rotate`."""

    method: ClassVar[str] = "quarot"
    title: ClassVar[str] = "QuaRot"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.00456"
    typed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "symmetric": "--asymmetric", "rotate": "--no-rotate", "online": "--offline",
            "cache_clip": "--kv-clip", "cache_sinks": "--kv-sinks", "key_centers": "--no-key-centers",
        }
    )  # fmt: skip
    known_widths: ClassVar[tuple[str, ...]] = tuple(map(str, range(2, 9)))
    younger: ClassVar[tuple[str, ...]] = (*Recipe.younger, "scale")

    weight_bits: int = 4
    group_size: int = 0
    """Columns that share a scale; 0: one scale per output channel."""
    symmetric: bool = True
    scale: Scale = "bfloat16"
    """Of groups: integer ones (`quarot.integer_scales`) multiply faster with quantised activations. Weights of more
    than four bits keep bfloat16."""
    rotate: bool = True
    online: bool = True
    """Also the rotations that cannot vanish into the weights: R3, R4 and, around a head that is tied to the embedding,
    R1."""
    activation_bits: int = 16
    """Bits of the inputs of the quantised linears, per token; 16 leaves them alone."""
    activation_clip: float | str | None = None
    """Share of a token's largest magnitude that the integers reach; None: `CLIP`; `search`: found for every input, on
    the calibration text (`ptq.statistics.clip_search`)."""
    key_bits: int = 16
    """Bits of the keys in the KV cache; 16 leaves them alone."""
    value_bits: int = 16
    cache_clip: float | None = None
    """Share of the range of keys and values that is kept; None: `CACHE_CLIP` or `UNTURNED_CLIP`."""
    key_centers: bool = True
    """Keys are cached without what they have in common (`ptq.kv.key_centers`), if there is calibration text."""
    cache_sinks: int = 0
    """Tokens at the start of a sequence whose keys and values are not quantised: attention sinks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_bits not in (4, 6, 8, 16):
            raise InputError(
                f"--activation-bits must be 4, 6 or 8, or 16 to leave activations alone; found {self.activation_bits}"
            )
        clip = self.activation_clip
        if clip not in (None, SEARCH) and not (isinstance(clip, float) and LEAST_CLIP <= clip <= 1):
            raise InputError(f"--activation-clip must be {LEAST_CLIP:g} to 1, or {SEARCH}; found {clip!r}")
        check_bits(self.key_bits, "--key-bits")
        check_bits(self.value_bits, "--value-bits")
        check_clip(1.0 if self.cache_clip is None else self.cache_clip, "--kv-clip")
        check_sinks(self.cache_sinks, "--kv-sinks")
        if self.weight_bits not in (*range(2, 9), 16):
            raise InputError(f"--weight-bits must be 2 to 8, or 16 to leave weights alone; found {self.weight_bits}")
        if self.weight_bits == 16 and self.widths:
            raise InputError(
                f"{self.width_option} is about weights that are rounded, and --weight-bits 16 leaves all alone: "
                "choose fewer, and leave out with --skip what is not to be rounded"
            )
        check_group_size(self.group_size, "--group-size")
        if self.activation_bits == 16:
            self.refuse_idle("without --activation-bits 8, 6 or 4", "activation_clip")
        if self.key_bits == self.value_bits == 16:
            self.refuse_idle("without --kv-bits, --key-bits or --value-bits below 16", "cache_clip", "cache_sinks")
        if self.key_bits == 16:
            self.refuse_idle("without --kv-bits or --key-bits below 16", "key_centers")
        if self.weight_bits < 16:
            check_kind(self.scale, self.weight_bits, self.group_size, self.symmetric)

    def as_dict(self) -> dict[str, Any]:
        found = super().as_dict()
        if self.key_bits == 16:
            del found["key_centers"]  # as in records of before there were any
        return found

    @property
    def rounds(self) -> bool:
        bits = self.weight_bits, self.activation_bits, self.key_bits, self.value_bits, self.embedding_bits
        return min(bits) < 16


def plan(shape: ModelShape, family: Family, recipe: QuarotRecipe, tensors: Tensors) -> Plan:
    """The plan of a model with these tensors. Raises InputError where an option does not fit a layer."""
    made = outline(recipe.method, shape, family, tensors)
    if recipe.rotate:
        made = rotated(made, shape, family, online=recipe.online, keep_tied=recipe.online)
        if not recipe.rounds:  # else GPTQ is something to ask for, too
            check_rotated(made, "`quantize quarot` rotates what it can when the model runs")
        if recipe.key_bits < 16:
            made = keys_balanced(made, shape, family)
    activation = None
    if recipe.activation_bits < 16:
        given = recipe.activation_clip
        clip = CLIP[recipe.activation_bits] if given is None or isinstance(given, str) else given
        activation = Activation(recipe.activation_bits, clip)

    def rounded(linear: LinearPlan) -> LinearPlan:
        if recipe.activation_clip == SEARCH and activation is not None:
            linear = replace(linear, clip_search=input_name(linear))
        if recipe.weight_bits == 16:
            return replace(linear, activation=activation)
        check_groups(linear, made, recipe.group_size)
        bits = int(recipe.width_of(linear.name) or recipe.weight_bits)
        scale = recipe.scale if bits <= MOST_BITS else "bfloat16"
        grid = {"bits": bits, "group_size": recipe.group_size, "symmetric": recipe.symmetric, "scale": scale}
        return replace(linear, activation=activation, format=formats.get("quarot/integer", **grid))

    made = replace(made, linears=chosen(made, recipe, tensors, rounded), cache=_cache(shape, recipe))
    if recipe.key_centers and recipe.key_bits < 16 and recipe.calibration is None:
        made = replace(made, notes=(*made.notes, WITHOUT_CENTERS))
    return finetuned(made, shape, recipe)


def _cache(shape: ModelShape, recipe: QuarotRecipe) -> CacheQuantization | None:
    if recipe.key_bits == 16 and recipe.value_bits == 16:
        return None
    turned = recipe.rotate and recipe.online and recipe.key_bits < 16

    def clip(bits: int, mixed: bool) -> float:
        if recipe.cache_clip is not None:
            return recipe.cache_clip
        mixed = mixed and hadamard.largest_block(shape.head_dim) == shape.head_dim
        return (clips_for(shape.head_dim) if mixed else UNTURNED_CLIP).get(bits, 1.0)

    return CacheQuantization(
        key_bits=recipe.key_bits,
        value_bits=recipe.value_bits,
        key_clip=clip(recipe.key_bits, turned),
        value_clip=clip(recipe.value_bits, recipe.rotate),
        sinks=recipe.cache_sinks,
        hadamard=key_rotation(shape.head_dim) if turned else None,
        centered=recipe.key_centers and recipe.key_bits < 16 and recipe.calibration is not None,
    )


def clips_for(head_dim: int) -> dict[int, float]:
    """`CACHE_CLIP` for heads of this size."""
    size = min(max(2 ** round(math.log2(head_dim)), 8), 256)
    return {bits: clips[size] for bits, clips in CACHE_CLIP.items()}
