"""The tasks of a run. Each ends by renaming a file of the work folder into place; a task whose file exists is done.

    linears/<name>.json           one rewritten linear is in its place in the shards; the statistics of its rounding
    rest.json                     so are the norms and what passes through
    hidden/<block>/<chunk>        calibration rows as they enter a block, after the quantised blocks before it
    hessians/<block>.safetensors  one per shared input of a block
    probe/<block>.safetensors     a few tokens as they enter a block of the original, the rotated and the packed model

Tensors of the result go straight to their places in the shards: for a large model, a second copy is too much disk.
The tasks read nothing but the source checkpoint, the plan, the shards and these files, so a run can stop at any moment.
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from ptq import memory, rewrite, rounding
from ptq.blocks import Part
from ptq.checkpoint import read_tensor
from ptq.errors import RunError
from ptq.header import read_header
from ptq.hessian import observe
from ptq.job import Job, dense_weight
from ptq.linear import guard
from ptq.plan import LinearPlan
from ptq.progress import Progress
from ptq.proof import largest_error
from ptq.rounding import Rounded
from ptq.shards import Shards, write_json, write_tensors
from ptq.work import remove_contents

CHUNK_TOKENS = 1024
"""Calibration tokens that go through a block at a time: bounds the memory of activations."""
ROTATION_TOLERANCE = 1e-3
"""Relative float32 difference of hidden states above which a rotation is called wrong; right ones stay near 1e-6."""

Tensors = dict[str, Tensor]


class Tasks:
    """The tasks of one job in one work folder. Methods are idempotent; each ends by renaming its file into place."""

    def __init__(self, job: Job, work: Path, shards: Shards) -> None:
        self.job, self.work, self.shards = job, work, shards
        if not shards.begun():  # then nothing that the folder says of them is true
            remove_contents(work)
            shards.begin()
        for folder in ("linears", "hidden", "hessians", "probe"):
            (work / folder).mkdir(parents=True, exist_ok=True)

    def first_block(self, calibrated: bool) -> int:
        """The first block that is not done, and may be begun."""
        marks = (self.work / "hidden").glob("*/complete") if calibrated else (self.work / "probe").glob("*.safetensors")
        return max((int(mark.parent.name if calibrated else mark.stem) for mark in marks), default=0)

    # --- weights --------------------------------------------------------------------------------------------------

    def mark(self, linear: LinearPlan) -> Path:
        """The file that says that `linear` is done."""
        return self.work / "linears" / f"{linear.name}.json"

    def block(self, index: int, calibrated: bool, progress: Progress) -> None:
        """All tasks of one block: prove its rotations, round its linears, send everything through the packed block."""
        weights = sum(linear.n * linear.k for linear in self.job.plan.block(index))
        if not self._probe_file(index + 1).exists():
            states = self.probe_states(index)
            part = self.job.original_block(index)
            original = part.run(states["original"])
            with progress.step(f"block {index}: rotate", weights):
                self.job.rotate_block(index, part)
            rotated = part.run(states["rotated"])
            self._compare_rotated(index, original, rotated)
            with progress.step(f"block {index}: Hessians", weights * calibrated):
                self.hessians(index, part)
            for linear in self.job.plan.block(index):
                with progress.step(linear.name, linear.n * linear.k):
                    self.linear(linear, part)
            del part
            packed = self._packed_block(index).run(states["packed"])
            self._write(self._probe_file(index + 1), {"original": original, "rotated": rotated, "packed": packed})
        if calibrated:
            with progress.step(f"block {index}: forward", weights):
                self.advance(index)

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
        bias = self.job.bias(linear)
        if bias is not None:
            tensors["bias"] = bias.to(self.job.checkpoint.tensors[f"{linear.name}.bias"].dtype)
        statistics["seconds"] = round(time.perf_counter() - start, 3)
        named = {f"{linear.name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        self._place(self.mark(linear), named, statistics)

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
        taken = dense_weight(linear)  # handed over, not kept: the solvers free what they do not need any more
        if recipe.rounding == "nearest":
            rounded = rounding.nearest(part.take(taken), codebook, name=linear.name)
        else:
            rounded = rounding.ldlq(
                part.take(taken), self._hessian(linear), codebook, damping=recipe.damping, name=linear.name
            )
        return linear.format.pack(rounded), rounded.statistics()

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
        per_chunk = max(1, CHUNK_TOKENS // rows.shape[1])
        self._write_hidden(0, (self.job.embed(weight, chunk) for chunk in rows.split(per_chunk)))

    def hessians(self, index: int, part: Part) -> None:
        """The Hessians of one rewritten block, each taken on its input as the weights will see it."""
        path = self._hessian_file(index)
        names = dict.fromkeys(linear.statistics for linear in self.job.plan.block(index) if linear.statistics)
        if not path.exists():
            memory.give_back()
            self._write(path, observe(part, names, self._hidden(index)))
            memory.give_back()

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
            self._write_hidden(index + 1, iter(()))
        elif not self._complete(index + 1):
            part = self._packed_block(index)
            self._write_hidden(index + 1, (part.run(chunk) for chunk in self._hidden(index)))
        shutil.rmtree(self.work / "hidden" / str(index), ignore_errors=True)
        self._hessian_file(index).unlink(missing_ok=True)

    def _packed_block(self, index: int) -> Part:
        return self.job.packed_block(index, self.packed_tensors(self.job.plan.block(index)))

    def _complete(self, index: int) -> bool:
        return (self.work / "hidden" / str(index) / "complete").exists()

    def _write_hidden(self, index: int, chunks: Iterator[Float[Tensor, "batch t k"]]) -> None:
        folder = self.work / "hidden" / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        for number, chunk in enumerate(chunks):
            self._write(folder / f"{number:05d}.safetensors", {"hidden": chunk})
        (folder / "complete").touch()

    def _hidden(self, index: int) -> Iterator[Float[Tensor, "batch t k"]]:
        for path in sorted((self.work / "hidden" / str(index)).glob("*.safetensors")):
            yield load_file(path)["hidden"].clone().to(self.job.device)

    # --- proof ----------------------------------------------------------------------------------------------------

    def probe_start(self, ids: Int[Tensor, "1 t"]) -> None:
        """Hidden states of a few tokens as they enter the first block. Needs the embedding to be done."""
        if self._probe_file(0).exists():
            return
        source = self.job.tensor(self.job.embedding.source)
        states = {
            "original": self.job.embed(source, ids),
            "rotated": self.job.embed(source, ids, rewrite=True),
            "packed": self.job.embed(self.packed_weight(self.job.embedding), ids),
        }
        self._write(self._probe_file(0), {**states, "ids": ids})

    def _compare_rotated(self, index: int, original: Tensor, rotated: Tensor) -> None:
        rotation = self.job.residual_rotation()
        expected = original.double()
        if rotation is not None:
            expected = rewrite.rotate(expected, rotation, self.job.signs)
        error = largest_error(rotated, expected)
        if not error < ROTATION_TOLERANCE:  # also where it is NaN
            raise RunError(
                f"block {index}: the rotated block differs from the original by {error:.1e} (relative; rounding is "
                f"below {ROTATION_TOLERANCE}), so nothing was written: this {self.job.family.model_type} model may "
                "have a part that the row in ptq/families.py does not know; please report it"
            )

    def probe_states(self, index: int) -> Tensors:
        """The probe's hidden states as they enter a block, or leave the last one, by model."""
        return {name: state.clone().to(self.job.device) for name, state in load_file(self._probe_file(index)).items()}

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

    def _probe_file(self, index: int) -> Path:
        return self.work / "probe" / f"{index}.safetensors"
