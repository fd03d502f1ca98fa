"""The result of a run: made beside its place, completed, proven, and renamed into place."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ptq.errors import InputError, RunError
from ptq.files import companions
from ptq.files.checkpoint import INDEX, Checkpoint
from ptq.files.shards import Shards, Specs, layout, write_bytes, write_json
from ptq.hf import residual
from ptq.hf.packed_config import PtqConfig
from ptq.kv import key_centers
from ptq.layers.packed_weight import GUARD, INPUT_SIGNS, OUTPUT_SIGNS, guard
from ptq.models.model_shape import UNREAD, shape_of
from ptq.pipeline.job import Job
from ptq.pipeline.work import RECORD, Record, differences, read_record

MAX_SHARD_BYTES = 50_000_000_000
"""The default of transformers' `save_pretrained`: saving a loaded checkpoint of one file gives the same file; several
may be cut elsewhere."""
LOG = "ptq_log.jsonl"


def partial_folder(out: Path) -> Path:
    """Where the result is made: beside its place, so that renaming it is atomic."""
    return out.with_name(f"{out.name}.ptq-partial")


@contextmanager
def leftovers_named(work: Path, out: Path) -> Iterator[None]:
    """Say what stays of a run that is refused in its midst, for a NaN in a weight and the like."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}. What was done stays in {work} and {partial_folder(out)}; to give up, remove both"
                         ) from error  # fmt: skip


def check_folders(out: Path, work: Path, source: Path | None = None) -> None:
    """Raise InputError where the output folder is a file or holds something, where the result could not be renamed to
    it, or where removing the work folder at the end would remove more than the work: the result, or the model."""
    check_out(out)
    inside = {other: other.resolve() for other in (out, source) if other is not None}
    for other, path in inside.items():
        if work.resolve() in (path, *path.parents):
            raise InputError(
                f"{work}: is removed at the end, so {other} cannot be in it; name another folder with --work"
            )
    partial = partial_folder(out).resolve()
    if {inside[out], partial} & {*work.resolve().parents} or work.resolve() == partial:
        raise InputError(f"{work}: is where the result is made; name another folder with --work")


def check_out(out: Path) -> None:
    """Raise InputError where a finished folder could not be renamed to `out`."""
    if out.resolve() in (here := Path.cwd(), *here.parents):
        raise InputError(f"{out}: is the current folder, or around it, which a new one would replace; name another")
    if out.is_symlink():
        raise InputError(f"{out}: is a link, and a folder takes its place at the end; name {out.resolve()}")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file, and the result is a folder; nothing in it was touched. Name another place")
    if out.exists() and any(out.iterdir()):
        what, remedy = "exists and is not empty", "Name another folder or remove it"
        if (out / "config.json").exists():  # which may be the only copy of a model
            what, remedy = "holds a model", "Name another folder"
        raise InputError(f"{out}: {what}; nothing in it was touched. {remedy}")
    if out.is_mount():
        raise InputError(f"{out}: is where a disk is mounted, which cannot be replaced; name a new folder inside of it")


def is_finished(out: Path, record: Record) -> bool:
    """Whether `out` holds the result of this very run already. Raises InputError where it holds that of another run
    (the difference is named), or where it is damaged."""
    path = out / RECORD
    if not path.is_file():
        return False
    stored = read_record(path)
    changes = differences(record.as_dict(), stored)
    if not changes and "prepacked" in stored:
        changes = ["put into the order of the kernels since"]
    if changes:
        raise InputError(
            f"{out}: holds the result of another run ({'; '.join(changes)}); nothing in it was touched. Name "
            "another folder or remove it"
        )
    Checkpoint.open(out)
    written, found = stored.get("files", {}), file_hashes(out)
    for name in written:
        if found.get(name) != written[name]:
            what = "is not as it was written (its SHA-256 differs)" if name in found else "is missing"
            raise InputError(f"{out / name}: {what}; the result was finished before, so remove {out} and run again")
    return True


def shards_of(job: Job, folder: Path, owner: str = "") -> Shards:
    """The shards of a job's result in `folder`, all of their sizes known from the plan."""
    return Shards(layout(written_tensors(job), MAX_SHARD_BYTES), folder, owner)


def written_tensors(job: Job) -> Specs:
    """Dtype and shape of every tensor of the result."""
    found: Specs = {}
    source = job.checkpoint.tensors
    for linear in job.plan.linears:
        if linear.format is None:
            found[f"{linear.name}.weight"] = source[linear.source].dtype, (linear.n, linear.k)
        else:
            found[f"{linear.name}.{GUARD}"] = guard().dtype, tuple(guard().shape)
            for part, (shape, dtype) in linear.format.buffers(linear.n, linear.k).items():
                found[f"{linear.name}.weight_{part}"] = dtype, shape
        if linear.online_output is not None:
            sizes = {INPUT_SIGNS: linear.k, OUTPUT_SIGNS: linear.n}
            found |= {f"{linear.name}.{leaf}": (torch.int16, (size,)) for leaf, size in sizes.items()}
        if (bias := f"{linear.name}.bias") in source:
            found[bias] = source[bias].dtype, (linear.n,)
    for name in (*job.plan.unit_norms, *job.plan.kept):
        found[name] = source[name].dtype, tuple(source[name].shape)
    if job.plan.online_residual is not None:
        found |= dict.fromkeys(residual.tensors(job.family), (torch.int16, (job.plan.online_residual.size,)))
    if job.plan.centered:
        shape, dtype = shape_of(job.config), source[f"{job.family.embedding}.weight"].dtype
        names = (key_centers.tensor_name(job.family, index) for index in range(job.plan.blocks))
        found |= dict.fromkeys(names, (dtype, (shape.kv_heads, shape.head_dim)))
    return found


def complete(job: Job, shards: Shards) -> None:
    """Force the shards to disk and put config and tokenizer files beside them, and nothing else."""
    for path in shards.folder.iterdir():
        if path.is_dir():  # left by a run that was killed here
            shutil.rmtree(path)
        elif path.name not in shards.layout.headers:
            path.unlink()
    shards.finish()
    write_bytes(shards.folder / "config.json", _config_text(job).encode())
    companions.copy(job.checkpoint.folder, shards.folder)


def write_record(
    folder: Path,
    record: Record,
    log: list[dict[str, Any]],
    trainings: dict[str, list[float | None]],
    result: dict[str, Any],
    hashes: dict[str, str],
) -> None:
    """Write the run's record with its results, held-out losses and `file_hashes`, and the log with a line per linear.

    The log holds seconds and is the one file that differs from run to run.
    """
    linears = {line["name"]: {k: v for k, v in line.items() if k not in ("name", "seconds")} for line in log}
    write_bytes(folder / LOG, b"".join(json.dumps(line).encode() + b"\n" for line in log))
    content = {**record.as_dict(), "result": result, "linears": linears, "files": hashes}
    content |= {"finetuning": trainings} if trainings else {}
    write_json(folder / RECORD, content)


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that a model is loaded from: tensors, their index, config.json, tokenizer and the like."""
    patterns = ("*.safetensors", INDEX, "config.json", *companions.COPIED)
    return {name: _sha256(folder / name) for name in companions.found(folder, patterns)}


def put_in_place(folder: Path, out: Path) -> None:
    """Rename the finished folder to `out`."""
    try:
        if out.exists():
            out.rmdir()  # empty, or it fails
        os.replace(folder, out)
    except OSError as error:
        raise RunError(
            f"{out}: the finished checkpoint could not be put there ({error.strerror}); it is complete in {folder}"
        ) from error


def _config_text(job: Job) -> str:
    config = copy.deepcopy(job.config)
    if job.plan.untied:
        config.tie_word_embeddings = False
    for key in UNREAD:
        if getattr(config, key, None):
            setattr(config, key, 0)  # their tensors are left out
    if any(job.plan.packed_linears()) or job.plan.cache or job.plan.online_residual:
        config.quantization_config = PtqConfig.of(job.plan).to_dict()
    return config.to_json_string()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
