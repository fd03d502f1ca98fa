"""The plan of FP6: every linear in small floats, which need no calibration; rotations that vanish into the weights, if
asked for (Xia et al. 2024, arXiv:2401.14112, for the idea; the formats are those of `fp6.element`)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fp6.choice import AutoFormat, SearchedFormat
from fp6.element import ELEMENTS
from fp6.minifloat import SCALES, SEARCHES, Scale, Search
from ptq.errors import InputError
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape
from ptq.ops.activations import Activation
from ptq.planning.finetuning import finetuned
from ptq.planning.outline import Tensors, chosen, outline
from ptq.planning.plan import LinearPlan, Plan, check_groups
from ptq.planning.rotations import check_rotated, rotated
from ptq.recipe import Recipe, Rounding
from ptq.weights.grouped import check_group_size


@dataclass(frozen=True)
class Fp6Recipe(Recipe):
    """Recipe of `quantize fp6`."""

    method: ClassVar[str] = "fp6"
    title: ClassVar[str] = "FP6"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.14112"
    width_option: ClassVar[str] = "--element-for"
    width_word: ClassVar[str] = "ELEMENT"
    known_widths: ClassVar[tuple[str, ...]] = (*ELEMENTS, "auto")

    rounding: Rounding = "nearest"
    element: str = "e2m3"
    """A name of `fp6.element.ELEMENTS`, or `auto`: per layer, whichever of e3m2 and e2m3 has the smaller error."""
    group_size: int | None = None
    """Columns that share a scale; 0: one scale per output channel. None: 0, and with e8m0 scales 32; it is
    replaced by that when a recipe is made."""
    scale: Scale = "bfloat16"
    """`e8m0`: powers of two in one byte; with groups of 32 as in the OCP Microscaling Formats."""
    scale_search: Search = "absmax"
    rotate: bool = False
    """QuaRot's rotations that vanish into the weights, R1 and R2."""
    activation_bits: int = 16
    """Bits of the inputs of the quantised linears, per token: 8, or 16 to leave them alone."""

    def __post_init__(self) -> None:
        if isinstance(self.element, str):
            object.__setattr__(self, "element", self.element.lower())  # as OCP writes it
        super().__post_init__()
        if self.element not in self.known_widths:
            raise InputError(f"--element must be one of {', '.join(self.known_widths)}; found {self.element!r}")
        if self.group_size is None:
            object.__setattr__(self, "group_size", self.default("group_size"))
        check_group_size(self.group_size, "--group-size")
        if self.scale not in SCALES:
            raise InputError(f"--scale must be bfloat16 or e8m0, found {self.scale!r}")
        if self.scale_search not in SEARCHES:
            raise InputError(f"--scale-search must be absmax or mse, found {self.scale_search!r}")
        if self.activation_bits not in (8, 16):
            raise InputError(f"--activation-bits must be 8, or 16 to leave them alone; found {self.activation_bits}")

    def default(self, field: str) -> Any:
        return (32 if self.scale == "e8m0" else 0) if field == "group_size" else super().default(field)

    @property
    def _group_size(self) -> int:
        assert self.group_size is not None  # since __post_init__
        return self.group_size

    def format_of(self, linear: str) -> SearchedFormat:
        """How a linear is stored, by its name."""
        element = self.width_of(linear) or self.element
        if element == "auto":
            return AutoFormat(group_size=self._group_size, scale=self.scale, search=self.scale_search)
        return SearchedFormat(element, self._group_size, self.scale, self.scale_search)


def plan(shape: ModelShape, family: Family, recipe: Fp6Recipe, tensors: Tensors) -> Plan:
    """The plan of a model with these tensors. Raises InputError where groups do not fit a layer."""
    made = outline(recipe.method, shape, family, tensors)
    if recipe.rotate:
        made = rotated(made, shape, family, online=False, keep_tied=True)
        check_rotated(made, "leave out --rotate")
    activation = Activation(recipe.activation_bits, 1.0) if recipe.activation_bits < 16 else None

    def rounded(linear: LinearPlan) -> LinearPlan:
        format = recipe.format_of(linear.name)
        check_groups(linear, made, format.group_size)
        return replace(linear, activation=activation, format=format)

    return finetuned(replace(made, linears=chosen(made, recipe, tensors, rounded)), shape, recipe)
