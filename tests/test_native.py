"""The native library: found, loaded once, and said to be missing once."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from ptq import native


def test_load_is_idempotent():
    assert native.load() == native.load() == native.available()


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
def test_kernels_override_the_reference():
    import ptq.kv_ops  # noqa: F401
    import quarot.integer  # noqa: F401
    import quip_sharp.e8p_format  # noqa: F401

    ops = (
        "hadamard", "hadamard_", "hadamard_quantize", "quantize_tokens", "integer_fit", "integer_round", "integer_ldlq",
        "integer_pack", "integer_linear", "integer_prepack", "integer_unprepack", "integer_linear_tiled",
        "integer_linear_quantized", "integer_layer", "kv_append", "kv_dequantize", "kv_attend", "kv_decode_attention",
        "dense_linear", "e8p_round", "e8p_ldlq",
        "e8p_decode", "e8p_prepack", "e8p_unprepack", "e8p_linear_tiled", "e8p_linear_quantized",
    )  # fmt: skip
    for op in ops:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ptq::{op}", "CPU"), op


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
def test_cpu_levels():
    try:
        best = native.set_cpu_level(None)
        assert native.set_cpu_level("portable") == "portable"
        reached = [native.set_cpu_level(level) for level in native.CPU_LEVELS]
        assert reached == [min(level, best, key=native.CPU_LEVELS.index) for level in native.CPU_LEVELS]
    finally:
        native.set_cpu_level(None)


def test_unbuilt_source_runs_and_says_so_once(tmp_path: Path):
    """A copy of the Python files alone: one warning that names the remedy, and right results."""
    source = Path(native.__file__).parent
    (tmp_path / "ptq").mkdir()
    (tmp_path / "ptq" / "__init__.py").touch()
    for name in ("errors.py", "memory.py", "native.py", "op_declarations.py", "paley.py", "hadamard.py"):
        (tmp_path / "ptq" / name).write_text((source / name).read_text())
    program = (
        # An editable install finds the package elsewhere, before the path is asked.
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "import torch, ptq.native as n, ptq.hadamard as h\n"
        "n.load(); assert not n.available()\n"
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
