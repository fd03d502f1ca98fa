"""The clips of quantised inputs, searched: for every input of a block the one with which the linears that read it err
least on a sample of the calibration text (docs/math.md, section 8).

    clips/<linear>.json   the clip of the input of a linear, and of all that share it; what was measured

All experts of a block have one clip in front of gate and up, and one in front of down: few tokens go to each, and
experts that treat their inputs alike decode in one call (`ptq.fast.experts.few_token_experts`).

The search runs in the rotated block, whose inputs, keys and values are quantised with their default clips: x is the
input as it comes then, after the online transform. Hessians are taken afterwards, of what the clips that were found
leave.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor, nn

from ptq.engine import Workers
from ptq.files import work_files
from ptq.files.json_numbers import six_digits
from ptq.files.shards import write_json
from ptq.hf.blocks import PartialModel
from ptq.layers.linear import QuantLinear
from ptq.ops import activations, matmul
from ptq.ops.activations import Activation
from ptq.planning.plan import LinearPlan, Plan, weights_of
from ptq.statistics.chunks import Chunks

GRID = tuple(round(1 - step / 40, 3) for step in range(21))
"""The clips that are tried: 1 to 0.5, the defaults among them."""
TOKENS = 512
"""Of the calibration text: most tokens of an input that are looked at."""
LEAST_TOKENS = 32
"""With fewer tokens an input keeps its default clip."""
FEW, OVERFLOWED = "for too few tokens of the text have come to it", "for its products overflow"
CLIP, NOTE = "clip", "clip_note"
"""What the clip, and why it is the default, are called in files and in the record of a linear."""


@dataclass(frozen=True)
class SearchedInput:
    """An input that linears of a block share; of experts, the inputs of all."""

    name: str
    activation: Activation
    """With the default clip."""
    readers: tuple[LinearPlan, ...]

    @property
    def places(self) -> list[list[LinearPlan]]:
        """The linears that are given the same tensor: all, or those of each expert."""
        found: dict[int | None, list[LinearPlan]] = {}
        for linear in self.readers:
            found.setdefault(linear.expert, []).append(linear)
        return list(found.values())

    @property
    def cost(self) -> int:
        """Weight of a token, relative to that of others."""
        return weights_of(self.readers) // len(self.places)


@dataclass
class Errors:
    """What was measured of an input."""

    sums: Float64[Tensor, " clips"]
    """Over the tokens, for each clip of `GRID`: squared error of what the linears give, relative to its square."""
    tokens: int = 0

    def best(self, default: float) -> dict[str, Any]:
        """The clip with the least error, the larger of two that are equal, and what the record says of it."""
        means = six_digits([value / max(1, self.tokens) for value in self.sums.tolist()])
        found = {"clip_tokens": self.tokens}
        if self.tokens < LEAST_TOKENS or None in means:
            return {CLIP: default, **found, NOTE: FEW if self.tokens < LEAST_TOKENS else OVERFLOWED}
        best = min(range(len(GRID)), key=means.__getitem__)
        return {CLIP: GRID[best], **found, "clip_error": means[best], "default_clip_error": means[GRID.index(default)]}


class Clips:
    """The searched clips of a run, in files of a folder."""

    def __init__(self, folder: Path, workers: Workers) -> None:
        self.folder, self.workers = folder, workers

    def search(self, part: PartialModel, plan: Plan, hidden: Chunks, index: int) -> list[str]:
        """Search those of a rewritten block whose inputs are quantised with the default clips; all processes share the
        inputs. From then on they are quantised with what was found. Sentences for the user."""
        inputs = inputs_of(plan, index)
        mine = self.workers.share(inputs, lambda one: one.cost)
        todo = [one for one in inputs if one in mine and not self._file(one.name).exists()]
        if todo:
            sample = hidden.sample(index)
            errors = measure(part, todo, (hidden.read(path) for path in sample), -(-TOKENS // len(sample)))
            for one in todo:
                write_json(self._file(one.name), errors[one.name].best(one.activation.clip), durable=False)
        self.workers.wait()
        kept = []
        for one in inputs:
            found = self.found(one.readers[0])
            for linear in one.readers:
                part.quantize_input(linear.name, replace(one.activation, clip=found[CLIP]))
            kept += [f"{one.name}: its input keeps the default clip, {found[NOTE]}"] if NOTE in found else []
        return [*kept[:1], *([f"so do {len(kept) - 1} more of block {index}"] if len(kept) > 1 else [])]

    def found(self, linear: LinearPlan) -> dict[str, Any]:
        """The clip of the input of a linear, and what the record says of it; nothing where it is not searched."""
        return {} if linear.clip_search is None else work_files.read_json(self._file(linear.clip_search))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def inputs_of(plan: Plan, index: int) -> list[SearchedInput]:
    """The inputs of a block whose clips are searched."""
    readers: dict[str, list[LinearPlan]] = {}
    for linear in plan.block(index):
        if linear.clip_search is not None:
            readers.setdefault(linear.clip_search, []).append(linear)
    found = []
    for name, some in readers.items():
        assert some[0].activation is not None and len({linear.activation for linear in some}) == 1, name
        found.append(SearchedInput(name, some[0].activation, tuple(some)))
    return found


def is_searched(plan: Plan) -> bool:
    """Whether clips are searched at all."""
    return any(linear.clip_search is not None for linear in plan.linears)


def measure(
    part: PartialModel, inputs: Sequence[SearchedInput], chunks: Iterable[Float[Tensor, "batch t k"]], most: int
) -> Mapping[str, Errors]:
    """Run a block on hidden states and measure inputs of it, at most so many tokens of each in a chunk, evenly spread
    (and one for each expert). The sums are taken in the order of the chunks."""
    found = {one.name: Errors(torch.zeros(len(GRID), dtype=torch.float64)) for one in inputs}
    with ExitStack() as hooks:
        for one in inputs:
            for readers in one.places:
                hooks.enter_context(_watch(part, readers, -(-most // len(one.places)), found[one.name]))
        for hidden in chunks:
            part.run(hidden)
    return found


def _watch(
    part: PartialModel, readers: Sequence[LinearPlan], most: int, found: Errors
) -> torch.utils.hooks.RemovableHandle:
    first = readers[0]
    module = part.module(first.name)
    assert isinstance(module, QuantLinear) and first.activation is not None, first.name
    bits = first.activation.bits

    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].flatten(0, -2)
        step = max(1, -(-len(x) // most))
        x = x[step // 2 :: step]
        weights = [part.parameter(linear.dense_weight) for linear in readers]
        sums, tokens = losses(module.transformed_input(x).float(), weights, bits)
        found.sums += sums
        found.tokens += tokens

    return module.register_forward_pre_hook(add)


def losses(
    x: Float32[Tensor, "t k"], weights: Sequence[Float32[Tensor, "_ k"]], bits: int
) -> tuple[Float64[Tensor, " clips"], int]:
    """For each clip of `GRID` the sum over tokens x of |W (Q(x) - x)|^2 / |W x|^2, both summed over the weights W; and
    the number of tokens. One whose products are all 0 does not count."""
    size = _squares(x, weights)
    size[size.isinf()] = math.nan  # that shows in the sums
    counted = size != 0
    sums = []
    for clip in GRID:
        error = activations.dequantize(*Activation(bits, clip).quantize(x)).sub_(x)
        sums.append((_squares(error, weights) / size)[counted].sum())
    return torch.stack(sums).cpu(), int(counted.sum())


def _squares(x: Float32[Tensor, "t k"], weights: Sequence[Float32[Tensor, "_ k"]]) -> Float64[Tensor, " t"]:
    """|W x|^2 of every token, summed over the weights."""
    squares = [torch.linalg.vector_norm(matmul.linear(x, w, None), dim=1).double().square() for w in weights]
    return torch.stack(squares).sum(0)
