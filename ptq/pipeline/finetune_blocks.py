"""Fine-tuning within a block (Tseng et al. 2024, arXiv:2402.04396, section 5): linears are rounded in turns, those that
share an input together, and after every turn whatever can still move follows the output of the original block.

    tuned/<block>-<turn>.safetensors        the block's tensors after a turn, and the losses of all turns
    tuned/<block>-<turn>.epoch.safetensors  state of the training in a turn, after each epoch
    tuned/<block>.json                      the block's tensors are in the shards; the losses

What moves: weights that are not rounded yet, biases, norms, and scales and sign vectors of what is rounded. A weight
that is rotated for good (QuaRot's) is trained as rotated, one whose layer undoes its transforms itself (QuIP#'s) as the
source has it. The input is what has left the packed blocks before, the target what leaves the original ones, or the
rotated ones, so errors of earlier blocks are made up for; Hessians are taken anew in every turn (what both are worth:
docs/results.md). Rounding and Hessians are shared out as ever, training is done by the first process alone; the others
read its files.
"""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.files import work_files
from ptq.files.json_numbers import six_digits
from ptq.hf.blocks import PartialModel
from ptq.layers.linear import config_entry
from ptq.pipeline import finetune, trainable
from ptq.pipeline.progress import Progress
from ptq.pipeline.tasks import Tasks
from ptq.pipeline.trainable import Trained, Values
from ptq.planning.plan import LinearPlan, weights_of
from ptq.statistics.clip_search import CLIP
from ptq.weights.grouped import SCALE, has_scales

LOSSES = "losses."
"""What losses are called in a turn's file, before the number of the turn and the name of the training."""


@dataclass(frozen=True)
class _Turn:
    """One turn of a block."""

    tasks: Tasks
    index: int
    number: int
    rounded: list[LinearPlan]
    """Before this turn."""
    group: list[LinearPlan]
    """What is rounded in it."""
    left: list[LinearPlan]
    """What is rounded later."""

    @property
    def key(self) -> str:
        return f"{self.index}-{self.number}"

    @property
    def what(self) -> str:
        """What is rounded in it: the role of its linears, or the first one where others have that role, too."""
        first, others = self.group[0], (*self.rounded, *self.left)
        unique = all(linear.role != first.role for linear in others)
        return first.role if unique else first.name.removeprefix(f"{self.tasks.job.plan.layers}.{self.index}.")

    @property
    def file(self) -> Path:
        return self.tasks.work / "tuned" / f"{self.key}.safetensors"


def teach(tasks: Tasks, index: int, part: PartialModel) -> None:
    """Send the calibration rows through a block of the teacher (`trainable.taught_by`): what leaves it is what its
    packed one is trained on."""
    tasks.teacher.through(index, part.run)


def tune(tasks: Tasks, index: int, progress: Progress) -> None:
    """Round and train a block."""
    linears = list(tasks.job.plan.block(index))
    tasks.round([linear for linear in linears if linear.statistics is None], None, progress, "")
    if tasks.workers.agree(_mark(tasks, index).exists()):
        return
    turns = _turns(tasks, index, linears)
    done = tasks.workers.agree(max((turn.number for turn in turns if turn.file.exists()), default=-1))
    for turn in turns[max(done, 0) :]:  # the file of a turn takes the place of the one before
        previous = turns[turn.number - 1].file if turn.number else None
        if turn.number > done:
            start = _start(turn) if previous is None else work_files.read_tensors(previous, tasks.job.device)
            _run_turn(turn, start, progress)
        if tasks.workers.first:
            tasks.hessians.drop(turn.key)
            if previous is not None:
                previous.unlink(missing_ok=True)
        tasks.workers.wait()
    if tasks.workers.first and turns:
        _place_trained(tasks, index, turns[-1].file)
    tasks.workers.wait()


def _turns(tasks: Tasks, index: int, linears: list[LinearPlan]) -> list[_Turn]:
    """The turns of a block, in their order."""
    groups = finetune.turns(linears)
    parts = [(groups[:number], group, groups[number + 1 :]) for number, group in enumerate(groups)]
    return [
        _Turn(tasks, index, number, [*chain(*before)], group, [*chain(*left)])
        for number, (before, group, left) in enumerate(parts)
    ]


def _run_turn(turn: _Turn, values: Values, progress: Progress) -> None:
    """Round and train in one turn."""
    tasks, index = turn.tasks, turn.index
    block = tasks.job.plan.block(index)
    part = _rewritten(turn, values)
    if tasks.job.recipe.rounding != "nearest":
        with progress.step(f"block {index}: Hessians", weights_of(turn.group)):
            with tasks.job.calibration_precision():
                tasks.hessians.collect(turn.key, part, [turn.group[0].statistics or ""], tasks.hidden, index)
    tasks.round(turn.group, part, progress, turn.key)
    del part
    if tasks.workers.first:
        with progress.training(weights_of(block), tasks.job.plan.finetune_epochs) as tell:
            _train(turn, values, tell)
    tasks.workers.wait()


def _start(turn: _Turn) -> Values:
    """The block's tensors before anything is rounded, in float32, with sign vectors as they were drawn."""
    job, part = turn.tasks.job, _unrounded(turn, [])
    linears, signs = (*turn.rounded, *turn.group, *turn.left), Values()
    for linear in linears:
        signs |= job.sign_tensors(linear)
    names = [_weight(linear) for linear in linears]
    names += [f"{linear.name}.bias" for linear in linears if part.holds(f"{linear.name}.bias")]
    values = trainable.read(job, signs | dict(job.norms_and_kept(f"{job.plan.layers}.{turn.index}.")))
    return {name: part.parameter(name) for name in names} | values


def _unrounded(turn: _Turn, rounded: list[LinearPlan]) -> PartialModel:
    """The block before others than `rounded` are: what is rotated for good is so, and what undoes its transforms itself
    is as in the source. Linears that are never rounded are as they were written; keys and values those of the cache."""
    job = turn.tasks.job
    part = job.original_block(turn.index)
    done = {linear.name for linear in rounded}
    left = [linear for linear in job.plan.block(turn.index) if linear.name not in done and not linear.undone]
    job.rotate_block(turn.index, part, left)
    for linear in left:
        part.load(turn.tasks.written(f"{linear.name}.") if linear.statistics is None else {})
    part.quantize_cache(job.plan.cache)
    part.load(turn.tasks.centers(turn.index))
    return part


def _weight(linear: LinearPlan) -> str:
    """Name of a weight that is not rounded yet."""
    return f"{linear.name}.weight" if linear.undone else linear.dense_weight


def _rewritten(turn: _Turn, values: Values) -> PartialModel:
    """The block before the linears of a turn are rounded: those before it packed, its own rewritten, others plain."""
    job, rounded, part = turn.tasks.job, turn.tasks.decided(turn.rounded), _unrounded(turn, turn.rounded)
    names = [name for name in values if not name.startswith(LOSSES) and part.holds(name)]
    part.load({name: values[name] for name in names})
    everything = trainable.shared(turn.rounded, values)
    part.pack({linear.name: config_entry(linear) for linear in rounded})
    for linear in rounded:
        found = turn.tasks.written(f"{linear.name}.")
        moved = {name: everything[name] for name in found if name in everything}
        part.load(found | trainable.written(job, moved))
    for linear in turn.group:
        if linear.undone:
            job.rotate_weight(linear, part)
            bias = f"{linear.name}.bias"
            part.load({bias: values[bias]} if bias in values else {})
        if (activation := _clipped(turn, linear).activation) is not None:
            part.quantize_input(linear.name, activation)
    return part


def _clipped(turn: _Turn, linear: LinearPlan) -> LinearPlan:
    """A linear whose input is quantised with the clip that was found for it."""
    if linear.activation is None:
        return linear
    clip = turn.tasks.clips.found(linear).get(CLIP, linear.activation.clip)
    return replace(linear, activation=replace(linear.activation, clip=clip))


def _train(turn: _Turn, values: Values, tell: finetune.Tell) -> None:
    """Train in a turn whose linears are rounded."""
    tasks, index, job = turn.tasks, turn.index, turn.tasks.job
    rounded = [*turn.rounded, *turn.group]
    for linear in turn.group:  # it is in the shards now
        del values[_weight(linear)]
        if has_scales(linear.format):
            values |= trainable.read(job, tasks.written(f"{linear.name}.{SCALE}"))
    part = _trainable(turn, rounded)
    trained = _trained(turn, rounded, values)
    chunks, targets = tasks.hidden.files(index), tasks.teacher.files(index + 1)
    batches = finetune.training_chunks(len(chunks))
    held = range(batches, len(chunks))
    whole = sum(float(tasks.teacher.read(targets[number]).double().square().sum()) for number in held)

    def loss(tensors: Values, number: int) -> Float[Tensor, ""]:
        found = part.differentiated(trainable.shared(rounded, tensors), hidden=tasks.hidden.read(chunks[number]))
        return (found - tasks.teacher.read(targets[number])).square().sum() / whole

    def gradients(tensors: Values, number: int) -> float:
        found = loss(tensors, number)
        found.backward()
        return float(found.detach()) * len(held)  # of one chunk, beside that of those held out

    @torch.no_grad()
    def held_out(tensors: Values) -> float:
        return sum(float(loss(tensors, number)) for number in held)

    task = finetune.Task(
        f"block {index} after {turn.what}", job.recipe.seed, trained, gradients, held_out, batches,
        job.plan.finetune_epochs, turn.file.with_name(f"{turn.key}.epoch.safetensors"),
    )  # fmt: skip
    best, losses = finetune.fit(task, tell)
    found = {**values, **best, f"{LOSSES}{turn.number} {task.name}": torch.tensor(losses, dtype=torch.float64)}
    work_files.write_tensors(turn.file, found)
    task.file.unlink(missing_ok=True)


def _trainable(turn: _Turn, rounded: list[LinearPlan]) -> PartialModel:
    """The block with its rounded weights frozen; `PartialModel.differentiated` puts the others in their places."""
    part = _unrounded(turn, rounded)
    for linear in turn.left:
        trainable.thaw(part, _clipped(turn, linear), _weight(linear))
    for linear in turn.tasks.decided(rounded):
        trainable.freeze(part, [linear], turn.tasks.written(f"{linear.name}."))
    return part


def _trained(turn: _Turn, rounded: list[LinearPlan], values: Values) -> dict[str, Trained]:
    share = finetune.rounding_error(map(turn.tasks.mark, turn.group))
    found = trainable.vectors(turn.tasks.job, rounded, values, share)
    for name in map(_weight, turn.left):
        found[name] = trainable.matrix(values[name], torch.float32, share)
    return found


def _place_trained(tasks: Tasks, index: int, file: Path) -> None:
    """Put what has been trained into the shards, and say so."""
    values = work_files.read_tensors(file)
    trained = sorted((name for name in values if name.startswith(LOSSES)), key=_turn_of)
    found = [[name.partition(" ")[2], six_digits(values.pop(name).tolist())] for name in trained]
    values = trainable.shared([linear for linear in tasks.job.plan.block(index) if linear.statistics], values)
    tasks.place(_mark(tasks, index), trainable.written(tasks.job, values), {"losses": found})
    file.unlink()


def _turn_of(name: str) -> int:
    """The number of the turn in what its losses are called."""
    return int(name.removeprefix(LOSSES).partition(" ")[0])


def losses(tasks: Tasks, index: int) -> dict[str, list[float | None]]:
    """The losses on held-out rows in all turns of a block, relative to the mean square of what they were to match."""
    mark = _mark(tasks, index)
    return dict(work_files.read_json(mark)["losses"]) if mark.exists() else {}


def _mark(tasks: Tasks, index: int) -> Path:
    return tasks.work / "tuned" / f"{index}.json"
