"""The tasks of a run. Each ends by renaming a file of the work folder into place; a task whose file exists is done.

    linears/<name>.json           one rewritten linear is in its place in the shards; the statistics of its rounding
    rest.json                     so are the norms and what passes through
    clips/<name>.json             the searched clip of the input of a linear, and of those that share it
    centers/<block>.json          the centres of a block's keys are in their place
    hidden/<block>/<chunk>        calibration rows as they enter a block, after the quantised blocks before it
    teacher/<block>/<chunk>       with fine-tuning or GPTAQ: the same of the model that is rotated and not quantised, or
                                  of the original, where rotations are the layers' own (`trainable.taught_by`)
    hessians/<block>.safetensors  one per shared input of a block; <block>.<part>: the sum over some of the chunks
    tuned/<block>.json            the block is fine-tuned (ptq.pipeline.finetune_blocks, ptq.pipeline.finetune_full)
    outliers/<block>.safetensors  what the report says of the inputs of a block's linears
    probe/<block>.safetensors     a few tokens as they enter a block of the original, the rotated and the packed model

Tensors of the result go straight to their places in the shards: for a large model, a second copy is too much disk.
The tasks read nothing but the source checkpoint, the plan, the shards and these files, so a run can stop at any moment,
and several processes can share the tasks of a step.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from ptq.engine import ALONE, Workers
from ptq.files import work_files
from ptq.files.shards import Shards, write_json
from ptq.hf.blocks import PartialModel
from ptq.kv import key_centers
from ptq.layers.linear import config_entry
from ptq.layers.packed_weight import guard
from ptq.pipeline import solve
from ptq.pipeline.ends import Matrix
from ptq.pipeline.finetune import HELD_OUT
from ptq.pipeline.job import Job
from ptq.pipeline.probe import Probe
from ptq.pipeline.progress import Progress
from ptq.pipeline.work import FOLDERS, REST, remove_contents
from ptq.planning.plan import LinearPlan
from ptq.statistics import chunks, key_means
from ptq.statistics.chunks import Chunks
from ptq.statistics.clip_search import CLIP, Clips
from ptq.statistics.hessian import Hessians
from ptq.weights.formats import Choice
from ptq.weights.rounding import Rounded, nearest, nearest_rows

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

    def round(self, linears: Sequence[LinearPlan], part: PartialModel | None, progress: Progress, key: str) -> None:
        """Round linears of a block, shared out among the processes by what they cost. `key`: the file of their
        Hessians (`ptq.statistics.hessian`)."""
        solver = 1 if self.job.recipe.rounding == "nearest" else 2
        mine = self.workers.share(linears, lambda linear: linear.n * linear.k**solver)
        for linear in linears:
            with progress.step(linear.name, linear.n * linear.k):
                if linear in mine:
                    self.linear(linear, part, key)
        self.workers.wait()

    def linear(self, linear: LinearPlan, part: PartialModel | None, key: str) -> None:
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

    def _pack(self, linear: LinearPlan, part: PartialModel | None, key: str) -> tuple[Tensors, dict[str, object]]:
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
        marks = {linear.name: work_files.read_json(self.mark(linear)) for linear in left}
        options, clips = ({n: m[key] for n, m in marks.items() if key in m} for key in (CHOSEN, CLIP))
        return replace(self.job, plan=self.job.plan.with_choices(options, clips)) if marks else self.job

    def decided(self, linears: Iterable[LinearPlan]) -> list[LinearPlan]:
        """These linears, which are done, as `job_with_choices` has them."""
        done = {linear.name: linear for linear in linears}
        return [linear for linear in self.job_with_choices(done.values()).plan.linears if linear.name in done]

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

    def chunks_of(self, rows: Int[Tensor, "samples t"]) -> tuple[Int[Tensor, "some t"], ...]:
        """The calibration rows in chunks, each of which goes through a block in one call."""
        size = chunks.CHUNK_TOKENS // rows.shape[1]
        if self.job.plan.finetune != "none":
            size = min(size, len(rows) // HELD_OUT)  # one chunk of so many is held out
        return rows.split(max(1, size))

    def packed_block(self, index: int) -> PartialModel:
        """A block as it is written and runs."""
        job = self.job_with_choices(self.job.plan.block(index))
        return job.packed_block(index, self.written(f"{self.job.plan.layers}.{index}."))

    def center_keys(self, index: int, part: PartialModel) -> None:
        """Measure the centres of the keys of a rewritten block, and write them."""
        name, mark = self._centers(index), self.work / "centers" / f"{index}.json"
        if name and self.workers.first and not mark.exists():
            states = (self.hidden.read(path) for path in self.hidden.sample(index))
            with self.job.calibration_precision():
                found = key_means.centers(part, states)
            self.place(mark, {name: found.to(self.shards.layout.tensors[name].dtype)}, {})
        self.workers.wait()

    def centers(self, index: int) -> Tensors:
        """The centres of a block's keys as they are written, by their name; nothing where keys have none."""
        name = self._centers(index)
        return {name: self.shards.read(name)} if name else {}

    def _centers(self, index: int) -> str | None:
        return key_centers.tensor_name(self.job.family, index) if self.job.plan.centered else None

    # --- results --------------------------------------------------------------------------------------------------

    def log(self) -> list[dict[str, object]]:
        """Name, seconds and error statistics of every linear."""
        return [{"name": linear.name, **work_files.read_json(self.mark(linear))} for linear in self.job.plan.linears]

    def place(self, mark: Path, tensors: Tensors, statistics: dict[str, object]) -> None:
        """Put tensors into the shards, then write their mark."""
        self.shards.place(tensors)
        write_json(mark, statistics, durable=False)
