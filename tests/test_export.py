"""`quantize export`: the library of compressed-tensors reads the same weights out of it; the rest is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, listing, quantize
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from transformers import AutoModelForCausalLM

from ptq.layers.linear import QuantLinear
from ptq.weights import formats
from ptq.weights.compressed_tensors import Exportable

pytestmark = pytest.mark.usefixtures("fast")
NEAREST = ("--rounding", "nearest", "--offline")
COMMANDS = {
    "W4": (("quarot", *NEAREST, "--group-size", "32"), "pack-quantized", torch.float32),
    "W3, channels": (("quarot", *NEAREST, "--weight-bits", "3"), "pack-quantized", torch.float32),
    "W8A8": (("quarot", *NEAREST, "--weight-bits", "8", "--activation-bits", "8"), "int-quantized", torch.float32),
    "MXFP6": (("fp6", "--scale", "e8m0", "--group-size", "32"), "mxfp6-pack-quantized", torch.bfloat16),
    "MXFP4": (
        ("fp6", "--scale", "e8m0", "--group-size", "32", "--element", "e2m1"),
        "mxfp4-pack-quantized",
        torch.bfloat16,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that groups of 32 divide; a head that is tied to the embedding."""
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_model(folder, **sizes, attention_bias=True, tie_word_embeddings=True)


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_other_library_reads_the_same_weights(kind: str, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the library that reads what is exported is not installed")
    (command, *options), format, dtype = COMMANDS[kind]
    assert quantize(command, model, tmp_path / "packed", "--no-report", *options).exit_code == 0
    done = quantize("export", tmp_path / "packed", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "14 linears in the format of compressed-tensors" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["out", "packed"]
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (described["format"], described["ignore"]) == (format, ["lm_head"])
    inputs = described["config_groups"]["group_0"]["input_activations"]
    assert (inputs is not None) == ("A8" in kind)

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    ids = torch.arange(3, 40).reshape(1, -1)
    with torch.no_grad():
        expected, found = ours(ids).logits.float(), theirs(ids).logits.float()  # which unpacks the weights of theirs
    if "A8" not in kind:  # transformers leaves their inputs alone
        assert (found - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.05) * expected.abs().max()
    linears = {name: module for name, module in ours.named_modules() if isinstance(module, QuantLinear)}
    assert len(linears) == 14
    for name, module in linears.items():
        w = module.format.dequantize(module.parts(), module.out_features, module.in_features)
        plain = theirs.get_submodule(name)
        assert torch.equal(plain.weight.float(), w), name
        assert (plain.bias is None) == (module.bias is None)


def test_golden_bytes() -> None:
    """The codes -8 .. of one row, by the text of compressed-tensors: code + 8, lowest bits first, in words of 32."""
    format = formats.get("quarot/integer", bits=4)
    assert isinstance(format, Exportable)
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98]], dtype=torch.uint8)  # 0 1 2 .. 9
    parts = {"codes": codes, "scale": torch.tensor([[0.5]]).bfloat16().view(torch.int16)}
    scheme = format.compressed_scheme(False)
    made = format.compress(parts, 1, 10, scheme)
    assert made["weight_packed"].tolist() == [[0x76543210, 0x98]]
    assert made["weight_shape"].tolist() == [1, 10] and made["weight_scale"].item() == 0.5
    again = format.decompress(made, 1, 10, scheme)
    assert all(torch.equal(again[part], parts[part]) for part in parts)


def test_linears_that_are_skipped_stay_plain(model: Path, tmp_path: Path) -> None:
    options = (*NEAREST, "--skip", "*.down_proj", "--group-size", "32", "--no-report")
    assert quantize("quarot", model, tmp_path / "packed", *options).exit_code == 0
    assert quantize("export", tmp_path / "packed", tmp_path / "out").exit_code == 0
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    downs = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert described["ignore"] == [*downs, "lm_head"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    assert all(torch.equal(tensors[f"{name}.weight"], packed[f"{name}.weight"]) for name in downs)
    assert quantize("export", tmp_path / "packed", tmp_path / "again").exit_code == 0
    assert listing(tmp_path / "again") == listing(tmp_path / "out")


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "online": (("quarot", "--rounding", "nearest"), "--offline"),
    "zero-points": (("quarot", *NEAREST, "--asymmetric"), "--symmetric"),
    "cache": (("quarot", *NEAREST, "--kv-bits", "4"), "KV cache"),
    "inputs": (("quarot", *NEAREST, "--activation-bits", "4"), "--activation-bits 8 --activation-clip 1"),
    "inputs of few bits of weights": (("quarot", *NEAREST, "--activation-bits", "8"), "--weight-bits 8"),
    "clip": (
        ("quarot", *NEAREST, "--weight-bits", "8", "--activation-bits", "8", "--activation-clip", "0.9"),
        "--activation-clip 1",
    ),
    "embedding": (("quarot", *NEAREST, "--embedding-bits", "8"), "--embedding-bits"),
    "head": (("fp6", "--scale", "e8m0", "--embedding-bits", "8"), "--embedding-bits"),
    "element": (("fp6", "--element", "e3m2"), "found e3m2, --scale bfloat16, groups of 0"),
    "signs": (("quip-sharp", "--rounding", "nearest"), "QuIP# cannot be exported"),
    "a part of q, k and v": (("quarot", *NEAREST, "--skip", "*.k_proj"), "q_proj is quantised and"),
    "a part of gate and up": (("quarot", *NEAREST, "--skip", "*.1.mlp.up_proj"), "layers.1.mlp.up_proj is not"),
    "nothing": (("rotate",), "no weight of it is quantised"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_other_runtimes_do_not_have_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    (command, *options), sentence = REFUSED[kind]
    given = options if command == "rotate" else ("--no-report", *options)
    assert quantize(command, model, tmp_path / "packed", *given).exit_code == 0
    check_refused(quantize("export", tmp_path / "packed", tmp_path / "out"), sentence)
    assert sorted(os.listdir(tmp_path)) == ["packed"]


def test_models_with_experts_are_refused_also_where_these_are_plain(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3_moe")
    options = (*NEAREST, "--skip", "*.experts.*", "--no-report")
    assert quantize("quarot", tmp_path / "model", tmp_path / "packed", *options).exit_code == 0
    check_refused(quantize("export", tmp_path / "packed", tmp_path / "out"), "experts")


def test_prepacked_weights_and_keys_of_the_layer_are_refused(model: Path, tmp_path: Path) -> None:
    assert quantize("quarot", model, tmp_path / "packed", *NEAREST, "--no-report").exit_code == 0
    assert quantize("prepack", tmp_path / "packed", tmp_path / "tiles").exit_code == 0
    check_refused(quantize("export", tmp_path / "tiles", tmp_path / "out"), "that it was made from")
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["schemes"]["scheme0"]["output_hadamard"] = "sylvester:4"
    path.write_text(json.dumps(config))
    (tmp_path / "packed" / "ptq.json").unlink()
    check_refused(quantize("export", tmp_path / "packed", tmp_path / "out"), "run with the model")


def test_scales_that_float16_cannot_hold_are_refused(model: Path, tmp_path: Path) -> None:
    assert quantize("quarot", model, tmp_path / "packed", *NEAREST, "--no-report").exit_code == 0
    (tmp_path / "packed" / "ptq.json").unlink()
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3] = torch.tensor(1.1e-7).bfloat16().view(torch.int16)
    save_file(tensors, path, {"format": "pt"})
    assert quantize("export", tmp_path / "packed", tmp_path / "out").exit_code == 0
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    result = quantize("export", tmp_path / "packed", tmp_path / "new")
    assert result.exit_code == 2
    assert "up_proj: scales do not fit into float16" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("new*"))  # nor what was written before


def test_a_folder_that_exists_and_a_damaged_checkpoint_are_refused(model: Path, tmp_path: Path) -> None:
    options: tuple[Any, ...] = (*NEAREST, "--no-report")
    assert quantize("quarot", model, tmp_path / "packed", *options).exit_code == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    check_refused(quantize("export", tmp_path / "packed", tmp_path / "out"), "not empty")
    assert os.listdir(tmp_path / "out") == ["notes"]
    path = tmp_path / "packed" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    check_refused(quantize("export", tmp_path / "packed", tmp_path / "new"), "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["out", "packed"]
