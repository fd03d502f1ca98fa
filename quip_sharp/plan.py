"""The plan of QuIP# (Tseng et al. 2024, arXiv:2402.04396): a randomised Hadamard transform of its own on both sides of
every linear (section 3), weights on the E8 lattice.

W̃ = H_n diag(sv) W diag(su) H_kᵀ is what is rounded. Signs and Hadamard matrices of both sides run with the model, so
norms, residual stream and cache stay as they are. Linears that read the same input have the same su, and
so have gate and up of all experts of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from ptq.errors import InputError
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape
from ptq.ops import hadamard
from ptq.ops.activations import Activation
from ptq.planning.finetuning import finetuned
from ptq.planning.outline import Tensors, chosen, outline
from ptq.planning.plan import LinearPlan, Plan, Rotation
from ptq.planning.rotations import block_notes, mlp_widths
from ptq.recipe import Recipe, Rounding
from ptq.weights import formats


@dataclass(frozen=True)
class QuipSharpRecipe(Recipe):
    """Recipe of `quantize quip-sharp`."""

    method: ClassVar[str] = "quip_sharp"
    title: ClassVar[str] = "QuIP#"
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04396"
    typed: ClassVar[Mapping[str, str]] = MappingProxyType({"rotate": "--no-rotate"})
    solver: ClassVar[Rounding] = "ldlq"
    known_widths: ClassVar[tuple[str, ...]] = ("2", "3", "4")
    younger: ClassVar[tuple[str, ...]] = ("widths", "gptaq_alpha")  # those of old could be fine-tuned

    rounding: Rounding = "ldlq"
    sweeps: int = 4
    bits: int = 2
    rotate: bool = True
    """Whether there are transforms at all; without them only to see what they are worth."""
    activation_bits: int = 8
    """Bits of the inputs of the quantised linears after their transform, per token; 16 leaves them alone. The points
    of the lattice are integers too, so at 8 bits products are exact (docs/math.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 3, 4):
            raise InputError(f"--bits must be 2, 3 or 4, found {self.bits}")
        if self.activation_bits not in (8, 16):
            raise InputError(f"--activation-bits must be 8, or 16 to leave them alone; found {self.activation_bits}")
        if self.finetune != "none" and not self.rotate:
            raise InputError("--finetune trains the sign vectors of the transforms, so leave out --no-rotate")


def plan(shape: ModelShape, family: Family, recipe: QuipSharpRecipe, tensors: Tensors) -> Plan:
    """The plan of a model with these tensors."""
    made = outline(recipe.method, shape, family, tensors)
    linears = chosen(made, recipe, tensors, lambda linear: _rounded(linear, recipe))
    rotations = [side for linear in linears for side in (linear.input, linear.output) if side is not None]
    made = replace(
        made,
        linears=linears,
        signs={rotation.signs: rotation.size for rotation in rotations if rotation.signs is not None},
        notes=(*made.notes, *(block_notes(_widths(shape, linears)) if recipe.rotate else ())),
    )
    return finetuned(made, shape, recipe)


def _rounded(linear: LinearPlan, recipe: QuipSharpRecipe) -> LinearPlan:
    """A linear on the lattice, with a transform on both sides."""
    activation = Activation(recipe.activation_bits, 1.0) if recipe.activation_bits < 16 else None
    format = formats.get("quip_sharp/e8p", bits=int(recipe.width_of(linear.name) or recipe.bits))
    if not recipe.rotate:
        return replace(linear, activation=activation, format=format)
    experts = linear.expert is not None and linear.role != "down"  # they read some tokens of one input
    shared = f"{linear.block}.experts" if experts else linear.statistics
    su = Rotation(linear.k, hadamard.largest_block(linear.k), f"SU.{shared}")
    sv = Rotation(linear.n, hadamard.largest_block(linear.n), f"SV.{linear.name}")
    return replace(
        linear, input=su, output=sv, online=su, online_output=sv, even_rows=True, activation=activation, format=format
    )


def _widths(shape: ModelShape, linears: tuple[LinearPlan, ...]) -> dict[str, int]:
    """The widths that are transformed, by what to call them."""
    sizes = {side.size for linear in linears for side in (linear.input, linear.output) if side is not None}
    of_model = {
        "hidden_size": shape.hidden,
        "query width": shape.heads * shape.head_dim,
        "value width": shape.kv_heads * shape.head_dim,
        **mlp_widths(shape),
    }
    fused = {f"{linear.role} width": linear.n for linear in linears if "+" in linear.role and linear.output}
    of_mixers = {
        f"{linear.name.rpartition('.')[2]} {side}": rotation.size
        for linear in linears
        if linear.role.startswith("mixer")
        for side, rotation in (("inputs", linear.input), ("outputs", linear.output))
        if rotation is not None
    }
    return {name: width for name, width in of_model.items() if width in sizes} | fused | of_mixers
