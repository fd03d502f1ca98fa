"""The tasks of a run. Each ends by renaming a file of the work folder into place; a task whose file exists is done.

    linears/<name>.json           one rewritten linear is in its place in the shards; the statistics of its rounding
    rest.json                     so are the norms and what passes through
    clips/<name>.json             the searched clip of the input of a linear, and of those that share it
    hidden/<block>/<chunk>        calibration rows as they enter a block, after the quantised blocks before it
    teacher/<block>/<chunk>       the same of the original model, where there is fine-tuning, or of the rotated one that
                                  is not quantised, where weights make up for what is done to their inputs (GPTAQ)
    hessians/<block>.safetensors  one per shared input of a block; <block>.<part>: the sum over some of the chunks
    tuned/<block>.json            the block is fine-tuned (ptq.pipeline.finetune_blocks, ptq.pipeline.finetune_full)
    outliers/<block>.safetensors  what the report says of the inputs of a block's linears
    probe/<block>.safetensors     a few tokens as they enter a block of the original, the rotated and the packed model

Tensors of the result go straight to their places in the shards: for a large model, a second copy is too much disk.
The tasks read nothing but the source checkpoint, the plan, the shards and these files, so a run can stop at any moment,
and several processes can share the tasks of a step.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ptq.engine import ALONE, Workers
from ptq.files.shards import Shards, write_json
from ptq.hf.blocks import Part
from ptq.hf.routing import Routes
from ptq.layers.linear import config_entry
from ptq.layers.packed_weight import guard
from ptq.ops import matmul, memory
from ptq.pipeline import finetune_blocks, finetune_full, solve
from ptq.pipeline.ends import Matrix, plain_matrix
from ptq.pipeline.finetune import HELD_OUT
from ptq.pipeline.job import Job
from ptq.pipeline.probe import Probe, row_by_row
from ptq.pipeline.progress import Progress
from ptq.pipeline.work import FOLDERS, REST, remove_contents
from ptq.planning.plan import LinearPlan
from ptq.statistics.chunks import Chunks
from ptq.statistics.clip_search import CLIP, Clips
from ptq.statistics.hessian import Hessians, unseen
from ptq.weights.formats import Choice
from ptq.weights.rounding import Rounded, nearest, nearest_rows

CHUNK_TOKENS = 1024
"""Calibration tokens that go through a block at a time: bounds the memory of activations."""
CHOSEN = "chosen"
"""Key of a linear's mark: the options of its format, where the plan leaves a choice."""

Tensors = dict[str, Tensor]


class Tasks:
    """The tasks of one job in one work folder. Methods are idempotent; each ends by renaming its file into place."""

    def __init__(self, job: Job, work: Path, shards: Shards, workers: Workers = ALONE) -> None:
        self.job, self.work, self.shards, self.workers = job, work, shards, workers
        self.probe = Probe(job, work)
        self.hidden, self.teacher = (Chunks(work / name, job.device, workers) for name in ("hidden", "teacher"))
        self.hessians = Hessians(work / "hessians", job.device, workers)
        self.clips = Clips(work / "clips", workers)
        if workers.first:
            if not shards.begun():  # then nothing that the folder says of them is true
                remove_contents(work)
                shards.begin()
            for folder in FOLDERS:
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
            with progress.step(linear.name, 0 if linear.format is None else linear.n * linear.k):
                if linear in mine:
                    self.linear(linear, None, "")
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
            few = not calibrated and (not states or states["original"].shape[1] <= matmul.FEW_TOKENS)
            part = self.job.original_block(index, as_stored=few)
            routes = Routes(self.job.family.experts.logits if self.job.family.experts else 0)
            original, before = self.probe.run_original(index, part, states.get("original"), routes)
            if self.job.plan.finetune != "none":
                finetune_blocks.teach(self, index, part)
            rotated, after = original, before
            with progress.step(f"block {index}: rotate", weights):
                if any(linear.rewritten or linear.acts_online for linear in self.job.plan.block(index)):
                    memory.give_back()
                    self.job.rotate_block(index, part)
                    rotated, after = self.probe.run(index, part, states.get("rotated"), routes)
            if original is not None and rotated is not None:
                self.probe.compare(index, original, rotated, routes)
            if solve.crossed_inputs(self.job, index) and index + 1 < self.job.plan.blocks:
                with progress.step(f"block {index}: unquantised", weights):
                    with self.job.calibration():
                        self.teacher.through(index, part.run)
            if self.job.plan.finetune != "none":
                del part
                finetune_blocks.tune(self, index, progress)
            else:
                self.job.quantize_inputs(index, part)
                with progress.step(f"block {index}: clips", 0):
                    for note in self.clips.search(part, self.job.plan, self.hidden, index):
                        progress.say(note)
                with progress.step(f"block {index}: Hessians", weights * calibrated):
                    self._observe(index, part, calibrated, progress)
                self.round(list(self.job.plan.block(index)), part, progress, str(index))
                del part
            if original is not None and rotated is not None:
                packed = row_by_row(self.packed_block(index), states["packed"])
                left = {"original": original, "rotated": rotated, "packed": packed}
                self.probe.write(index, left, before, after)
            self.workers.wait()
        if calibrated:
            with progress.step(f"block {index}: forward", weights):
                self.advance(index)

    def round(self, linears: Sequence[LinearPlan], part: Part | None, progress: Progress, key: str) -> None:
        """Round linears of a block, shared out among the processes by what they cost. `key`: the file of their
        Hessians (`ptq.statistics.hessian`)."""
        solver = 1 if self.job.recipe.rounding == "nearest" else 2
        mine = self.workers.share(linears, lambda linear: linear.n * linear.k**solver)
        for linear in linears:
            with progress.step(linear.name, linear.n * linear.k):
                if linear in mine:
                    self.linear(linear, part, key)
        self.workers.wait()

    def linear(self, linear: LinearPlan, part: Part | None, key: str) -> None:
        """Round and pack one linear of the rewritten block `part` with the Hessians `key`, or write one that is not
        quantised."""
        if self.mark(linear).exists():
            return
        start = time.perf_counter()
        if linear.format is None:
            tensors, statistics = {"weight": self._cast(linear)}, {}
        else:
            parts, statistics = self._pack(linear, part, key)
            tensors = {"weight": guard(), **{f"weight_{part}": tensor for part, tensor in parts.items()}}
        signs = self.job.sign_tensors(linear)
        bias = self.job.bias(linear)
        if bias is not None:
            tensors["bias"] = bias.to(self.job.checkpoint.tensors[f"{linear.name}.bias"].dtype)
        statistics |= self.clips.found(linear)
        statistics["seconds"] = round(time.perf_counter() - start, 3)
        named = {f"{linear.name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        self.place(self.mark(linear), named | signs, statistics)

    def _cast(self, linear: LinearPlan) -> Tensor:
        """A weight that is not quantised: from float64 to the source's dtype in one step."""
        return self.job.rewritten(linear, self.job.checkpoint.tensors[linear.source].dtype)

    def _pack(self, linear: LinearPlan, part: Part | None, key: str) -> tuple[Tensors, dict[str, object]]:
        """The stored parts of a weight, and the statistics of its rounding."""
        format, recipe = linear.format, self.job.recipe
        assert format is not None
        if format.codebook is None:
            return format.pack(Rounded(self._cast(linear), {})), {}
        if part is None:  # the embedding or the head
            rounded = nearest_rows(self.job.rewritten_rows(linear), format.codebook, name=linear.name)
            return format.pack(rounded), rounded.statistics()
        chosen = {}
        if isinstance(format, Choice):
            weight = solve.weight_or_rewritten(self.job, linear, part.parameter(linear.dense_weight))
            format = format.choose(weight, name=linear.name)
            chosen = {CHOSEN: format.options()}
        codebook = format.codebook
        assert codebook is not None
        if recipe.rounding == "nearest":
            rounded = nearest(solve.take_weight(self.job, linear, part), codebook, name=linear.name)
        else:
            rounded = solve.round_with_hessian(self.job, self.hessians, linear, part, key, codebook)
        return format.pack(rounded), rounded.statistics() | chosen

    def job_with_choices(self, linears: Iterable[LinearPlan]) -> Job:
        """The job with the formats and clips that its plan leaves open filled in: as they were chosen for these
        linears, which are done."""
        left = [linear for linear in linears if isinstance(linear.format, Choice) or linear.clip_search]
        marks = {linear.name: json.loads(self.mark(linear).read_bytes()) for linear in left}
        options, clips = ({n: m[key] for n, m in marks.items() if key in m} for key in (CHOSEN, CLIP))
        return replace(self.job, plan=self.job.plan.with_choices(options, clips)) if marks else self.job

    def rest(self) -> None:
        """Norms, and whatever passes through, in the source's dtypes."""
        path = self.work / REST
        if not path.exists():
            dtypes = self.job.checkpoint.tensors
            tensors = {name: tensor.to(dtypes[name].dtype) for name, tensor in self.job.norms_and_kept("")}
            self.place(path, tensors | self.job.residual_signs(), {})

    def written(self, prefix: str) -> Tensors:
        """The tensors of the result whose names begin with `prefix`."""
        return {name: self.shards.read(name) for name in self.shards.layout.tensors if name.startswith(prefix)}

    def matrix(self, linear: LinearPlan) -> Matrix:
        """The embedding or the head as it is written."""
        tensors = {name.rpartition(".")[2]: tensor for name, tensor in self.written(f"{linear.name}.weight").items()}
        return Matrix(tensors, None if linear.format is None else config_entry(linear))

    # --- calibration ----------------------------------------------------------------------------------------------

    def embed(self, rows: Int[Tensor, "samples t"]) -> None:
        """Hidden states of the calibration rows as they enter the first block."""
        if self.first_block(calibrated=True) > 0 or self.hidden.complete(0):
            return
        matrices, chunks = [self.matrix(linear) for linear in self.job.embeddings], self.chunks_of(rows)
        if self.job.recipe.gptaq_alpha or self.job.plan.finetune != "none":
            source = [plain_matrix(self.job.tensor(linear.source)) for linear in self.job.embeddings]
            model = "rotated" if self.job.recipe.gptaq_alpha else "original"
            self.teacher.write(0, len(chunks), lambda number: self.job.embed(source, chunks[number], model))
        self.hidden.write(0, len(chunks), lambda number: self.job.embed(matrices, chunks[number]))

    def chunks_of(self, rows: Int[Tensor, "samples t"]) -> tuple[Int[Tensor, "some t"], ...]:
        """The calibration rows in chunks, each of which goes through a block in one call."""
        size = CHUNK_TOKENS // rows.shape[1]
        if self.job.plan.finetune != "none":
            size = min(size, len(rows) // HELD_OUT)  # one chunk of so many is held out
        return rows.split(max(1, size))

    def _observe(self, index: int, part: Part, calibrated: bool, progress: Progress) -> None:
        """The Hessians of a block whose linears are all rounded together."""
        names = dict.fromkeys(linear.statistics for linear in self.job.plan.block(index) if linear.statistics)
        calibrated &= self.job.recipe.rounding != "nearest"  # text may be there for the clips alone
        if names and calibrated and not self.hessians.there(str(index)):
            block = tuple(self.job.plan.block(index))
            if all(linear.expert is None for linear in block):  # with experts it is not said which runs last
                part.take(block[-1].dense_weight)  # the pass ends at its input: it is made again for rounding
            with self.job.calibration():
                self.hessians.take(
                    str(index), part, names, self.hidden, index, self.teacher, solve.crossed_inputs(self.job, index)
                )
            for note in unseen(self.hessians, self.job.plan, index):
                progress.say(note)

    def advance(self, index: int) -> None:
        """Send the calibration rows through the packed block, and drop what only that block needed."""
        if index + 1 == self.job.plan.blocks:  # nothing follows that would read them
            self.hidden.write(index + 1, 0, lambda number: torch.empty(0))
        elif not self.hidden.complete(index + 1):
            part = self.packed_block(index)
            with self.job.calibration():
                self.hidden.through(index, part.run)
        if self.workers.first:
            self.hidden.drop(index)
            self.teacher.drop(index)
            self.hessians.drop(str(index))
        self.workers.wait()

    def packed_block(self, index: int) -> Part:
        """A block as it is written and runs."""
        job = self.job_with_choices(self.job.plan.block(index))
        return job.packed_block(index, self.written(f"{self.job.plan.layers}.{index}."))

    # --- results --------------------------------------------------------------------------------------------------

    def log(self) -> list[dict[str, object]]:
        """Name, seconds and error statistics of every linear."""
        return [{"name": linear.name, **json.loads(self.mark(linear).read_bytes())} for linear in self.job.plan.linears]

    def trainings(self) -> dict[str, list[float | None]]:
        """The losses on held-out rows of everything that was fine-tuned, by name, those of the starts first."""
        blocks = (finetune_blocks.losses(self, index) for index in range(self.job.plan.blocks))
        return {name: found for losses in (*blocks, finetune_full.losses(self)) for name, found in losses.items()}

    def place(self, mark: Path, tensors: Tensors, statistics: dict[str, object]) -> None:
        """Put tensors into the shards, then write their mark."""
        self.shards.place(tensors)
        write_json(mark, statistics, durable=False)
