"""GPTAQ: weights that make up for what earlier rounding did to their inputs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import listing
from tiny_models import TINY, save_model

import ptq
from ptq.layers.linear import QuantLinear
from ptq.pipeline import stages
from ptq.pipeline.job import Job
from ptq.statistics.hessian import observe, whole
from ptq.weights import factor, rounding
from quarot.integer import IntegerGrid
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

QUIET = ptq.RunOptions(progress=False, report=False)
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gram(k: int, rank: int) -> torch.Tensor:
    x = seeded(rank, k, seed=rank).double()
    return x.T @ x


@pytest.mark.parametrize("panel", [1, 7, 1024])
def test_rows_are_solved_in_any_order_of_columns(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "PANEL", panel)
    h, b, order = gram(24, 60), seeded(5, 24), torch.randperm(24, generator=torch.Generator().manual_seed(2))
    lower, added, _ = factor.factor(h.float(), h.diagonal().float(), order, 0.01, "w")
    damped = h + torch.diag(added[order.argsort()].double())
    expected = torch.linalg.solve(damped, b.double().T).T
    found = factor.solved_rows(b.clone(), lower, order)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [32, 29])
def test_what_is_rounded_is_the_weight_that_fits_the_exact_model_best(k: int) -> None:
    """With all of the drift, W' x̂ is as close to W x as any matrix brings it: no step from it lowers the loss."""
    x = seeded(200, k, seed=3).double()
    seen = x + 0.3 * seeded(200, k, seed=4).double() + 0.2 * x.roll(1, 1)
    w, h, cross = seeded(6, k, seed=5), seen.T @ seen, (x - seen).T @ seen
    fitted = (torch.linalg.lstsq(seen, x @ w.double().T).solution.T).float()
    drift = (w.double() @ cross).float()
    found = rounding.ldlq(w, h.float(), IntegerGrid(4), drift=drift, damping=1e-9)
    expected = rounding.ldlq(fitted, h.float(), IntegerGrid(4), damping=1e-9)
    torch.testing.assert_close(found.scales, expected.scales)
    assert (found.codes != expected.codes).sum() <= 2  # ties, which the last bits of W' decide
    plain = rounding.ldlq(w, h.float(), IntegerGrid(4), damping=1e-9)

    def loss(rounded: rounding.Rounded) -> float:
        decoded = IntegerGrid(4).decode(rounded.codes, rounded.scales).double()
        return float((x @ w.double().T - seen @ decoded.T).square().sum())

    assert loss(found) < 0.9 * loss(plain)


def rotated_block(source: Path) -> tuple[Job, Any]:
    recipe = QuarotRecipe(rounding="nearest", activation_bits=4, key_bits=4, value_bits=3)
    target = ptq.plan(str(source), recipe)
    drawn = {name: torch.ones(length, dtype=torch.int8) for name, length in target.plan.signs.items()}
    job = Job(recipe=recipe, signs=drawn, device=torch.device("cpu"), **vars(target))
    part = job.original_block(0)
    job.rotate_block(0, part)
    return job, part


def test_cross_moments_are_of_the_exact_and_of_the_quantised_input(tiny: Path) -> None:
    job, part = rotated_block(tiny)
    k = job.plan.block(0).__iter__().__next__().k
    exact, hidden = seeded(2, 9, k), seeded(2, 9, k, seed=1)
    seen: dict[str, torch.Tensor] = {}

    def kept(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = part.module(DOWN)
        assert isinstance(module, QuantLinear)
        handle = module.register_forward_pre_hook(lambda m, x: seen.update(x=m.effective_input(x[0]).flatten(0, 1)))
        left = part.run(state)
        handle.remove()
        return left, seen["x"].double()

    before, x = kept(exact)
    job.quantize_inputs(0, part)
    quantised, seen_x = kept(hidden)
    with part.exact():
        assert torch.equal(part.run(exact), before), "inside, the block is the rotated one"
    assert torch.equal(part.run(hidden), quantised), "and outside what it was"
    sums, counts = observe(part, [QUERY, DOWN], [hidden], [exact], [DOWN])
    torch.testing.assert_close(whole(sums[DOWN]).double(), seen_x.T @ seen_x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums[f"{DOWN}.cross"][0].double(), (x - seen_x).T @ seen_x, rtol=1e-4, atol=1e-3)
    assert counts == {QUERY: 18, DOWN: 18} and f"{QUERY}.cross" not in sums


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefghij klmnop", k=2000)))
    return str(path)


@pytest.mark.parametrize("method", [QuarotRecipe, QuipSharpRecipe])
def test_a_run_with_an_alpha_stops_and_goes_on(
    method: type[Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptq.statistics.chunks.CHUNK_TOKENS", 64)
    model = save_model(tmp_path / "model", **TINY)
    options = {"calibration": text, "samples": 8, "sequence_length": 32, "embedding_bits": 4}
    if method is QuarotRecipe:
        options |= {"activation_bits": 4, "key_bits": 4, "value_bits": 4}
    recipe, plain = method(**options, gptaq_alpha=0.5), method(**options)
    assert "gptaq_alpha" not in plain.as_dict() and recipe.as_dict()["gptaq_alpha"] == 0.5
    ptq.quantize(model, tmp_path / "plain", plain, QUIET)
    ptq.quantize(model, tmp_path / "whole", recipe, QUIET)
    real, calls = stages.advance, []

    def advance(tasks: Any, index: int) -> None:
        calls.append(index)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(tasks, index)

    monkeypatch.setattr(stages, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    whole, out, without = (listing(tmp_path / name) for name in ("whole", "out", "plain"))
    assert out["model.safetensors"] == whole["model.safetensors"] != without["model.safetensors"]


def test_a_model_with_experts_takes_it_for_the_rest(text: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3_moe")
    options: dict[str, Any] = {"calibration": text, "samples": 8, "sequence_length": 32}
    for name, alpha in (("plain", 0.0), ("out", 0.5)):
        ptq.quantize(model, tmp_path / name, QuarotRecipe(**options, gptaq_alpha=alpha), QUIET)
    names = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "out")]
    assert names[0] != names[1]


def test_it_brings_the_demo_closer_to_the_original(tmp_path: Path) -> None:
    """Two bits, a part of the text, and the probe: single seeds by 3 to 9 % here, with half of it by 0 to 7, as the
    processor rounds; by more on all of the text (docs/results.md)."""
    shares = []
    for seed in range(2):
        found = []
        for alpha in (0.0, 0.25):
            recipe = QuarotRecipe(weight_bits=2, samples=32, sequence_length=256, gptaq_alpha=alpha, seed=seed)
            found.append(ptq.quantize("demo", tmp_path / f"{seed} {alpha}", recipe, QUIET).kl)
        shares.append(found[1] / found[0])
    assert sum(shares) < len(shares), shares
