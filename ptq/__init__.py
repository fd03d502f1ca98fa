"""ptq: post-training quantisation. `import ptq` lets transformers load packed checkpoints."""

import os

# torch then asks for huge pages, if it is not loaded yet: large weights come and go, and mapping fresh memory page by
# page costs more than the arithmetic on it.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from ptq.errors import InputError, RunError  # noqa: E402
from ptq.hf import PtqConfig, PtqQuantizer  # noqa: E402
from ptq.pipeline import Result, plan, quantize  # noqa: E402
from ptq.recipe import Recipe, RunOptions  # noqa: E402

__all__ = ["InputError", "PtqConfig", "PtqQuantizer", "Recipe", "Result", "RunError", "RunOptions", "plan", "quantize"]
