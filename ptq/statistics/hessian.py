"""Hessians of the layer-wise proxy loss: H = sum of x xᵀ over the inputs x of a linear layer."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.engine import Workers
from ptq.files import work_files
from ptq.files.work_files import StoredTensors
from ptq.hf.blocks import PartialModel
from ptq.ops import gram, matmul, memory
from ptq.planning.outline import pooled_statistics
from ptq.planning.plan import LinearPlan, Plan
from ptq.statistics.chunks import Chunks
from ptq.statistics.inputs import CROSS, CrossMoments, run_until_seen
from ptq.statistics.shrinkage import shrunk

MAX_PARTS, PART_CHUNKS = 8, 4
"""Hessians are summed in up to 8 parts of at least 4 chunks each, by one process or by several: sums of floating-point
numbers depend on their order, and the result must not depend on the number of processes."""
NO_TOKEN = "no token of the calibration text was routed to this expert: rounded to nearest"
TOKENS = "tokens"
"""What the number of tokens is called in the files, behind the name of the linear."""
PANEL = 1024
"""Rows of H that are summed together. What lies right of the diagonal is left to symmetry: a panel ends with its block
on the diagonal, in memory and in the files, and there it may hold anything."""


class Hessians:
    """The Hessians of a run, in files of a folder: a file, called `key`, for the linears that are rounded together."""

    def __init__(self, folder: Path, device: torch.device, workers: Workers) -> None:
        self.folder, self.device, self.workers = folder, device, workers
        self._pool: tuple[str, Tensor, int] | None = None
        self._opened: tuple[str, StoredTensors] | None = None

    def collect(
        self,
        key: str,
        part: PartialModel,
        names: Iterable[str],
        hidden: Chunks,
        index: int,
        exact: Chunks | None = None,
        crossed: Iterable[str] = (),
    ) -> None:
        """Sum the Hessians of the named inputs of a rewritten block, as its weights will see them, into the file `key`;
        all processes share the work. Of inputs that are `crossed` also the cross moments with those that come of the
        chunks that are `exact` (`ptq.statistics.inputs`)."""
        if self.exists(key):
            return
        names, chunks, crossed = list(names), hidden.files(index), list(crossed)
        others = exact.files(index) if exact is not None and crossed else []
        count = max(1, min(MAX_PARTS, len(chunks) // PART_CHUNKS))
        bounds = [len(chunks) * number // count for number in range(count + 1)]
        files = [self.folder / f"{key}.{number}.safetensors" for number in range(count)]
        for number in sorted(self.workers.share(range(count))):
            if not files[number].exists():
                memory.give_back()
                here = slice(bounds[number], bounds[number + 1])
                some, same = (map(hidden.read, paths[here]) for paths in (chunks, others))
                sums, counts = observe(part, names, some, same, crossed)
                panels = {f"{name}.{i}": panel for name in sums for i, panel in enumerate(sums[name])}
                panels |= {f"{name}.{TOKENS}": torch.tensor([count]) for name, count in counts.items()}
                work_files.write_tensors(files[number], panels)
                del sums, panels
        self.workers.wait()
        self._opened = None
        memory.give_back()
        if self.workers.first:
            work_files.write_tensors(self._file(key), merged(files))
            for file in files:
                file.unlink()
        self.workers.wait()

    def exists(self, key: str) -> bool:
        """Whether the file `key` is complete."""
        return self.workers.agree(self._file(key).exists())

    def read(self, key: str, name: str) -> Float32[Tensor, "k k"]:
        """The Hessian of one input, as a full matrix."""
        return whole(self._panels(key, [name]))

    def tokens(self, key: str, names: Iterable[str]) -> int:
        """How many tokens were seen at these inputs."""
        stored = self._stored(key)
        return sum(int(stored.read(f"{name}.{TOKENS}")) for name in names)

    def of(self, key: str, linear: LinearPlan, plan: Plan) -> tuple[Float32[Tensor, "k k"] | None, dict[str, Any]]:
        """The Hessian that a linear is rounded with, and what the record says of it. An expert's is drawn towards the
        mean of the block's experts (`ptq.statistics.shrinkage`); None where neither it nor they have seen a token.
        """
        name = linear.statistics
        assert name is not None, linear.name
        if linear.expert is None:
            return self.read(key, name), {}
        tokens, others = self.tokens(key, [name]), pooled_statistics(linear, plan)
        h, share = shrunk(self.read(key, name), tokens, *(self._together(key, others) if others else (None, 0)))
        return h, {"tokens": tokens, "shrinkage": share, **({"note": NO_TOKEN} if h is None else {})}

    def cross(self, key: str, name: str) -> Float32[Tensor, "k k"]:
        """The cross moments of one input."""
        return self._stored(key).read(f"{name}.{CROSS}.0").to(self.device)

    def _together(self, key: str, names: Sequence[str]) -> tuple[Float32[Tensor, "k k"], int]:
        """The sum of several Hessians, and their tokens; kept for the next call, which asks for the same."""
        if self._pool is None or self._pool[0] != key:
            self._pool = None
            self._pool = key, whole(self._panels(key, names)), self.tokens(key, names)
        return self._pool[1:]

    def _panels(self, key: str, names: Sequence[str]) -> list[Float32[Tensor, "_ _"]]:
        """The panels of the sum of some Hessians."""
        stored = self._stored(key)
        count = next(number for number in itertools.count() if f"{names[0]}.{number}" not in stored)
        sums = [stored.read(f"{names[0]}.{number}").to(self.device) for number in range(count)]
        for name in names[1:]:
            for number, panel in enumerate(sums):
                panel += stored.read(f"{name}.{number}").to(self.device)
        return sums

    def drop(self, key: str) -> None:
        """Remove the file `key`, which nobody reads any more."""
        self._pool = self._opened = None
        for file in (*self.folder.glob(f"{key}.*.safetensors"), self._file(key)):  # parts, left by a crash; all
            file.unlink(missing_ok=True)

    def _stored(self, key: str) -> StoredTensors:
        """The file `key`, opened once for all that is read of it: of a block of many experts its header is long."""
        if self._opened is None or self._opened[0] != key:
            self._opened = key, StoredTensors(self._file(key))
        return self._opened[1]

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def observe(
    part: PartialModel,
    names: Iterable[str],
    chunks: Iterable[Float[Tensor, "batch t k"]],
    exact: Iterable[Float[Tensor, "batch t k"]] = (),
    crossed: Iterable[str] = (),
) -> tuple[dict[str, list[Float32[Tensor, "_ _"]]], dict[str, int]]:
    """Run a block on hidden states and sum x xᵀ over the inputs of the named linears, in the order of the chunks; the
    sums, and of how many tokens they are.

    Where a linear transforms its input online, x is taken after the transform, as its weight sees it. The sums are
    float32, on the block's device, and in panels: see `whole`. Of those of the linears that are `crossed` there are
    cross moments too, called `<name>.cross`, with what comes of the chunks that are `exact`.
    """
    names, cross = sorted(set(names)), CrossMoments(part, crossed)
    sums = {name: _zeros(cast(int, part.module(name).in_features), part.device) for name in names}
    counts = dict.fromkeys(names, 0)

    def add(name: str, x: Float32[Tensor, "t k"]) -> None:
        gram.add_gram_(sums[name], x, matmul.PRODUCTS.bfloat16)
        counts[name] += len(x)
        cross.add(name, x)

    for hidden, state in zip(chunks, exact if cross.names else itertools.repeat(None), strict=bool(cross.names)):
        if state is not None:
            cross.expect(state)
        run_until_seen(part, names, hidden, add)
    return sums | {f"{name}.{CROSS}": [c] for name, c in cross.sums.items()}, counts


def panel_shapes(k: int) -> list[tuple[int, int]]:
    """Rows and columns of the panels of one H."""
    ends = [min(start + PANEL, k) for start in range(0, k, PANEL)]
    return [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _zeros(k: int, device: torch.device) -> list[Float32[Tensor, "_ _"]]:
    """The panels of a sum of nothing. They share one piece of memory, made before the block runs: many small ones among
    its activations would leave holes."""
    shapes = panel_shapes(k)
    sizes = [rows * columns for rows, columns in shapes]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    return [panel.view(shape) for panel, shape in zip(flat.split(sizes), shapes, strict=True)]


def whole(panels: list[Float32[Tensor, "_ _"]]) -> Float32[Tensor, "k k"]:
    """H from its panels: each has `PANEL` rows (the last one fewer), from the left up to the block on the diagonal, of
    which the lower half is read. The list is used up: panels and H together would be half as much again."""
    k = panels[-1].shape[1]
    h = panels[-1].new_empty(k, k)
    while panels:
        panel = panels.pop()
        rows, columns = panel.shape
        start = columns - rows
        h[start:columns, :start] = panel[:, :start]
        h[:start, start:columns] = panel[:, :start].T
        h[start:columns, start:columns] = panel[:, start:].tril() + panel[:, start:].tril(-1).T
    return h


def unseen_experts(hessians: Hessians, plan: Plan, index: int) -> Iterator[str]:
    """A sentence where experts of a block saw no token: what is done then."""
    names = [linear.statistics for linear in plan.block(index) if linear.expert is not None and linear.role == "down"]
    found = [name for name in names if name and hessians.tokens(str(index), [name]) == 0]
    if found:
        yield (
            f"block {index}: {len(found)} of {len(names)} experts were given no calibration token: gate and up are "
            "rounded with what the others saw, down is rounded to nearest; more text helps (--samples)"
        )


def merged(files: Sequence[Path]) -> dict[str, Tensor]:
    """The sums of what is in several files, in the files' order."""
    sums = work_files.read_tensors(files[0])
    for stored in map(StoredTensors, files[1:]):
        for name in stored:
            sums[name] += stored.read(name)
    return sums
