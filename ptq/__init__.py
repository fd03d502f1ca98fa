"""ptq: post-training quantisation. `import ptq` lets transformers load packed checkpoints."""

import os

from ptq import startup

if startup.is_command():
    startup.quit_on_interrupt()
    startup.share_processors()

# torch then asks for huge pages, if it is not loaded yet: large weights come and go, and mapping fresh memory page by
# page costs more than the arithmetic on it.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from ptq.errors import InputError, RunError  # noqa: E402
from ptq.recipe import Recipe, RunOptions  # noqa: E402

if not startup.is_command():  # which imports what it needs when it needs it
    from ptq.commands.compare import Comparison, compare
    from ptq.commands.perplexity import Measured, perplexity
    from ptq.commands.verify import Verification, verify
    from ptq.hf.packed_config import PtqConfig
    from ptq.hf.plugin import PtqQuantizer
    from ptq.pipeline.pipeline import plan, quantize
    from ptq.pipeline.result import Result

__all__ = [
    "Comparison",
    "InputError",
    "Measured",
    "PtqConfig",
    "PtqQuantizer",
    "Recipe",
    "Result",
    "RunError",
    "RunOptions",
    "Verification",
    "compare",
    "perplexity",
    "plan",
    "quantize",
    "verify",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version(startup.DISTRIBUTION)
