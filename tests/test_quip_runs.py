"""`quantize quip-sharp` from end to end: deterministic, continued after any crash, loaded to the bit, safe from bad
input."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, quantize
from interrupted_runs import check_all_continue, contents, photographed
from safetensors.torch import load_file, save_file
from test_engine import finish, start
from tiny_models import TINY, save_model
from transformers import AutoConfig, AutoModelForCausalLM

import ptq
from ptq.files.checkpoint import Checkpoint
from ptq.hf import blocks
from ptq.hf.packed_config import PtqConfig
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import loaded_signs, stored_signs
from ptq.models.families import FAMILIES
from ptq.pipeline import needs
from ptq.statistics import chunks, hessian
from quip_sharp.plan import QuipSharpRecipe

QUIET = ptq.RunOptions(progress=False, report=False)
IDS = torch.arange(3, 60).reshape(1, -1)
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 64)
        patch.setattr(needs, "_matmul_rate", lambda bfloat16=False: 1e9)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


def recipe(model: Path, **changes: Any) -> QuipSharpRecipe:
    text = model.parent / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghij klmnop", k=800)))
    return QuipSharpRecipe(**{**dict(calibration=str(text), samples=20, sequence_length=32), **changes})


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    out = model.parent / "packed"
    ptq.quantize(model, out, recipe(model), QUIET)
    return out


def test_twice_the_same_bytes_and_another_seed_others(model: Path, packed: Path, tmp_path: Path) -> None:
    ptq.quantize(model, tmp_path / "again", recipe(model), QUIET)
    assert contents(tmp_path / "again") == contents(packed)
    ptq.quantize(model, tmp_path / "other", recipe(model, seed=1), QUIET)
    assert contents(tmp_path / "other")["model.safetensors"] != contents(packed)["model.safetensors"]


def test_a_crash_at_any_moment_costs_nothing(model: Path, tmp_path: Path) -> None:
    pictures, expected = photographed(model, tmp_path, recipe(model, bits=3, samples=4))
    chosen = random.Random(0).sample(pictures, 25)
    check_all_continue(chosen, expected, model, recipe(model, bits=3, samples=4))


def test_any_number_of_processes_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for count in (1, 3):
        assert finish(start(count, model, tmp_path / str(count), recipe(model))) == [0] * count
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("activation_bits", [8, 16])
@torch.no_grad()
def test_loaded_logits_are_those_of_the_run(bits: int, activation_bits: int, model: Path, tmp_path: Path) -> None:
    """`from_pretrained` gives the numbers of the parts that the run measured; generate works."""
    out = tmp_path / "out"
    ptq.quantize(model, out, recipe(model, bits=bits, activation_bits=activation_bits, rounding="nearest"), QUIET)
    checkpoint, config = Checkpoint.open(out), AutoConfig.from_pretrained(out)
    found = PtqConfig.parse(checkpoint.config)
    assert found is not None

    def part(index: int | None, *prefixes: str) -> blocks.PartialModel:
        made = blocks.PartialModel(config, FAMILIES["llama"], index, torch.device("cpu"))
        made.pack(found.entries() if index is not None else {})
        made.load({name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefixes)})
        return made

    hidden = part(None, "model.embed_tokens").embed(IDS)
    for index in range(config.num_hidden_layers):
        hidden = part(index, f"model.layers.{index}.").run(hidden)
    loaded: Any = AutoModelForCausalLM.from_pretrained(out)
    last = part(None, "model.norm")
    last.load({"lm_head.weight": checkpoint.read("model.embed_tokens.weight")})  # tied
    expected = last.logits(hidden)
    assert torch.equal(expected, loaded(IDS).logits)
    assert loaded.generate(IDS, max_new_tokens=5, do_sample=False).shape == (1, IDS.shape[1] + 5)


def test_size_is_bits_and_vectors(model: Path, packed: Path) -> None:
    layer: Any = AutoModelForCausalLM.from_pretrained(packed).get_submodule(DOWN)
    assert isinstance(layer, QuantLinear)
    n, k = layer.out_features, layer.in_features
    stored = sum(
        t.nbytes for name, t in load_file(packed / "model.safetensors").items() if name.startswith(f"{DOWN}.weight")
    )
    assert stored == 2 * n * k // 8 + 2 * (n + k) + 4 + 1  # codes, sign vectors, one scale, the guard; k is 8 c here


@torch.no_grad()
@torch.no_grad()
def test_token_after_token_gives_the_logits_of_all_at_once(packed: Path) -> None:
    """From the second token on, linears that share an input are multiplied together."""
    model, ids = AutoModelForCausalLM.from_pretrained(packed).eval(), torch.arange(1, 13)[None]
    whole, cache, steps = model(ids).logits, None, []
    for token in ids.split(1, 1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


def test_dtypes(packed: Path) -> None:
    exact: Any = AutoModelForCausalLM.from_pretrained(packed)
    for dtype in (torch.float16, torch.bfloat16):
        other: Any = copy.deepcopy(exact).to(dtype)
        found, wanted = other(IDS).logits, exact(IDS).logits
        assert found.dtype == dtype
        assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


@torch.no_grad()
def test_sign_vectors_that_are_loaded_later_are_used(packed: Path) -> None:
    """Their numbers are kept between calls; `load_state_dict` writes into the same parameters."""
    layer: Any = AutoModelForCausalLM.from_pretrained(packed).get_submodule(DOWN)
    x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(0))
    bias = layer.bias
    before, state = layer(x) - bias, {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["weight_sv"] = stored_signs(-2 * loaded_signs(state["weight_sv"]))
    layer.load_state_dict(state)
    torch.testing.assert_close(layer(x) - bias, -2 * before, rtol=1e-3, atol=1e-4)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["abs", "signs", "scale", "su", "sv"])
@pytest.mark.parametrize("damage", ["missing", "short", "dtype"])
def test_damaged_tensors_are_refused(leaf: str, damage: str, packed: Path, tmp_path: Path) -> None:
    folder, name = shutil.copytree(packed, tmp_path / "damaged"), f"{DOWN}.weight_{leaf}"
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if damage == "short":
        tensors[name] = tensor[..., : tensor.shape[-1] - 1].contiguous()
    elif damage == "dtype":
        tensors[name] = tensor.to(torch.int64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ptq.InputError, match=name):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_hessian_that_is_not_finite_costs_its_layer_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hessian.observe

    def observe(*arguments: Any) -> tuple[dict[str, list[torch.Tensor]], dict[str, int]]:
        sums, counts = real(*arguments)
        if DOWN in sums:
            sums[DOWN][0][5, 3] = torch.nan
        return sums, counts

    monkeypatch.setattr(hessian, "observe", observe)
    with pytest.warns(UserWarning, match=f"{DOWN}.*rounded to nearest"):
        ptq.quantize(model, tmp_path / "out", recipe(model), QUIET)
    log = (tmp_path / "out" / "ptq_log.jsonl").read_text().splitlines()
    lines = {line["name"]: line for line in map(json.loads, log)}
    assert lines[DOWN]["solver"] == "nearest" and "NaN" in lines[DOWN]["note"]
    assert lines[DOWN.replace("0", "1")]["solver"] == "ldlq"


def test_wrong_options(model: Path, tmp_path: Path) -> None:
    asked = recipe(model)
    text = ["--calibration", asked.calibration]
    check_refused(
        quantize("quip-sharp", model, tmp_path / "out", "--bits", 5, *text), "bits must be 2, 3 or 4, found 5"
    )
    check_refused(quantize("quip-sharp", model, tmp_path / "out"), "text")
    check_refused(quantize("quip-sharp", model, tmp_path / "out", "--finetune", "blocks"), "text")
    assert not (tmp_path / "out").exists()
