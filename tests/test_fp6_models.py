"""Whole runs of `quantize fp6`: the command, what comes out, the same every time, and what is refused."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, listing, quantize
from interrupted_runs import LOG, check_all_continue, kill_or_finish, photographed
from safetensors.torch import load_file, save_file
from test_engine import contents, finish, start
from tiny_models import DISTINCT, UNTURNED, save_model
from transformers import AutoModelForCausalLM

import ptq
from fp6.element import ELEMENTS
from fp6.plan import Fp6Recipe

IDS = torch.arange(3, 40).reshape(1, -1)
QUIET = ptq.RunOptions(progress=False)
pytestmark = pytest.mark.usefixtures("fast")


def logits(folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(IDS).logits


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def elements(folder: Path) -> dict[str, str]:
    """The element of every packed linear, as config.json says it."""
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {name: found["schemes"][scheme]["element"] for name, scheme in found["linears"].items()}


@pytest.fixture(scope="module")
def mixed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, some of whose linears have outliers, so that e3m2 fits them better."""
    model = shutil.copytree(tiny, tmp_path_factory.mktemp("mixed") / "model")
    names = [f"model.layers.{index}.self_attn.o_proj.weight" for index in range(2)]
    edit_tensors(lambda tensors: [tensors[name][:, 3].mul_(60) for name in names])(model)
    return model


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", DISTINCT)
def test_every_family_without_text(model_type: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    result = ptq.quantize(model, tmp_path / "out", Fp6Recipe(), QUIET)
    assert result.rotation_error == 0
    outs = [tmp_path / "out"]
    if model_type in UNTURNED:
        for command in (("fp6", "--rotate"), ("rotate",)):
            check_refused(quantize(*command, model, tmp_path / "rotated"), "there is nothing to rotate")
        assert quantize("quarot", model, tmp_path / "quarot", "--rounding", "nearest", "--plan").exit_code == 0
    else:
        rotated = ptq.quantize(model, tmp_path / "rotated", Fp6Recipe(rotate=True), QUIET)
        assert 0 < rotated.rotation_error < 1e-5
        outs.append(tmp_path / "rotated")
    original = logits(model)
    for out in outs:
        assert 0 < divergence(original, logits(out)) < 0.05 * divergence(original, original.roll(1, dims=1))


@pytest.mark.parametrize("options", [{"element": name} for name in ELEMENTS] + [{"scale": "e8m0", "group_size": 8}])
def test_every_element_through_the_command(options: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    done = quantize("fp6", tiny, tmp_path / "out", *arguments)
    assert done.exit_code == 0, done.output
    assert set(elements(tmp_path / "out").values()) == {options.get("element", "e2m3")}
    assert quantize("verify", tmp_path / "out").exit_code == 0
    shown = quantize("inspect", tmp_path / "out")
    assert f"element={options.get('element', 'e2m3')}" in shown.stdout
    logits(tmp_path / "out")


def test_the_plan_and_the_default_groups_of_powers_of_two(tmp_path: Path) -> None:
    shown = quantize("fp6", "demo", tmp_path / "out", "--plan", "--scale", "e8m0", "--element", "auto")
    assert shown.exit_code == 0
    assert shown.stdout.count("fp6/minifloat element=auto group_size=32 scale=e8m0") == 7  # of every block
    assert "Hadamard" not in shown.stdout  # nothing is rotated: nothing to explain
    assert not (tmp_path / "out").exists()


def test_gptq_is_closer_than_nearest(calibration_text: Path, tiny: Path, tmp_path: Path) -> None:
    recipe = dict(element="e2m1", group_size=8, calibration=str(calibration_text), samples=8, sequence_length=64)
    nearest = ptq.quantize(tiny, tmp_path / "nearest", Fp6Recipe(**recipe), QUIET)
    gptq = ptq.quantize(tiny, tmp_path / "gptq", Fp6Recipe(rounding="gptq", **recipe), QUIET)
    assert gptq.kl < nearest.kl


def test_eight_bit_activations(tiny: Path, tmp_path: Path) -> None:
    ptq.quantize(tiny, tmp_path / "out", Fp6Recipe(activation_bits=8), QUIET)
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert all(scheme["activation"] == {"bits": 8, "clip": 1.0} for scheme in found["schemes"].values())
    original, loaded = logits(tiny), logits(tmp_path / "out")
    assert 0 < divergence(original, loaded) < 0.05 * divergence(original, original.roll(1, dims=1))


def test_loading_again_gives_the_same_logits_and_saving_the_same_file(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ptq.quantize(mixed, out, Fp6Recipe(element="auto", scale="e8m0", group_size=8), QUIET)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits(out))
    model.save_pretrained(tmp_path / "saved")
    name = "model.safetensors"
    assert (tmp_path / "saved" / name).read_bytes() == (out / name).read_bytes()
    assert elements(tmp_path / "saved") == elements(out)


# --- the choice of an element -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_auto_chooses_for_every_linear(rounding: str, mixed: Path, calibration_text: Path, tmp_path: Path) -> None:
    common = dict(rounding=rounding, calibration=str(calibration_text), samples=4, sequence_length=32)
    results = {
        name: ptq.quantize(mixed, tmp_path / name, Fp6Recipe(element=name, **common), QUIET)
        for name in ("auto", "e2m3", "e3m2")
    }
    chosen = elements(tmp_path / "auto")
    assert {name for name, element in chosen.items() if element == "e3m2"} == {
        f"model.layers.{index}.self_attn.o_proj" for index in range(2)
    }
    log = [json.loads(line) for line in (tmp_path / "auto" / LOG).read_text().splitlines()]
    assert {line["name"]: line["chosen"]["element"] for line in log if "chosen" in line} == chosen
    assert results["auto"].kl < min(results["e2m3"].kl, results["e3m2"].kl)
    assert quantize("verify", tmp_path / "auto").exit_code == 0
    page = json.loads((tmp_path / "auto" / "report.json").read_text())
    assert "element=auto" not in json.dumps(page)


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_twice_the_same_bytes(mixed: Path, tmp_path: Path) -> None:
    for out in ("first", "second"):
        ptq.quantize(mixed, tmp_path / out, Fp6Recipe(element="auto", scale_search="mse"), QUIET)
        torch.rand(3)  # the global state is another one the second time
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_a_crash_at_any_moment_costs_nothing(mixed: Path, tmp_path: Path) -> None:
    recipe = Fp6Recipe(element="auto")
    pictures, expected = photographed(mixed, tmp_path, recipe)
    assert len(pictures) > 30
    check_all_continue(pictures[::4], expected, mixed, recipe)


def test_kill_and_continue_gives_the_same_bytes(mixed: Path, tmp_path: Path) -> None:
    chance, recipe = random.Random(0), Fp6Recipe(element="auto", rotate=True)
    assert finish(start(1, mixed, tmp_path / "expected", recipe)) == [0]
    kills = 0
    out = tmp_path / "run" / "out"
    out.parent.mkdir()
    while not kill_or_finish(start(1, mixed, out, recipe)[0], out.parent, chance):
        kills += 1
    assert kills > 2
    assert contents(out) == contents(tmp_path / "expected") and os.listdir(out.parent) == ["out"]


def test_two_processes_give_the_same_bytes(mixed: Path, tmp_path: Path) -> None:
    recipe = Fp6Recipe(element="auto")
    for count in (1, 2):
        assert finish(start(count, mixed, tmp_path / str(count), recipe)) == [0] * count
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_elements_are_known_by_the_names_of_ocp() -> None:
    assert Fp6Recipe(element="E2M1") == Fp6Recipe(element="e2m1")


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--element", "e5m2"],
            "--element must be one of e3m2, e2m3, e2m2, e3m1, e2m1, e4m2, e3m3, auto; found 'e5m2'",
        ),
        (["--group-size", "-1"], "--group-size must be 0 (per output channel) or positive, found -1"),
        (["--group-size", "7"], "16 input channels cannot be cut into groups of 7; try --group-size 8"),
        (["--scale", "e8m0"], "cannot be cut into groups of 32; try --group-size 8"),
        (["--activation-bits", "4"], "--activation-bits must be 8, or 16 to leave them alone; found 4"),
        (["--rounding", "gptq"], "GPTQ needs text"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], message: str, tiny: Path, tmp_path: Path) -> None:
    check_refused(quantize("fp6", tiny, tmp_path / "out", *arguments), message)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_tensor_that_is_not_finite_is_named(bad: float, tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = shutil.copytree(tiny, tmp_path / "model")
    edit_tensors(lambda tensors: tensors[name][5].fill_(bad))(model)
    check_refused(quantize("fp6", model, tmp_path / "out"), f"tensor '{name}' holds")
    assert not (tmp_path / "out").exists()


def test_rows_of_zeros_are_rows_of_zeros(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    edit_tensors(lambda tensors: [t[2].zero_() for name, t in tensors.items() if "proj" in name])(model)
    assert quantize("fp6", model, tmp_path / "out", "--element", "auto").exit_code == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    codes = [tensor for name, tensor in stored.items() if name.endswith("weight_codes")]
    assert len(codes) == 14 and not any(tensor[2].any() for tensor in codes)
    assert logits(tmp_path / "out").isfinite().all()


@pytest.mark.parametrize("columns", [-1, 1])
def test_a_packed_tensor_of_another_size_is_refused(columns: int, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert quantize("fp6", tiny, out).exit_code == 0
    name = "model.layers.0.mlp.up_proj.weight_codes"
    tensors = load_file(out / "model.safetensors")
    tensors[name] = torch.nn.functional.pad(tensors[name], (0, columns)).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ptq.InputError, match=rf"tensor '{name}' has shape \[24, {12 + columns}\], config.json says"):
        logits(out)
    check_refused(quantize("verify", out), "is not the file that was written")


def test_another_version_or_element_in_the_config_is_refused(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert quantize("fp6", tiny, out).exit_code == 0
    before = listing(out)
    for change, message in (
        ({"version": 2}, "fp6/minifloat has layout version 2, this package reads version 1"),
        ({"element": "e9m9"}, "unknown element 'e9m9'; known elements"),
        ({"element": "auto"}, "unknown element 'auto'"),
        ({"group_size": 5}, "do not divide into groups of 5"),
    ):
        config = json.loads(before["config.json"] or b"")
        config["quantization_config"]["schemes"]["scheme0"] |= change
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(ptq.InputError, match=message):
            logits(out)
        check_refused(quantize("inspect", out), message)
