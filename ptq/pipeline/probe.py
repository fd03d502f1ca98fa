"""The probe: a few rows of tokens that pass through the original, the rotated and the packed model side by side, one
block of each at a time. Every run proves its rotations on it, and reports what they do to outliers."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float, Int
from torch import Tensor

from ptq.errors import InputError, RunError, refused
from ptq.files import work_files
from ptq.hf.blocks import UNRUN, PartialModel, row_by_row
from ptq.hf.routing import Routes, recorded_routes, replayed
from ptq.pipeline import rewrite
from ptq.pipeline.ends import Matrix, plain_matrix
from ptq.pipeline.job import Job
from ptq.pipeline.proof import TOLERANCE, largest_error
from ptq.statistics.outliers import MeasuredInput, from_tensors, observed, to_tensors, watching

SIDES = ("before.", "after.")


class Probe:
    """The files `probe/<block>` and `outliers/<block>` of a work folder."""

    def __init__(self, job: Job, work: Path) -> None:
        self.job, self.work = job, work

    def done(self, index: int) -> bool:
        """Whether the probe has left a block."""
        return self._file(index + 1).exists()

    def start(self, ids: Int[Tensor, "rows t"], packed: Sequence[Matrix]) -> None:
        """States as they enter the first block; `packed` are the embeddings as they are written."""
        if self._file(0).exists():
            return
        source = [plain_matrix(self.job.tensor(linear.source)) for linear in self.job.embeddings]
        states = {
            "original": self.job.embed(source, ids, "original"),
            "rotated": self.job.embed(source, ids, "rotated"),
            "packed": self.job.embed(packed, ids),
        }
        work_files.write_tensors(self._file(0), {**states, "ids": ids})

    def run_original(
        self, index: int, part: PartialModel, state: Float[Tensor, "rows t k"] | None, routes: Routes
    ) -> tuple[Float[Tensor, "rows t left"] | None, dict[str, MeasuredInput]]:
        """The same as `run`, of the original: where that does not run or gives no numbers, its settings and weights
        are to blame. Raises InputError."""
        with refused(f"{UNRUN}: block {index}"):
            left, seen = self.run(index, part, state, routes)
        if left is not None and not left.isfinite().all():
            raise InputError(
                f"block {index}: what leaves it in the original model is not finite: a number in config.json is wrong, "
                "or the weights are damaged"
            )
        return left, seen

    def run(
        self, index: int, part: PartialModel, state: Float[Tensor, "rows t k"] | None, routes: Routes
    ) -> tuple[Float[Tensor, "rows t left"] | None, dict[str, MeasuredInput]]:
        """What leaves a block, and the inputs of the linears inside; None and nothing where there is no probe. The
        first model that runs leaves its `routes`, the second one takes them."""
        if state is None:
            return None, {}
        names = observed(self.job.plan, index)
        grid = next((linear.activation for linear in self.job.plan.block(index) if linear.activation), None)
        routers = [linear.name for linear in self.job.plan.block(index) if linear.role == "router"]
        following = replayed if routes.made else recorded_routes
        with watching(part, names, grid) as found, following(part, routers, routes):
            return row_by_row(part, state), found

    def compare(
        self, index: int, original: Float[Tensor, "rows t k"], rotated: Float[Tensor, "rows t k"], routes: Routes
    ) -> None:
        """Prove the rotations of a block. Raises RunError."""
        rotation = self.job.residual_rotation()
        expected = original.double()
        if rotation is not None:
            expected = rewrite.rotate(expected, rotation, self.job.signs)
        error = max(largest_error(rotated, expected), *(largest_error(*logits) for logits in routes.logits()), 0.0)
        if not error < TOLERANCE:  # also where it is NaN
            raise RunError(
                f"block {index}: the rotated block differs from the original by {error:.1e} (relative; what "
                f"float32 rounds is below {TOLERANCE}), so there is no result: this "
                f"{self.job.family.model_type} model may have a part that the row of its family does not "
                "know; please report it"
            )

    def write(
        self, index: int, left: dict[str, Tensor], before: dict[str, MeasuredInput], after: dict[str, MeasuredInput]
    ) -> None:
        """Keep what has left a block, and what was seen inside; what entered it is needed no more."""
        seen = {f"{side}{k}": v for side, found in zip(SIDES, (before, after), strict=True)
                for k, v in to_tensors(found).items()}  # fmt: skip
        work_files.write_tensors(self.work / "outliers" / f"{index}.safetensors", seen)
        work_files.write_tensors(self._file(index + 1), left)
        if index:
            self._file(index).unlink(missing_ok=True)

    def replace(self, packed: Float[Tensor, "rows t k"]) -> None:
        """Put the states of another packed model, as they left its last block, in the place of the packed ones here."""
        states = work_files.read_tensors(file := self._file(self.job.plan.blocks))
        work_files.write_tensors(file, {**states, "packed": packed})

    def states(self, index: int) -> dict[str, Tensor]:
        """The states as they enter a block, or leave the last one, by model; of the first also the `ids`."""
        return work_files.read_tensors(self._file(index), self.job.device)

    def outliers(self) -> tuple[dict[str, MeasuredInput], dict[str, MeasuredInput]]:
        """The inputs of the linears in the original and in the rotated model."""
        found: dict[str, Tensor] = {}
        for index in range(self.job.plan.blocks):
            found |= work_files.read_tensors(self.work / "outliers" / f"{index}.safetensors")
        sides = ({k.removeprefix(side): v for k, v in found.items() if k.startswith(side)} for side in SIDES)
        before, after = (from_tensors(side) for side in sides)
        return before, after

    def _file(self, index: int) -> Path:
        return self.work / "probe" / f"{index}.safetensors"
