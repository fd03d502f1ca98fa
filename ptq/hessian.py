"""Hessians of the layer-wise proxy loss: H = sum of x xᵀ over the inputs x of a linear layer."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ptq import memory
from ptq.blocks import Part
from ptq.checkpoint import read_tensor
from ptq.chunks import Chunks
from ptq.engine import Workers
from ptq.header import read_header
from ptq.linear import QuantLinear
from ptq.matmul import product
from ptq.shards import write_tensors

MAX_PARTS, PART_CHUNKS = 8, 4
"""Hessians are summed in up to 8 parts of at least 4 chunks each, by one process or by several: sums of floating-point
numbers depend on their order, and the result must not depend on the number of processes."""
PANEL = 1024
"""Rows and columns of H that one product adds to: bounds its memory, and leaves half of H to symmetry."""


class Hessians:
    """Hessians in files of a folder, one for all linears that are rounded together."""

    def __init__(self, folder: Path, device: torch.device, workers: Workers) -> None:
        self.folder, self.device, self.workers = folder, device, workers

    def take(self, key: str, part: Part, names: Iterable[str], hidden: Chunks, index: int) -> None:
        """Take those of the named inputs of a rewritten block, as the weights will see them; all processes share it."""
        if self.there(key):
            return
        names, chunks = list(names), hidden.files(index)
        count = max(1, min(MAX_PARTS, len(chunks) // PART_CHUNKS))
        bounds = [len(chunks) * number // count for number in range(count + 1)]
        files = [self.folder / f"{key}.{number}.safetensors" for number in range(count)]
        for number in sorted(self.workers.share(range(count))):
            if not files[number].exists():
                memory.give_back()
                some = (hidden.read(chunk) for chunk in chunks[bounds[number] : bounds[number + 1]])
                write_tensors(files[number], observe(part, names, some), durable=False)
        self.workers.wait()
        memory.give_back()
        if self.workers.first:
            write_tensors(self._file(key), merged(files), durable=False)
            for file in files:
                file.unlink()
        self.workers.wait()

    def there(self, key: str) -> bool:
        """Whether they have been taken."""
        return self.workers.agree(self._file(key).exists())

    def read(self, key: str, name: str) -> Float32[Tensor, "k k"]:
        """One of them."""
        path = self._file(key)
        # Read, not mapped: a map would count as memory beside the copy that solvers work on.
        return read_tensor(path, read_header(path)[0][name]).to(self.device)

    def drop(self, key: str) -> None:
        """Remove what nobody reads any more."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def observe(
    part: Part, names: Iterable[str], chunks: Iterable[Float[Tensor, "batch t k"]]
) -> dict[str, Float32[Tensor, "k k"]]:
    """Run a block on hidden states and sum x xᵀ over the inputs of the named linears, in the order of the chunks.

    Where a linear transforms its input online, x is taken after the transform, as its weight sees it. The sums are
    float32 and on the block's device.
    """
    sums: dict[str, Tensor] = {}
    names = set(names)
    missing: set[str] = set()
    handles = [_watch(part.module(name), name, sums, missing) for name in names]
    try:
        for hidden in chunks:
            missing |= names
            with suppress(_Seen):  # what comes after the last input is not needed
                part.run(hidden)
    finally:
        for handle in handles:
            handle.remove()
    for h in sums.values():
        _mirror(h)
    return sums


class _Seen(Exception):
    """Every input of the block has been seen."""


def merged(files: Sequence[Path]) -> dict[str, Float32[Tensor, "k k"]]:
    """The sums of the Hessians in several files, in the files' order; one of them and a panel in memory at a time."""
    first = read_header(files[0])[0]
    sums = {name: read_tensor(files[0], info) for name, info in first.items()}
    for file in files[1:]:
        for name, info in read_header(file)[0].items():
            rows, k = info.shape
            for start in range(0, rows, PANEL):
                end = min(start + PANEL, rows)
                panel = replace(
                    info, shape=(end - start, k), offset=info.offset + 4 * k * start, nbytes=4 * k * (end - start)
                )
                sums[name][start:end] += read_tensor(file, panel)
    return sums


def _watch(
    module: nn.Module, key: str, sums: dict[str, Tensor], missing: set[str]
) -> torch.utils.hooks.RemovableHandle:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = module.transform(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
        xt = x.flatten(0, -2).float().T.contiguous()
        del x
        if key not in sums:
            sums[key] = torch.zeros(len(xt), len(xt), device=xt.device)
        _accumulate(sums[key], xt)
        missing.discard(key)
        if not missing:
            raise _Seen

    return module.register_forward_pre_hook(add)


def _accumulate(h: Float32[Tensor, "k k"], xt: Float32[Tensor, "k t"]) -> None:
    """h += xt xtᵀ, up to the panels on the diagonal."""
    for start in range(0, len(xt), PANEL):
        for left in range(0, start + 1, PANEL):
            rows, columns = xt[start : start + PANEL], xt[left : left + PANEL]
            h[start : start + PANEL, left : left + PANEL] += product(rows, columns.T)


def _mirror(h: Float32[Tensor, "k k"]) -> None:
    """Copy the panels below the diagonal to the other side."""
    for start in range(0, len(h), PANEL):
        end = min(start + PANEL, len(h))
        h[:start, start:end] = h[start:end, :start].T
