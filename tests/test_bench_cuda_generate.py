"""scripts/bench_cuda_generate.py on the CPU, with a tiny model: its rows, its check, and the models that it makes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from typer import Typer
from typer.testing import CliRunner, Result

from ptq.kv.attention import SETTINGS, attach
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS
from ptq.ops import hadamard

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, whose siblings it imports."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_cuda_generate

    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield bench_cuda_generate
    for name in ("bench_cuda_generate", "bench_cuda", "bench_cuda_cases", "random_packed_model"):
        sys.modules.pop(name, None)


def run(bench: ModuleType, output: Path, *options: str) -> tuple[Result, list[dict[str, Any]]]:
    """What the command prints and writes."""
    app = Typer(add_completion=False)
    app.command()(bench.main)
    result = CliRunner().invoke(app, [f"--output={output}", "--device=cpu", "--shape=tiny", "--tokens=3", *options])
    path = output.with_suffix(".json")
    return result, json.loads(path.read_text())["rows"] if path.exists() else []


def test_an_embedding_counts_where_it_is_the_head(bench: ModuleType) -> None:
    """Tied or not, a token reads the matrix once."""
    config, read = bench.packed.config_of("tiny"), []
    for config.tie_word_embeddings in (False, True):
        read.append(bench.packed.bytes_per_token(bench.packed.build(None, config, CPU, torch.bfloat16)))
    assert read[0] == read[1]


def test_there_is_a_row_for_every_variant(bench: ModuleType, tmp_path: Path) -> None:
    result, rows = run(bench, tmp_path / "generate")
    assert result.exit_code == 0, result.output
    assert [row["variant"] for row in rows] == list(bench.VARIANTS)
    assert all(row["tokens_per_second"] > 0 and row["of_copy"] > 0 and row["error"] is None for row in rows)
    assert all(row["step"] == "eager, no graph" and row["difference"] < 0.05 for row in rows)
    linears = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    bits = [8 * (row["bytes_per_token"] - 2 * (256 * 128 + 5 * 128)) / linears for row in rows]  # head, norms: bfloat16
    assert bits[0] == 16
    for found, least in zip(bits[1:], (4.125, 6, 2, 4.125), strict=True):
        assert least <= found < least + 0.4  # scales, sign vectors
    table = (tmp_path / "generate.md").read_text()
    assert table in result.output and all(f"| {name} | eager, no graph |" in table for name in bench.VARIANTS)


def test_a_row_that_fails_says_so(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bench.packed.build

    def build(recipe: Any, *others: Any) -> Any:
        if recipe is None:
            raise RuntimeError("CUDA error: out of order")
        return built(recipe, *others)

    monkeypatch.setattr(bench.packed, "build", build)
    result, rows = run(bench, tmp_path / "generate", "--only=bf16", "--only=FP6 e2m3 W6A16")
    assert result.exit_code == 1 and "RuntimeError: CUDA error: out of order" in result.output
    assert [row["error"] is None for row in rows] == [False, True]


def test_steps_that_differ_from_a_forward_are_found(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "logits_of", lambda model, state, ids, positions: model(ids).logits)  # without a cache
    result, rows = run(bench, tmp_path / "generate", "--only=INT4 W4A16 g128")
    assert result.exit_code == 1 and "other logits" in rows[0]["error"]


@pytest.mark.parametrize("options", [["--shape=huge"], ["--only=INT3"]])
def test_names_that_do_not_exist(bench: ModuleType, tmp_path: Path, options: list[str]) -> None:
    result, rows = run(bench, tmp_path / "generate", *options)
    assert result.exit_code == 1 and "shapes are 8b, tiny" in result.output and not rows


def meant(linear: QuantLinear) -> Tensor:
    """The weight that a linear with transforms on both sides multiplies with: diag(sv) H_nᵀ Ŵ H_k diag(su)."""
    n, k = linear.out_features, linear.in_features
    w, online = linear.format.dequantize(linear.parts(), n, k).double(), linear.online
    for order, size, left in ((online.output, n, True), (online.input, k, False)):
        if order is not None:
            block = hadamard.matrix_from(order) / hadamard.order_of(order) ** 0.5
            h = torch.block_diag(*[block] * (size // len(block)))
            w = h.t() @ w if left else w @ h
    su, sv = linear.signs(INPUT_SIGNS), linear.signs(OUTPUT_SIGNS)
    if su is not None and sv is not None:
        w = sv.double()[:, None] * w * su.double()
    return w.float()


@torch.no_grad()
def test_the_random_models_are_what_their_codes_say(bench: ModuleType) -> None:
    config, ids = bench.packed.config_of("tiny"), torch.randint(256, (1, 20))
    for name, recipe in bench.VARIANTS.items():
        model = bench.packed.build(recipe, config, CPU, torch.float32)
        plain = bench.packed.build(None, config, CPU, torch.float32)
        weights = dict(model.named_parameters())
        linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
        assert len(linears) == (0 if recipe is None else 14)
        for path, parameter in plain.named_parameters():
            owner = linears.get(path.removesuffix(".weight"))
            parameter.copy_(weights[path] if owner is None else meant(owner))
            if owner is not None:
                assert 0.8 < parameter.std() * owner.in_features**0.5 < 1.3, path
        if getattr(model.base_model, SETTINGS, None) is not None:
            attach(plain, getattr(model.base_model, SETTINGS))
        found, wanted = model(ids).logits, plain(ids).logits
        assert (found - wanted).norm() < (0.05 if "A8" in name else 1e-2) * wanted.norm(), name
