"""Models with quantised activations: plan, config.json, loading, and Hessians of what the weights see."""

import dataclasses
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ptq
from ptq.files.checkpoint import Checkpoint
from ptq.hf import blocks, residual
from ptq.hf.packed_config import PtqConfig
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.ops import activations
from ptq.ops.activations import Activation
from ptq.pipeline import proof
from ptq.pipeline.job import Job
from ptq.statistics.hessian import observe, whole
from quarot.plan import QuarotRecipe

QUIET = ptq.RunOptions(progress=False, report=False)
IDS = torch.arange(3, 40).reshape(1, -1)
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("activations") / "model")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    """INT4 weights, INT8 inputs, and one linear that is skipped."""
    recipe = QuarotRecipe(rounding="nearest", group_size=8, activation_bits=8, skip=("model.layers.1.mlp.gate_proj",))
    ptq.quantize(source, source.with_name("packed"), recipe, QUIET)
    return source.with_name("packed")


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS).logits


def test_the_plan(source: Path) -> None:
    recipe = QuarotRecipe(
        rounding="nearest", activation_bits=6, activation_clip=0.8, skip=("*.k_proj", "*.1.mlp.down*")
    )
    made = ptq.plan(str(source), recipe).plan
    for linear in made.linears:
        inside = linear.name.startswith("model.layers") and not linear.name.endswith("k_proj")
        inside &= linear.name != "model.layers.1.mlp.down_proj"
        assert linear.activation == (Activation(6, 0.8) if inside else None), linear.name
    for bits, clip in ((4, 0.9), (6, 0.95), (8, 1.0)):
        default = ptq.plan(str(source), QuarotRecipe(rounding="nearest", activation_bits=bits)).plan
        assert {linear.activation for linear in default.block(1)} == {Activation(bits, clip)}
    whole = ptq.plan(str(source), dataclasses.replace(recipe, weight_bits=16, skip=())).plan
    kinds = {linear.format.name for linear in whole.block(0) if linear.format and linear.activation}
    assert kinds == {"dense"} and not any(linear.statistics for linear in whole.linears)


def test_config_round_trip(packed: Path) -> None:
    content = json.loads((packed / "config.json").read_text())["quantization_config"]
    found = PtqConfig(**content)
    assert found.to_dict() == content and found.cache() is None
    assert found.entries()[DOWN]["activation"] == {"bits": 8, "clip": 1.0}
    assert "model.layers.1.mlp.gate_proj" not in found.entries()


def test_loaded_logits_are_those_of_the_run(packed: Path) -> None:
    checkpoint = Checkpoint.open(packed)
    config, family = AutoConfig.from_pretrained(packed), FAMILIES["llama"]
    found = PtqConfig.parse(checkpoint.config)
    assert found is not None and (construction := found.residual()) is not None

    def part(index: int | None, *prefixes: str) -> blocks.PartialModel:
        made = blocks.PartialModel(config, family, index, torch.device("cpu"))
        made.pack(found.entries() if index is not None else {})
        if index is None:
            residual.install(made.model, construction)
        made.load({name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefixes)})
        return made

    hidden = part(None, "model.embed_tokens").embed(IDS)
    for index in range(config.num_hidden_layers):
        hidden = part(index, f"model.layers.{index}.").run(hidden)
    last = part(None, "model.norm")
    last.load({"lm_head.weight": checkpoint.read("model.embed_tokens.weight")})  # tied
    assert torch.equal(last.logits(hidden), logits(packed))


def test_everything_in_four_bits_gives_the_logits_that_the_run_measured(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Tensor] = {}
    reload = proof.reload

    def recorded(checkpoint: Checkpoint, job: Job, ids: Tensor, measured: Tensor) -> None:
        seen.update(ids=ids, logits=measured)
        reload(checkpoint, job, ids, measured)

    monkeypatch.setattr(proof, "reload", recorded)
    recipe = QuarotRecipe(rounding="nearest", group_size=8, activation_bits=4, key_bits=4, value_bits=4)
    ptq.quantize(source, tmp_path / "out", recipe, QUIET)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(seen["ids"], use_cache=False).logits, seen["logits"])
        assert model.generate(seen["ids"], max_new_tokens=64, min_new_tokens=64).shape[1] == 64 + seen["ids"].shape[1]


def test_activations_are_on(packed: Path, tmp_path: Path) -> None:
    """The same weights without the entry give other logits, and almost the same model."""
    plain = shutil.copytree(packed, tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    for scheme in config["quantization_config"]["schemes"].values():
        del scheme["activation"]
    (plain / "config.json").write_text(json.dumps(config))
    with_, without = logits(packed), logits(plain)
    error = (with_ - without).norm() / without.norm()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("weight_bits, online, kl", [(16, True, 0.0015), (16, False, 0.0023), (4, False, 1.04)])
def test_other_weights(weight_bits: int, online: bool, kl: float, source: Path, tmp_path: Path) -> None:
    recipe = QuarotRecipe(rounding="nearest", weight_bits=weight_bits, activation_bits=8, online=online)
    result = ptq.quantize(source, tmp_path / "out", recipe, QUIET)
    assert result.rotation_error < 1e-4 and kl / 2 < result.kl < 2 * kl
    assert logits(tmp_path / "out").isfinite().all()


def test_save_pretrained_keeps_the_entry(packed: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(packed, dtype="auto").save_pretrained(tmp_path / "saved")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (packed / name).read_bytes()


HOSTILE: dict[str, tuple[Any, str]] = {
    "text": ("int8", "activation must be an object"),
    "nothing": (None, "activation must be an object"),
    "no clip": ({"bits": 8}, "activation must be an object"),
    "more": ({"bits": 8, "clip": 0.9, "zero": 1}, "activation must be an object"),
    "many bits": ({"bits": 10**30, "clip": 0.9}, "activation bits must be 2 to 8"),
    "bits that are text": ({"bits": "8", "clip": 0.9}, "activation bits must be 2 to 8"),
    "a clip above one": ({"bits": 8, "clip": 1e300}, "activation clip must be 1e-05 to 1"),
    "a clip that is a list": ({"bits": 8, "clip": [1]}, "activation clip must be 1e-05 to 1"),
}


@pytest.mark.parametrize(("entry", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config(entry: Any, message: str, packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["schemes"]["scheme0"]["activation"] = entry
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ptq.InputError, match=message):
        logits(copy)


# --- Hessians -------------------------------------------------------------------------------------------------------


def test_hessians_are_of_the_quantised_input(source: Path) -> None:
    """A rotated block is the original until `quantize_inputs`; then H is the sum over what the weights see."""
    recipe = QuarotRecipe(rounding="nearest", activation_bits=4)
    target = ptq.plan(str(source), recipe)
    drawn = {name: torch.ones(length, dtype=torch.int8) for name, length in target.plan.signs.items()}
    job = Job(recipe=recipe, signs=drawn, device=torch.device("cpu"), **vars(target))
    part = job.original_block(0)
    job.rotate_block(0, part)
    assert all(part.parameter(linear.dense_weight).shape == (linear.n, linear.k) for linear in job.plan.block(0))
    hidden, inputs = torch.randn(2, 9, 72, generator=torch.Generator().manual_seed(0)), []
    exact = part.run(hidden)
    job.quantize_inputs(0, part)
    assert (part.run(hidden) - exact).norm() > 1e-3 * exact.norm()
    module = part.module(DOWN)
    assert isinstance(module, QuantLinear)
    handle = module.register_forward_pre_hook(lambda _, x: inputs.append(x[0].detach()))
    h = whole(observe(part, [DOWN], iter([hidden]))[0][DOWN])
    handle.remove()
    assert module.online.activation is not None
    x = activations.dequantize(*module.quantized_input(inputs[-1])).flatten(0, 1).double()
    torch.testing.assert_close(h.double(), x.T @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cache", [{}, {"key_bits": 4, "value_bits": 4}], ids=["plain", "packed"])
def test_a_block_is_gone_when_nobody_holds_it(cache: dict[str, int], source: Path) -> None:
    """Without waiting for the garbage collector: a block of a large model is most of the memory of a run."""
    target = ptq.plan(str(source), QuarotRecipe(rounding="nearest", **cache))
    drawn = {name: torch.ones(length, dtype=torch.int8) for name, length in target.plan.signs.items()}
    job = Job(recipe=QuarotRecipe(), signs=drawn, device=torch.device("cpu"), **vars(target))
    gc.disable()
    try:
        part = job.original_block(0)
        job.rotate_block(0, part)
        job.quantize_inputs(0, part)
        part.run(torch.randn(1, 9, 72))
        blocks = [weakref.ref(module) for module in part.block.modules()]
        del part
        assert not [module for block in blocks if (module := block()) is not None]
    finally:
        gc.enable()
