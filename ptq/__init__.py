"""ptq: post-training quantisation. `import ptq` lets transformers load packed checkpoints."""

from ptq.errors import InputError, RunError
from ptq.hf import PtqConfig, PtqQuantizer
from ptq.pipeline import Result, plan, quantize
from ptq.recipe import Recipe, RunOptions

__all__ = ["InputError", "PtqConfig", "PtqQuantizer", "Recipe", "Result", "RunError", "RunOptions", "plan", "quantize"]
