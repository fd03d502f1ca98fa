"""The work folder: which run it belongs to, and the record of that run."""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ptq.errors import InputError
from ptq.files.checkpoint import UNFINISHED
from ptq.files.shards import OWNER, remove_leftovers, write_json
from ptq.files.source import path_of
from ptq.files.strict_json import json_object
from ptq.pipeline import rewrite
from ptq.planning.plan import Plan
from ptq.recipe import Recipe
from ptq.startup import DISTRIBUTION

RECORD = "ptq.json"
"""The record inside a finished checkpoint."""
MAX_RECORD_BYTES = 200_000_000
"""A line for each linear: those of 100 000 experts are 30 MB."""
FOLDERS = ("linears", "clips", "centers", "hidden", "teacher", "hessians", "tuned", "probe", "outliers")
"""The folders in a work folder."""
REST = "rest.json"
"""A file beside them, written once every tensor that is not rounded is in its place."""
ROWS = ("seed", "samples", "sequence_length", "calibration")
"""Fields of the recipe that, with the text, choose the calibration rows."""


def package_version() -> str:
    """Versions of this package and of what computes; part of every fingerprint: another one may round otherwise."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:  # a source checkout that was never installed
        own = "unknown"
    return f"ptq {own}, torch {torch.__version__}, transformers {transformers.__version__}"


@dataclass(frozen=True)
class Record:
    """What made a checkpoint. Stored in the work folder and, with the results of the run, in the checkpoint."""

    recipe: dict[str, Any]
    source: str
    """`Checkpoint.identity` of the model that was quantised."""
    calibration: str | None
    """SHA-256 of the calibration tokens."""
    version: str
    signs: dict[str, str]
    """Every sign vector, as hexadecimal digits of its bits: 1 is -1, least significant bit first."""

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, source: str, calibration: str | None) -> "Record":
        """The record of a new run: draws the signs."""
        signs = {name: _to_hex(rewrite.draw_signs(name, length, recipe.seed)) for name, length in plan.signs.items()}
        plain = json.loads(json.dumps(recipe.as_dict()))
        if plain["calibration"] is not None and (path := path_of(plain["calibration"])).is_file():
            plain["calibration"] = path.name  # where a file lay is nobody's business
        return cls(plain, source, calibration, package_version(), signs)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with the fingerprint of everything else."""
        return {**asdict(self), "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def sign_vectors(self, plan: Plan) -> rewrite.Signs:
        """The sign vectors as int8 tensors of +-1."""
        return {name: _from_hex(self.signs[name], length) for name, length in plan.signs.items()}


def open_work(folder: Path, record: Record, restart: bool, partial: Path) -> None:
    """Make the work folder of a run, or continue the one that is there; `partial`: where its result is made.

    Raises InputError where either holds another run (the difference is named) or something that is no run at all.
    """
    path = folder / UNFINISHED
    if restart and path.exists():
        _check_ours(folder)
        remove_work(folder)
    if not path.exists():
        _check_empty(folder)
        if not restart:
            check_owner(partial, record.fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, record.as_dict())
        return
    found = differences(record.as_dict(), read_record(path))
    if found:
        raise InputError(
            f"{folder}: holds unfinished work of another run ({'; '.join(found)}); "
            "repeat that command to finish it, or pass --restart to throw it away"
        )
    check_owner(partial, record.fingerprint)
    for inside in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
        remove_leftovers(inside)


def check_owner(folder: Path, owner: str | None) -> None:
    """Raise InputError where a folder holds what another run than `owner` has written of its result so far."""
    path = folder / OWNER
    if path.is_file() and path.read_text(errors="replace") != owner:
        raise InputError(
            f"{folder}: holds the unfinished result of another run; finish that one (its command goes on with it), or "
            "remove the folder to throw it away"
        )


def _check_ours(folder: Path) -> None:
    """Raise InputError where a folder holds more than runs make: it may be somebody else's."""
    for entry in folder.iterdir():
        half_written = entry.name.startswith((f"{UNFINISHED}.", f"{REST}.")) and entry.suffix == ".tmp"
        if entry.name not in (UNFINISHED, REST, *FOLDERS) and not half_written:
            raise InputError(
                f"{folder}: holds {entry.name}, which is no work of ptq, and --restart would remove it; move it, or "
                "name another folder with --work"
            )


def _check_empty(folder: Path) -> None:
    """Raise InputError where a folder holds more than the half-written record of a run that was killed at once."""
    names = [] if not folder.exists() else [e.name for e in folder.iterdir()] if folder.is_dir() else [folder.name]
    if names and all(name in (REST, *FOLDERS) for name in names):
        raise InputError(
            f"{folder}: is unfinished work that has lost its {UNFINISHED}, so nothing tells of what run; remove it"
        )
    if any(not name.startswith(f"{UNFINISHED}.") for name in names):
        raise InputError(
            f"{folder}: holds something that is not unfinished work of ptq; name another folder with --work"
        )


def rounded_before(folder: Path, plan: Plan) -> str | None:
    """How many linears of a run are rounded already, in words; None where it begins."""
    names = [linear.name for linear in plan.packed_linears()]
    done = sum((folder / "linears" / f"{name}.json").exists() for name in names)
    return f"continues: {done} of {len(names)} linears are done" if done else None


def remove_contents(folder: Path) -> None:
    """Remove everything in a work folder but its record."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != UNFINISHED:
            entry.unlink()


def remove_work(folder: Path) -> None:
    """Remove a work folder, its record last: whatever is left by a crash is still known as ours. A folder that cannot
    be removed, such as one where a disk is mounted, is left empty."""
    remove_contents(folder)
    (folder / UNFINISHED).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def remove_finished_work(folder: Path, record: Record) -> None:
    """Remove the work folder of a run that was killed after its result was in place."""
    path = folder / UNFINISHED
    empty = folder.is_dir() and not any(folder.iterdir())
    if empty or path.is_file() and not differences(record.as_dict(), read_record(path)):
        remove_work(folder)


def read_record(path: Path) -> dict[str, Any]:
    """The record of a run, in its work folder or in its result. Raises InputError for a file that is none."""
    way = "fetch the checkpoint again, or quantise again"
    if path.name == UNFINISHED:
        way = "pass --restart, or name another folder with --work"
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise ValueError(f"larger than {MAX_RECORD_BYTES} bytes")
        record = json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a record of a ptq run ({error}); {way}") from error
    if not isinstance(record.get("recipe"), dict):
        raise InputError(f"{path}: not a record of a ptq run; {way}")
    return record


def differences(mine: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """What differs between two records of runs, one sentence part each; empty where they are the same run."""
    if mine["fingerprint"] == stored.get("fingerprint"):
        return []
    theirs = stored["recipe"]
    if theirs.get("method") != mine["recipe"]["method"]:
        return [f"another method, {theirs.get('method')}"]
    keys = sorted(mine["recipe"].keys() | theirs.keys())
    found = [
        f"{k}: {theirs.get(k)!r} -> {mine['recipe'].get(k)!r}" for k in keys if theirs.get(k) != mine["recipe"].get(k)
    ]
    names = {"source": "the model has changed", "calibration": "the calibration data has changed"}
    if any(theirs.get(key) != mine["recipe"].get(key) for key in ROWS):
        del names["calibration"]  # other rows of what may be the same text
    found += [text for key, text in names.items() if mine[key] != stored.get(key)]
    if mine["version"] != stored.get("version"):
        found.append(f"{stored.get('version')} -> {mine['version']}")
    return found or ["its record has been edited"]


def _to_hex(signs: Tensor) -> str:
    bits = (signs < 0).to(torch.uint8)
    padded = torch.cat([bits, bits.new_zeros(-len(bits) % 8)]).view(-1, 8)
    return bytes((padded << torch.arange(8, dtype=torch.uint8)).sum(1).tolist()).hex()


def _from_hex(text: str, length: int) -> Tensor:
    packed = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return 1 - 2 * bits.flatten()[:length].to(torch.int8)
