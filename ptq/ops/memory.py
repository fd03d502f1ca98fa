"""How this process holds on to memory that it has freed.

By default the C library gives large pieces back to the system at once and gets fresh ones, page by page, for the next
weight of the same size. On virtual machines that costs several times the arithmetic on the weight.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

ALL_BYTES, SMALL_BYTES = 1 << 30, 56 << 20
"""Largest pieces that are kept: all; or activations, but not weights, which come in many sizes and leave holes."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
USUAL_BYTES = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}
"""What glibc arrives at by itself in a program that has freed a large tensor. `mallopt` ends its adapting, so its first
thresholds, of 128 KiB, would hold for ever, and every tensor of the program would take fresh pages."""
ASKED_FOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which users set this themselves."""


@cache
def _glibc() -> Any:
    """The C library; None where it is not glibc."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _ours_to_set() -> Any:
    """The C library; None where its thresholds are the user's, or cannot be set."""
    return None if any(name in os.environ for name in ASKED_FOR) else _glibc()


def set_thresholds() -> None:
    """Keep up to 64 MiB of freed memory, in pieces of up to 32 MiB, from the first tensor on: outputs of layers then
    lie on pages that are there already. Left to itself, glibc comes to this by what happens to be freed."""
    library = _ours_to_set()
    if library is not None:
        for option, nbytes in USUAL_BYTES.items():
            library.mallopt(option, nbytes)


@contextmanager
def kept(largest: int = ALL_BYTES) -> Iterator[None]:
    """While the block runs, freed memory is kept for the next tensor, in pieces of up to `largest` bytes, together
    up to `ALL_BYTES`; afterwards it goes back to the system."""
    library = _ours_to_set()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, largest)
    library.mallopt(M_TRIM_THRESHOLD, ALL_BYTES)
    try:
        yield
    finally:
        for option, nbytes in USUAL_BYTES.items():
            library.mallopt(option, nbytes)
        library.malloc_trim(0)


def give_back() -> None:
    """Give back what is free now: before a step that is short of memory, or after one that took more than the next."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
