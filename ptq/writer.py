"""The end of a run: assemble the checkpoint beside its place, prove it, and rename it into place."""

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ptq.checkpoint import INDEX
from ptq.errors import InputError, RunError
from ptq.hf import PtqConfig
from ptq.job import Job
from ptq.shards import merge, plan_shards, write_bytes, write_json
from ptq.work import RECORD, Record

MAX_SHARD_BYTES = 50_000_000_000
"""The default of transformers' `save_pretrained`, so that saving a loaded checkpoint gives the same files."""
LOG = "ptq_log.jsonl"
COPIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
          "generation_config.json", "chat_template*", "LICENSE*")  # fmt: skip


def partial_folder(out: Path) -> Path:
    """Where the result is assembled: beside its place, so that renaming it is atomic."""
    return out.with_name(f"{out.name}.ptq-partial")


def check_folders(out: Path, work: Path, source: Path) -> None:
    """Raise InputError where the output folder is a file or holds something, or where removing the work folder at the
    end would remove more than the work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; nothing in it was touched. Name another folder or remove it")
    inside = {other: other.resolve() for other in (out, source)}
    for other, path in inside.items():
        if work.resolve() in (path, *path.parents):
            raise InputError(
                f"{work}: is removed at the end, so {other} cannot be in it; name another folder with --work"
            )
    if inside[out] in work.resolve().parents:
        raise InputError(f"{work}: lies inside the folder of the result; name another folder with --work")


def assemble(job: Job, files: list[Path], folder: Path) -> None:
    """Write shards, config and tokenizer files into `folder`, replacing what an interrupted run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    merge(plan_shards(files, max_shard_bytes=MAX_SHARD_BYTES), folder)
    write_bytes(folder / "config.json", _config_text(job).encode())
    for pattern in COPIED:
        for path in sorted(job.checkpoint.folder.glob(pattern)):
            if path.is_file():
                write_bytes(folder / path.name, path.read_bytes())


def write_record(folder: Path, record: Record, log: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Write the run's record with its results, and the log with a line per linear.

    The log holds seconds and is the one file that differs from run to run.
    """
    linears = {line["name"]: {k: v for k, v in line.items() if k not in ("name", "seconds")} for line in log}
    write_bytes(folder / LOG, b"".join(json.dumps(line).encode() + b"\n" for line in log))
    content = {**record.as_dict(), "result": result, "linears": linears, "files": file_hashes(folder)}
    write_json(folder / RECORD, content)


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that hold tensors, their index and config.json."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    names += [name for name in (INDEX, "config.json") if (folder / name).is_file()]
    return {name: _sha256(folder / name) for name in names}


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
    if any(job.plan.rounded()):
        config.quantization_config = PtqConfig.of(job.plan).to_dict()
    return config.to_json_string()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
