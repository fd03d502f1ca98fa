"""How many tokens a run's probe has (`ptq.pipeline.probe`)."""

ROWS, LENGTH = 4, 256
"""Rows of text, of at most so many tokens."""
CENTER_ROWS = 8
"""As many tokens each, for the centres of keys where nothing else is fitted to the text."""
LOGITS = 1 << 23
"""Most logits of a probe row: rows are shorter where the vocabulary is large."""
LEAST_TOKENS = 16
"""Tokens of a probe row of text, however large the vocabulary."""
RANDOM_TOKENS = 4
"""The probe where there is no text: at most `matmul.FEW_TOKENS`."""


def length(vocab: int) -> int:
    """Most tokens of a probe row of text: its logits in three models are compared in float64."""
    return max(LEAST_TOKENS, min(LENGTH, LOGITS // vocab))
