"""Files of a work folder, as the run that goes on reads them: a crash, or somebody, may have damaged them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ptq.errors import InputError


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own. Raises InputError."""
    with _refused(path):
        return {name: tensor.clone().to(device) for name, tensor in load_file(path).items()}


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
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, what: object) -> InputError:
    """The error for a file of a work folder that is not as a run has written it."""
    return InputError(f"{path}: this file of unfinished work is damaged ({what}); pass --restart")
