"""How long a run will take, and how much memory and disk it needs: orders of magnitude, from its plan."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from ptq.layers.packed_weight import guard
from ptq.models.model_shape import ModelShape
from ptq.ops import matmul
from ptq.pipeline import finetune, probe_size
from ptq.pipeline.finetune_full import LOGITS
from ptq.planning.plan import LinearPlan, Plan, weights_of
from ptq.planning.rotations import mlp_widths
from ptq.recipe import Recipe
from ptq.reporting.sizes import duration_text, size_text
from ptq.statistics import clip_search
from ptq.statistics.chunks import CHUNK_TOKENS, SAMPLE_CHUNKS
from ptq.statistics.clip_search import is_searched
from ptq.statistics.hessian import MAX_PARTS, PART_CHUNKS, panel_shapes
from ptq.weights.formats import RowScaledCodebook
from ptq.weights.loss_scales import MULTIPLES

ELEMENT_RATE = 5e8
"""Numbers per second and core that training goes through outside of matrix products, there and back."""
BASE_SECONDS = 4.0
"""For what takes as long in small models: to open the result again, the proof and the report."""
BASE_MEMORY = 500 << 20
"""Bytes that Python, torch and transformers take before any weight is read."""
ENDS_SHARE = 0.3
"""Share of the result above which it is said what embedding and head take."""
LOGIT_BYTES = 96
"""For a logit of a probe row while three models are compared, in float64."""
MARK_BYTES = 8192
"""What the work folder holds of a linear beside its statistics, on disk: a mark, and what its report says."""
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
        most = f"; embeddings and head are {size_text(self.ends)} of that: see --embedding-bits"
        return (
            f"estimate: about {duration_text(self.seconds)}, {size_text(self.memory)} of memory, "
            f"{size_text(self.work)} of disk while it works, {size_text(self.out)} for the result"
            f"{most if self.ends > ENDS_SHARE * self.out else ''}"
        )


@dataclass(frozen=True)
class _Cost:
    """What a step of the calibration takes; operations are those of one block."""

    passes: float = 0.0
    """Operations in products with calibration rows, which may be in bfloat16."""
    others: float = 0.0
    """All other operations."""
    memory: int = 0
    """Bytes, beside those of the steps before."""
    disk: int = 0

    def __add__(self, other: "_Cost") -> "_Cost":
        return _Cost(
            self.passes + other.passes,
            self.others + other.others,
            self.memory + other.memory,
            self.disk + other.disk,
        )


def heaviest_block(plan: Plan) -> list[LinearPlan]:
    """The linears of the block with most weights: blocks with experts may stand beside others."""
    blocks: dict[int, list[LinearPlan]] = {}
    for linear in plan.linears:
        if linear.block is not None:
            blocks.setdefault(linear.block, []).append(linear)
    return max(blocks.values(), key=weights_of)


def estimate(plan: Plan, shape: ModelShape, recipe: Recipe, sizes: dict[str, int], bfloat16: bool = False) -> Estimate:
    """Needs of a run with a recipe whose `sequence_length` is known; `sizes` maps the source's tensors to their bytes,
    `bfloat16`: calibration rows are multiplied in it. Measures the machine for a moment."""
    length = recipe.sequence_length
    assert length is not None
    if not fits_weights(plan, recipe):
        recipe, length = replace(recipe, samples=probe_size.CENTER_ROWS), min(length, probe_size.LENGTH)
    block = heaviest_block(plan)
    largest = max((4 if linear.role == "layer_embedding" else 6) * linear.weights for linear in plan.linears)
    needs = _Cost(memory=max(4 * weights_of(block) + 12 * max(x.weights for x in block), largest))
    seconds = BASE_SECONDS + weights_of(plan.linears) / (STREAM_RATE * torch.get_num_threads())
    if needs_text(plan, recipe):
        found = _calibrating(block, shape, recipe, length)
        if needs_hessians(plan, recipe):
            found += _solving(block, shape, recipe, length)
        rate = _matmul_rate()
        seconds += plan.blocks * (found.passes / (_matmul_rate(bfloat16) if bfloat16 else rate) + found.others / rate)
        needs += found
    if needs_text(plan, recipe) or recipe.calibration is not None:
        needs += _Cost(memory=_mixing(block, shape, length))
    packed = sum(_packed_bytes(linear, sizes) for linear in plan.linears)
    probe = _probing(shape, recipe, length)
    work = needs.disk + probe.disk + MARK_BYTES * len(plan.linears)
    memory = BASE_MEMORY + max(needs.memory, probe.memory)
    made = Estimate(seconds, memory, work, packed, _plain_ends(plan, sizes))
    return made if plan.finetune == "none" else _finetuning(made, plan, shape, recipe.samples, length)


def _probing(shape: ModelShape, recipe: Recipe, length: int) -> _Cost:
    """The probe: states of three models in front of the first block, of another and behind it are on disk; at the end
    the logits of a row, and a head, are in memory."""
    text = recipe.calibration is not None
    tokens = min(length, probe_size.length(shape.vocab)) if text else probe_size.RANDOM_TOKENS
    return _Cost(
        memory=shape.vocab * (LOGIT_BYTES * tokens + 4 * shape.hidden),
        disk=3 * 3 * 4 * (probe_size.ROWS if text else 1) * tokens * shape.state,
    )


def _calibrating(block: list[LinearPlan], shape: ModelShape, recipe: Recipe, length: int) -> _Cost:
    """The calibration rows go through a block; the clips of its inputs are searched. On disk are the rows in front of a
    block and behind it."""
    tokens = recipe.samples * length
    return _Cost(
        passes=2 * tokens * _active(block, shape),
        others=_clip_search(block, shape, tokens, length),
        memory=4 * max(length, CHUNK_TOKENS) * (3 * shape.state + 4 * max(mlp_widths(shape).values())),
        disk=2 * 4 * tokens * shape.state,
    )


def _solving(block: list[LinearPlan], shape: ModelShape, recipe: Recipe, length: int) -> _Cost:
    """Hessians are summed, and weights rounded with them. On disk is every Hessian, and the parts that it is the sum
    of."""
    tokens = recipe.samples * length
    inputs = {linear.statistics: linear.k for linear in block if linear.statistics}
    hessians = 4 * sum(p * c for k in inputs.values() for p, c in panel_shapes(k))
    square = sum(share_of_tokens(linear, shape) * linear.k**2 for linear in block if linear.statistics == linear.name)
    solve = sum(_passes(linear, recipe) * linear.n * linear.k**2 for linear in block)
    solve += sum(k**3 for k in inputs.values())
    found = _Cost(passes=tokens * (2 * _active(block, shape) + square), others=2.0 * solve)
    crossed = {x.statistics: x.k for x in block if x.statistics and x.expert is None and recipe.gptaq_alpha}
    if crossed:  # the rows of another model, its products, and the cross moments of both
        squares = sum(k**2 for k in crossed.values())
        hessians += 4 * squares
        found += _Cost(
            passes=tokens * (4 * _active(block, shape) + 2 * squares),
            others=6.0 * sum(x.n * x.k**2 for x in block if x.expert is None),
            memory=4 * max(length, CHUNK_TOKENS) * sum(crossed.values()) + 4 * max(x.weights for x in block),
            disk=2 * 4 * tokens * shape.state,
        )
    # Beside the block and its Hessians: H, and of experts the sum of all.
    solver = max((4 if x.expert is None else 8) * x.k**2 + 8 * x.weights for x in block)
    parts = 1 + max(1, min(MAX_PARTS, tokens // (max(length, CHUNK_TOKENS) * PART_CHUNKS)))
    return found + _Cost(memory=max(hessians, solver), disk=parts * hessians)


def _passes(linear: LinearPlan, recipe: Recipe) -> int:
    """How often rounding goes through a weight: once, in every sweep, and with all scales that are tried on rows."""
    codebook = linear.format.codebook if linear.format is not None else None
    tried = 1 + len(MULTIPLES) if recipe.sweeps and isinstance(codebook, RowScaledCodebook) else 0
    return 1 + recipe.sweeps + tried


def _active(block: list[LinearPlan], shape: ModelShape) -> float:
    """Weights that a token is multiplied with."""
    return sum(share_of_tokens(linear, shape) * linear.weights for linear in block)


def _mixing(block: list[LinearPlan], shape: ModelShape, length: int) -> int:
    """Bytes beside the weights while a mixer runs on a chunk: what its linears give, some times; and of latent
    attention the scores, which torch holds whole, and three times, where keys are wider than values."""
    widths = sum(linear.n for linear in block if linear.role.startswith("mixer"))
    latent = any(linear.role == "mixer_inside" for linear in block)
    return 4 * max(length, CHUNK_TOKENS) * 3 * (widths + latent * shape.heads * length)


def _finetuning(made: Estimate, plan: Plan, shape: ModelShape, samples: int, length: int) -> Estimate:
    """The same with fine-tuning. While a block is trained, its weights are there six times: values, the best of them,
    gradients, two averages of these, and the state before. So is the head, at the end."""
    block, head = weights_of(heaviest_block(plan)), shape.vocab * shape.hidden
    tokens = max(length, CHUNK_TOKENS)
    kept_numbers = 24 * shape.hidden + 10 * shape.intermediate  # of a token in a block, for the gradient
    activations = 4 * tokens * kept_numbers
    memory = BASE_MEMORY + 4 * 6 * block + activations
    kept = 4 * 4 * block
    trained = finetune.trained_weights(plan)
    numbers = trained / block * (kept_numbers + 6 * shape.heads * length)
    seconds = 10 * trained / _matmul_rate() + numbers / (ELEMENT_RATE * torch.get_num_threads())
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
    sample = min(tokens, SAMPLE_CHUNKS * max(length, CHUNK_TOKENS))
    passed = sample * _active(block, shape)
    experts = max(1, shape.experts)
    most = {True: max(clip_search.TOKENS / experts, SAMPLE_CHUNKS), False: clip_search.TOKENS}
    tried = sum(min(most[x.expert is not None], share_of_tokens(x, shape) * sample) * x.weights for x in searched)
    return 2 * (passed + (1 + len(clip_search.GRID)) * tried)


def share_of_tokens(linear: LinearPlan, shape: ModelShape) -> float:
    """The share of all tokens that a linear sees: less than 1 for one of an expert."""
    return 1.0 if linear.expert is None else shape.experts_per_token / shape.experts


def needs_text(plan: Plan, recipe: Recipe) -> bool:
    """Whether a run needs calibration text."""
    return fits_weights(plan, recipe) or plan.centered


def fits_weights(plan: Plan, recipe: Recipe) -> bool:
    """Whether weights, or the clips of their inputs, are fitted to calibration text."""
    return needs_hessians(plan, recipe) or plan.finetune != "none" or is_searched(plan)


def needs_hessians(plan: Plan, recipe: Recipe) -> bool:
    """Whether a run takes Hessians."""
    return recipe.rounding != "nearest" and any(linear.statistics for linear in plan.linears)


def _plain_ends(plan: Plan, sizes: dict[str, int]) -> int:
    """Bytes of embeddings and head, where they are not packed beside linears that are."""
    rounded = any(linear.format is not None and linear.format.codebook is not None for linear in plan.linears)
    return rounded * sum(sizes[linear.source] for linear in plan.ends() if linear.format is None)


def _packed_bytes(linear: LinearPlan, sizes: dict[str, int]) -> int:
    if linear.format is None:
        return sizes[linear.source]
    buffers = linear.format.buffers(linear.n, linear.k).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)


def bits_per_weight(plan: Plan) -> float | None:
    """True bits per weight over all linears that are quantised, as `ptq.reporting.contents` counts those of a
    checkpoint; None where there are none."""
    rounded = [x for x in plan.linears if x.format is not None and x.format.codebook is not None]
    signs = sum(2 * (x.n + x.k) for x in rounded if x.online_output is not None)
    stored = signs + sum(_packed_bytes(x, {}) + guard().nbytes for x in rounded)
    return 8 * stored / weights_of(rounded) if rounded else None


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
