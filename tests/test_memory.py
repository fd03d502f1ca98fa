"""Freed memory is kept while a run lasts, and what is left behind afterwards is no slower than before."""

import resource
import sys

import pytest
import torch

from ptq.ops import memory

PAGES = (8 << 20) // 4096


def faults() -> int:
    """Fresh pages that a few tensors of 8 MiB take, one after the other."""
    torch.zeros(2 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(2 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux" or memory._glibc() is None, reason="only glibc has these settings")
def test_freed_memory_is_used_again_during_and_after() -> None:
    with memory.kept():
        assert faults() < PAGES
    assert faults() < PAGES
