"""The stages of a run: the embedding and the head, then one block after another. Each is tasks (`ptq.pipeline.tasks`)
in their order, and those that are done are passed by.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from ptq.hf.blocks import PartialModel, row_by_row
from ptq.hf.routing import Routes
from ptq.ops import matmul, memory
from ptq.pipeline import finetune_blocks, finetune_full, solve, trainable
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.progress import Progress
from ptq.pipeline.tasks import Tasks
from ptq.planning.plan import weights_of
from ptq.statistics.hessian import unseen_experts


def ends(tasks: Tasks, progress: Progress) -> None:
    """Write the embedding and the head, norms, and what passes through."""
    linears = list(tasks.job.plan.ends())
    mine = tasks.workers.share(linears, lambda linear: linear.weights)
    for linear in linears:
        with progress.step(linear.name, 0 if linear.format is None else linear.weights):
            if linear in mine:
                tasks.linear(linear, None, "")
    if tasks.workers.first:
        tasks.rest()
    tasks.workers.wait()


def embed(tasks: Tasks, rows: Int[Tensor, "samples t"]) -> None:
    """Make the hidden states of the calibration rows as they enter the first block."""
    if tasks.first_block(calibrated=True) > 0 or tasks.hidden.complete(0):
        return
    job, chunks = tasks.job, tasks.chunks_of(rows)
    matrices = [tasks.matrix(linear) for linear in job.embeddings]
    if job.recipe.gptaq_alpha or job.plan.finetune != "none":
        source = [plain_matrix(job.tensor(linear.source)) for linear in job.embeddings]
        model = "rotated" if job.recipe.gptaq_alpha else trainable.taught_by(job.plan)
        tasks.teacher.write(0, len(chunks), lambda number: job.embed(source, chunks[number], model))
    tasks.hidden.write(0, len(chunks), lambda number: job.embed(matrices, chunks[number]))


def block(tasks: Tasks, index: int, calibrated: bool, progress: Progress) -> None:
    """Prove the rotations of a block, round its linears, and send everything through the packed block."""
    if not tasks.workers.agree(tasks.probe.done(index)):
        if calibrated:
            memory.give_back()
        _pack(tasks, index, calibrated, progress)
        tasks.workers.wait()
    if calibrated:
        with progress.step(f"block {index}: forward", weights_of(tasks.job.plan.block(index))):
            advance(tasks, index)


def trainings(tasks: Tasks) -> dict[str, list[float | None]]:
    """The losses on held-out rows of everything that was fine-tuned, by name, those of the starts first."""
    blocks = (finetune_blocks.losses(tasks, index) for index in range(tasks.job.plan.blocks))
    return {name: found for losses in (*blocks, finetune_full.losses(tasks)) for name, found in losses.items()}


def _pack(tasks: Tasks, index: int, calibrated: bool, progress: Progress) -> None:
    """Rotate and round a block, and take the probe through the original, the rotated and the packed one."""
    job, probe = tasks.job, tasks.probe
    states = probe.states(index) if tasks.workers.first else {}
    few = not calibrated and (not states or states["original"].shape[1] <= matmul.FEW_TOKENS)
    part = job.original_block(index, as_stored=few)
    routes = Routes(job.family.experts.logits if job.family.experts else 0)
    original, before = probe.run_original(index, part, states.get("original"), routes)
    teacher = trainable.taught_by(job.plan) if job.plan.finetune != "none" else None
    if teacher == "original":
        finetune_blocks.teach(tasks, index, part)
    rotated, after = original, before
    with progress.step(f"block {index}: rotate", weights_of(tasks.job.plan.block(index))):
        if any(linear.rewritten or linear.acts_online for linear in job.plan.block(index)):
            memory.give_back()
            job.rotate_block(index, part)
            rotated, after = probe.run(index, part, states.get("rotated"), routes)
    if original is not None and rotated is not None:
        probe.compare(index, original, rotated, routes)
    if job.plan.centered:
        with progress.step(f"block {index}: key centres", 0):
            tasks.center_keys(index, part)
    if teacher == "rotated":
        finetune_blocks.teach(tasks, index, part)
    if teacher is not None:
        _search_clips(tasks, index, part, progress)
        del part
        finetune_blocks.tune(tasks, index, progress)
    else:
        _round(tasks, index, part, calibrated, progress)
        del part
    if original is not None and rotated is not None:
        packed = row_by_row(tasks.packed_block(index), states["packed"])
        probe.write(index, {"original": original, "rotated": rotated, "packed": packed}, before, after)


def _round(tasks: Tasks, index: int, part: PartialModel, calibrated: bool, progress: Progress) -> None:
    """Round the linears of a rotated block, each with what its rounding asks for."""
    job, weights = tasks.job, weights_of(tasks.job.plan.block(index))
    if solve.crossed_inputs(job, index) and index + 1 < job.plan.blocks:
        with progress.step(f"block {index}: unquantised", weights), job.calibration_precision():
            tasks.teacher.through(index, part.run)
    _search_clips(tasks, index, part, progress)
    with progress.step(f"block {index}: Hessians", weights * calibrated):
        if calibrated and job.recipe.rounding != "nearest":  # text may be there for the clips alone
            observe(tasks, index, part, progress)
    tasks.round(list(job.plan.block(index)), part, progress, str(index))


def _search_clips(tasks: Tasks, index: int, part: PartialModel, progress: Progress) -> None:
    """Quantise what a rotated block is fed, and find the clips that are left open."""
    tasks.job.quantize_inputs(index, part)
    part.load(tasks.centers(index))
    with progress.step(f"block {index}: clips", 0):
        for note in tasks.clips.search(part, tasks.job.plan, tasks.hidden, index):
            progress.say(note)


def observe(tasks: Tasks, index: int, part: PartialModel, progress: Progress) -> None:
    """Take the Hessians of a block whose linears are all rounded together."""
    job, block = tasks.job, tuple(tasks.job.plan.block(index))
    names = dict.fromkeys(linear.statistics for linear in block if linear.statistics)
    if not names or tasks.hessians.exists(str(index)):
        return
    if all(linear.expert is None for linear in block):  # with experts it is not said which runs last
        part.take(block[-1].dense_weight)  # the pass ends at its input: it is made again for rounding
    with job.calibration_precision():
        crossed = solve.crossed_inputs(job, index)
        tasks.hessians.collect(str(index), part, names, tasks.hidden, index, tasks.teacher, crossed)
    for note in unseen_experts(tasks.hessians, job.plan, index):
        progress.say(note)


def advance(tasks: Tasks, index: int) -> None:
    """Send the calibration rows through the packed block, and drop what only that block needed."""
    if index + 1 == tasks.job.plan.blocks:  # nothing follows that would read them
        tasks.hidden.write(index + 1, 0, lambda number: torch.empty(0))
    elif not tasks.hidden.complete(index + 1):
        part = tasks.packed_block(index)
        with tasks.job.calibration_precision():
            tasks.hidden.through(index, part.run)
    if tasks.workers.first:
        tasks.hidden.drop(index)
        tasks.teacher.drop(index)
        tasks.hessians.drop(str(index))
    tasks.workers.wait()
