"""Before a run starts: how long it will take, how much memory and disk it needs, and whether this machine has them."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.models.model_shape import ModelShape
from ptq.ops import matmul
from ptq.pipeline import available, finetune
from ptq.pipeline.finetune_full import LOGITS
from ptq.pipeline.tasks import CHUNK_TOKENS
from ptq.pipeline.writer import partial_folder
from ptq.planning.plan import LinearPlan, Plan
from ptq.planning.rotations import mlp_widths
from ptq.recipe import Recipe
from ptq.statistics import clip_search
from ptq.statistics.clip_search import is_searched
from ptq.statistics.hessian import MAX_PARTS, PART_CHUNKS, panel_shapes

ELEMENT_RATE = 1e9
"""Numbers per second and core that training goes through outside of matrix products, there and back."""
BASE_MEMORY = 500 << 20
"""Bytes that Python, torch and transformers take before any weight is read."""
ENDS_SHARE = 0.3
"""Share of the result above which it is said what embedding and head take."""
FEWEST_TOKENS = 10
"""Different tokens that calibration text has at least."""
MARK_BYTES = 8192
"""What the work folder holds of a linear beside its statistics, on disk: a mark, and what its report says."""
TOKENS_PER_CHANNEL = 10
"""Calibration tokens per input channel below which a Hessian is mostly noise."""
STREAM_RATE = 60e6
"""Weights per second that are read, rewritten in float64, rounded and written on one core: a cautious figure."""


@dataclass(frozen=True)
class Estimate:
    """Needs of a run, in seconds and bytes. Orders of magnitude: the time within a factor of two or so."""

    seconds: float
    memory: int
    work: int
    """Bytes of the work folder at its largest."""
    out: int
    """Bytes of the result."""
    ends: int = 0
    """Bytes of the result that embeddings and head take, where they stay as they are and the rest does not."""
    remedy: str = "close other programs or use a machine with more"
    """What to do where the memory is not enough: the end of a sentence."""

    def __str__(self) -> str:
        most = f"; embeddings and head are {_size(self.ends)} of that: see --embedding-bits"
        return (
            f"estimate: {_duration(self.seconds)}, {_size(self.memory)} of memory, {_size(self.work)} of disk while it "
            f"works, {_size(self.out)} for the result{most if self.ends > ENDS_SHARE * self.out else ''}"
        )


def largest_block(plan: Plan) -> list[LinearPlan]:
    """The linears of the block with most weights: blocks with experts may stand beside others."""
    blocks: dict[int, list[LinearPlan]] = {}
    for linear in plan.linears:
        if linear.block is not None:
            blocks.setdefault(linear.block, []).append(linear)
    return max(blocks.values(), key=lambda block: sum(linear.n * linear.k for linear in block))


def estimate(plan: Plan, shape: ModelShape, recipe: Recipe, sizes: dict[str, int], bfloat16: bool = False) -> Estimate:
    """Needs of a run with a recipe whose `sequence_length` is known; `sizes` maps the source's tensors to their bytes,
    `bfloat16`: calibration rows are multiplied in it. Measures the machine for a moment."""
    length = recipe.sequence_length
    assert length is not None
    block = largest_block(plan)
    weights = sum(linear.n * linear.k for linear in plan.linears)
    block_weights = sum(linear.n * linear.k for linear in block)
    largest = max((4 if linear.role == "layer_embedding" else 6) * linear.n * linear.k for linear in plan.linears)
    inputs = {linear.statistics: linear.k for linear in block if linear.statistics}
    packed = sum(_packed_bytes(linear, sizes) for linear in plan.linears)
    seconds = weights / (STREAM_RATE * torch.get_num_threads())
    memory = BASE_MEMORY + max(4 * block_weights + 12 * max(linear.n * linear.k for linear in block), largest)
    hidden, parts, hessians = 0, 0, 0
    if needs_text(plan, recipe):
        tokens = recipe.samples * length
        hidden = 2 * 4 * tokens * shape.state
        active = sum(_share(linear, shape) * linear.n * linear.k for linear in block)
        passes, work = 2 * tokens * active, _clip_search(block, shape, tokens, length)
        memory += 4 * CHUNK_TOKENS * (3 * shape.state + 4 * max(mlp_widths(shape).values()))
        if needs_hessians(plan, recipe):
            hessians = 4 * sum(p * c for k in inputs.values() for p, c in panel_shapes(k))
            parts = 1 + max(1, min(MAX_PARTS, tokens // (CHUNK_TOKENS * PART_CHUNKS)))
            square = sum(_share(linear, shape) * linear.k**2 for linear in block if linear.statistics == linear.name)
            solve = sum(linear.n * linear.k**2 for linear in block) + sum(k**3 for k in inputs.values())
            passes += tokens * (2 * active + square)
            work += 2 * solve
            crossed = {x.statistics: x.k for x in block if x.statistics and x.expert is None and recipe.gptaq_alpha}
            if crossed:
                hidden *= 2
                squares = sum(k**2 for k in crossed.values())
                passes += tokens * (4 * active + 2 * squares)
                work += 6 * sum(x.n * x.k**2 for x in block if x.expert is None)
                hessians += 4 * squares
                memory += 4 * CHUNK_TOKENS * sum(crossed.values()) + 4 * max(x.n * x.k for x in block)
            # Beside the block and its Hessians: H, and of experts the sum of all.
            solver = max((4 if x.expert is None else 8) * x.k**2 + 8 * x.n * x.k for x in block)
            memory += max(hessians, solver)
        rate = _matmul_rate()
        seconds += plan.blocks * (passes / (_matmul_rate(bfloat16) if bfloat16 else rate) + work / rate)
    if needs_text(plan, recipe) or recipe.calibration is not None:
        memory += _mixing(block, shape, length)
    marks = MARK_BYTES * len(plan.linears)
    made = Estimate(seconds, memory, hidden + parts * hessians + marks, packed, _plain_ends(plan, sizes))
    return made if plan.finetune == "none" else _finetuning(made, plan, shape, recipe.samples, length)


def _mixing(block: list[LinearPlan], shape: ModelShape, length: int) -> int:
    """Bytes beside the weights while a mixer runs on a chunk: what its linears give, some times; and of latent
    attention the scores, which torch holds whole, and three times, where keys are wider than values."""
    widths = sum(linear.n for linear in block if linear.role.startswith("mixer"))
    latent = any(linear.role == "mixer_inside" for linear in block)
    return 4 * max(length, CHUNK_TOKENS) * 3 * (widths + latent * shape.heads * length)


def _finetuning(made: Estimate, plan: Plan, shape: ModelShape, samples: int, length: int) -> Estimate:
    """The same with fine-tuning. While a block is trained, its weights are there six times: values, the best of them,
    gradients, two averages of these, and the state before. So is the head, at the end."""
    block, head = sum(linear.n * linear.k for linear in largest_block(plan)), shape.vocab * shape.hidden
    tokens = max(length, CHUNK_TOKENS)
    activations = 4 * tokens * (24 * shape.hidden + 10 * shape.intermediate)  # what the gradient needs of one block
    memory = BASE_MEMORY + 4 * 6 * block + activations
    kept = 4 * 4 * block
    numbers = 24 * shape.hidden + 10 * shape.intermediate + 6 * shape.heads * length  # of a token in a block
    passes = finetune.weights(plan) / block
    seconds = 8 * finetune.weights(plan) / _matmul_rate() + passes * numbers / (ELEMENT_RATE * torch.get_num_threads())
    if plan.finetune == "full":
        states = 4 * tokens * shape.hidden * plan.blocks
        memory = max(memory, BASE_MEMORY + 4 * (8 * head + block) + activations + states + 8 * 4 * LOGITS)
        kept = max(kept, 4 * 4 * head)
    return replace(
        made,
        seconds=made.seconds + samples * length * seconds,
        memory=max(made.memory, memory),
        work=2 * made.work + kept,
        remedy="fine-tune less (--finetune blocks or none), close other programs or use a machine with more",
    )


def _clip_search(block: list[LinearPlan], shape: ModelShape, tokens: int, length: int) -> float:
    """Operations of the search for clips in a block: the sample goes through it, and then through its weights once for
    every clip. (The memory is less than a pass of the block takes.)"""
    searched = [linear for linear in block if linear.clip_search]
    if not searched:
        return 0.0
    sample = min(tokens, clip_search.CHUNKS * max(length, CHUNK_TOKENS))
    passed = sample * sum(_share(linear, shape) * linear.n * linear.k for linear in block)
    experts = max(1, shape.experts)
    most = {True: max(clip_search.TOKENS / experts, clip_search.CHUNKS), False: clip_search.TOKENS}
    tried = sum(min(most[x.expert is not None], _share(x, shape) * sample) * x.n * x.k for x in searched)
    return 2 * (passed + (1 + len(clip_search.GRID)) * tried)


def _share(linear: LinearPlan, shape: ModelShape) -> float:
    """The share of all tokens that a linear sees: less than 1 for one of an expert."""
    return 1.0 if linear.expert is None else shape.experts_per_token / shape.experts


def needs_text(plan: Plan, recipe: Recipe) -> bool:
    """Whether a run needs calibration text."""
    return needs_hessians(plan, recipe) or is_searched(plan)


def needs_hessians(plan: Plan, recipe: Recipe) -> bool:
    """Whether a run takes Hessians."""
    solved = recipe.rounding != "nearest" or plan.finetune != "none"
    return solved and any(linear.statistics for linear in plan.linears)


def warnings(plan: Plan, shape: ModelShape, recipe: Recipe, rows: Tensor | None) -> Iterator[str]:
    """What a user should know about the calibration rows. `recipe` is what was asked for, without defaults."""
    if rows is None and recipe.calibration is not None:
        yield "note: nothing is fitted to the text of --calibration here; it only serves to measure the result"
    if rows is not None and (repeated := _repetition(rows)):
        yield (
            f"warning: the calibration text repeats itself ({repeated}): what is fitted to it, and measured on it, "
            "says little about other text"
        )
    needy = max(
        (linear for linear in plan.linears if linear.statistics), key=lambda x: x.k / _share(x, shape), default=None
    )
    if rows is None or needy is None or not needs_hessians(plan, recipe):
        return
    tokens = round(rows.numel() * _share(needy, shape))
    if tokens < TOKENS_PER_CHANNEL * needy.k:
        found = (
            f"{tokens} calibration tokens" if needy.expert is None else f"about {tokens} calibration tokens an expert"
        )
        yield (
            f"warning: {found} for layers of up to {needy.k} input channels are few; "
            f"{TOKENS_PER_CHANNEL} per channel give steady statistics: raise --samples"
        )


def _repetition(rows: Tensor) -> str | None:
    """How calibration rows repeat themselves; None where they do not."""
    different, tokens = len(rows.unique(dim=0)), len(rows.unique())
    if 10 * different < 9 * len(rows):
        return f"{different} different rows of {len(rows)}"
    return f"{tokens} different tokens" if tokens < FEWEST_TOKENS else None


def check(needs: Estimate, work: Path, out: Path, processes: int = 1) -> None:
    """Raise InputError where memory or disk cannot be enough for so many processes on this machine. What a run before
    has left counts as free: it is continued, or thrown away."""
    free, wanted = available.memory(), processes * needs.memory
    if wanted > free:
        raise InputError(f"this run needs about {_size(wanted)} of memory, {_size(free)} are free; "
                         f"{needs.remedy}")  # fmt: skip
    folders = {work: max(0, needs.work - _used(work)), out: max(0, needs.out - _used(partial_folder(out)))}
    existing = {
        folder: next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        for folder in folders
    }
    devices = {folder: parent.stat().st_dev for folder, parent in existing.items()}
    for folder, device in devices.items():
        wanted = sum(nbytes for other, nbytes in folders.items() if devices[other] == device)
        free = shutil.disk_usage(existing[folder]).free
        if wanted > free:
            without = wanted - (folders[work] if devices[work] == device else 0)
            remedy = "name a folder on another disk with --work" if without <= free else "choose another OUT"
            raise InputError(
                f"{existing[folder]}: this run needs about {_size(wanted)} of disk, {_size(free)} are free; free some, "
                f"or {remedy}"
            )


def _used(folder: Path) -> int:
    """Bytes that the files of a folder take on disk; shards that are not filled yet take less than their size."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _plain_ends(plan: Plan, sizes: dict[str, int]) -> int:
    """Bytes of embeddings and head, where they are not packed beside linears that are."""
    rounded = any(linear.format is not None and linear.format.codebook is not None for linear in plan.linears)
    return rounded * sum(sizes[linear.source] for linear in plan.ends() if linear.format is None)


def _packed_bytes(linear: LinearPlan, sizes: dict[str, int]) -> int:
    if linear.format is None:
        return sizes[linear.source]
    buffers = linear.format.buffers(linear.n, linear.k).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)


def _matmul_rate(bfloat16: bool = False) -> float:
    """Operations per second of products in float32, or in bfloat16: the best of a tenth of a second, on one thread, as
    what else the machine does at the moment will pass."""
    threads, a = torch.get_num_threads(), torch.ones(512, 512)
    torch.set_num_threads(1)
    try:
        with matmul.in_bfloat16() if bfloat16 else nullcontext():
            best, start = math.inf, time.perf_counter()
            while time.perf_counter() - start < 0.1:
                before = time.perf_counter()
                matmul.linear(a, a, None)
                best = min(best, time.perf_counter() - before)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * 512**3 / best


def _size(nbytes: int | float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _duration(seconds: int | float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
