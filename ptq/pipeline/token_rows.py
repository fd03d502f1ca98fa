"""The tokens of a run: the calibration rows, and the probe, which passes through the original, the rotated and the
packed model."""

from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

from ptq.errors import InputError
from ptq.hf.loading import load_tokenizer
from ptq.models.model_shape import shape_of
from ptq.pipeline import probe_size
from ptq.pipeline.finetune import HELD_OUT
from ptq.pipeline.needs import fits_weights, needs_hessians, needs_text
from ptq.planning.plan import Plan
from ptq.recipe import Recipe
from ptq.statistics import calibration
from ptq.statistics.clip_search import is_searched


def choose(
    plan: Plan, config: PreTrainedConfig, recipe: Recipe, model: Path
) -> tuple[Int[Tensor, "samples t"] | None, Int[Tensor, "rows probe"]]:
    """Token ids: the calibration rows, or None where the recipe needs none, and the probe, which are other rows of the
    same text if it has any, and random tokens where there is no text. For the centres of keys alone, few and short rows
    are enough. `recipe.sequence_length` must be known.

    Raises InputError where there is no text and it is needed, for too little text, for a tokenizer of another model.
    """
    needed, vocab = needs_text(plan, recipe), shape_of(config).vocab
    if recipe.calibration is None:
        if needed:
            raise InputError(_without_text(plan, recipe))
        generator = torch.Generator().manual_seed(recipe.seed)
        return None, torch.randint(vocab, (1, probe_size.RANDOM_TOKENS), generator=generator)
    if plan.finetune != "none" and recipe.samples < HELD_OUT:
        raise InputError(
            f"--finetune needs at least {HELD_OUT} calibration rows, so that some can be held out; found "
            f"--samples {recipe.samples}"
        )
    assert recipe.sequence_length is not None
    fitted, length, samples, others = True, recipe.sequence_length, recipe.samples, probe_size.ROWS
    if not fits_weights(plan, recipe):  # a short text can be probed
        fitted, length, samples = False, min(length, probe_size.LENGTH), 1
        others += (probe_size.CENTER_ROWS if needed else probe_size.ROWS) - 1
    tokenizer = load_tokenizer(model)
    bos = calibration.bos_of(tokenizer, config)
    rows = calibration.load_rows(recipe.calibration, tokenizer, samples, length, recipe.seed, others, bos)
    if int(rows.max()) >= vocab:
        raise InputError(f"{model}: its tokenizer gives token {int(rows.max())}, the model has {vocab}")
    samples = samples if fitted else max(0, len(rows) - probe_size.ROWS) or len(rows)
    probe = rows[samples:] if len(rows) > samples else rows[: probe_size.ROWS]
    return rows[:samples] if needed else None, probe[:, : probe_size.length(vocab)].contiguous()


def are_fitted(rows: Int[Tensor, "samples t"] | None, probe: Int[Tensor, "rows p"]) -> bool:
    """Whether weights, or centres of keys, are fitted to the very rows of the probe: the text had no others."""
    return rows is not None and torch.equal(rows[: len(probe), : probe.shape[1]], probe)


def described(text: str | None, rows: Int[Tensor, "samples t"] | None, probe: Int[Tensor, "rows p"]) -> str | None:
    """What the probe is taken from, in words; None where it is random."""
    if text is None:
        return None
    return f"{text}, to which {'the model was' if are_fitted(rows, probe) else 'nothing was'} fitted"


def _without_text(plan: Plan, recipe: Recipe) -> str:
    readers = {"choose --rounding nearest": recipe.rounding.upper()} if needs_hessians(plan, recipe) else {}
    readers |= {"leave out --finetune": "fine-tuning"} if plan.finetune != "none" else {}
    readers |= {"leave out --activation-clip search": "--activation-clip search"} if is_searched(plan) else {}
    ways, (reader, *_) = list(readers), readers.values()
    return (
        f"{reader} needs text: name some with --calibration (a .txt or .jsonl file, wikitext2, c4, or a hub dataset), "
        f"or {' and '.join(ways)}"
    )
