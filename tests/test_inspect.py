"""`quantize inspect`: what is inside a checkpoint, and what made it."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import check_refused, edit_config, quantize
from safetensors.torch import load_file

from ptq.kv.kv_cache import CacheQuantization

pytestmark = pytest.mark.usefixtures("fast")


def test_inspect(packed: Path, tiny: Path) -> None:
    result = quantize("inspect", packed)
    assert result.exit_code == 0 and "quarot/integer v1" in result.stdout and "plain tensors" in result.stdout
    found = json.loads(quantize("inspect", packed, "--json").stdout)
    assert sum(len(group["linears"]) for group in found["groups"]) == 14
    tensors = load_file(packed / "model.safetensors")
    names = {name: tensor for name, tensor in tensors.items() if "_proj.weight" in name}
    stored = 8 * sum(tensor.nbytes for tensor in names.values())
    weights = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)
    assert found["bits_per_weight"] == pytest.approx(stored / weights)
    assert found["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert found["kv_cache"] is None
    assert "not quantised" not in result.stdout and "not quantised" in quantize("inspect", tiny).stdout
    assert json.loads(quantize("inspect", tiny, "--json").stdout)["groups"] == []
    assert "0.000" not in quantize("inspect", tiny).stdout


def test_inspect_says_what_made_a_checkpoint(packed: Path, tiny: Path, tmp_path: Path) -> None:
    assert "made by" not in quantize("inspect", tiny).stdout
    assert json.loads(quantize("inspect", tiny, "--json").stdout)["made"] is None
    assert quantize("rotate", tiny, tmp_path / "out").exit_code == 0
    shown = quantize("inspect", tmp_path / "out").stdout
    assert "a plain one" in shown and "made by quarot with ptq" in shown and "measured on" not in shown
    record = json.loads((packed / "ptq.json").read_text())
    made = json.loads(quantize("inspect", packed, "--json").stdout)["made"]
    assert made == {key: record[key] for key in ("recipe", "version", "result")}
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    measured = record["result"] | {"text": "a.txt", "kl": 0.01, "kl_standard_error": None, "perplexity": 6.06}
    (copy / "ptq.json").write_text(json.dumps(record | {"result": measured | {"original_perplexity": 6}}))
    shown = quantize("inspect", copy).stdout.splitlines()[-1]
    told = "KL from the original 0.0100 nats per token, perplexity 6.000 to 6.060 (+1.0%)"
    assert shown == f"measured on a few rows of a.txt: {told}"
    (copy / "ptq.json").write_text(json.dumps(record | {"result": measured | {"newer": 1, "original_perplexity": 0}}))
    assert quantize("inspect", copy).stdout.splitlines()[-1].endswith("nats per token, about +1.0% of perplexity")
    none = "ptq.json: no result of a run is in it; quantise again"
    results = [measured | wrong for wrong in ({"kl": "0.01"}, {"kl": None}, {"text": ["a.txt"]}, {"perplexity": True})]
    contents = [json.dumps(record | {"result": result}) for result in (*results, None, [], {"kl": 1.0})]
    for content, said in (*((each, none) for each in contents), ("{", "not a record of a ptq run")):
        (copy / "ptq.json").write_text(content)
        shown = quantize("inspect", copy)
        assert shown.exit_code == 0 and "plain tensors" in shown.stdout and said in shown.stdout.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_inspect_of_a_model_without_sizes(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    edit_config(intermediate_size=0)(copy)
    check_refused(quantize("inspect", copy), f"{copy}/config.json: model.layers.0.mlp.down_proj has no weights")


def test_inspect_shows_what_happens_when_the_model_runs(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    content = json.loads((packed / "config.json").read_text())["quantization_config"]
    content["schemes"]["scheme0"]["activation"] = {"bits": 8, "clip": 0.9}
    content["kv_cache"] = CacheQuantization(key_bits=4, value_bits=2).as_dict()
    edit_config(quantization_config=content)(copy)
    lines = quantize("inspect", copy).stdout.splitlines()
    assert "input bits=8 clip=0.9" in lines[1] and "clip" not in lines[2]
    assert "key_bits=4 value_bits=2" in lines[-2]
    assert json.loads(quantize("inspect", copy, "--json").stdout)["kv_cache"] == content["kv_cache"]


def test_inspect_refuses_what_it_does_not_know(packed: Path, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    edit_config(quantization_config={"quant_method": "gptq"})(model)
    for command in (
        ("inspect", model),
        *((name, model, tmp_path / "out") for name in ("dequantize", "prepack", "export")),
    ):
        check_refused(quantize(*command), f"{model}/config.json: the model was quantised by 'gptq', not by ptq")
    hostile = shutil.copytree(packed, tmp_path / "hostile")
    content = json.loads((packed / "config.json").read_text())["quantization_config"]
    content["linears"]["model.layers.0.mlp.other"] = "scheme0"
    edit_config(quantization_config=content)(hostile)
    check_refused(quantize("inspect", hostile), "which the model does not have")
    content["linears"].popitem()
    edit_config(quantization_config={**content, "schemes": {**content["schemes"], "idle": {}}})(hostile)
    check_refused(quantize("inspect", hostile), "no linear uses scheme 'idle'")
