"""The scripts that make the tables of docs/results.md and perplexity.md: what they compare, and what they say of it."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import TINY, save_model
from transformers import AutoConfig

from ptq.commands.windows import Windows
from ptq.models.model_shape import shape_of
from ptq.pipeline.pipeline import plan
from ptq.pipeline.result import Result
from quarot.plan import UNTURNED_CLIP, clips_for

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """scripts/activation_table.py, whose siblings it imports."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import activation_table

    yield activation_table
    for name in ("activation_table", "perplexity_table"):
        sys.modules.pop(name, None)


@pytest.fixture
def task(tables: ModuleType, tmp_path: Path) -> Any:
    folder = save_model(tmp_path / "model", **TINY)
    windows = Windows(torch.zeros(3, 4, dtype=torch.long), 12, "", "")
    return tables.Task(folder, tmp_path / "text.txt", windows, 2, 4)


def recipes_run(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> list[Any]:
    """Stands in for whole runs: the n-th gives the n-th loss; returns what was asked for, with its plan."""
    asked: list[Any] = []

    def quantized(task: Any, recipe: Any) -> tuple[Result, list[float]]:
        loss = losses[len(asked)]
        asked.append((task.folder, recipe, plan(str(task.folder), recipe).plan))
        return Result(task.folder, 4.5, 10, 1e-6, 0.1, 0.9), [loss - 0.1, loss, loss + 0.1]

    monkeypatch.setattr(tables, "quantized", quantized)
    return asked


ORIGINAL = [0.9, 1.0, 1.1]


def test_the_ablation_adds_one_thing_at_a_time(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipes_run(tables, task, monkeypatch, [2.0, 1.8, 1.9, 1.5, 1.4, 1.35, 1.3])
    rows = list(tables.steps("ablation", task, 8, tables.ABLATION, ORIGINAL))
    plans = [found for _, _, found in asked]
    assert [any(linear.input for linear in found.linears) for found in plans] == [False, *[True] * 6]
    assert [found.cache.hadamard is not None for found in plans] == [False, False, *[True] * 5]
    assert [any(linear.online for linear in found.linears) for found in plans] == [False] * 3 + [True] * 4
    assert [recipe.cache_clip for _, recipe, _ in asked] == [1.0] * 4 + [None] * 3
    assert [found.cache.centered for found in plans] == [False] * 5 + [True] * 2
    clips = [{linear.activation.clip for linear in found.linears if linear.activation} for found in plans]
    assert clips == [{1.0}] * 4 + [{0.9}] * 3
    assert [recipe.rounding for _, recipe, _ in asked] == ["nearest"] * 6 + ["gptq"]
    for _, recipe, _ in asked:
        bits = (recipe.weight_bits, recipe.activation_bits, recipe.key_bits, recipe.value_bits, recipe.group_size)
        assert bits == (4, 4, 4, 4, 8)
    assert tables.percent(rows[0].loss_increase, 0.5) == pytest.approx((100 * (math.e - 1), 50 * math.e))
    assert rows[0].loss_increase_error == pytest.approx(0, abs=1e-12)
    assert rows[0].step is None and [row.step for row in rows[1:]] == pytest.approx(
        [-0.2, 0.1, -0.4, -0.1, -0.05, -0.05]
    )
    steps = [line for line in tables.verdicts(rows) if "ablation" in line]
    assert [line.split(":")[1].strip()[0] for line in steps] == ["-", "+", "-", "-", "-", "-"]


def test_r3_alone(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipes_run(tables, task, monkeypatch, [2.0, 1.8, 1.7])
    real = tables.keys_online
    edited: list[bool] = []
    monkeypatch.setattr(tables, "keys_online", lambda: edited.append(True) or real())
    rows = list(tables.steps("keys", task, 0, tables.KEYS[1], ORIGINAL))
    assert [row.name for row in rows] == ["K3, no R3", "K3 and R3", "K3 centred and R3"] and edited == [True] * 2
    assert [found.cache.hadamard is not None for _, _, found in asked] == [False, True, True]
    assert [found.cache.centered for _, _, found in asked] == [False, False, True]
    clip = clips_for(shape_of(AutoConfig.from_pretrained(task.folder)).head_dim)[3]
    assert [found.cache.key_clip for _, _, found in asked] == [UNTURNED_CLIP[3], clip, clip]
    assert [(found.cache.key_bits, found.cache.value_bits) for _, _, found in asked] == [(3, 16)] * 3
    assert not any(linear.online or linear.activation for _, _, found in asked for linear in found.linears)


def test_keys_with_outliers(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipes_run(tables, task, monkeypatch, [2.0, 1.8, 1.7, 4.0, 3.0, 2.5, 1.8, 1.7] * 3)
    rows = list(tables.keys_table(task, 0, ORIGINAL))
    four = rows[:8]
    names = ["K4, no R3", "K4 and R3", "K4 centred and R3"]
    planted = [f"outliers in keys, no balance, {name}" for name in names]
    assert [row.name for row in four[:6]] == [*names, *planted] and len(rows) == 24
    assert [row.name for row in four[6:]] == [f"outliers in keys, {name}" for name in names[1:]]
    assert [folder == task.folder for folder, _, _ in asked[:8]] == [True] * 3 + [False] * 5
    balanced = [any(linear.balance for linear in found.linears) for _, _, found in asked[:8]]
    assert balanced == [True] * 3 + [False] * 3 + [True] * 2
    steps = [-0.2, -0.1, None, -1.0, -0.5, -0.7, -0.1]
    assert [row.step for row in four[1:]] == [step and pytest.approx(step) for step in steps] and four[0].step is None


def test_clips_are_compared_over_seeds(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [2.0, 2.0, 2.0, 2.4, 1.8, 1.8, 1.8, 2.2] * len(tables.CLIPS)
    asked = recipes_run(tables, task, monkeypatch, losses)
    rows = list(tables.clips_table(task, 8, ORIGINAL))
    assert [recipe.seed for _, recipe, _ in asked] == [0, 1, 2, 3] * 2 * len(tables.CLIPS)
    clips = [recipe.activation_clip for _, recipe, _ in asked]
    assert clips == ([None] * 4 + ["search"] * 4) * len(tables.CLIPS)
    assert [row.loss_increase for row in rows[:2]] == pytest.approx([1.1, 0.9])
    assert [row.step for row in rows[:2]] == [None, pytest.approx(-0.2)]
    assert [row.name for row in rows[:2]] == ["W4A4KV4", "W4A4KV4, searched clips"] and len(rows) == 10
    assert [recipe.rotate for _, recipe, _ in asked] == [True] * 32 + [False] * 8


def test_planted_models_are_compared_with_themselves_unplanted(
    tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipes_run(tables, task, monkeypatch, [2.0, 800.0, 1.5, 1.52, 1.6, 1.6])
    rows = list(tables.planted_table(task, 8, ORIGINAL, 1))
    assert [folder == task.folder for folder, _, _ in asked] == [True, False] * 3
    assert [recipe.rotate for _, recipe, _ in asked] == [False, False, *[True] * 4]
    assert [row.loss_increase for row in rows] == pytest.approx([1.0, 798.0, 0.5, 0.02, 0.6, 0.0])
    assert all(tables.markdown(row).count("|") == 8 for row in rows)
    verdicts = list(tables.verdicts(rows))
    assert len(verdicts) == 3 and "collapses" in verdicts[0] and "+2.02 ± 0.00 % (bar: 3.0 %)" in verdicts[1]


def test_the_bits_are_what_their_names_say(tables: ModuleType, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipes_run(tables, task, monkeypatch, [1.0] * len(tables.BITS))
    rows = list(tables.bits_table(task, 0, ORIGINAL))
    for (_, recipe, _), row in zip(asked, rows, strict=True):
        name = row.name
        if name.startswith("W"):
            weight, activation, cache = (int(part) for part in name[1:].replace("A", " ").replace("KV", " ").split())
            assert (recipe.weight_bits, recipe.activation_bits) == (weight, activation)
            assert recipe.key_bits == recipe.value_bits == cache
        else:
            assert (recipe.weight_bits, recipe.activation_bits) == (16, 16)
            assert min(recipe.key_bits, recipe.value_bits) <= 8
    assert "W8A8KV8: +0.00 ± 0.00 % (bar: 0.5 %)" in list(tables.verdicts(rows))
