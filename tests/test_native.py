"""The native library: found, loaded once, and said to be missing once."""

import functools
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ptq.methods import METHODS
from ptq.ops import native

ROOT = Path(__file__).resolve().parents[1]


def cpu_kernels() -> list[str]:
    """Ops that the sources register a CPU kernel for."""
    sources = [path.read_text() for path in sorted(ROOT.glob("csrc/*/*_cpu.cpp"))]
    return [name for source in sources for name in re.findall(r'm\.impl\("(\w+)"', source)]


AVX2_ONLY = ("prefill_attention", "add_gram_", "add_cross_")


@pytest.mark.skipif(not native.load(), reason="native kernels are not built")
@pytest.mark.parametrize("op", cpu_kernels())
def test_kernels_override_the_reference(op: str):
    assert op in declared()
    if op in AVX2_ONLY and native.set_cpu_level(None) in ("portable", "dotprod"):
        pytest.skip("without AVX2 torch is faster")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CPU")


CUDA_ONLY = {
    "integer_linear_fragments", "integer_quantized_fragments", "minifloat_linear_fragments",
    "minifloat_quantized_fragments", "e8p_linear_fragments", "e8p_quantized_fragments", "e8p_dequantize_fragments",
    "hadamard_to", "norm_input", "gate_input", "kv_append_at", "decode_attention_at", "kv_decode_attention_at",
}  # fmt: skip
"""Ops whose reference is what a CPU runs."""


def test_every_op_has_a_cpu_kernel():
    kernels = cpu_kernels()
    assert len(kernels) == len(set(kernels))
    assert declared() - set(kernels) == {*CUDA_ONLY, "no_gradient"}  # which only raises


@functools.cache
def declared() -> set[str]:
    """Ops that any module declares."""
    for package in ("ptq", *METHODS):
        for path in (ROOT / package).rglob("[!_]*.py"):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return {name for library, name in names if library == "ptq"}


def levels_of(best: str) -> list[str]:
    """Those of a machine whose best level this is, in their order."""
    if best == "dotprod":
        return ["portable", best]
    levels = native.CPU_LEVELS[: native.CPU_LEVELS.index(best) + 1]
    return [level for level in levels if level != "avxvnni" or native.set_cpu_level(level) == level]


@pytest.mark.skipif(not native.load(), reason="native kernels are not built")
def test_cpu_levels():
    try:
        levels = levels_of(native.set_cpu_level(None))
        for i, level in enumerate(native.CPU_LEVELS):
            assert native.set_cpu_level(level) == [x for x in levels if native.CPU_LEVELS.index(x) <= i][-1]
    finally:
        native.set_cpu_level(None)


def test_unbuilt_source_runs_and_says_so_once(tmp_path: Path):
    """A copy of the Python files alone: one warning that names the remedy, and right results."""
    (tmp_path / "ptq" / "ops").mkdir(parents=True)
    (tmp_path / "ptq" / "__init__.py").touch()
    ops = (f"ops/{name}" for name in ("__init__", "memory", "native", "op_declarations", "paley", "hadamard"))
    for name in ("errors", "startup", *ops):
        (tmp_path / "ptq" / f"{name}.py").write_text((ROOT / "ptq" / f"{name}.py").read_text())
    program = (
        # An editable install finds the package elsewhere, before the path is asked.
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "import torch, ptq.ops.native as n, ptq.ops.hadamard as h\n"
        "n.load(); assert not n.load()\n"
        "x = torch.randn(2, 12); y = h.apply(h.apply(x, None, 12), None, 12, True)\n"
        "assert torch.allclose(x, y, atol=1e-5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install --no-build-isolation .") == 1


def test_missing_library_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_find", lambda name: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert native.load.__wrapped__() is False
    assert len(caught) == 1 and "native kernels are not built" in str(caught[0].message)
