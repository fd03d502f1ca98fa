"""torch as it is by itself, whatever the caller has set."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_defaults() -> Iterator[None]:
    """New tensors in float32 and on the CPU, and no autocast: solvers and trials count on it, and a caller may have set
    others, as transformers does that makes a model on meta."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context slows every call
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, before)
        yield
