"""The tasks of a run. Each ends by renaming a file of the work folder into place; a task whose file exists is done.

    linears/<name>.json           one rewritten linear is in its place in the shards; the statistics of its rounding
    rest.json                     so are the norms and what passes through
    hidden/<block>/<chunk>        calibration rows as they enter a block, after the quantised blocks before it
    hessians/<block>.safetensors  one per shared input of a block; <block>.<part>: the sum over some of the chunks
    outliers/<block>.safetensors  what the report says of the inputs of a block's linears
    probe/<block>.safetensors     a few tokens as they enter a block of the original, the rotated and the packed model

Tensors of the result go straight to their places in the shards: for a large model, a second copy is too much disk.
The tasks read nothing but the source checkpoint, the plan, the shards and these files, so a run can stop at any moment,
and several processes can share the tasks of a step.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from ptq import memory, rounding
from ptq.blocks import Part
from ptq.checkpoint import read_tensor
from ptq.engine import ALONE, Workers
from ptq.header import read_header
from ptq.hessian import merged, observe
from ptq.job import Job, dense_weight
from ptq.linear import guard
from ptq.plan import LinearPlan
from ptq.probe import Probe, row_by_row
from ptq.progress import Progress
from ptq.rounding import Rounded
from ptq.shards import Shards, write_json, write_tensors
from ptq.work import remove_contents

CHUNK_TOKENS = 1024
"""Calibration tokens that go through a block at a time: bounds the memory of activations."""
MAX_PARTS, PART_CHUNKS = 8, 4
"""Hessians are summed in up to 8 parts of at least 4 chunks each, by one process or by several: sums of floating-point
numbers depend on their order, and the result must not depend on the number of processes."""

Tensors = dict[str, Tensor]


class Tasks:
    """The tasks of one job in one work folder. Methods are idempotent; each ends by renaming its file into place."""

    def __init__(self, job: Job, work: Path, shards: Shards, workers: Workers = ALONE) -> None:
        self.job, self.work, self.shards, self.workers = job, work, shards, workers
        self.probe = Probe(job, work)
        if workers.first:
            if not shards.begun():  # then nothing that the folder says of them is true
                remove_contents(work)
                shards.begin()
            for folder in ("linears", "hidden", "hessians", "probe", "outliers"):
                (work / folder).mkdir(parents=True, exist_ok=True)
        workers.wait()

    def first_block(self, calibrated: bool) -> int:
        """The first block that is not done, and may be begun."""
        marks = (self.work / "hidden").glob("*/complete") if calibrated else (self.work / "probe").glob("*.safetensors")
        numbers = (int(mark.parent.name if calibrated else mark.stem) for mark in marks)
        return self.workers.agree(max(numbers, default=0))

    # --- weights --------------------------------------------------------------------------------------------------

    def mark(self, linear: LinearPlan) -> Path:
        """The file that says that `linear` is done."""
        return self.work / "linears" / f"{linear.name}.json"

    def ends(self, progress: Progress) -> None:
        """The embedding and the head, norms, and the probe as it enters the first block."""
        mine = self.workers.share(self.job.plan.ends(), lambda linear: linear.n * linear.k)
        for linear in self.job.plan.ends():
            with progress.step(linear.name, 0):
                if linear in mine:
                    self.linear(linear, None)
        if self.workers.first:
            self.rest()
        self.workers.wait()

    def block(self, index: int, calibrated: bool, progress: Progress) -> None:
        """All tasks of one block: prove its rotations, round its linears, send everything through the packed block."""
        weights = sum(linear.n * linear.k for linear in self.job.plan.block(index))
        if not self.workers.agree(self.probe.done(index)):
            if calibrated:
                memory.give_back()
            states = self.probe.states(index) if self.workers.first else {}
            part = self.job.original_block(index)
            original, before = self.probe.run(index, part, states.get("original"))
            with progress.step(f"block {index}: rotate", weights):
                memory.give_back()
                self.job.rotate_block(index, part)
            rotated, after = self.probe.run(index, part, states.get("rotated"))
            if original is not None and rotated is not None:
                self.probe.compare(index, original, rotated)
            self.job.quantize_inputs(index, part)
            with progress.step(f"block {index}: Hessians", weights * calibrated):
                self.hessians(index, part)
            self._round(index, part, progress)
            del part
            if original is not None and rotated is not None:
                packed = row_by_row(self._packed_block(index), states["packed"])
                left = {"original": original, "rotated": rotated, "packed": packed}
                self.probe.write(index, left, before, after)
            self.workers.wait()
        if calibrated:
            with progress.step(f"block {index}: forward", weights):
                self.advance(index)

    def _round(self, index: int, part: Part, progress: Progress) -> None:
        """The linears of a block, shared out by what they cost."""
        solver = 1 if self.job.recipe.rounding == "nearest" else 2
        mine = self.workers.share(self.job.plan.block(index), lambda linear: linear.n * linear.k**solver)
        for linear in self.job.plan.block(index):
            with progress.step(linear.name, linear.n * linear.k):
                if linear in mine:
                    self.linear(linear, part)
        self.workers.wait()

    def linear(self, linear: LinearPlan, part: Part | None) -> None:
        """Round and pack one linear of the rewritten block `part`, or write one that is not quantised."""
        if self.mark(linear).exists():
            return
        start = time.perf_counter()
        if linear.format is None:
            tensors, statistics = {"weight": self._cast(linear)}, {}
        else:
            parts, statistics = self._pack(linear, part)
            tensors = {"weight": guard(), **{f"weight_{part}": tensor for part, tensor in parts.items()}}
        signs = self.job.sign_tensors(linear)
        bias = self.job.bias(linear)
        if bias is not None:
            tensors["bias"] = bias.to(self.job.checkpoint.tensors[f"{linear.name}.bias"].dtype)
        statistics["seconds"] = round(time.perf_counter() - start, 3)
        named = {f"{linear.name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        self._place(self.mark(linear), named | signs, statistics)

    def _cast(self, linear: LinearPlan) -> Tensor:
        """A weight that is not quantised: from float64 to the source's dtype in one step."""
        return self.job.rewritten(linear, self.job.checkpoint.tensors[linear.source].dtype)

    def _pack(self, linear: LinearPlan, part: Part | None) -> tuple[Tensors, dict[str, object]]:
        """The stored parts of a weight, and the statistics of its rounding."""
        assert linear.format is not None
        codebook, recipe = linear.format.codebook, self.job.recipe
        if codebook is None:
            return linear.format.pack(Rounded(self._cast(linear), {})), {}
        assert part is not None
        if recipe.rounding == "nearest":
            rounded = rounding.nearest(self._weight(linear, part), codebook, name=linear.name)
        else:
            memory.give_back()
            rounded = rounding.ldlq(  # the weight is handed over, not kept: the solver frees it when it can
                self._weight(linear, part), self._hessian(linear), codebook, damping=recipe.damping, name=linear.name
            )
        return linear.format.pack(rounded), rounded.statistics()

    def _weight(self, linear: LinearPlan, part: Part) -> Float[Tensor, "n k"]:
        """The rewritten weight of a linear, which the block then does not hold any more."""
        weight = part.take(dense_weight(linear))
        return self.job.rewritten(linear, torch.float32) if weight.is_meta else weight

    def rest(self) -> None:
        """Norms, and whatever passes through, in the source's dtypes."""
        path = self.work / "rest.json"
        if not path.exists():
            dtypes = self.job.checkpoint.tensors
            tensors = {name: tensor.to(dtypes[name].dtype) for name, tensor in self.job.norms_and_kept("")}
            self._place(path, tensors, {})

    def packed_tensors(self, linears: Iterable[LinearPlan]) -> Tensors:
        """The results of linears that are done."""
        prefixes = tuple(f"{linear.name}." for linear in linears)
        return {name: self.shards.read(name) for name in self.shards.layout.tensors if name.startswith(prefixes)}

    def packed_weight(self, linear: LinearPlan) -> Tensor:
        """The embedding or the head as it is written."""
        return self.shards.read(f"{linear.name}.weight")

    # --- calibration ----------------------------------------------------------------------------------------------

    def embed(self, rows: Int[Tensor, "samples t"]) -> None:
        """Hidden states of the calibration rows as they enter the first block."""
        if self.first_block(calibrated=True) > 0 or self._complete(0):
            return
        weight = self.packed_weight(self.job.embedding)
        chunks = rows.split(max(1, CHUNK_TOKENS // rows.shape[1]))
        self._write_hidden(0, len(chunks), lambda number: self.job.embed(weight, chunks[number]))

    def hessians(self, index: int, part: Part) -> None:
        """The Hessians of one rewritten block, each taken on its input as the weights will see it."""
        names = dict.fromkeys(linear.statistics for linear in self.job.plan.block(index) if linear.statistics)
        chunks = self._chunks(index)
        if not chunks or self.workers.agree(self._hessian_file(index).exists()):
            return
        count = max(1, min(MAX_PARTS, len(chunks) // PART_CHUNKS))
        bounds = [len(chunks) * number // count for number in range(count + 1)]
        files = [self.work / "hessians" / f"{index}.{number}.safetensors" for number in range(count)]
        *_, last = self.job.plan.block(index)  # the pass ends at its input: its weight is made again when it is rounded
        part.take(dense_weight(last))
        for number in sorted(self.workers.share(range(count))):
            if not files[number].exists():
                memory.give_back()
                hidden = (self._hidden(chunk) for chunk in chunks[bounds[number] : bounds[number + 1]])
                self._write(files[number], observe(part, names, hidden))
        self.workers.wait()
        memory.give_back()
        if self.workers.first:
            self._write(self._hessian_file(index), merged(files))
            for file in files:
                file.unlink()
        self.workers.wait()

    def _hessian(self, linear: LinearPlan) -> Float[Tensor, "k k"]:
        index = int(linear.name.removeprefix(f"{self.job.plan.layers}.").partition(".")[0])
        path = self._hessian_file(index)
        assert linear.statistics is not None
        # Read, not mapped: a map would count as memory beside the copy that solvers work on.
        return read_tensor(path, read_header(path)[0][linear.statistics]).to(self.job.device)

    def _hessian_file(self, index: int) -> Path:
        return self.work / "hessians" / f"{index}.safetensors"

    def advance(self, index: int) -> None:
        """Send the calibration rows through the packed block, and drop what only that block needed."""
        if index + 1 == self.job.plan.blocks:  # nothing follows that would read them
            self._write_hidden(index + 1, 0, lambda number: torch.empty(0))
        elif not self._complete(index + 1):
            part, chunks = self._packed_block(index), self._chunks(index)
            self._write_hidden(index + 1, len(chunks), lambda number: part.run(self._hidden(chunks[number])))
        if self.workers.first:
            shutil.rmtree(self.work / "hidden" / str(index), ignore_errors=True)
            self._hessian_file(index).unlink(missing_ok=True)
        self.workers.wait()

    def _packed_block(self, index: int) -> Part:
        return self.job.packed_block(index, self.packed_tensors(self.job.plan.block(index)))

    def _complete(self, index: int) -> bool:
        return self.workers.agree((self.work / "hidden" / str(index) / "complete").exists())

    def _write_hidden(self, index: int, count: int, chunk: Callable[[int], Float[Tensor, "batch t k"]]) -> None:
        """`count` chunks of hidden states, this process's share of them made here."""
        folder = self.work / "hidden" / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        for number in sorted(self.workers.share(range(count))):
            path = folder / f"{number:05d}.safetensors"
            if not path.exists():
                self._write(path, {"hidden": chunk(number)})
        self.workers.wait()
        if self.workers.first:
            (folder / "complete").touch()
        self.workers.wait()

    def _chunks(self, index: int) -> list[Path]:
        """The files of the calibration rows as they enter a block."""
        return sorted((self.work / "hidden" / str(index)).glob("*.safetensors"))

    def _hidden(self, path: Path) -> Float[Tensor, "batch t k"]:
        return load_file(path)["hidden"].clone().to(self.job.device)

    # --- results --------------------------------------------------------------------------------------------------

    def log(self) -> list[dict[str, object]]:
        """Name, seconds and error statistics of every linear."""
        return [{"name": linear.name, **json.loads(self.mark(linear).read_bytes())} for linear in self.job.plan.linears]

    def _write(self, path: Path, tensors: Tensors) -> None:
        write_tensors(path, tensors, durable=False)

    def _place(self, mark: Path, tensors: Tensors, statistics: dict[str, object]) -> None:
        """Put tensors into the shards, and then say so."""
        self.shards.place(tensors)
        write_json(mark, statistics, durable=False)
