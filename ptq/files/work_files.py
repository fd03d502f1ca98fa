"""Files of a work folder, as a run writes them and the one that goes on reads them: a crash, a disk or somebody may
have damaged them, and one wrong number of the calibration would go unnoticed into every weight behind it."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ptq.errors import InputError
from ptq.files import shards
from ptq.files.checkpoint import read_tensor
from ptq.files.header import read_header

CHECKSUMS = "crc32"
"""In a file's metadata: JSON, the CRC-32 of every tensor by name."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file atomically; not durably, see `ptq.files.shards`. Raises RunError."""
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    shards.write_tensors(path, tensors, {CHECKSUMS: json.dumps(sums)}, durable=False)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


class StoredTensors:
    """A file of tensors. What is read of it is what was written. Raises InputError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _refused(path):
            with safe_open(path, "pt") as file:
                self._sums: dict[str, int] = json.loads((file.metadata() or {})[CHECKSUMS])
            self._infos = read_header(path)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def read(self, name: str) -> Tensor:
        """One tensor, read and not mapped: a map would count as memory beside what is made of it."""
        with _refused(self._path):
            tensor = read_tensor(self._path, self._infos[name])
            if _checksum(tensor) != self._sums[name]:
                raise ValueError(f"tensor {name!r} holds other numbers than were written")
            return tensor


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a file. Raises InputError."""
    stored = StoredTensors(path)
    return {name: stored.read(name).to(device) for name in stored}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises InputError."""
    with _refused(path):
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("expected an object")
        return found


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        if not path.is_file():
            raise ValueError("it is missing, or no file")
        yield
    except KeyError as error:
        raise damaged(path, f"there is no {error}") from error
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, what: object) -> InputError:
    """The error for a file of a work folder that is not as a run has written it."""
    return InputError(f"{path}: this file of unfinished work is damaged ({what}); pass --restart")
