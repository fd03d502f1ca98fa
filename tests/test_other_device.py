"""Whole runs on a device that is not the CPU (`simulated_device`): nothing meets a tensor that was left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model
from torch.utils import backend_registration

TEXT = dict(samples=16, sequence_length=32)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "quarot": ("quarot", dict(group_size=32, activation_bits=4, key_bits=4, value_bits=4, cache_sinks=2, **TEXT)),
    "quarot with a search": (
        "quarot",
        dict(activation_bits=8, activation_clip="search", symmetric=False, sweeps=1, **TEXT),
    ),
    "quarot offline": ("quarot", dict(rounding="nearest", online=False, embedding_bits=8)),
    "fp6": ("fp6", dict(rounding="gptq", activation_bits=8, rotate=True, sweeps=1, **TEXT)),
    "fp6 without text": ("fp6", dict(group_size=32, scale_search="mse", element="e3m2", embedding_bits=6)),
    "quip-sharp": ("quip-sharp", dict(bits=2, sweeps=1, finetune="blocks", finetune_epochs=1, **TEXT)),
    "quip-sharp, tuned whole": ("quip-sharp", dict(rounding="nearest", finetune="full", finetune_epochs=1, **TEXT)),
}


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backend in Python",
)
@pytest.mark.parametrize("run", RUNS)
def test_a_run_stays_on_its_device(run: str, tmp_path: Path) -> None:
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes["num_hidden_layers"] = 1
    model, (method, options) = save_model(tmp_path / "model", "llama", **sizes), RUNS[run]
    if "samples" in options:
        (tmp_path / "text.txt").write_text(" ".join(map(str, range(3000))))
        options = options | {"calibration": str(tmp_path / "text.txt")}
    script = Path(__file__).with_name("simulated_device.py")
    command = [sys.executable, str(script), str(model), str(tmp_path / "out"), method, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "config.json").is_file()
