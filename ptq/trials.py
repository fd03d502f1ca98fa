"""Where modules of a model are tried on random numbers, before others take their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def trial() -> Iterator[None]:
    """Without gradients, in float32 and on the CPU, whatever the caller's default dtype and device are: a model that is
    being loaded is made on meta."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.no_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
