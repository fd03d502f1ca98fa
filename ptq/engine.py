"""One run on many processes: `torchrun --nproc-per-node N -m ptq ...`, on one machine or several that share a disk.

Tasks are files (ptq.pipeline.tasks), so all that processes have to agree on is who does what, and when a step is over.
No tensor travels between them. A process that dies takes its unfinished task with it; torchrun stops the others, and
starting again, by hand or with its --max-restarts, goes on from the files that are there.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ptq import startup
from ptq.errors import InputError, RunError

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = timedelta(days=30)
"""How long a process waits for the others: their tasks may take hours, and torchrun tells of dead ones."""


@dataclass(frozen=True)
class Workers:
    """The processes of a run, as one of them sees them."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Among those of this machine: which GPU is this process's own."""
    local_count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process does what must be done once, and speaks to the user."""
        return self.rank == 0

    @property
    def again(self) -> bool:
        """Whether torchrun has started the processes once more, after one had died."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def wait(self) -> None:
        """Go on when every process has come here."""
        if self.count > 1:
            with _lost():
                dist.barrier()

    def agree(self, value: T) -> T:
        """The value that the first process found, for all of them: what it tells may change while others look."""
        if self.count == 1:
            return value
        box = [value]
        with _lost():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def first_finds(self, find: Callable[[], T]) -> T:
        """What `find` gives the first process, for all of them; it alone calls it. Its errors are all theirs, too."""
        found: T | InputError | RunError | None = None
        if self.first:
            try:
                found = find()
            except (InputError, RunError) as error:
                found = error
        if isinstance(found := self.agree(found), InputError | RunError):
            raise found
        return cast(T, found)

    def share(self, items: Iterable[T], cost: Callable[[T], float] = lambda item: 1.0) -> set[T]:
        """The items that are this process's: the dearest first, each to the one that has the least to do."""
        load, mine = [0.0] * self.count, set()
        for item in sorted(items, key=cost, reverse=True):  # a stable sort: the same in every process
            rank = load.index(min(load))
            load[rank] += cost(item)
            if rank == self.rank:
                mine.add(item)
        return mine

    def check_same(self, run: R, differences: Callable[[R, R], list[str]], limit: int) -> None:
        """Raise InputError, in every process, where they are not about to do the same `run`, or are more than can share
        it. `differences` names what two runs differ in."""
        if self.count == 1:
            return
        if self.count > limit:
            raise InputError(
                f"torchrun started {self.count} processes, but a block has {limit} layers to share; start at most "
                f"{limit}"
            )
        found: list[Any] = [None] * self.count
        with _lost():
            dist.all_gather_object(found, run)
        for rank, other in enumerate(found):
            if named := differences(other, found[0]):
                raise InputError(
                    f"process {rank} is about to do another run than process 0 ({'; '.join(named)}): start all with "
                    "the same command, packages, model and calibration data"
                )


ALONE = Workers()


@contextmanager
def _lost() -> Iterator[None]:
    """Say in one sentence what the network library says in its own words when another process has died."""
    try:
        yield
    except RuntimeError as error:
        raise RunError("another process of this run has stopped; the same command continues the run") from error


@contextmanager
def workers() -> Iterator[Workers]:
    """The processes that torchrun started together with this one; this one alone where it was started by itself."""
    _, count = startup.process_of_run()
    if count == 1 or not dist.is_available():
        yield ALONE
        return
    if dist.is_initialized():
        raise InputError(
            "torch.distributed is in use here already, and ptq.quantize shares its work in a group of its own; call it "
            "before init_process_group, or in a process that torchrun has not started"
        )
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Workers(dist.get_rank(), dist.get_world_size(), *local)
    finally:
        dist.destroy_process_group()
