"""`quantize`: from a model and a recipe to a checkpoint that is proven, whole and in its place."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ptq import engine
from ptq.engine import Workers
from ptq.errors import InputError, RunError
from ptq.files import source
from ptq.files.checkpoint import Checkpoint
from ptq.files.lock import exclusive, lock_file
from ptq.files.shards import OWNER
from ptq.hf.loading import device_named, positions_of
from ptq.models.model_shape import shape_of
from ptq.ops import memory
from ptq.ops.defaults import own_defaults
from ptq.pipeline import finetune_full, needs, preflight, proof, stages, token_rows
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job, calibrates_in_bfloat16
from ptq.pipeline.needs import Estimate
from ptq.pipeline.progress import Progress, without_kernel_hints
from ptq.pipeline.result import Result, read_result
from ptq.pipeline.target import Target, plan, with_text
from ptq.pipeline.tasks import Tasks
from ptq.pipeline.work import (
    RECORD,
    Record,
    differences,
    open_work,
    remove_finished_work,
    remove_work,
    rounded_before,
)
from ptq.pipeline.writer import (
    check_folders,
    complete,
    file_hashes,
    is_finished,
    leftovers_named,
    partial_folder,
    put_in_place,
    shards_of,
    write_record,
    written_tensors,
)
from ptq.recipe import Recipe, RunOptions, check_recipe
from ptq.reporting import model_card, report
from ptq.reporting.contents import summary
from ptq.statistics import calibration, outliers

DEFAULTS = RunOptions()


def estimate(target: Target, model: str, recipe: Recipe) -> Estimate:
    """What a run will need on this machine. Raises InputError for rows that are longer than the model's limit."""
    sizes = {name: info.nbytes for name, info in target.checkpoint.tensors.items()}
    recipe = _resolved(recipe, model, target.config)
    bfloat16 = calibrates_in_bfloat16(target.checkpoint, target.family)
    return needs.estimate(target.plan, shape_of(target.config), recipe, sizes, bfloat16)


def quantize(model: str | Path, out: str | Path, recipe: Recipe, options: RunOptions = DEFAULTS) -> Result:
    """Quantise `model` into the folder `out`; the same call continues a run that was interrupted. Started by torchrun,
    processes share the work, and all of them return the result.

    Raises InputError (bad input; what is found late, such as a NaN in a weight, leaves the work folder and the partial
    result) or RunError (what is done stays in the work folder).
    """
    model = source.spelled(model)
    if not isinstance(out, str | Path):
        raise InputError(f"out must be a folder, found {out!r}")
    if not isinstance(options, RunOptions):
        raise InputError(f"options must be RunOptions, such as RunOptions(device='cpu'), found {options!r}")
    check_recipe(recipe)
    out, work = _folders(out, options)
    with engine.workers() as workers, without_kernel_hints(), own_defaults():
        with source.headers_only(model) as (folder, missing):
            if missing:
                _foresee(folder, model, work, out, recipe, options, workers)
        return _quantize(plan(model, recipe), model, work, out, recipe, options, workers)


def refusal(needed: Estimate, model: Path, out: Path, options: RunOptions) -> str | None:
    """Why a run with such needs would be refused on this machine, its folders being as they are; None: it would not, as
    far as can be told without weights and text."""
    out, work = _folders(out, options)
    try:
        _device(options.device, engine.ALONE)
        check_folders(out, work, model)
        preflight.check(needed, work, out)
    except InputError as error:
        return str(error)
    return None


def _folders(out: str | Path, options: RunOptions) -> tuple[Path, Path]:
    """Where the result and the unfinished work go."""
    out = source.path_of(out).absolute()
    if not out.name:
        raise InputError(f"{out}: is no folder that could be made; name another one")
    work = source.path_of(options.work or out.with_name(f"{out.name}.work"))
    try:
        out.resolve()
        return out, work.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise InputError(f"{out} or {work}: leads nowhere ({error}); name another folder") from error


def _foresee(
    folder: Path, model: str, work: Path, out: Path, recipe: Recipe, options: RunOptions, workers: Workers
) -> None:
    """Raise InputError, or RunError for a dataset that cannot be had, for what can be refused without weights: they are
    not fetched for that. `folder` has headers in the place of weights."""
    target = plan(str(folder), recipe)
    _device(options.device, workers)
    if not (out / RECORD).is_file():  # else it may be finished, and need nothing
        token_rows.choose(target.plan, target.config, _resolved(recipe, model, target.config), folder)
        check_folders(out, work)
        preflight.check(estimate(target, model, recipe), work, out, workers.local_count)


def _quantize(
    target: Target, model: str, work: Path, out: Path, recipe: Recipe, options: RunOptions, workers: Workers
) -> Result:
    device = _device(options.device, workers)
    asked, recipe = recipe, _resolved(recipe, model, target.config)
    rows, probe = token_rows.choose(target.plan, target.config, recipe, target.checkpoint.folder)
    used = (probe,) if rows is None else (rows, probe)
    tokens = calibration.fingerprint(*used) if recipe.calibration else None
    record = Record.of(recipe, target.plan, target.checkpoint.identity(), tokens)
    asking = {key: value for key, value in record.as_dict().items() if key != "signs"}
    workers.check_same(asking, differences, limit=len(list(target.plan.block(0))))
    _check_tied(target)
    if workers.first_finds(lambda: is_finished(out, record)):
        if workers.first:
            _tidy(out, work, record)
        return read_result(out)
    check_folders(out, work, target.checkpoint.folder)
    needed = estimate(target, model, recipe)
    preflight.check(needed, work, out, workers.local_count)
    workers.wait()  # the others have looked at the folders too
    job = Job(recipe=recipe, signs=record.sign_vectors(target.plan), device=device, **vars(target))
    calibrated, visible = rows is not None, options.progress and workers.first
    kept = memory.kept(memory.SMALL_BYTES if calibrated else memory.ALL_BYTES)
    alone = exclusive(out, work) if workers.first else nullcontext()
    with alone, kept, Progress(target.plan, calibrated, visible, recipe.gptaq_alpha > 0) as progress:
        if workers.first:
            open_work(work, record, options.restart and not workers.again, partial_folder(out))
        warnings = preflight.warnings(target.plan, shape_of(target.config), asked, rows, probe)
        for note in (*target.plan.notes, *warnings, str(needed)):
            progress.say(note)
        if done := rounded_before(work, target.plan):
            progress.say(done)
        tasks = Tasks(job, work, shards_of(job, partial_folder(out), record.fingerprint), workers)
        with leftovers_named(work, out):
            _run(tasks, rows, probe, progress)
            if workers.first:
                text = token_rows.described(record.recipe["calibration"], rows, probe)
                _finish(tasks, record, out, model, asked, text, options.report)
        if workers.first:
            remove_work(work)
    workers.wait()
    return read_result(out)


def _tidy(out: Path, work: Path, record: Record) -> None:
    """Remove what a run has left that was killed after its result was in place; unless another run is at work there."""
    if any(path.exists() for path in (work, lock_file(out), lock_file(work))):
        with suppress(InputError, RunError), exclusive(out, work):
            remove_finished_work(work, record)


def _run(tasks: Tasks, rows: Int[Tensor, "samples t"] | None, probe: Int[Tensor, "rows t"], progress: Progress) -> None:
    """Every task in its order."""
    stages.ends(tasks, progress)
    if tasks.workers.first:
        tasks.probe.start(probe, [tasks.matrix(linear) for linear in tasks.job.embeddings])
    if rows is not None:
        stages.embed(tasks, rows)
    memory.give_back()  # the embedding is by far the largest weight
    first = tasks.first_block(rows is not None)
    progress.skip(first)
    for index in range(first, tasks.job.plan.blocks):
        stages.block(tasks, index, rows is not None, progress)
    if tasks.job.plan.finetune == "full":
        assert rows is not None
        finetune_full.tune(tasks, rows, progress)


def _finish(
    tasks: Tasks, record: Record, out: Path, model: str, asked: Recipe, text: str | None, with_report: bool
) -> None:
    """Complete, prove and rename the checkpoint, with a card and maybe a report; `model` and `asked` are what the user
    gave, `text` is what the probe is taken from."""
    job, folder = tasks.job_with_choices(tasks.job.plan.linears), tasks.shards.folder
    (folder / OWNER).unlink(missing_ok=True)
    memory.give_back()
    ids = tasks.probe.states(0)["ids"]
    packed, agreement, positions = _agreement(tasks, ids)
    complete(job, tasks.shards)
    written = Checkpoint.open(folder)
    proof.check_tensor_names(written, set(written_tensors(job)))
    with ThreadPoolExecutor(1) as other:
        hashes = other.submit(file_hashes, folder)
        proof.reload(written, job, ids[:1], packed)
    result = Result(out, summary(written).bits_per_weight, written.nbytes, **asdict(agreement), text=text)
    found = {key: value for key, value in asdict(result).items() if key != "out"}
    before, after = tasks.probe.outliers()
    log, trainings = tasks.log(), stages.trainings(tasks)
    made = report.build(
        model=model, plan=job.plan, family=job.family, record=record.as_dict(), result=found,
        source=job.checkpoint.tensors, written=written.tensors, log=log, before=before, after=after,
        positions=None if text is None else positions, text=text or "", trainings=trainings,
    )  # fmt: skip
    if made.positions is not None:
        found["original_perplexity"], found["perplexity"] = made.positions.perplexities
    if with_report:
        report.write(made, folder)
    asked = replace(asked, calibration=asked.calibration and record.recipe["calibration"])  # without its folder
    model_card.write(made, asked, job.checkpoint.folder, written, with_report)
    write_record(folder, record, log, trainings, found, hashes.result())
    put_in_place(folder, out)


def _agreement(
    tasks: Tasks, ids: Int[Tensor, "rows t"]
) -> tuple[Float[Tensor, "1 t v"], proof.ProbeAgreement, Float64[Tensor, "3 rows t-1"]]:
    """The packed model's logits of the first probe row, how all rows compare, and the same by position."""
    job, states = tasks.job, tasks.probe.states(tasks.job.plan.blocks)
    first, last = ({name: read(name) for name in job.final_tensors} for read in (job.tensor, tasks.shards.read))
    logits = {
        "original": job.logits(plain_matrix(job.tensor(job.head.source)), first, states["original"], "original"),
        "rotated": job.logits(
            plain_matrix(job.rewritten(job.head, torch.float32)), job.rewritten_last(), states["rotated"], "rotated"
        ),
        "packed": job.logits(tasks.matrix(job.head), last, states["packed"]),
    }
    rows = list(zip(logits["original"], logits["rotated"], logits["packed"], ids.split(1), strict=True))
    agreement = proof.over_rows([proof.compare(original, rotated, packed) for original, rotated, packed, _ in rows])
    positions = torch.cat([outliers.by_position(original, packed, row) for original, _, packed, row in rows], dim=1)
    return logits["packed"][0], agreement, positions


def _check_tied(target: Target) -> None:
    """Raise InputError for a head that the config ties to the embedding and that is stored with other numbers."""
    head, embedding = f"{target.family.head}.weight", f"{target.family.embedding}.weight"
    if head in target.plan.unused and not torch.equal(target.checkpoint.read(head), target.checkpoint.read(embedding)):
        raise InputError(
            f"tensor {head!r} differs from the embedding, to which config.json ties it; "
            "set tie_word_embeddings to false there if the head is the model's own"
        )


def _resolved(recipe: Recipe, model: str, config: PreTrainedConfig) -> Recipe:
    """The recipe with its defaults that depend on the model."""
    limit = positions_of(config) or sys.maxsize
    length = recipe.sequence_length or min(2048, limit)
    if length > limit:
        raise InputError(f"--sequence-length {length}: the model's limit is {limit} positions")
    return replace(with_text(recipe, model), sequence_length=length)


def _device(name: str, workers: Workers) -> torch.device:
    device = device_named(name)
    return device if device.type == "cpu" else torch.device("cuda", workers.local_rank % torch.cuda.device_count())
