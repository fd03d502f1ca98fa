"""Freed memory is kept while a run lasts, and what is left behind afterwards is no slower than before."""

import resource
import sys

import pytest
import torch

from ptq.ops import memory

PAGES = (8 << 20) // 4096


def faults(size: int = 2 << 20, together: int = 1) -> int:
    """Fresh pages that some tensors, of 8 MiB unless another size is named, take five times in turn."""
    held = [torch.zeros(size) for _ in range(together)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        held.clear()
        held.extend(torch.zeros(size) for _ in range(together))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux" or memory._glibc() is None, reason="only glibc has these settings")
def test_freed_memory_is_used_again_during_and_after() -> None:
    with memory.kept():
        assert faults() < PAGES
    with memory.kept(memory.SMALL_BYTES):  # the activations of a block are more than one of them
        assert faults(10 << 20, together=4) < PAGES
    assert faults() < PAGES
