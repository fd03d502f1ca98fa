"""Packed checkpoints in transformers: load, generate, save, and refuse what is damaged or hostile."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, quantize
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import ptq
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.files.dtypes import dtype_name
from ptq.hf import blocks, plugin, residual
from ptq.hf.packed_config import PtqConfig
from ptq.kv.kv_cache import CacheQuantization
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from quarot.plan import QuarotRecipe

IDS = torch.arange(3, 40).reshape(1, -1)
QUIET = ptq.RunOptions(progress=False, report=False)
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """INT4 with an online rotation, every bias, and one linear that is skipped."""
    folder = tmp_path_factory.mktemp("packed")
    recipe = QuarotRecipe(rounding="nearest", group_size=8, symmetric=False, skip=("model.layers.1.mlp.down_proj",))
    ptq.quantize(save_model(folder / "model"), folder / "out", recipe, QUIET)
    return folder / "out"


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that can import this package."""
    path = os.pathsep.join([str(Path(ptq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# --- loading --------------------------------------------------------------------------------------------------------


def test_a_fresh_process_loads_generates_and_saves(packed: Path, tmp_path: Path) -> None:
    code = """
import sys, torch, ptq
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 13).reshape(1, -1)
print(model.generate(ids, max_new_tokens=8, do_sample=False).tolist())
model.save_pretrained(sys.argv[2])
"""
    result = python(code, packed, tmp_path / "saved")
    assert result.returncode == 0, result.stderr
    here = load(packed, dtype="auto")
    expected = here.generate(torch.arange(3, 13).reshape(1, -1), max_new_tokens=8, do_sample=False)
    assert json.loads(result.stdout) == expected.tolist()
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (packed / name).read_bytes(), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_forked_off_runs(packed: Path) -> None:
    """OpenMP's threads are not in the copy: it must not wait for them."""
    code = """
import os, signal, sys, torch, ptq
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 30).reshape(1, -1)
wanted = model(torch.cat(9 * [ids])).logits
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    signal.alarm(60)
    os._exit(not torch.allclose(model(torch.cat(9 * [ids])).logits, wanted, rtol=1e-4, atol=1e-4))
"""
    result = python(code, packed)
    assert result.stdout == "0\n", result.stderr


def test_adapters_are_trained_where_gradients_pass(packed: Path, tmp_path: Path) -> None:
    """transformers' Trainer asks for it."""
    assert load(packed).hf_quantizer.is_trainable
    source = packed.parent / "model"
    for name, changes in (("activations", dict(activation_bits=8)), ("cache", dict(key_bits=4))):
        ptq.quantize(source, tmp_path / name, QuarotRecipe(rounding="nearest", **changes), QUIET)
        assert not load(tmp_path / name).hf_quantizer.is_trainable


def test_without_this_package_nothing_loads(packed: Path) -> None:
    """transformers only warns about a method that it does not know; the guard tensor has to stop it."""
    code = """
import sys
from transformers import AutoModelForCausalLM
assert "ptq" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except RuntimeError as error:
    print("refused:", error)
"""
    result = python(code, packed)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("refused:")
    assert "mismatch" in result.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(packed: Path, dtype: torch.dtype) -> None:
    model, exact = load(packed, dtype=dtype), load(packed)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    stored = load_file(packed / "model.safetensors")
    assert isinstance(layer, QuantLinear)
    for part, tensor in layer.parts().items():  # the bytes are no numbers of that dtype
        assert torch.equal(tensor, stored[f"model.layers.0.mlp.up_proj.weight_{part}"])
    assert layer.bias.dtype == model.lm_head.weight.dtype == logits(model).dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    assert (logits(model) - logits(exact)).norm() / logits(exact).norm() <= tolerance


def test_a_model_without_a_head(packed: Path, tmp_path: Path) -> None:
    """AutoModel's modules have names without "model."; so have the tensors that it saves."""
    expected = load(packed).model(IDS).last_hidden_state
    for folder in (packed, tmp_path):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        assert isinstance(model.get_submodule("layers.0.mlp.up_proj"), QuantLinear)
        assert torch.equal(model(IDS).last_hidden_state, expected)
        model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).model(IDS).last_hidden_state, expected)


def test_two_loads_agree_to_the_bit(packed: Path) -> None:
    assert torch.equal(logits(load(packed)), logits(load(packed)))


def test_loaded_logits_are_those_of_the_run(packed: Path) -> None:
    """`from_pretrained` gives the very numbers that the run measured on its parts."""
    checkpoint = Checkpoint.open(packed)
    config, family = AutoConfig.from_pretrained(packed), FAMILIES["llama"]
    found = PtqConfig.parse(checkpoint.config)
    assert found is not None
    entries, construction = found.entries(), found.residual()
    assert construction is not None

    def part(index: int | None, *prefixes: str) -> blocks.PartialModel:
        made = blocks.PartialModel(config, family, index, torch.device("cpu"))
        made.pack(entries if index is not None else {})
        if index is None:
            residual.install(made.model, construction)
        made.load({name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefixes)})
        return made

    hidden = part(None, "model.embed_tokens").embed(IDS)
    for index in range(config.num_hidden_layers):
        hidden = part(index, f"model.layers.{index}.").run(hidden)
    last = part(None, "model.norm")
    last.load({"lm_head.weight": checkpoint.read("model.embed_tokens.weight")})  # tied
    assert torch.equal(last.logits(hidden), logits(load(packed)))


def test_device_map(packed: Path) -> None:
    assert torch.equal(logits(load(packed, device_map="auto")), logits(load(packed)))


def test_layers_offloaded_to_disk(packed: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = load(packed, device_map=places, offload_folder=tmp_path / "offload")
    assert model.get_submodule(DOWN).weight_codes.is_meta
    # norms of an offloaded layer are the model's own code, whose sums end otherwise
    torch.testing.assert_close(logits(model), logits(load(packed)), rtol=1e-4, atol=1e-4)


def test_float16_on_a_cpu(tmp_path: Path) -> None:
    """Holds the same numbers in float32, and is saved so."""
    recipe = QuarotRecipe(rounding="nearest", group_size=8)
    ptq.quantize(save_model(tmp_path / "model", dtype=torch.float16), tmp_path / "out", recipe, QUIET)
    with pytest.warns(UserWarning, match="float16 is slow on a CPU, so the model is loaded in float32"):
        model = load(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float32 and torch.equal(logits(model), logits(load(tmp_path / "out")))
    model.save_pretrained(tmp_path / "again")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again")]
    assert files[0].keys() == files[1].keys() and torch.float16 in {tensor.dtype for tensor in files[0].values()}
    assert all(
        torch.equal(files[1][name], x.float() if x.dtype == torch.float16 else x) for name, x in files[0].items()
    )
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_save_pretrained_round_trips_shards(packed: Path, tmp_path: Path) -> None:
    """Saved in small shards, then loaded and saved whole again: the same bytes."""
    load(packed, dtype="auto").save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    load(tmp_path / "shards", dtype="auto").save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()


def test_fewer_blocks(packed: Path, tmp_path: Path) -> None:
    """As of a plain model: cut off and saved, or by an option; the entries of the others are left alone."""
    model = load(packed)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    model.save_pretrained(tmp_path / "cut")
    with pytest.warns(UserWarning, match="the model has 1 blocks, and its files more"):
        cut = load(packed, num_hidden_layers=1)
    for found in (load(tmp_path / "cut"), cut):
        assert torch.equal(logits(found), logits(model)) and not torch.equal(logits(found), logits(load(packed)))
    assert quantize("verify", tmp_path / "cut").exit_code == quantize("inspect", tmp_path / "cut").exit_code == 0


def test_plain_weights_under_a_config_of_packed_ones(packed: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(packed)).save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="holds plain numbers, and config.json says .* remove its quantization_config"):
        load(tmp_path / "plain")


def test_a_random_model_cannot_be_quantised_by_transformers(packed: Path) -> None:
    """`from_pretrained(plain, quantization_config=...)` would pack random numbers; packing is done by `quantize`."""
    config = PtqConfig(schemes={}, linears={})
    with pytest.raises(ValueError, match="not pre-quantized|pre-quantized"):
        load(packed.parent / "model", quantization_config=config)


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "damaged")


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("leaf", ["weight_codes", "weight_scale", "weight_zero", "bias", "weight"])
def test_a_missing_tensor(leaf: str, damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors.pop(f"{DOWN}.{leaf}"))
    with pytest.raises(ptq.InputError, match=f"{DOWN}.{leaf}' is missing"):
        load(damaged)


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.input_layernorm", "layers.1.mlp.down_proj", "norm"])
def test_a_missing_plain_tensor(name: str, damaged: Path) -> None:
    """transformers says so and goes on with random numbers."""
    edit_tensors(damaged, lambda tensors: tensors.pop(f"model.{name}.weight"))
    with pytest.raises(ptq.InputError, match=f"model.{name}.weight' is missing"):
        load(damaged)


def test_a_transformers_that_does_not_say_what_it_misses(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "ADJUST", "_of_another_version")
    with pytest.warns(UserWarning, match="check .* with `quantize verify`"):
        AutoModelForCausalLM.from_pretrained(packed)


@pytest.mark.parametrize("leaf", ["weight_su", "weight_codes_2"])
def test_a_tensor_that_nobody_reads(leaf: str, damaged: Path) -> None:
    """Such as the sign vectors of a linear whose scheme has lost its `signs`: it would be another model."""
    edit_tensors(damaged, lambda tensors: tensors.update({f"{DOWN}.{leaf}": torch.zeros(3, dtype=torch.int16)}))
    message = f"layers.0.mlp.down_proj.{leaf}', of which quantization_config in config.json says nothing"
    with pytest.raises(ptq.InputError, match=message):
        load(damaged)
    (damaged / "ptq.json").unlink()
    for command in (("inspect",), ("verify",)):
        check_refused(quantize(*command, damaged), message)


def test_sizes_that_are_not_those_of_the_tensors(damaged: Path) -> None:
    edit_config(intermediate_size=304)(damaged)
    check_refused(quantize("inspect", damaged), "config.json says")


@pytest.mark.parametrize("value", ["ptq", [], 5])
def test_an_entry_that_is_no_object(value: Any, damaged: Path) -> None:
    edit_config(quantization_config=value)(damaged)
    check_refused(quantize("inspect", damaged), f"quantization_config must be an object, found '{value}'")


@pytest.mark.parametrize("count", [-3, 0])
def test_no_blocks(count: int, damaged: Path) -> None:
    """transformers makes an empty model, and leaves out the tensors."""
    edit_config(num_hidden_layers=count)(damaged)
    with pytest.raises(ptq.InputError, match=f"num_hidden_layers must be a positive whole number, found {count}"):
        load(damaged)


def test_a_tensor_of_another_shape(damaged: Path) -> None:
    name = f"{DOWN}.weight_scale"
    edit_tensors(damaged, lambda tensors: tensors.update({name: tensors[name][:, :1].contiguous()}))
    with pytest.raises(ptq.InputError, match=r"weight_scale' has shape \[72, 1\], config.json says \[72, 19\]"):
        load(damaged)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_tensor_of_another_dtype(dtype: torch.dtype, damaged: Path) -> None:
    name = f"{DOWN}.weight_codes"
    edit_tensors(damaged, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ptq.InputError, match=r"weight_codes' is \w+, expected uint8"):
        load(damaged)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.input_layernorm", "model.norm"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64])
def test_a_plain_tensor_of_another_kind(dtype: torch.dtype, name: str, damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"].to(dtype)}))
    with pytest.raises(ptq.InputError, match=rf"{name}.weight' is {dtype_name(dtype)}, expected float32"):
        load(damaged)


# --- hostile configs ------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"format": value}
    return value


def scheme(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["schemes"]["scheme0"].update(changes)


def cache(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(kv_cache={**CacheQuantization().as_dict(), **changes})


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda c: c.update(version=2), "version 2, this package reads 1"),
    "a version that is no number": (lambda c: c.update(version=True), "version True, this package reads 1"),
    "a linear that is left out": (lambda c: c["linears"].pop(DOWN), "packed, and config.json does not list it"),
    "an unknown entry": (lambda c: c.update(surprise=1), "unknown entries: surprise"),
    "no schemes": (lambda c: c.pop("schemes"), "must hold the objects"),
    "a list of linears": (lambda c: c.update(linears=["lm_head"]), "must hold the objects"),
    "an unknown scheme": (lambda c: c["linears"].update({DOWN: "none"}), "no scheme is called 'none'"),
    "a scheme that is a list": (lambda c: c["linears"].update({DOWN: [1]}), r"no scheme is called \[1\]"),
    "a scheme of no linear": (lambda c: c["schemes"].update(other=5), "of other: expected an object, found 5"),
    "a scheme that is text": (lambda c: c["schemes"].update(scheme0="int4"), "expected an object, found 'int4'"),
    "an unknown linear": (lambda c: c["linears"].update({"model.layers.0.q": "scheme0"}), "the model does not have"),
    "a norm": (lambda c: c["linears"].update({"model.norm": "scheme0"}), "which is a LlamaRMSNorm, no Linear"),
    "the model itself": (lambda c: c["linears"].update({"": "scheme0"}), "no Linear"),
    "a parameter": (lambda c: c["linears"].update({"model.norm.weight": "scheme0"}), "the model does not have"),
    "an unknown format": (scheme(format="os.system"), "unknown format 'os.system'"),
    "a format that is a list": (scheme(format=["dense"]), "unknown format"),
    "a deep format": (scheme(format=nested(50)), "unknown format"),
    "another layout": (scheme(version=7), "layout version 7, this package reads version 1"),
    "no layout": (scheme(version=None), "layout version None"),
    "an unknown option": (scheme(colour="red"), "unknown option 'colour'"),
    "an option of another type": (scheme(bits=True), "bits must be 2 to 8, found True"),
    "too many bits": (scheme(bits=10**30), "bits must be 2 to 8"),
    "groups that do not divide": (scheme(group_size=10**30), "do not divide"),
    "a negative group": (scheme(group_size=-8), "group size must be 0"),
    "an unknown matrix": (scheme(hadamard="identity"), "expected paley1:Q"),
    "a huge matrix": (scheme(hadamard="sylvester:60"), "Hadamard"),
    "a matrix that does not fit": (scheme(hadamard="sylvester:6"), "does not divide its 72 input channels"),
    "a matrix of another type": (scheme(hadamard=[4]), "hadamard must be a string"),
    "a cache that is text": (lambda c: c.update(kv_cache="int4"), "kv_cache: expected an object"),
    "a cache of another version": (cache(version=3), "kv_cache has version 3, this package reads versions 1 to 2"),
    "a cache with more": (cache(surprise=1), "kv_cache: expected key_bits"),
    "a cache of one bit": (cache(key_bits=1), "kv_cache: KV cache: key_bits must be one of"),
    "a cache with a huge matrix": (cache(hadamard="sylvester:60"), "kv_cache: Hadamard construction"),
}


@pytest.mark.parametrize(("edit", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config(edit: Callable[[dict[str, Any]], Any], message: str, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    edit(config["quantization_config"])
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(ptq.InputError, match=message):
        load(damaged)


def test_a_plain_model_is_not_touched(packed: Path) -> None:
    """Importing this package changes nothing for other checkpoints."""
    model = load(packed.parent / "model")
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
