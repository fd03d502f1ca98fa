"""The scale between up and down: exact, and gone where nobody needs it."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import save_model

from ptq import balance, hadamard, pipeline
from ptq.families import FAMILIES
from ptq.job import Job, dense_weight
from ptq.work import Record
from quarot.plan import QuarotRecipe

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "plant_outliers.py"
spec = importlib.util.spec_from_file_location("plant_outliers_for_balance", SCRIPT)
assert spec and spec.loader
plant_outliers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plant_outliers)

RECIPE = QuarotRecipe(rounding="nearest")


def job_of(folder: Path, recipe: QuarotRecipe = RECIPE) -> Job:
    target = pipeline.plan(str(folder), recipe)
    signs = Record.of(recipe, target.plan, "", None).sign_vectors(target.plan)
    return Job(recipe=recipe, signs=signs, device=torch.device("cpu"), **vars(target))


def test_the_scale_is_the_power_of_two_next_to_the_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(600, 8, generator=generator), torch.randn(300, 600, generator=generator)
    up *= torch.logspace(-2, 2, 600)[:, None]
    up[3], down[:, 5] = 0, 0
    ratios = torch.tensor([(float(down[:, c].norm()) / max(float(up[c].norm()), 1e-30)) ** 0.5 for c in range(600)])
    alive = [c for c in range(600) if c not in (3, 5)]
    median = ratios[alive].median()
    found = balance.scale(up, down)
    for c in alive:
        assert 2**-0.51 < float(found[c] * median / ratios[c]) < 2**0.51 and float(found[c].log2()).is_integer()
    assert found[3] == found[5] == 1 and found.min() < 0.5 and found.max() > 2
    assert torch.equal(balance.scale(torch.zeros(4, 2), torch.ones(3, 4)), torch.ones(4).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_planted_outliers_vanish_to_the_bit(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type, dtype)
    planted = plant_outliers.plant(folder, tmp_path / "planted", channels=3)
    first, second = job_of(folder), job_of(planted)
    parts = first.original_block(1), second.original_block(1)
    first.rotate_block(1, parts[0])
    second.rotate_block(1, parts[1])
    for linear in first.plan.block(1):
        # A family without norms in front of its readers has nothing planted there.
        assert torch.equal(parts[0].parameter(dense_weight(linear)), parts[1].parameter(dense_weight(linear)))
        biases = [job.bias(linear) for job in (first, second)]
        assert biases[0] is None and biases[1] is None or torch.equal(biases[0], biases[1])


def test_usual_models_are_left_as_they_are(tmp_path: Path) -> None:
    job = job_of(save_model(tmp_path / "model"))
    up = job.plan.linear("model.layers.0.mlp.up_proj")
    assert up is not None and up.balance is not None
    scale = job._scale(up)
    assert scale is not None and torch.equal(scale, torch.ones_like(scale))
    without = replace(up, balance=None)
    assert torch.equal(job.rewritten(up, torch.float32), job.rewritten(without, torch.float32))


@pytest.mark.parametrize("recipe", [QuarotRecipe(online=False), QuarotRecipe(rotate=False)])
def test_only_where_the_channels_are_rotated(recipe: QuarotRecipe, tmp_path: Path) -> None:
    found = pipeline.plan(str(save_model(tmp_path / "model")), recipe).plan
    assert not any(linear.balance for linear in found.linears)


# --- rows of one size -----------------------------------------------------------------------------------------------


def test_rows_have_one_size_behind_their_scale() -> None:
    w = torch.randn(300, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 300)[:, None]
    w[7] = 0
    scale = balance.row_scale(w)
    sizes = (w.double() / scale[:, None]).square().mean(1).sqrt()
    rest = torch.arange(300) != 7
    torch.testing.assert_close(sizes[rest], sizes[rest].mean().expand(299), rtol=1e-3, atol=0)
    assert scale[7] == 1 and torch.equal(scale, scale.to(torch.float16).double())
    assert scale[rest].square().sum() / 300 == pytest.approx(1, rel=1e-3)  # so the sum of all errors is what it was


def test_row_scales_stay_numbers_of_float16() -> None:
    scale = balance.row_scale(torch.cat([torch.full((5, 8), 1e-20), torch.full((1, 8), 1e10)]))
    assert scale.isfinite().all() and (scale > 0).all() and scale.min() == 2**-10


def test_even_rows_help_the_small_ones() -> None:
    """The relative error of a row that is 30 times smaller than the others, with and without the scale."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 64, generator=generator).double()
    w[::8] /= 30
    small = torch.arange(0, 64, 8)
    errors = {}
    for name, scale in (("plain", torch.ones(64).double()), ("even", balance.row_scale(w))):
        turned = hadamard.apply_columns(w / scale[:, None], None, 64)
        step = turned.abs().max() / 2
        back = hadamard.apply_columns((turned / step).round() * step, None, 64, transpose=True) * scale[:, None]
        errors[name] = ((back - w)[small].norm() / w[small].norm()).item()
    assert errors["even"] < 0.1 * errors["plain"]
