"""The calibration rows as they enter a block, in files: `<folder>/<block>/<chunk>`, and `complete`, their number."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ptq.engine import Workers
from ptq.files import work_files
from ptq.files.shards import write_json

CHUNK_TOKENS = 1024
"""Calibration tokens that go through a block at a time: bounds the memory of activations."""

SAMPLE_CHUNKS = 8
"""Chunks that are looked at where a part of the text is enough."""


class Chunks:
    """The hidden states of one model, made by all processes together."""

    def __init__(self, folder: Path, device: torch.device, workers: Workers) -> None:
        self.folder, self.device, self.workers = folder, device, workers

    def complete(self, index: int) -> bool:
        """Whether the rows have come to a block."""
        return self.workers.agree(self._mark(index).exists())

    def write(self, index: int, count: int, chunk: Callable[[int], Float[Tensor, "batch t k"]]) -> None:
        """`count` chunks as they enter a block, this process's share of them made here."""
        folder = self.folder / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        for number in sorted(self.workers.share(range(count))):
            path = folder / f"{number:05d}.safetensors"
            if not path.exists():
                work_files.write_tensors(path, {"hidden": chunk(number)})
        self.workers.wait()
        if self.workers.first:
            write_json(self._mark(index), {"chunks": count}, durable=False)
        self.workers.wait()

    def through(self, index: int, run: Callable[[Tensor], Tensor]) -> None:
        """The chunks behind block `index`, which `run` sends them through."""
        if not self.complete(index + 1):
            chunks = self.files(index)
            self.write(index + 1, len(chunks), lambda number: run(self.read(chunks[number])))

    def files(self, index: int) -> list[Path]:
        """The chunks as they enter a block. Raises InputError where some that were there are lost."""
        found = sorted((self.folder / str(index)).glob("*.safetensors"), key=lambda path: int(path.stem))
        if (written := work_files.read_json(mark := self._mark(index)).get("chunks")) != len(found):
            raise work_files.damaged(mark, f"it counts {written} chunks, beside it are {len(found)}")
        return found

    def sample(self, index: int) -> list[Path]:
        """At most `SAMPLE_CHUNKS` of them, evenly spread."""
        files = self.files(index)
        count = min(len(files), SAMPLE_CHUNKS)
        return [files[len(files) * i // count] for i in range(count)]

    def read(self, path: Path) -> Float[Tensor, "batch t k"]:
        """One chunk."""
        return work_files.read_tensors(path, self.device)["hidden"]

    def drop(self, index: int) -> None:
        """Remove the chunks of a block that is done with."""
        shutil.rmtree(self.folder / str(index), ignore_errors=True)

    def _mark(self, index: int) -> Path:
        return self.folder / str(index) / "complete"
