"""The compiled kernels: found once, loaded once. Without them every op still runs, on its reference in plain torch.

Ops are declared in Python (schema, fake kernel, reference); the libraries built from `csrc/` only register kernels for
the CPU and CUDA dispatch keys, so loading one overrides the reference and nothing else has to know.
"""

import ctypes
import functools
import importlib.metadata
import json
import warnings
from pathlib import Path

import torch

from ptq.ops import memory
from ptq.startup import DISTRIBUTION

CPU_LEVELS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "dotprod")
"""Of csrc/common/cpu_level.h. `dotprod` is of Arm; from `avx512` on, a level may be there without `avxvnni`."""
_CPU, _CUDA = "libptq_cpu.so", "libptq_cuda.so"


def _editable_folder(source: Path) -> Path | None:
    """Where `pip install -e` put the libraries, if this very source tree is what was installed."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable") or origin.get("url") != source.as_uri():
        return None
    return Path(str(distribution.locate_file("ptq")))


def _find(name: str) -> Path | None:
    package = Path(__file__).resolve().parents[1]
    folders = [package, _editable_folder(package.parent)]
    return next((f / name for f in folders if f is not None and (f / name).is_file()), None)


def _cuda_library() -> Path | None:
    """The CUDA kernels, where they are built and torch has CUDA and a device."""
    gpu = _find(_CUDA)
    return gpu if gpu is not None and torch.version.cuda is not None and torch.cuda.is_available() else None


@functools.cache
def load() -> bool:
    """Load the native libraries, once. Returns whether the CPU kernels are there; warns, once, when they are not.

    A library that is there and cannot be loaded is an error (`OSError`): the build does not fit this torch.
    """
    cpu = _find(_CPU)
    if cpu is None:
        warnings.warn(
            "ptq: the native kernels are not built, so everything runs on slow references; "
            "build them with `pip install --no-build-isolation .` (or `-e .`) in the source folder",
            stacklevel=2,
        )
        return False
    torch.ops.load_library(str(cpu))
    memory.set_thresholds()
    if (gpu := _cuda_library()) is not None:
        torch.ops.load_library(str(gpu))
    return True


@functools.cache
def has_cuda() -> bool:
    """Whether CUDA tensors meet the CUDA kernels (loads them)."""
    return load() and _cuda_library() is not None


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_find(_CPU)))


def cpu_level() -> str:
    """Which of `CPU_LEVELS` the kernels run at; `portable` where they are not built."""
    return CPU_LEVELS[_library().ptq_cpu_level()] if load() else CPU_LEVELS[0]


def set_cpu_level(level: str | None) -> str:
    """For tests: run CPU kernels at `level`, one of `CPU_LEVELS`, or at the next one below that this machine has; None
    for the best.

    Returns the level now in use. Needs the native library.
    """
    return CPU_LEVELS[_library().ptq_set_cpu_level(-1 if level is None else CPU_LEVELS.index(level))]


def has_slow_pairs() -> bool:
    """Whether the kernels use AVX-512 BF16 on a processor that multiplies float32 faster: Intel's."""
    return load() and bool(_library().ptq_has_slow_pairs())


def set_slow_pairs(slow: bool | None) -> None:
    """For tests: take the processor for one of those, or not; None for what it is. Needs the native library."""
    _library().ptq_set_slow_pairs(-1 if slow is None else slow)
