"""`quantize verify`: is a checkpoint what was written, and how close is it to the original?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ptq.commands import evaluate
from ptq.commands.windows import Windows, check_fit, context_for, windows_from_text
from ptq.errors import InputError
from ptq.files import companions, source
from ptq.files.checkpoint import INDEX, Checkpoint
from ptq.hf.loading import load_config, load_model, load_tokenizer
from ptq.layers.linear import plain_weight
from ptq.layers.packed_weight import PackedWeight
from ptq.models.state import StateLayout
from ptq.pipeline import writer
from ptq.pipeline.progress import counting, without_kernel_hints
from ptq.pipeline.streamed import Streamed
from ptq.pipeline.work import RECORD, read_record
from ptq.reporting.contents import check_packed, summary
from ptq.statistics.calibration import bos_of
from ptq.statistics.text_sources import path_named, read_text

RANDOM_TOKENS = 512
STATE_BYTES = 1 << 30
"""Of the states of all windows that pass through a block together, of both models."""


@dataclass(frozen=True)
class Verification:
    """What was checked; an error is raised where something is wrong."""

    tensors: int
    files: int
    recorded: bool
    """Whether the bytes are those that were written. False: other software wrote the files again and left no record."""
    added: tuple[str, ...] = ()
    """Files that a model is loaded from, and that were put there since: they are not checked."""
    tokens: int | None = None
    kl: float | None = None
    """Mean KL divergence from the original, nats per token."""
    kl_standard_error: float | None = None
    """Its standard error, with windows as samples; None where there is but one."""
    top1: float | None = None
    perplexity: float | None = None
    original_perplexity: float | None = None
    """Both on the text, where there is one."""
    source: bool | None = None
    """Whether the model that it was compared with is, by the record, the one that was quantised; None: neither asked
    nor recorded."""


def verify(
    checkpoint: str | Path,
    against: str | Path | None = None,
    text: str | Path | None = None,
    *,
    progress: bool = True,
) -> Verification:
    """Check a checkpoint against its own record and, if asked, against the original model, on random tokens or a text.
    `progress`: whether stderr shows how much is done.

    Raises InputError for a checkpoint that is not quantised by ptq, or whose files are not as they were written.
    Without a record (`save_pretrained` writes none), everything else is checked.
    """
    if text is not None and against is None:
        raise InputError("--text does nothing without --against, the original to compare with")
    folder = source.resolve(source.spelled(checkpoint, "checkpoint"))
    found = check_integrity(folder)
    if against is None:
        return found
    original = source.resolve(source.spelled(against, "against"))
    ours, theirs = (load_config(model).get_text_config() for model in (folder, original))
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if (own := getattr(ours, size)) != (other := getattr(theirs, size)):
            raise InputError(f"{original}: is not the original of {folder}: its {size} is {other}, not {own}")
    is_source = None
    if found.recorded:
        is_source = Checkpoint.open(original).identity() == read_record(folder / RECORD).get("source")
    windows = _windows(original, text)
    with without_kernel_hints():
        agreement = _compare(Streamed.open(folder), Streamed.open(original), windows, progress)
    perplexities = (agreement.model.perplexity, agreement.original.perplexity) if text else (None, None)
    return replace(
        found,
        tokens=agreement.model.tokens,
        kl=agreement.kl,
        kl_standard_error=agreement.kl_standard_error,
        top1=agreement.top1,
        perplexity=perplexities[0],
        original_perplexity=perplexities[1],
        source=is_source,
    )


def _compare(model: Streamed, original: Streamed, windows: Windows, progress: bool) -> evaluate.Agreement:
    """How close a model is to its original, with a block of one of them, or both heads, in memory at a time."""
    for each in (model, original):
        check_fit(each.config, windows)
    with counting("blocks", progress) as advance:
        return evaluate.compare_logits(_logits(model, original, windows, advance), windows)


def _logits(
    model: Streamed, original: Streamed, windows: Windows, progress: evaluate.Progress
) -> Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"]]]:
    """Logits of both models that predict all but the first token of every window. As many windows as there is memory
    for pass through a block together."""
    state_bytes = 4 * windows.context * sum(StateLayout.of(each.config).width for each in (model, original))
    groups = windows.tokens.split(max(1, STATE_BYTES // state_bytes))
    for number, group in enumerate(groups):
        ours, theirs = model.embed(group), original.embed(group)
        for index in range(model.blocks):
            ours, theirs = model.run(index, ours), original.run(index, theirs)
            progress(number * model.blocks + index + 1, len(groups) * model.blocks)
        for own, other in zip(model.logits(ours), original.logits(theirs), strict=True):
            yield own[0, :-1], other[0, :-1]


def check_integrity(folder: Path) -> Verification:
    """What is found of a checkpoint that is as it was written. Raises InputError where it is not."""
    found = Checkpoint.open(folder)
    contents = summary(found)
    hashes = writer.file_hashes(folder)
    recorded = (folder / RECORD).is_file()
    added: set[str] = set()
    if recorded:
        added = _check_hashes(folder, hashes)
    elif not (contents.groups or contents.cache or contents.residual):
        raise InputError(
            f"{folder}: holds plain weights and no {RECORD}, which every result of a run has, so there is nothing to "
            "check it by; to compare two models: `quantize perplexity FOLDER --against MODEL --text FILE`"
        )
    if contents.groups:
        check_packed(found)
    for name in found.tensors:
        found.read_checked(name)
    if not recorded:
        model = load_model(folder)
        _check_weights(folder, model)
        _check_runs(folder, model)
    read = added - {*companions.found(folder, companions.TERMS)}  # from a licence no model is loaded
    return Verification(len(found.tensors), len(hashes) - len(added), recorded, tuple(sorted(read)))


def _check_weights(folder: Path, model: PreTrainedModel) -> None:
    """Raise InputError for packed weights that stand for no numbers: the bits of a scale may be those of NaN."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight) and not plain_weight(module, module.state_dict()).isfinite().all():
            raise InputError(
                f"{folder}: the weights of {name!r} are not finite: its scales or sign vectors are damaged; fetch the "
                "checkpoint again"
            )


def _check_runs(folder: Path, model: PreTrainedModel) -> None:
    """Raise InputError where a model gives no numbers."""
    with torch.no_grad():
        logits = model(torch.arange(4)[None] % model.config.get_text_config().vocab_size).logits
    if logits.isnan().any():
        raise InputError(f"{folder}: its logits are NaN: some tensor of it is damaged; fetch it again")


def _check_hashes(folder: Path, hashes: dict[str, str]) -> set[str]:
    """The files that were not written by the run. Raises InputError where one that was is another, and for weights that
    were added."""
    expected = read_record(folder / RECORD).get("files")
    if not isinstance(expected, dict) or not expected:
        raise InputError(f"{folder / RECORD}: lists no files; quantise again")
    added = hashes.keys() - expected.keys()
    weights = {name for name in added if name.endswith(".safetensors") or name == INDEX}
    for name in sorted(expected.keys() | weights):
        if expected.get(name) != hashes.get(name):
            if name not in expected:
                raise InputError(f"{folder / name}: no file of this checkpoint; remove it")
            what = "is missing" if name not in hashes else "is not the file that was written (its SHA-256 differs)"
            raise InputError(f"{folder / name}: {what}; fetch it again")
    return added


def _windows(original: Path, text: str | Path | None) -> Windows:
    config = load_config(original)
    if text is None:
        context = context_for(config, min(RANDOM_TOKENS, context_for(config)))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.get_text_config().vocab_size, (1, context), generator=generator)
        return Windows(tokens, context, "random tokens", "none")
    context = context_for(config)
    tokenizer = load_tokenizer(original)
    bos = bos_of(tokenizer, config)
    return windows_from_text(
        tokenizer, read_text(path_named(text), tokenizer), context, str(text), bos, or_shorter=True
    )
