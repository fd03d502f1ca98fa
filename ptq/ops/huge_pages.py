"""Where weights lie in memory: those that are read whole for every token, on huge pages.

A page of 4 KB ends the stream of lines that a processor fetches by itself, and each one needs its address translated.
On Zen 4 one thread reads half as much again from huge ones (docs/processors.md). torch asks for them where a tensor has
its own (`THP_MEM_ALLOC_ENABLE`), which leaves out what begins or ends within one, and weights that lie in a mapped
file, as safetensors leaves them, with their first numbers anywhere.
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptq.ops import free_memory

LARGE_BYTES = 1 << 20
"""Of tensors that are worth it."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h; the second from Linux 6.1 on
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


@cache
def _size() -> int:
    """Bytes of a huge page; 0 where there are none, or where they are switched off."""
    if sys.platform != "linux" or os.environ.get("THP_MEM_ALLOC_ENABLE") == "0":
        return 0
    try:
        enabled = (SETTINGS / "enabled").read_text()
        return 0 if "[never]" in enabled else int((SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


@cache
def _advise() -> Any:
    """`madvise` of the C library."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def take_out_of_files(modules: Iterable[nn.Module]) -> None:
    """Give the large CPU parameters of these modules that lie in mapped files memory of their own. Not where that would
    be more than half of what is free: a prepacked checkpoint may be larger than that, and is read from its files."""
    held = {id(p): p for module in modules for p in module._parameters.values() if p is not None and _is_large(p)}
    mapped = _in_files(held.values())
    if sum(p.nbytes for p in mapped) <= free_memory.available() // 2:
        for parameter in mapped:
            parameter.data = parameter.data.clone()


def use(tensors: Iterable[Tensor]) -> None:
    """Have the system put large CPU tensors on huge pages, now where it can, else in its own time. What lies between
    two of them may come along; the numbers stay what they are, at the same addresses."""
    size = _size()
    if not size:
        return
    large = [t for t in tensors if _is_large(t)]
    mapped = {id(t) for t in _in_files(large)}
    for begin, end in _pieces((t for t in large if id(t) not in mapped), size):
        first, last = -(-begin // size) * size, end // size * size
        if first < last and _advise()(first, last - first, MADV_HUGEPAGE) == 0:
            _advise()(first, last - first, MADV_COLLAPSE)  # may find no room, or be unknown


def _in_files(tensors: Iterable[Tensor]) -> list[Tensor]:
    files = [range(begin, end) for begin, end in _mapped_files()]
    return [t for t in tensors if any(t.data_ptr() in file for file in files)]


def _mapped_files() -> Iterator[tuple[int, int]]:
    """The addresses at which this process has files; none where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        place, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, end = place.split("-")
            yield int(begin, 16), int(end, 16)


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes >= LARGE_BYTES


def _pieces(tensors: Iterable[Tensor], gap: int) -> Iterator[tuple[int, int]]:
    """The addresses of some tensors, those less than `gap` bytes apart together."""
    begin = end = 0
    for first, last in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
        if first - end >= gap:
            if end:
                yield begin, end
            begin = first
        end = max(end, last)
    if end:
        yield begin, end
