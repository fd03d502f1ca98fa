"""The scales between up and down, and of queries and keys: exact, and gone where nobody needs them."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import by_role
from safetensors.torch import load_file, save_file
from tiny_models import CACHED, DISTINCT, KEYS_WITHOUT_NORM, WRITTEN_PLAIN, save_model, tiny_config, tiny_model

import ptq
from ptq.hf.blocks import PartialModel
from ptq.models.model_shape import ModelShape, shape_of
from ptq.ops import hadamard
from ptq.pipeline import balance, pipeline, rewrite
from ptq.pipeline.job import Job
from ptq.pipeline.work import Record
from ptq.planning.plan import KeyBalance, LinearPlan
from ptq.planning.rotations import READERS
from ptq.statistics import key_means
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


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def behind_norm(linear: LinearPlan, job: Job, part: PartialModel) -> torch.Tensor:
    """A rewritten weight with the gain of the norm in front of it, which is 1 where R1 has folded it."""
    w, field = part.parameter(linear.dense_weight), READERS.get(linear.role.partition("+")[0])
    norm = None if field is None else getattr(job.family, field)
    if norm is None or not job.family.norm_tensors:
        return w
    return w * (part.parameter(f"{job.plan.layers}.1.{norm}.weight") + job.plan.norm_offset)


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
@pytest.mark.parametrize("model_type", [name for name in DISTINCT if name in WRITTEN_PLAIN])
def test_planted_outliers_vanish_to_the_bit(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type, dtype)
    planted = plant_outliers.plant(folder, tmp_path / "planted", channels=3)
    first, second = job_of(folder), job_of(planted)
    parts = first.original_block(1), second.original_block(1)
    first.rotate_block(1, parts[0])
    second.rotate_block(1, parts[1])
    for linear in first.plan.block(1):
        # Nothing is planted behind norms that a family does not have, or whose gains it stores less 1.
        assert torch.equal(*(behind_norm(linear, job, part) for job, part in zip((first, second), parts, strict=True)))
        assert same(*(job.bias(linear) for job in (first, second)))


def test_usual_models_are_left_as_they_are(tmp_path: Path) -> None:
    job = job_of(save_model(tmp_path / "model"))
    up = job.plan.linear("model.layers.0.mlp.up_proj")
    assert up is not None and up.balance is not None
    scale = job._factor(up)
    assert scale is not None and torch.equal(scale, torch.ones_like(scale))
    without = replace(up, balance=None)
    assert torch.equal(job.rewritten(up, torch.float32), job.rewritten(without, torch.float32))


@pytest.mark.parametrize("recipe", [QuarotRecipe(online=False), QuarotRecipe(rotate=False)])
def test_only_where_the_channels_are_rotated(recipe: QuarotRecipe, tmp_path: Path) -> None:
    found = pipeline.plan(str(save_model(tmp_path / "model")), recipe).plan
    assert not any(linear.balance for linear in found.linears)


# --- queries and keys -----------------------------------------------------------------------------------------------

CACHE = QuarotRecipe(rounding="nearest", key_bits=4)
SHAPE = ModelShape(hidden=48, intermediate=64, vocab=9, blocks=1, heads=6, kv_heads=2, head_dim=8, rotary=8, tied=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", KEYS_WITHOUT_NORM)
def test_outliers_planted_in_keys_vanish_to_the_bit(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type, dtype)
    jobs = job_of(folder, CACHE), job_of(plant_outliers.plant_keys(folder, tmp_path / "planted"), CACHE)
    parts = [job.original_block(1) for job in jobs]
    for job, part in zip(jobs, parts, strict=True):
        job.rotate_block(1, part)
    for linear in jobs[0].plan.block(1):
        assert torch.equal(parts[0].parameter(linear.dense_weight), parts[1].parameter(linear.dense_weight))
        assert same(*(job.bias(linear) for job in jobs))


def test_large_biases_of_keys(tmp_path: Path) -> None:
    """As Qwen2 has them: the function stays, and what is cached has channels of like size."""
    folder = save_model(tmp_path / "model", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.self_attn.k_proj.bias", "model.layers.1.self_attn.k_proj.bias"):
        tensors[name][2] = 300.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = ptq.quantize(folder, tmp_path / "out", replace(CACHE, weight_bits=8), ptq.RunOptions(progress=False))
    assert result.rotation_error < 1e-5
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert 10 < written["model.layers.1.self_attn.k_proj.bias"].abs().max() < 60


def test_the_scale_of_keys_makes_the_error_least() -> None:
    """(sum of (|k| / s)^2) (sum of (s |q|)^2), against its minimum: the nearest power of two costs at most 25 / 16."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(size, generator=generator).double() for size in (2 * 3 * 8, 2 * 8))
    key *= torch.logspace(-3, 3, 16).double()[torch.randperm(16, generator=generator)]
    partner = balance.partners(SHAPE, False)
    found = balance.key_scale(query, key, partner)
    assert torch.equal(found[:, :4], found[:, 4:])
    found = found[:, :4]
    q, k = query.view(2, 3, 2, 4).sum((1, 2)), key.view(2, 2, 4).sum(1)

    def error(s: torch.Tensor) -> torch.Tensor:
        return (k / s**2).sum(1) * (q * s**2).sum(1)

    best = (k * q).sqrt().sum(1) ** 2
    assert (error(found) < 25 / 16 * best).all() and (error(found) < error(torch.ones(2, 4))).all()
    assert torch.equal(found, found.log2().round().exp2()) and (found == 1).any(1).all()
    key[[0, 4]] = 0  # a pair
    assert (balance.key_scale(query, key, partner)[0, [0, 4]] == 1).all()
    nothing = torch.zeros(8).double()
    assert torch.equal(balance.key_scale(nothing, nothing, partner), torch.ones(1, 8).double())


@pytest.mark.parametrize(("rotary", "interleaved"), [(20, False), (20, True), (10, False), (0, False)])
def test_what_a_centre_leaves_of_a_bias(rotary: int, interleaved: bool) -> None:
    """Against a bias that is turned and centred by hand."""
    model = tiny_model(tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    theta = model.model.rotary_emb.inv_freq
    assert len(theta) == 10
    if rotary < 20:
        model.model.rotary_emb.inv_freq = theta[: rotary // 2]
        theta = theta[: rotary // 2]
    shape = replace(SHAPE, head_dim=20, rotary=rotary)
    found = key_means.bias_left(model, shape, interleaved)
    partner, pairs = balance.partners(shape, interleaved), range(rotary // 2)
    first = [2 * pair if interleaved else pair for pair in pairs]
    positions = key_means.spread(1, 4096, key_means.reach(model.config))[0].double()
    wanted = torch.zeros(20).double()
    for channel, angle in zip(first, theta.double(), strict=True):
        turned = torch.polar(torch.ones_like(positions), positions * angle) * (3 + 4j)
        wanted[[channel, int(partner[channel])]] = ((turned - turned.mean()).abs() ** 2).mean() / 25
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    assert not rotary or (found[first[0]] > 0.9 and found[first[-1]] < 0.7)


@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_a_centre_leaves_nothing_of_a_bias_where_nothing_is_turned(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    assert not key_means.bias_left(model, shape_of(model.config), False).any()


def test_a_bias_that_the_centre_takes_does_not_count() -> None:
    """Of keys alone, and in the rows of keys alone."""
    read = {"k.weight": torch.ones(16, 3), "q.weight": torch.ones(48, 3), "n": torch.ones(3)}
    read["k.bias"] = torch.full((16,), 40.0)
    given = KeyBalance("q", "k", "n", SHAPE)
    left = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 0]).double()
    found = balance.scale_of(given, read.get, bias_left=left)
    assert torch.equal(found, balance.scale_of(given, {**read, "k.bias": read["k.bias"] * left.repeat(2)}.get))
    assert not torch.equal(found, balance.scale_of(given, read.get))
    read["q.bias"] = torch.zeros(48)
    read["q.bias"][[0, 3]] = 40.0
    assert not torch.equal(balance.scale_of(given, read.get, bias_left=left), found)


@pytest.mark.parametrize(
    ("rotary", "interleaved", "wanted"),
    [
        (8, False, [4, 5, 6, 7, 0, 1, 2, 3]),
        (8, True, [1, 0, 3, 2, 5, 4, 7, 6]),
        (4, False, [2, 3, 0, 1, 4, 5, 6, 7]),
        (4, True, [1, 0, 3, 2, 4, 5, 6, 7]),
    ],
)
def test_partners_are_what_rope_turns(rotary: int, interleaved: bool, wanted: list[int]) -> None:
    """And a channel without a partner has a scale of its own, as if it were two."""
    partner = balance.partners(replace(SHAPE, rotary=rotary), interleaved)
    assert partner.tolist() == wanted
    query, key = torch.ones(8).double(), torch.ones(8).double()
    key[7] = 4.0**4  # of the mean squares: a scale of 4 for a channel alone
    alone = wanted[7] == 7
    expected = torch.ones(1, 8).double()
    expected[0, [7, wanted[7]]] = 4.0 if alone else 2.0 ** round(math.log2((4**4 + 1) / 2) / 4)
    assert torch.equal(balance.key_scale(query, key, partner), expected)


def test_keys_of_usual_models_are_left_as_they_are(tmp_path: Path) -> None:
    job = job_of(save_model(tmp_path / "model"), CACHE)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        linear = job.plan.linear(name)
        assert linear is not None and linear.balance is not None
        factor = job._factor(linear)
        assert factor is not None and torch.equal(factor, torch.ones(linear.n).double())


@pytest.mark.parametrize("model_type", ["llama", "glm"])
def test_a_partial_rotary_factor_counts_where_the_model_reads_it(model_type: str, tmp_path: Path) -> None:
    """Llama turns whole heads, whatever the config says: the proof of the rotations would fail."""
    rope = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
    folder = save_model(tmp_path / "model", model_type, rope_parameters=rope)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj.weight" in name:
            tensor.view(2, 20, -1)[:, [1, 11]] *= 30
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    recipe = replace(CACHE, weight_bits=16)
    assert ptq.quantize(folder, tmp_path / "out", recipe, ptq.RunOptions(progress=False)).rotation_error < 1e-5


@pytest.mark.parametrize("model_type", CACHED)
def test_only_where_keys_are_quantised_and_have_no_norm(model_type: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type)

    def balanced(recipe: QuarotRecipe) -> set[str]:
        plan = pipeline.plan(str(folder), recipe).plan
        return {role for role, linear in by_role(plan, 1).items() if linear.balance and role in ("query", "key")}

    assert balanced(CACHE) == ({"query", "key"} if model_type in KEYS_WITHOUT_NORM else set())
    assert balanced(replace(CACHE, key_bits=16, value_bits=4)) == balanced(replace(CACHE, rotate=False)) == set()


# --- rows of one size -----------------------------------------------------------------------------------------------


def test_rows_have_one_size_behind_their_scale() -> None:
    w = torch.randn(300, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 300)[:, None]
    w[7] = 0
    scale = rewrite.row_scale(w)
    sizes = (w.double() / scale[:, None]).square().mean(1).sqrt()
    rest = torch.arange(300) != 7
    torch.testing.assert_close(sizes[rest], sizes[rest].mean().expand(299), rtol=1e-3, atol=0)
    assert scale[7] == 1 and torch.equal(scale, scale.to(torch.float16).double())
    assert scale[rest].square().sum() / 300 == pytest.approx(1, rel=1e-3)  # so the sum of all errors is what it was


def test_row_scales_stay_numbers_of_float16() -> None:
    scale = rewrite.row_scale(torch.cat([torch.full((5, 8), 1e-20), torch.full((1, 8), 1e10)]))
    assert scale.isfinite().all() and (scale > 0).all() and scale.min() == 2**-10


def test_even_rows_help_the_small_ones() -> None:
    """The relative error of a row that is 30 times smaller than the others, with and without the scale."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 64, generator=generator).double()
    w[::8] /= 30
    small = torch.arange(0, 64, 8)
    errors = {}
    for name, scale in (("plain", torch.ones(64).double()), ("even", rewrite.row_scale(w))):
        turned = hadamard.apply_columns(w / scale[:, None], None, 64)
        step = turned.abs().max() / 2
        back = hadamard.apply_columns((turned / step).round() * step, None, 64, transpose=True) * scale[:, None]
        errors[name] = ((back - w)[small].norm() / w[small].norm()).item()
    assert errors["even"] < 0.1 * errors["plain"]
