"""The list of methods. The only place, beside `ptq.weights.formats`, where ptq reaches a method's package, by name."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

METHODS = ("quarot", "quip_sharp", "fp6")
"""Packages of methods. Each has `plan.plan`, and `cli.register`, which adds its commands to `quantize`."""


def planner(method: str) -> Callable[..., Any]:
    """The `plan(shape, family, recipe, tensors)` of a method, which gives a `Plan`."""
    assert method in METHODS, method
    return import_module(f"{method}.plan").plan


def commands() -> Iterator[Callable[[Any], None]]:
    """The `register(app)` of every method, of what runs a model, and of what is done with checkpoints."""
    modules = *(f"{method}.cli" for method in METHODS), "ptq.cli_models", "ptq.cli_checkpoints"
    return (import_module(module).register for module in modules)
