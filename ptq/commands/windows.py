"""Text cut into windows, on which perplexity is measured.

The papers' protocol (Frantar et al. 2022, GPTQ, section 4; the same in QuaRot and QuIP#): the text is tokenised once,
with the tokenizer's own special tokens and none per window, and cut into windows of the context that do not overlap;
the tail that fills no window is dropped. Models that were never trained without a beginning-of-sequence token
(`Family.needs_bos`: Gemma) get one in front of every window, as lm-eval does it; it is the token that is not predicted.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ptq.errors import InputError
from ptq.hf.loading import positions_of
from ptq.statistics.calibration import windows_of

PAPER_CONTEXT = 2048


@dataclass(frozen=True)
class Windows:
    """Token ids cut into windows, with what a reader must know to repeat the measurement.

    `found` counts the tokens of the whole text, the dropped tail included; `bos` says how the text begins.
    """

    tokens: Int[Tensor, "windows context"]
    found: int
    tokenizer: str
    bos: str

    @property
    def context(self) -> int:
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return self.tokens.shape[0]


def context_for(config: PretrainedConfig, requested: int | None = None, model: str = "the model") -> int:
    """The window length: `requested`, or the papers' 2048 where the model reaches that far, else the model's maximum.

    Raises InputError for a context that `model`, whose config it is, was not made for, or that predicts nothing.
    """
    longest = positions_of(config)
    if requested is None:
        return PAPER_CONTEXT if longest is None else min(PAPER_CONTEXT, longest)
    if type(requested) is not int:
        raise InputError(f"context must be a whole number of tokens, found {requested!r}")
    if requested < 2:
        raise InputError(f"context {requested}: a window needs at least 2 tokens, one to read and one to predict")
    if longest is not None and requested > longest:
        raise InputError(
            f"context {requested} is longer than {model} reaches: max_position_embeddings {longest}; ask for at most "
            "that"
        )
    return requested


def windows_from_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    context: int,
    name: str = "the text",
    bos: int | None = None,
    or_shorter: bool = False,
) -> Windows:
    """Tokenise the whole text once and cut it; the tail is dropped. `bos` is put in front of every window. With
    `or_shorter` a text that fills no window is one.

    Raises InputError, with this `name`, if the text fills no window.
    """
    if not text.strip():
        raise InputError(f"{name} is empty; give a text")
    ids = tokenizer(text, verbose=False, add_special_tokens=bos is None)["input_ids"]
    if or_shorter:
        context = min(context, max(2, len(ids) + (bos is not None)))
    tokens = windows_of(torch.tensor(ids, dtype=torch.long), context, bos)
    if len(tokens) == 0:
        raise InputError(
            f"{name} has {len(ids)} tokens, too few for one window of {context}; "
            "give a longer text, or a smaller --context where the command has one"
        )
    leads = ids[0] == tokenizer.bos_token_id and not text.startswith(str(tokenizer.bos_token))
    once = "one at the start of the text, none per window" if leads else "none"
    return Windows(
        tokens=tokens,
        found=len(ids),
        tokenizer=f"{type(tokenizer).__name__}, {len(tokenizer)} tokens",
        bos=once if bos is None else "one in front of every window",
    )


def check_fit(config: PretrainedConfig, windows: Windows) -> None:
    """Raise InputError for windows that are too long for a model, or of another model's tokenizer."""
    context_for(config, windows.context)
    largest, vocabulary = int(windows.tokens.max()), config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise InputError(
            f"the tokenizer gives token {largest}, but the model knows only {vocabulary} tokens; "
            "it is not this model's tokenizer"
        )
