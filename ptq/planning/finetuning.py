"""Whether a plan can be fine-tuned (`ptq.pipeline.finetune`), and the plan that says so."""

from dataclasses import replace

from ptq.errors import InputError
from ptq.models.model_shape import ModelShape
from ptq.planning.plan import Plan
from ptq.recipe import Recipe


def finetuned(plan: Plan, shape: ModelShape, recipe: Recipe) -> Plan:
    """The plan with the training that a recipe asks for. Raises InputError for a model that cannot be trained."""
    if recipe.finetune == "none":
        return plan
    if any(linear.expert is not None for linear in plan.linears):
        raise InputError("--finetune is not made for models with experts: leave it out, and quantise without")
    if shape.layer_input or shape.without_keys:
        raise InputError(
            "--finetune is not made for models whose blocks share keys and values or have inputs of their own: leave "
            "it out, and quantise without"
        )
    if not any(linear.statistics and linear.format and linear.format.codebook for linear in plan.linears):
        raise InputError(
            "--finetune trains around rounded weights, and --skip or 16 bits leave none: leave one of them out"
        )
    return replace(plan, finetune=recipe.finetune, finetune_epochs=recipe.finetune_epochs)
