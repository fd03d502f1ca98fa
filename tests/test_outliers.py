"""What a run measures of its activations and predictions, against sums made by hand; and planted outliers."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import DISTINCT, KEYS_WITHOUT_NORM, PLAIN_ATTENTION, TINY, WRITTEN_PLAIN, save_model, separated
from transformers import AutoModelForCausalLM

from ptq.commands import evaluate
from ptq.commands.windows import Windows
from ptq.models.families import FAMILIES
from ptq.models.model_shape import shape_of
from ptq.ops import hadamard
from ptq.ops.activations import Activation, dequantize
from ptq.pipeline import pipeline
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job
from ptq.pipeline.work import Record
from ptq.planning.outline import first_row
from ptq.statistics import outliers
from ptq.statistics.outliers import MeasuredInput
from quarot.plan import QuarotRecipe

IDS = torch.arange(3, 67).reshape(2, 32)


def script(name: str) -> ModuleType:
    """A module of scripts/, which is no package."""
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plant_outliers = script("plant_outliers")


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def inputs_of(model: torch.nn.Module, names: dict[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """The inputs of linears in the whole model, [t, k] in float64; together those that a name stands for."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    family = FAMILIES[model.config.model_type]
    separated(model, family.experts.linears if family.experts else None)
    for name, linears in names.items():
        for linear in linears:
            module = model.get_submodule(family.module_name(linear))
            module.register_forward_pre_hook(lambda _, x, name=name: found[name].append(x[0].flatten(0, -2).double()))
    with torch.no_grad():
        model(IDS)
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def by_hand(x: torch.Tensor, activation: Activation | None = None) -> MeasuredInput:
    """Token by token, in Python."""
    sums = torch.zeros(5, dtype=torch.float64)
    for token in x.double():
        mean = sum(float(v) ** 2 for v in token) / len(token)
        fourth = sum(float(v) ** 4 for v in token) / len(token)
        error = 0.0
        if activation is not None:
            q = dequantize(*activation.quantize(token.float()[None]))[0].double()
            error = float(((q - token) ** 2).sum() / (token**2).sum())
        sums += torch.tensor(
            [1.0, fourth / mean**2, max(abs(float(v)) for v in token) / mean**0.5, error, mean], dtype=torch.float64
        )
    return MeasuredInput(torch.tensor([max(abs(float(v)) for v in column) for column in x.T]).float(), sums)


def check_equal(found: MeasuredInput, expected: MeasuredInput) -> None:
    torch.testing.assert_close(found.peak, expected.peak, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-4, atol=1e-6)


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, Activation(4, 0.9)])
def test_measure_is_the_sum_over_tokens(activation: Activation | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "CHUNK", 5)  # several pieces
    x = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0)) ** 3
    found = outliers.measure(x, activation)
    check_equal(found, by_hand(x.flatten(0, 1), activation))
    assert found.tokens == 12
    assert (found.rounding_error > 0) == (activation is not None)
    halves = outliers.measure(x[:1], activation) + outliers.measure(x[1:], activation)
    torch.testing.assert_close(halves.sums, found.sums)
    assert torch.equal(halves.peak, found.peak)


def test_extreme_tokens() -> None:
    one = torch.zeros(1, 64)
    one[0, 7] = -5.0
    found = outliers.measure(one)
    assert found.kurtosis == pytest.approx(64) and found.peak_to_rms == pytest.approx(8)
    assert found.peak[7] == 5 and found.rms == pytest.approx(5 / 8)
    nothing = outliers.measure(torch.zeros(3, 64), Activation(4, 0.9))
    assert (nothing.kurtosis, nothing.peak_to_rms, nothing.rounding_error, nothing.rms) == (1, 1, 0, 0)
    normal = outliers.measure(torch.randn(2000, 512, generator=torch.Generator().manual_seed(0)))
    assert normal.kurtosis == pytest.approx(3, abs=0.05)


def test_inputs_survive_being_stored() -> None:
    found = {"a.peak": outliers.measure(torch.ones(2, 8)), "b": outliers.measure(torch.rand(2, 4))}
    tensors = outliers.to_tensors(found)
    again = outliers.from_tensors({**tensors, "hidden": torch.zeros(1)})
    assert set(again) == set(found)
    for name, value in found.items():
        assert torch.equal(again[name].peak, value.peak) and torch.equal(again[name].sums, value.sums)


@pytest.mark.parametrize("model_type", DISTINCT)
def test_watching_a_block_before_and_after_rotation(model_type: str, tmp_path: Path) -> None:
    """Against the whole model: before, its own inputs; after, what the rotations make of them."""
    folder = save_model(tmp_path / "model", model_type)
    recipe = QuarotRecipe(rounding="nearest")
    target = pipeline.plan(str(folder), recipe)
    record = Record.of(recipe, target.plan, "", None)
    signs = record.sign_vectors(target.plan)
    job = Job(recipe=recipe, signs=signs, device=torch.device("cpu"), **vars(target))
    names = outliers.observed(job.plan, 0)
    experts = 4 if shape_of(job.config).has_experts(0) else 1
    assert [len(linears) for linears in names.values()] == [1, 1, experts, experts]
    roles = [linear.role.partition("+")[0] for name in names if (linear := job.plan.linear(name))]
    assert roles[:2] == (
        ["query", "attention_output"] if model_type in PLAIN_ATTENTION else ["mixer_input", "mixer_output"]
    )
    expected = inputs_of(load(folder), names)

    part = job.original_block(0)
    with outliers.watching(part, names) as before:
        hidden = job.embed([plain_matrix(job.tensor(linear.source)) for linear in job.embeddings], IDS, "original")
        part.run(hidden[:1])
        part.run(hidden[1:])
    assert list(before) == list(names)
    for name in names:
        check_equal(before[name], by_hand(expected[name]))

    job.rotate_block(0, part)
    with outliers.watching(part, names) as after:
        part.run(job.embed([plain_matrix(job.rewritten(linear, torch.float32)) for linear in job.embeddings], IDS))
    for name in names:
        linear = job.plan.linear(name)
        assert linear is not None
        x = expected[name]
        if linear.norm is not None:
            x = x / (job.tensor(linear.norm).double() + job.plan.norm_offset)
        if linear.input is not None:
            size = linear.input.size
            s = torch.ones(1) if linear.input.signs is None else signs[linear.input.signs]
            s = s.double().repeat(size // len(s))
            x = hadamard.apply(x, s, linear.input.order)
        check_equal(after[name], by_hand(x))
    with outliers.watching(part, names) as nothing:
        pass
    part.run(hidden)
    assert nothing == {}


def test_predictions_by_position_are_those_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "CHUNK", 10)
    folder = save_model(tmp_path / "model", **TINY)
    original, packed = load(folder), load(folder)
    packed.lm_head.weight.data = packed.lm_head.weight.detach() * 1.3
    with torch.no_grad():
        found = outliers.by_position(original(IDS).logits, packed(IDS).logits, IDS)
    assert found.shape == (3, 2, 31)
    agreement = evaluate.compare(packed, original, Windows(IDS, IDS.numel(), "", ""))
    assert found.mean((1, 2)).tolist() == pytest.approx(
        [agreement.original.loss, agreement.model.loss, agreement.kl], rel=1e-5
    )
    with torch.no_grad():
        log_q = packed(IDS[1:]).logits[0].double().log_softmax(-1)
    assert found[1, 1, 17].item() == pytest.approx(-log_q[17, IDS[1, 18]].item(), rel=1e-4)


def test_a_logit_of_minus_infinity_adds_nothing() -> None:
    logits = torch.tensor([[[0.0, 1.0, float("-inf")]] * 3])
    found = outliers.by_position(logits, logits, torch.tensor([[0, 1, 0]]))
    assert found.isfinite().all() and found[2].abs().max() < 1e-6


# --- planting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", [name for name in DISTINCT if name in WRITTEN_PLAIN])
def test_planted_outliers_change_inputs_and_no_logits(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type, dtype)
    planted = plant_outliers.plant(folder, tmp_path / "planted", channels=3)
    with torch.no_grad():
        a, b = load(folder)(IDS).logits, load(planted)(IDS).logits
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    family = FAMILIES[model_type]
    plan = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).plan
    first = {name: (name,) for name in outliers.observed(plan, 1)}  # of the experts one: each has channels of its own
    names = list(first)
    before, after = inputs_of(load(folder), first), inputs_of(load(planted), first)
    scaled = {names[0]: family.attention_norm, names[2]: family.mlp_norm} if family.norm_tensors else {}
    for name in names:
        grown = (after[name].abs().amax(0) / before[name].abs().amax(0)).nan_to_num(1)  # 0 / 0: behind a ReLU
        inside = name == names[3] and family.gate is not None
        planted_here = inside or scaled.get(name) is not None and not family.norm_offset
        expected = [32, 32, 64] if planted_here else []
        assert grown[grown > 1.5].sort().values.tolist() == pytest.approx(expected, rel=1e-3), name
        torch.testing.assert_close(
            grown[grown < 1.5], torch.ones(len(grown) - len(expected)).double(), rtol=1e-3, atol=0
        )


def test_planting_with_any_factor(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    planted = plant_outliers.plant(folder, tmp_path / "planted", channels=2, factors=(33.3, 97.0), seed=5)
    with torch.no_grad():
        torch.testing.assert_close(load(planted)(IDS).logits, load(folder)(IDS).logits, rtol=1e-5, atol=2e-5)
    assert {path.name for path in planted.iterdir()} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("model_type", KEYS_WITHOUT_NORM)
def test_outliers_planted_in_keys(model_type: str, tmp_path: Path) -> None:
    """The same logits; one pair of channels of every key-value head is eight times as large. It is the one that RoPE
    turns together: the logits would change."""
    folder = save_model(tmp_path / "model", model_type)
    planted = plant_outliers.plant_keys(folder, tmp_path / "planted")
    with torch.no_grad():
        before, after = load(folder), load(planted)
        torch.testing.assert_close(after(IDS).logits, before(IDS).logits, rtol=1e-5, atol=1e-5)
    shape, row = shape_of(before.config), FAMILIES[model_type]
    first = first_row("key", shape, row)
    for block in range(shape.blocks):
        name = f"{row.layers}.{block}.{row.key}"
        grown = after.get_submodule(name).weight / before.get_submodule(name).weight
        factors = grown.mean(0 if row.transposed else 1)[first:][: shape.kv_heads * shape.head_dim].view(
            shape.kv_heads, -1
        )
        assert (factors.sort(-1).values == torch.tensor([1.0] * (shape.head_dim - 2) + [8.0] * 2)).all()
