"""Searched clips of activations: against brute force, and whole runs that choose some."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, quantize
from test_expert_runs import never_chosen
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import ptq
from ptq.layers.linear import QuantLinear
from ptq.pipeline import needs, stages
from ptq.pipeline.job import Job
from ptq.pipeline.pipeline import plan, proof
from ptq.pipeline.tasks import Tasks
from ptq.reporting import report_schema
from ptq.statistics.clip_search import GRID, Errors, inputs_of, losses, measure
from quarot.plan import CLIP, QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False)
SEARCH = ("--activation-bits", "4", "--activation-clip", "search")


def of_text(text: Path, **changes: Any) -> QuarotRecipe:
    common = dict(calibration=str(text), samples=8, sequence_length=64, activation_bits=4, activation_clip="search")
    return QuarotRecipe(**{**common, **changes})


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ptq.json").read_text())["linears"]


def in_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The `activation` entry of every linear of a checkpoint."""
    content = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {name: content["schemes"][scheme].get("activation") for name, scheme in content["linears"].items()}


# --- the search -----------------------------------------------------------------------------------------------------


def brute_force(x: Tensor, weights: list[Tensor], bits: int) -> Tensor:
    """The mean over tokens that give something, for each clip: |W (Q(x) - x)|^2 / |W x|^2, in float64."""
    found, top = [], 2 ** (bits - 1) - 1
    w, x = torch.cat(weights).double(), x.double()
    for clip in GRID:
        relative = []
        for token in x:
            size = ((w @ token) ** 2).sum()
            if size > 0:
                step = token.abs().max() * clip / top
                error = torch.clamp(torch.round(token / step), -top - 1, top) * step - token
                relative.append(((w @ error) ** 2).sum() / size)
        found.append(torch.stack(relative).mean())
    return torch.stack(found)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("kind", ["gaussian", "flat", "ignored"])
def test_the_clip_of_brute_force(kind: str, bits: int) -> None:
    """Gaussian tokens; such whose every number is as large as their largest; with a large channel that no weight reads.
    Tokens of very different sizes, and one that gives nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 48, generator=generator) * torch.logspace(-2, 3, 60)[:, None]
    weights = [torch.randn(n, 48, generator=generator) for n in (20, 7)]
    if kind == "flat":
        x = x.sign() * x.norm(dim=1, keepdim=True)
    if kind == "ignored":
        x[:, 5] = 30 / 48**0.5 * x.norm(dim=1)
        for w in weights:
            w[:, 5] = 0
    x[11] = 0
    sums, tokens = losses(x, weights, bits)
    wanted = brute_force(x, weights, bits)
    assert tokens == 59
    torch.testing.assert_close(sums / tokens, wanted, rtol=1e-3, atol=1e-7)
    found = Errors(sums, tokens).best(CLIP[bits])
    assert found["clip"] == GRID[int(wanted.argmin())]
    assert found["clip_error"] == pytest.approx(float(wanted.min()), rel=1e-3, abs=1e-7)
    assert found["default_clip_error"] == pytest.approx(float(wanted[GRID.index(CLIP[bits])]), rel=1e-3, abs=1e-7)
    if kind != "gaussian":
        assert found["clip"] == {"flat": 1.0, "ignored": GRID[-1]}[kind]


def test_too_few_tokens_and_overflow_keep_the_default() -> None:
    sums = torch.linspace(2, 1, len(GRID), dtype=torch.float64)
    assert Errors(sums, 32).best(0.9)["clip"] == GRID[-1]
    assert Errors(sums.flip(0) * 0 + 1, 32).best(0.9)["clip"] == 1.0  # the larger of equals
    for few in (0, 31):
        found = Errors(sums, few).best(0.9)
        assert (found["clip"], found["clip_tokens"]) == (0.9, few) and "few tokens" in found["clip_note"]
    sums[3] = torch.nan
    assert "overflow" in Errors(sums, 32).best(0.95)["clip_note"] and Errors(sums, 32).best(0.95)["clip"] == 0.95


def rotated(source: Path, **changes: Any) -> tuple[Job, Any]:
    """A job, and its first block as the search finds it."""
    recipe = QuarotRecipe(rounding="nearest", activation_bits=4, activation_clip="search", **changes)
    target = ptq.plan(str(source), recipe)
    drawn = {name: torch.ones(length, dtype=torch.int8) for name, length in target.plan.signs.items()}
    job = Job(recipe=recipe, signs=drawn, device=torch.device("cpu"), **vars(target))
    part = job.original_block(0)
    job.rotate_block(0, part)
    job.quantize_inputs(0, part)
    return job, part


def test_what_is_measured_of_a_block(tiny: Path) -> None:
    """Inputs as they come after the online transform, every second of 20 tokens, against all linears that read them."""
    job, part = rotated(tiny)
    inputs = inputs_of(job.plan, 0)
    roles = [[linear.role for linear in one.readers] for one in inputs]
    assert roles == [["query", "key", "value"], ["attention_output"], ["gate", "up"], ["down"]]
    chunks = torch.randn(3, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    seen: dict[str, list[Tensor]] = {one.name: [] for one in inputs}
    for one in inputs:
        module = part.module(one.name)
        assert isinstance(module, QuantLinear)
        module.register_forward_pre_hook(
            lambda m, x, to=seen[one.name]: to.append(m.transformed_input(x[0]).flatten(0, 1)[1::2])
        )
    found = measure(part, inputs, chunks, 10)
    for one in inputs:
        weights = [part.parameter(linear.dense_weight) for linear in one.readers]
        wanted = brute_force(torch.cat(seen[one.name]), weights, 4)
        torch.testing.assert_close(found[one.name].sums / 30, wanted, rtol=1e-3, atol=1e-7)
        assert found[one.name].tokens == 30


def test_linears_that_are_left_out_have_no_clip(tiny: Path) -> None:
    job, _ = rotated(tiny, skip=("*.q_proj", "*.down_proj"))
    names = [one.name.rpartition(".")[2] for one in inputs_of(job.plan, 0)]
    assert names == ["k_proj", "o_proj", "gate_proj"]


# --- whole runs -----------------------------------------------------------------------------------------------------


def loud_channel(tensors: dict[str, Tensor]) -> None:
    """In the first block, a channel that is many times as large as the others and that q, k and v do not read."""
    tensors["model.layers.0.input_layernorm.weight"].fill_(1)[3] = 12
    for name in "qkv":
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"][:, 3] = 0


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("clips") / "model")
    edit_tensors(loud_channel)(folder)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        dict(rounding="gptq", rotate=False, group_size=8, key_bits=4, value_bits=4),
        dict(rounding="nearest", rotate=False),
        dict(weight_bits=16, rotate=False),
    ],
    ids=["gptq", "nearest", "16-bit weights"],
)
def test_a_run_finds_what_was_planted(
    changes: dict[str, Any], planted: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clips are in config.json and in the record, the model loads, and its logits are those of the run."""
    seen: dict[str, Tensor] = {}
    reload = proof.reload

    def recorded(checkpoint: Any, job: Job, ids: Tensor, measured: Tensor) -> None:
        seen.update(ids=ids, logits=measured)
        reload(checkpoint, job, ids, measured)

    monkeypatch.setattr(proof, "reload", recorded)
    out = tmp_path / "out"
    ptq.quantize(planted, out, of_text(calibration_text, **changes), QUIET)
    found, clips = record(out), {name: entry["clip"] for name, entry in in_config(out).items() if entry}
    assert len(clips) == 14 and clips == {name: line["clip"] for name, line in found.items() if "clip" in line}
    inputs = [{clips[name] for name in clips if f"layers.0.{end}" in name} for end in ("self_attn.q", "self_attn.k",
              "self_attn.v", "mlp.gate", "mlp.up")]  # fmt: skip
    assert inputs[0] == inputs[1] == inputs[2] == {GRID[-1]} and inputs[3] == inputs[4] != {GRID[-1]}
    loud = found["model.layers.0.self_attn.q_proj"]
    assert loud["clip_error"] < 0.8 * loud["default_clip_error"]
    assert all(line["clip_error"] <= line["default_clip_error"] for line in found.values() if "clip" in line)
    layers = {layer.name: layer for layer in report_schema.read(out / "report.json").layers}
    assert all(layers[name].activation_clip == clip for name, clip in clips.items())
    assert f"4 bits, clip {GRID[-1]}" in (out / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(seen["ids"], use_cache=False).logits, seen["logits"])


def test_hessians_are_of_what_the_clips_leave(
    planted: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    observe = stages.observe

    def watched(tasks: Tasks, index: int, part: Any, *rest: Any) -> None:
        modules = {linear.name: part.module(linear.name) for linear in tasks.job.plan.block(index)}
        seen.append({name: module.online.activation.clip for name, module in modules.items()})
        observe(tasks, index, part, *rest)

    monkeypatch.setattr(stages, "observe", watched)
    ptq.quantize(planted, tmp_path / "out", of_text(calibration_text, rotate=False), QUIET)
    clips = {name: entry["clip"] for name, entry in in_config(tmp_path / "out").items()}
    assert {**seen[0], **seen[1]} == clips and len(set(clips.values())) > 2


def test_without_hessians_none_are_taken(tiny: Path, calibration_text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "ptq.statistics.hessian.Hessians.collect", lambda *_: pytest.fail("Hessians of a run that rounds to nearest")
    )
    ptq.quantize(tiny, tmp_path / "out", of_text(calibration_text, rounding="nearest"), QUIET)


def test_an_input_that_few_tokens_reach_keeps_the_default(
    tiny: Path, calibration_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = of_text(calibration_text, rounding="nearest", samples=1, sequence_length=31)
    ptq.quantize(tiny, tmp_path / "out", recipe)
    found = [line for line in record(tmp_path / "out").values() if "clip" in line]
    assert len(found) == 14 and all(line["clip"] == CLIP[4] and line["clip_tokens"] == 31 for line in found)
    assert all("too few tokens" in line["clip_note"] for line in found)
    assert "its input keeps the default clip" in capsys.readouterr().err


def test_experts_of_a_block_have_clips_in_common(calibration_text: Path, tmp_path: Path) -> None:
    """Also one that sees no token; and all tokens that were looked at count."""
    source = save_model(tmp_path / "model", "olmoe", num_experts_per_tok=1)
    edit_tensors(never_chosen)(source)
    recipe = of_text(calibration_text, rounding="nearest")
    ptq.quantize(source, tmp_path / "out", recipe, QUIET)
    found, config = record(tmp_path / "out"), in_config(tmp_path / "out")
    inputs: dict[str | None, set[tuple[float, int]]] = {}
    for linear in (each for each in plan(str(source), recipe).plan.linears if each.clip_search):
        assert config[linear.name]["clip"] == found[linear.name]["clip"]
        numbers = found[linear.name]["clip"], found[linear.name]["clip_tokens"]
        inputs.setdefault(linear.clip_search, set()).add(numbers)
    assert len(inputs) == 2 * (2 + 2) and all(len(numbers) == 1 for numbers in inputs.values())
    experts = [numbers for name, (numbers,) in inputs.items() if name and ".experts." in name]
    assert len(experts) == 4 and all(32 < tokens <= 512 for _, tokens in experts)


# --- what is said and refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*SEARCH, "--rounding", "nearest"), "--activation-clip search needs text: name some with --calibration"),
        ((*SEARCH, "--weight-bits", "16"), "or leave out --activation-clip search"),
        (SEARCH, "GPTQ needs text"),
        (SEARCH, "or choose --rounding nearest and leave out --activation-clip search"),
        (("--activation-clip", "search"), "--activation-clip does nothing without --activation-bits 8, 6 or 4"),
        (("--activation-bits", "8", "--activation-clip", "best"), "1e-05 to 1, or search; found 'best'"),
    ],
)
def test_refused(options: tuple[str, ...], message: str, tiny: Path, tmp_path: Path) -> None:
    check_refused(quantize("quarot", tiny, tmp_path / "out", *options), message)
    assert not list(tmp_path.iterdir())


def test_the_plan_and_inspect_say_it(tiny: Path, calibration_text: Path, tmp_path: Path) -> None:
    shown = quantize("quarot", tiny, tmp_path / "out", *SEARCH, "--rounding", "nearest", "--plan")
    assert shown.stdout.count("input bits=4 clip=searched") == 7 and "needs --calibration" in shown.stderr
    options = (*SEARCH, "--calibration", calibration_text, "--samples", 8, "--sequence-length", 64)
    made = quantize("quarot", tiny, tmp_path / "out", *options, "--offline")
    assert made.exit_code == 0, made.stderr
    clips = sorted(entry["clip"] for entry in in_config(tmp_path / "out").values())
    lines = quantize("inspect", tmp_path / "out").stdout.splitlines()
    assert clips[0] < clips[-1]
    assert len([line for line in lines if "quarot/integer" in line]) == 1
    assert f"clip={clips[0]}..{clips[-1]}" in lines[1]
    groups = json.loads(quantize("inspect", tmp_path / "out", "--json").stdout)["groups"]
    assert sorted({group["scheme"]["activation"]["clip"] for group in groups}) == sorted(set(clips))


def test_the_estimate_counts_it(tiny: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "LOGIT_BYTES", 0)  # which take more than all else in this model

    def needed(**changes: Any) -> needs.Estimate:
        recipe = of_text(calibration_text, **changes)
        return ptq.pipeline.pipeline.estimate(ptq.plan(str(tiny), recipe), str(tiny), recipe)

    found, fixed = needed(), needed(activation_clip=0.9)
    assert found.seconds > fixed.seconds and (found.memory, found.work) == (fixed.memory, fixed.work)
    nearest, plain = needed(rounding="nearest"), needed(rounding="nearest", activation_clip=0.9)
    assert nearest.seconds > plain.seconds and plain.memory < nearest.memory < fixed.memory
    assert 0 < plain.work < nearest.work < fixed.work  # of plain, the marks alone
