"""Models that are damaged, hostile or unknown: one sentence, the right exit code, nothing half-written."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, listing, quantize
from safetensors.torch import load_file, save_file
from tiny_models import save_model

pytestmark = pytest.mark.usefixtures("fast")
NAME = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.1.mlp.up_proj.bias"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return shutil.copytree(tiny, tmp_path / "model")


def shards(folder: Path) -> None:
    """The same model in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(folder: Path) -> None:
    shards(folder)
    (folder / "b.safetensors").unlink()


def wrong_index(folder: Path) -> None:
    shards(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NAME] = "b.safetensors" if index["weight_map"][NAME] == "a.safetensors" else "a.safetensors"
    path.write_text(json.dumps(index))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pickle_inside(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04" + b"x" * 100)


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def gguf_beside_config(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf")


def hostile_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def hostile_json(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


BAD_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (missing_shard, "this shard is missing"),
    "wrong index": (wrong_index, "does not hold it"),
    "truncated shard": (truncated, "truncated"),
    "pickle": (pickle, "a pickle can run code, so it is never opened; convert it with"),
    "pickle under another name": (pickle_inside, "a pickle under a safetensors name"),
    "hostile header": (hostile_header, "the header does not fit"),
    "hostile JSON": (hostile_json, "nested too deeply"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
    "an adapter": (adapter, "an adapter (LoRA) is no model: merge it"),
    "GGUF": (gguf, "GGUF is not read: pass the model that it was made from"),
    "GGUF beside its config": (gguf_beside_config, "model.gguf: GGUF is not read: pass the model that it"),
    "missing tensor": (edit_tensors(lambda t: t.pop(NAME)), f"has no tensor '{NAME}'"),
    "missing bias": (edit_tensors(lambda t: t.pop(BIAS)), f"has no tensor '{BIAS}', but its config.json promises it"),
    "surplus bias": (edit_config(attention_bias=False), "does not promise it"),
    "unclaimed tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(3))), "tensor 'extra' is nothing"),
    "fewer blocks than there are": (edit_config(num_hidden_layers=1), "config.json promises 1 blocks, 0 to 0"),
    "tokenizer that is no JSON": (
        lambda folder: (folder / "tokenizer.json").write_text('{"broken"'), "tokenizer.json: not valid JSON"
    ),
    "tokenizer settings that are a list": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json: expected an object, found '[]'",
    ),
    "contradicting shape": (edit_tensors(lambda t: t.update({NAME: torch.ones(24, 8)})), "has shape [24, 8], but"),
    "a norm of another shape": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(1)})), "'model.norm.weight' has shape [1], but"
    ),
    "integer weights": (edit_tensors(lambda t: t.update({NAME: t[NAME].to(torch.int8)})), "is int8: weights must be"),
    "blocks without end": (edit_config(num_hidden_layers=10**9), "num_hidden_layers 1000000000, but the checkpoint"),
    "a config of another size": (edit_config(hidden_size=32), "config.json says"),
    "unknown model_type": (edit_config(model_type="mamba"), "is not supported. A new one is one row of a table"),
    "mistyped model_type": (edit_config(model_type="lama"), "is not supported (is it llama?)"),
    "invented model_type": (edit_config(model_type="no-such-model"), "docs/add-a-family.md"),
    "quantised already": (edit_config(quantization_config={"quant_method": "gptq"}), "quantised already"),
    "a classifier": (
        edit_config(architectures=["LlamaForSequenceClassification"]), "only models that generate text are supported"
    ),
    "a model that embeds texts": (
        edit_config(architectures=["LlamaModel"]), "only models that generate text are supported"
    ),
    "sizes of the wrong type": (edit_config(num_hidden_layers="two"), "num_hidden_layers"),
    "sizes that are not positive": (edit_config(intermediate_size=-24), "intermediate_size"),
    "a size without end": (edit_config(head_dim=10**30), "head_dim must be 2147483647 at most"),
    "an angle that is no float": (edit_config(rope_parameters=dict(rope_type="default", rope_theta=10**30)), "too big"),
    "a padding token outside": (edit_config(pad_token_id=2**31), "makes no model of it: Padding_idx must be within"),
    "heads that do not divide": (edit_config(num_key_value_heads=3), "num_key_value_heads"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_bad_model(damage: Callable[[Path], None], message: str, model: Path, tmp_path: Path) -> None:
    damage(model)
    before = listing(tmp_path)
    refused = quantize("quarot", model, tmp_path / "out", "--rounding", "nearest")
    check_refused(refused, message)
    assert not refused.stderr.startswith("quantize: config.json")  # of which of two models?
    check_refused(quantize("quarot", model, tmp_path / "out", "--plan"), message)
    assert listing(tmp_path) == before


UNRUN: list[tuple[str, str, Any, str]] = [
    ("granitemoehybrid", "mamba_chunk_size", 0, "mamba_chunk_size must be a positive whole number, found 0"),
    ("granitemoehybrid", "mamba_chunk_size", 10**6, "mamba_chunk_size must be 4096 at most"),
    ("granitemoehybrid", "embedding_multiplier", None, "does not run: unsupported operand"),
    ("granitemoehybrid", "residual_multiplier", 10**30, "does not run: block 0: int too big"),
    ("granitemoehybrid", "logits_scaling", None, "does not run: unsupported operand"),
    ("llama", "rms_norm_eps", {"__float__": "NaN"}, "block 0: what leaves it in the original model is not finite"),
    ("granite", "logits_scaling", {"__float__": "NaN"}, "the original model's logits are not finite"),
    ("lfm2", "block_ffn_dim_multiplier", 0, "block_ffn_dim_multiplier 0 makes MLPs of width 0"),
    ("lfm2", "block_multiple_of", "x", "block_multiple_of"),
    ("gemma3_text", "layer_types", [None, None], "config.json"),
    ("deepseek_v3", "initializer_range", -0.5, "makes no model of it: normal expects std >= 0.0"),
]
"""Family, key and value: settings with which transformers builds a model, or none, that does not run."""


@pytest.mark.parametrize(("model_type", "key", "value", "message"), UNRUN, ids=[f"{m} {k} {v}" for m, k, v, _ in UNRUN])
def test_settings_that_transformers_cannot_run(
    model_type: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", model_type)
    assert key in json.loads((model / "config.json").read_text())
    edit_config(**{key: value})(model)
    check_refused(quantize("quarot", model, tmp_path / "out", "--rounding", "nearest"), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_how_somebody_computed_attention_is_their_business(model_type: str, key: str, tmp_path: Path) -> None:
    folders = [save_model(tmp_path / name, model_type) for name in ("plain", "said")]
    edit_config(**{key: "flash_attention_2"})(folders[1])
    for folder in folders:
        result = quantize("quarot", folder, tmp_path / f"{folder.name}-out", "--rounding", "nearest")
        assert result.exit_code == 0, result.output
    verified = quantize("verify", tmp_path / "said-out", "--against", folders[1])
    assert verified.exit_code == 0, verified.output
    config, other = ((tmp_path / f"{folder.name}-out" / "config.json").read_bytes() for folder in folders)
    assert config == other


def test_a_text_needs_a_tokenizer(model: Path, calibration_text: Path, tmp_path: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    message = f"{model}: holds no tokenizer, without which a text cannot be read; put the model's tokenizer.json"
    check_refused(quantize("quarot", model, tmp_path / "out", "--calibration", calibration_text), message)
    assert quantize("quarot", model, tmp_path / "out", "--rounding", "nearest").exit_code == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite(value: float, model: Path, tmp_path: Path) -> None:
    """Seen when the tensor is read, so work that is done by then is kept; nothing else is written."""
    edit_tensors(lambda content: content[NAME][3].fill_(value))(model)
    before = listing(tmp_path)
    check_refused(quantize("quarot", model, tmp_path / "out", "--rounding", "nearest"), f"tensor '{NAME}' holds")
    assert {name for name in listing(tmp_path) if not name.startswith(("out.work", "out.ptq-partial"))} == before.keys()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_beside_the_weights_that_cannot_be_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.name == "generation_config.json":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (model := tmp_path / "model").mkdir()
    for path in tiny.iterdir():
        (model / path.name).write_bytes(read(path))
    (model / "generation_config.json").write_text("{}")
    refused = quantize("fp6", model, tmp_path / "out")
    check_refused(refused, "generation_config.json: cannot be read (Permission denied); check the path")
