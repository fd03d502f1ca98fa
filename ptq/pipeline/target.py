"""A model that is to be read: its checkpoint as a run sees it, and the plan for it. No weight is read."""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig

from ptq import methods
from ptq.errors import InputError, in_folder
from ptq.files import companions, published, source
from ptq.files.checkpoint import Checkpoint
from ptq.hf import fused, pieces, text_model, transposed
from ptq.hf.meta_model import as_turned, check_promised, parameter_shapes, transformers_config
from ptq.kv import supported
from ptq.models.families import check_generates, family_of
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape, shape_of
from ptq.planning import packed_ends
from ptq.planning.plan import Plan, check_claims, check_tensors
from ptq.recipe import Recipe, check_recipe
from ptq.reporting import console_tables


@dataclass(frozen=True)
class Source:
    """A plain model of a known family: the text model alone, weights of few bits as if they were stored in 16, and a
    matrix [n, k] for every linear, those of experts, too."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    family: Family
    shape: ModelShape
    notes: tuple[str, ...]
    """What a user should know."""


@dataclass(frozen=True)
class Target:
    """A model that can be quantised, and the plan for it."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    family: Family
    plan: Plan

    def __str__(self) -> str:
        """What happens to every linear, as `--plan` shows it."""
        return console_tables.plan_table(self.plan)


def opened(model: str) -> Source:
    """A model from its config and its headers.

    Raises InputError for one that is missing, damaged, quantised already (FP8 and MXFP4 are read) or of an unknown
    family.
    """
    checkpoint = Checkpoint.open(source.resolve(model))
    with in_folder(checkpoint.folder):
        return _opened(checkpoint)


def _opened(checkpoint: Checkpoint) -> Source:
    checkpoint, notes = text_model.alone(checkpoint)
    checkpoint, more = published.dequantized(checkpoint)
    check_generates(checkpoint.config)
    family, config = family_of(checkpoint.config), transformers_config(checkpoint)
    family, shape = family.for_config(config), shape_of(config)
    tensors = fused.as_published(pieces.renamed(checkpoint.tensors, family), family, shape.experts)
    tensors = transposed.as_read(pieces.as_read(tensors, family, shape), family)
    checkpoint = replace(checkpoint, tensors=tensors)
    if shape.experts and family.experts is None:
        raise InputError(
            f"config.json: {shape.experts} experts in a block: {family.model_type} is supported without experts alone"
        )
    if shape.experts * (shape.blocks - len(shape.dense)) > len(checkpoint.tensors):
        raise InputError(
            f"config.json: {shape.experts} experts in a block, but the checkpoint has {len(checkpoint.tensors)} tensors"
        )
    return Source(checkpoint, config, family, shape, (*notes, *more))


def check(found: Source, plan: Plan) -> None:
    """Raise InputError for a tensor that a plan does not account for, or that is not what it promises."""
    promised, tensors = parameter_shapes(found.config), found.checkpoint.tensors
    check_promised(plan, found.family, tensors, promised)
    check_claims(plan, {name: info.shape for name, info in tensors.items()})
    check_tensors(plan, tensors, promised)


def plan(model: str | Path, recipe: Recipe) -> Target:
    """The plan for a model. Raises InputError as `opened` and `check` do, and for a recipe that does not fit."""
    model = source.spelled(model)
    check_recipe(recipe)
    found = opened(model)
    with in_folder(found.checkpoint.folder):
        return _planned(found, with_text(recipe, model))


def with_text(recipe: Recipe, model: str) -> Recipe:
    """The recipe with the text that comes with the model `demo`, where none is given."""
    if recipe.calibration is not None or model != "demo":
        return recipe
    return replace(recipe, calibration=str(source.resolve(model) / "calibration.txt"))


def _planned(found: Source, recipe: Recipe) -> Target:
    shape, family, tensors = as_turned(found.shape, found.config), found.family, found.checkpoint.tensors
    plan = methods.planner(recipe.method)(shape, family, recipe, tensors)
    plan = packed_ends.packed(plan, recipe.embedding_bits)
    fused.check_loadable(plan, family)
    transposed.check_loadable(plan, family)
    if plan.cache is not None:
        supported.check(found.config, plan.cache)
    check(found, plan)
    companions.check(found.checkpoint.folder)
    return Target(found.checkpoint, found.config, family, replace(plan, notes=(*found.notes, *plan.notes)))
