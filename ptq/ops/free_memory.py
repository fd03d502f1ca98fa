"""Memory that may be taken."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NAMES = {"": ("memory.max", "memory.current", ""),
         "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}  # fmt: skip
"""Of control groups of version 2 and 1: the files with the limit and with what is in use, and how lines of memory.stat
begin."""
GIVEN_BACK = ("active_file", "inactive_file", "slab_reclaimable")
"""What these lines call the part of what is in use that is given back when somebody asks for memory."""


def available(device: torch.device | None = None) -> int:
    """Bytes that are free: of a GPU, or of the machine, or of the container or job whose limit leaves less."""
    if device is not None and device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of torch's own allocator
        return torch.cuda.mem_get_info(device)[0] + unused
    return min([psutil.virtual_memory().available, *_left(GROUPS, OWN_GROUPS)])


def _left(groups: Path, own: Path) -> Iterator[int]:
    """What the limits of this process's control group, and of those around it, leave. A container may see its own as
    the outermost one, whatever the path says."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") > 1]
    except (OSError, ValueError):  # no Linux
        return
    for _, controllers, path in lines:
        for controller in {*controllers.split(",")} & NAMES.keys():
            outermost = groups / controller
            inner = outermost / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if outermost in (folder, *folder.parents):
                    yield from _left_in(folder, *NAMES[controller])


def _left_in(folder: Path, limit: str, used: str, prefix: str) -> Iterator[int]:
    try:
        most, now = int((folder / limit).read_text()), int((folder / used).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield max(0, most - now + sum(int(counts.get(f"{prefix}{name}", 0)) for name in GIVEN_BACK))
    except (OSError, ValueError):  # no limit (`max`), or nothing of the kind here
        return
