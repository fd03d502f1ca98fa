"""`quantize`: from a model and a recipe to a checkpoint that is proven, whole and in its place."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ptq import calibration, memory, methods, preflight, proof, source
from ptq.checkpoint import Checkpoint, refuse_quantised
from ptq.contents import parameter_shapes, read_config, summary
from ptq.errors import InputError
from ptq.families import Family, family_of, shape_of
from ptq.job import Job
from ptq.loading import load_tokenizer
from ptq.plan import Plan, check_biases, check_claims, check_tensors
from ptq.progress import Progress
from ptq.recipe import Recipe, RunOptions
from ptq.tasks import Tasks
from ptq.work import RECORD, Record, compare, open_work, read_record, remove_finished_work, remove_work
from ptq.writer import (
    check_folders,
    complete,
    file_hashes,
    partial_folder,
    put_in_place,
    shards_of,
    write_record,
    written_tensors,
)

PROBE_TOKENS = 16
DEFAULTS = RunOptions()


@dataclass(frozen=True)
class Target:
    """A model that can be quantised, and the plan for it."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    family: Family
    plan: Plan


def plan(model: str, recipe: Recipe) -> Target:
    """The plan for a model, from its config and its headers alone; no weight is read.

    Raises InputError for a model that is missing, damaged, quantised already, of an unknown family, or that has a
    tensor which the plan does not account for.
    """
    checkpoint = Checkpoint.open(source.resolve(model))
    refuse_quantised(checkpoint.config)
    family = family_of(checkpoint.config)
    config = read_config(checkpoint)
    shape = shape_of(config)
    if shape.blocks > len(checkpoint.tensors):  # before anything is built that large
        raise InputError(
            f"config.json: num_hidden_layers {shape.blocks}, but the checkpoint has {len(checkpoint.tensors)} tensors"
        )
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    plan = methods.planner(recipe.method)(shape, family, recipe, dtypes)
    check_claims(plan, {name: info.shape for name, info in checkpoint.tensors.items()})
    promised = parameter_shapes(config)
    check_biases(plan, checkpoint.tensors, promised)
    check_tensors(plan, checkpoint.tensors, promised)
    return Target(checkpoint, config, family, plan)


@dataclass(frozen=True)
class Result:
    """What a run has made."""

    out: Path
    bits_per_weight: float | None
    """Bits of the quantised linears, scales and padding included, per weight; None where nothing is quantised."""
    nbytes: int
    """Bytes of all tensors."""
    rotation_error: float
    """Relative difference of the rotated model's logits from the original's, in float32."""
    kl: float
    """Mean KL divergence of the packed model from the original over the probe tokens, nats per token."""
    top1: float
    """Share of probe tokens after which both models expect the same token."""


def quantize(model: str | Path, out: str | Path, recipe: Recipe, options: RunOptions = DEFAULTS) -> Result:
    """Quantise `model` into the folder `out`; the same call continues a run that was interrupted.

    Raises InputError (bad input: nothing is touched) or RunError (what is done stays in the work folder).
    """
    target, out = plan(str(model), recipe), Path(out).absolute()
    work, device = (options.work or out.with_name(f"{out.name}.work")).resolve(), _device(options.device)
    recipe = _resolved(recipe, str(model), target.config)
    rows = _calibration_rows(target, recipe)
    tokens = None if rows is None else calibration.fingerprint(rows)
    record = Record.of(recipe, target.plan, target.checkpoint.identity(), tokens)
    _check_tied(target)
    if is_finished(out, record):
        remove_finished_work(work, record)
        return read_result(out)
    check_folders(out, work, target.checkpoint.folder)
    sizes = {name: info.nbytes for name, info in target.checkpoint.tensors.items()}
    needs = preflight.estimate(target.plan, shape_of(target.config), recipe, rows, sizes)
    preflight.check(needs, work, out)
    open_work(work, record, options.restart)
    job = Job(recipe=recipe, signs=record.sign_vectors(target.plan), device=device, **vars(target))
    with memory.kept(), Progress(target.plan, rows is not None, options.progress) as progress:
        for note in (*target.plan.notes, str(needs)):
            progress.say(note)
        tasks = Tasks(job, work, shards_of(job, partial_folder(out)))
        _run(tasks, rows, progress)
        result = _finish(tasks, record, out)
    remove_work(work)
    return result


def _run(tasks: Tasks, rows: Int[Tensor, "samples t"] | None, progress: Progress) -> None:
    """Every task in its order."""
    plan = tasks.job.plan
    tasks.rest()
    for linear in plan.ends():
        with progress.step(linear.name, 0):
            tasks.linear(linear, None)
    tasks.probe_start(_probe_ids(tasks.job, rows))
    if rows is not None:
        tasks.embed(rows)
    memory.give_back()  # the embedding is by far the largest weight
    for index in range(tasks.first_block(rows is not None), plan.blocks):
        tasks.block(index, rows is not None, progress)


def _finish(tasks: Tasks, record: Record, out: Path) -> Result:
    """Complete, prove and rename the checkpoint."""
    job, folder = tasks.job, tasks.shards.folder
    memory.give_back()
    packed, agreement = _agreement(tasks)
    complete(job, tasks.shards)
    written = Checkpoint.open(folder)
    proof.account(written, set(written_tensors(job)))
    with ThreadPoolExecutor(1) as other:
        hashes = other.submit(file_hashes, folder)
        proof.reload(written, job, tasks.probe_states(0)["ids"], packed)
    result = Result(out, summary(written).bits_per_weight, written.nbytes, **asdict(agreement))
    found = {key: value for key, value in asdict(result).items() if key != "out"}
    write_record(folder, record, tasks.log(), found, hashes.result())
    put_in_place(folder, out)
    return result


def _agreement(tasks: Tasks) -> tuple[Float[Tensor, "1 probe v"], proof.Agreement]:
    """The packed model's logits of the probe, and how they compare with the other models'."""
    job, states = tasks.job, tasks.probe_states(tasks.job.plan.blocks)
    original = job.logits(job.tensor(job.head.source), job.tensor(job.final_norm), states["original"])
    rotated = job.logits(job.rewritten(job.head, torch.float32), job.written_norm(), states["rotated"])
    packed = job.logits(tasks.packed_weight(job.head), job.written_norm(), states["packed"])
    return packed, proof.compare(original, rotated, packed)


def is_finished(out: Path, record: Record) -> bool:
    """Whether `out` holds the result of this very run already. Raises InputError where it does, and is damaged."""
    path = out / RECORD
    if not path.is_file() or compare(record, stored := read_record(path)):
        return False
    Checkpoint.open(out)
    missing = [name for name in stored.get("files", {}) if not (out / name).is_file()]
    if missing:
        raise InputError(f"{out / missing[0]}: is missing from the finished result; remove {out} and run again")
    return True


def _check_tied(target: Target) -> None:
    """Raise InputError for a head that the config ties to the embedding and that is stored with other numbers."""
    head, embedding = f"{target.family.head}.weight", f"{target.family.embedding}.weight"
    if head in target.plan.unused and not torch.equal(target.checkpoint.read(head), target.checkpoint.read(embedding)):
        raise InputError(
            f"tensor {head!r} differs from the embedding, to which config.json ties it; "
            "set tie_word_embeddings to false there if the head is the model's own"
        )


def read_result(out: Path) -> Result:
    """The result of a finished run."""
    return Result(out, **read_record(out / RECORD)["result"])


def _resolved(recipe: Recipe, model: str, config: PreTrainedConfig) -> Recipe:
    """The recipe with its defaults that depend on the model."""
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    length = recipe.sequence_length or min(2048, limit)
    if length > limit:
        raise InputError(f"--sequence-length {length}: the model's limit is {limit} positions")
    text = recipe.calibration
    if text is None and model == "demo":
        text = str(source.resolve(model) / "calibration.txt")
    return replace(recipe, sequence_length=length, calibration=text)


def _calibration_rows(target: Target, recipe: Recipe) -> Int[Tensor, "samples t"] | None:
    """Token ids of the calibration rows, or None where the recipe needs no data."""
    if recipe.rounding == "nearest" or not any(linear.statistics for linear in target.plan.linears):
        return None
    if recipe.calibration is None:
        raise InputError(
            "GPTQ needs text: name some with --calibration (a .txt or .jsonl file, wikitext2, c4, or a hub dataset), "
            "or choose --rounding nearest"
        )
    assert recipe.sequence_length is not None
    tokenizer = load_tokenizer(target.checkpoint.folder)
    rows = calibration.load_rows(recipe.calibration, tokenizer, recipe.samples, recipe.sequence_length, recipe.seed)
    vocab = shape_of(target.config).vocab
    if int(rows.max()) >= vocab:
        raise InputError(
            f"{target.checkpoint.folder}: its tokenizer gives token {int(rows.max())}, the model has {vocab}"
        )
    return rows


def _probe_ids(job: Job, rows: Int[Tensor, "samples t"] | None) -> Int[Tensor, "1 probe"]:
    """Tokens for the proofs: the start of the first calibration row, or random ones."""
    if rows is not None:
        return rows[:1, :PROBE_TOKENS]
    generator = torch.Generator().manual_seed(job.recipe.seed)
    return torch.randint(shape_of(job.config).vocab, (1, PROBE_TOKENS), generator=generator)


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda, found {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
