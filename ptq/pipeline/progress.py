"""What a run shows on stderr while it works: a Rich progress bar with the time left."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from ptq.pipeline import finetune
from ptq.planning.plan import Plan, weights_of
from ptq.reporting.sizes import duration_text

console = Console(stderr=True, highlight=False, markup=False)

SILENCE = 30.0
"""Seconds between two lines of a log."""

PASSES_PER_EPOCH = 3
"""Forward and backward."""


@contextmanager
def without_kernel_hints() -> Iterator[None]:
    """Within it transformers does not say, once for every kernel, that linear attention or a state space would be
    faster with another package: that is true of the original, and says nothing about what is done here."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(_no_hint)
    try:
        yield
    finally:
        logger.removeFilter(_no_hint)


def _no_hint(record: logging.LogRecord) -> bool:
    return "is falling back to its reference" not in record.getMessage()


@contextmanager
def counting(things: str, visible: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that counts; where that is no terminal, a line from time to time; nothing unless `visible`. What
    it yields is called with how many are done, and how many there are."""
    spoke = started = time.monotonic()
    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (visible and console.is_terminal),
        transient=True,
    ) as bar:
        task = bar.add_task(things, total=None)

        def count(done: int, total: int) -> None:
            nonlocal spoke
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if visible and not console.is_terminal and done and now - spoke > SILENCE:
                spoke = now
                left = (now - started) * (total - done) / done
                console.print(f"{things}: {done} of {total}, about {duration_text(left)} left", soft_wrap=True)

        yield count


class Progress:
    """A bar whose unit is one weight that is rewritten, observed or rounded."""

    def __init__(self, plan: Plan, calibrated: bool, visible: bool, crossed: bool = False) -> None:
        self.plan, self.calibrated, self.visible = plan, calibrated, visible
        self.spoke = time.monotonic()
        self.began: tuple[float, float] | None = None
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Bar(
            *columns,
            TimeRemainingColumn(),
            console=console,
            disable=not (visible and console.is_terminal),
            transient=True,
        )
        passes = 4 if calibrated else 2  # rewriting and rounding; with calibration also two forward passes
        passes += crossed
        every, ends = (weights_of(some) for some in (plan.linears, plan.ends()))
        packed_ends = weights_of(linear for linear in plan.ends() if linear.format is not None)
        whole = weights_of(plan.linears) * plan.finetune_epochs * (plan.finetune == "full")
        trained = PASSES_PER_EPOCH * finetune.trained_weights(plan)
        self.of_blocks = passes * (every - ends) + trained - PASSES_PER_EPOCH * whole
        self.task = self.bar.add_task("", total=passes * (every - ends) + packed_ends + trained or None)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def skip(self, blocks: int) -> None:
        """So many blocks were done before."""
        done, every = (weights_of(x for i in range(n) for x in self.plan.block(i)) for n in (blocks, self.plan.blocks))
        self.bar.advance(self.task, self.of_blocks * done / max(1, every))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    @contextmanager
    def step(self, description: str, weights: int | float) -> Iterator[None]:
        """Name what is being done; when it is done, `weights` more count as done."""
        self._tell(description)
        yield
        self.bar.advance(self.task, weights)

    @contextmanager
    def training(self, weights: int, epochs: int) -> Iterator[Callable[[str, float], None]]:
        """A step that trains so many weights for up to so many epochs. What it yields is called with what is being
        done, and with the share of the step that has just been done."""
        left = total = float(PASSES_PER_EPOCH * epochs * weights)

        def tell(description: str, share: float) -> None:
            nonlocal left
            done = min(left, share * total)
            left -= done
            self._tell(description, done)

        yield tell
        self.bar.advance(self.task, left)

    def _tell(self, description: str, advance: float = 0.0) -> None:
        """Move the bar; where there is none (a log), print a line from time to time."""
        self.bar.update(self.task, description=description, advance=advance)
        if not console.is_terminal and time.monotonic() - self.spoke > SILENCE:
            self.spoke = time.monotonic()
            self.say(f"{self.bar.tasks[0].percentage:.0f} % done{self._left()}: {description}")

    def _left(self) -> str:
        """How long the rest takes if it goes on as it went; nothing before that can be said."""
        now, task = time.monotonic(), self.bar.tasks[0]
        if self.began is None:
            self.began = now, task.completed  # what was done before this run counts for nothing
        since, before = self.began
        if task.total is None or task.completed <= before:
            return ""
        left = (now - since) * (task.total - task.completed) / (task.completed - before)
        return f", about {duration_text(left)} left"

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.visible:
            console.print(text, soft_wrap=True)
