"""Hessians of the layer-wise proxy loss: H = sum of x xᵀ over the inputs x of a linear layer."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

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
"""Rows of H that are summed together. What lies right of a panel's block on the diagonal is left to symmetry, in memory
and in the files."""


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
                sums = observe(part, names, some)
                panels = {f"{name}.{i}": panel for name in names for i, panel in enumerate(sums[name])}
                write_tensors(files[number], panels, durable=False)
                del sums, panels
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
        """One of them, whole."""
        path = self._file(key)
        # Read, not mapped: a map would count as memory beside the copy that solvers work on.
        infos = (info for panel, info in read_header(path)[0].items() if panel.rpartition(".")[0] == name)
        return whole(
            [read_tensor(path, info).to(self.device) for info in sorted(infos, key=lambda info: info.shape[1])]
        )

    def drop(self, key: str) -> None:
        """Remove what nobody reads any more."""
        for file in (*self.folder.glob(f"{key}.*.safetensors"), self._file(key)):  # parts, left by a crash; all
            file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def observe(
    part: Part, names: Iterable[str], chunks: Iterable[Float[Tensor, "batch t k"]]
) -> dict[str, list[Float32[Tensor, "_ _"]]]:
    """Run a block on hidden states and sum x xᵀ over the inputs of the named linears, in the order of the chunks.

    Where a linear transforms its input online, x is taken after the transform, as its weight sees it. The sums are
    float32, on the block's device, and in panels: see `whole`.
    """
    names = set(names)
    sums = {name: _zeros(cast(int, part.module(name).in_features), part.device) for name in sorted(names)}
    missing: set[str] = set()
    handles = [_watch(part.module(name), name, sums[name], missing) for name in names]
    try:
        for hidden in chunks:
            missing |= names
            with suppress(_Seen):  # what comes after the last input is not needed
                part.run(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def panel_shapes(k: int) -> list[tuple[int, int]]:
    """Rows and columns of the panels of one H."""
    ends = [min(start + PANEL, k) for start in range(0, k, PANEL)]
    return [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _zeros(k: int, device: torch.device) -> list[Float32[Tensor, "_ _"]]:
    """The panels of a sum of nothing. They share one piece of memory, made before the block runs: many small ones among
    its activations would leave holes."""
    shapes = panel_shapes(k)
    sizes = [rows * columns for rows, columns in shapes]
    flat = torch.zeros(sum(sizes), device=device)
    return [panel.view(shape) for panel, shape in zip(flat.split(sizes), shapes, strict=True)]


def whole(panels: list[Float32[Tensor, "_ _"]]) -> Float32[Tensor, "k k"]:
    """H from its panels: each has `PANEL` rows (the last one fewer), from the left up to the block on the diagonal.
    The list is used up: panels and H together would be half as much again."""
    k = panels[-1].shape[1]
    h = panels[-1].new_empty(k, k)
    while panels:
        panel = panels.pop()
        rows, columns = panel.shape
        start = columns - rows
        h[start:columns, :columns] = panel
        h[:start, start:columns] = panel[:, :start].T
    return h


class _Seen(Exception):
    """Every input of the block has been seen."""


def merged(files: Sequence[Path]) -> dict[str, Float32[Tensor, "_ _"]]:
    """The sum of the panels in several files, in the files' order."""
    sums = {name: read_tensor(files[0], info) for name, info in read_header(files[0])[0].items()}
    for file in files[1:]:
        for name, info in read_header(file)[0].items():
            sums[name] += read_tensor(file, info)
    return sums


def _watch(module: nn.Module, name: str, panels: list[Tensor], missing: set[str]) -> torch.utils.hooks.RemovableHandle:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = module.transform(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
        xt = x.flatten(0, -2).float().T.contiguous()
        del x
        _accumulate(panels, xt)
        missing.discard(name)
        if not missing:
            raise _Seen

    return module.register_forward_pre_hook(add)


def _accumulate(panels: list[Float32[Tensor, "_ _"]], xt: Float32[Tensor, "k t"]) -> None:
    """Add xt xtᵀ, in pieces that bound the memory of a product."""
    for panel in panels:
        size, end = panel.shape
        for left in range(0, end, PANEL):
            columns = slice(left, min(left + PANEL, end))
            panel[:, columns] += product(xt[end - size : end], xt[columns].T)
