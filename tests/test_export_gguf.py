"""`quantize export --gguf`: the package of llama.cpp reads the same weights out of it; the rest is refused."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, quantize
from safetensors.torch import load_file, save_file
from tiny_models import plain_gguf, save_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ptq.commands.export_gguf import correlation, least_correlation
from ptq.errors import InputError
from ptq.files.gguf_file import FILE_TYPES, GgufFile
from ptq.layers.packed_weight import PackedWeight
from ptq.weights import formats, ggml
from ptq.weights.rounding import nearest
from quarot.integer import IntegerFormat

gguf = pytest.importorskip("gguf", reason="the package that reads files of llama.cpp is not installed")
pytestmark = pytest.mark.usefixtures("fast")
NEAREST = ("--rounding", "nearest", "--offline", "--no-report")
COMMANDS = {
    "Q4_0": ("quarot", *NEAREST, "--group-size", "32"),
    "Q8_0": ("quarot", *NEAREST, "--weight-bits", "8", "--activation-bits", "8", "--embedding-bits", "8"),
    "Q5_0": ("quarot", "--rounding", "nearest", "--no-rotate", "--weight-bits", "5", "--no-report"),
    "MXFP4": ("fp6", "--scale", "e8m0", "--element", "e2m1", "--no-report"),
}


def saved(folder: Path, model_type: str, **changes: Any) -> Path:
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    return save_model(folder, model_type, **(sizes | dict(tie_word_embeddings=True, attention_bias=True) | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, its head tied to the embedding; beside it its GGUF, and one packed in the way of Q4_0."""
    folder = saved(tmp_path_factory.mktemp("gguf") / "model", "llama")
    plain_gguf(folder, folder.with_name("model.gguf"))
    assert quantize(COMMANDS["Q4_0"][0], folder, folder.with_name("packed"), *COMMANDS["Q4_0"][1:]).exit_code == 0
    return folder


def read_back(path: Path, like: Path) -> Any:
    """The plain model of transformers whose weights are those of a GGUF."""
    config = AutoConfig.from_pretrained(like)
    config.tie_word_embeddings = "output.weight" not in GgufFile(path).names
    plain, file = AutoModelForCausalLM.from_config(config).eval(), GgufFile(path)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in plain.named_parameters():
        target = file.name_of(name, config.num_hidden_layers)
        assert target is not None
        values, count = file.numbers(target), heads.get(name.split(".")[-2])
        if count is not None and file.architecture == "llama":
            values = values.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        parameter.data = values
    return plain


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_other_package_reads_the_same_model(kind: str, model_type: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "model", model_type, tie_word_embeddings=kind != "Q8_0")
    original = plain_gguf(source, tmp_path / "model.gguf")
    command, *options = COMMANDS[kind]
    assert quantize(command, source, tmp_path / "packed", *options).exit_code == 0
    done = quantize("export", tmp_path / "packed", tmp_path / "out.gguf", "--gguf", original)
    assert done.exit_code == 0, done.output
    count = 16 if kind == "Q8_0" else 14
    assert f"{count} weights in a GGUF" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["model", "model.gguf", "out.gguf", "packed"]

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    theirs = read_back(tmp_path / "out.gguf", source)
    packed = {name: module for name, module in ours.named_modules() if isinstance(module, PackedWeight)}
    assert len(packed) == count
    for name, module in packed.items():
        w = module.format.dequantize(module.parts(), module.out_features, module.in_features)
        assert torch.equal(theirs.get_submodule(name).weight, w), name
    if kind != "Q8_0":  # whose inputs are rounded in ours
        ids = torch.arange(3, 40).reshape(1, -1)
        with torch.no_grad():
            expected, found = ours(ids).logits, theirs(ids).logits
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_what_is_beside_the_tensors_stays(model: Path, tmp_path: Path) -> None:
    original, out = model.with_name("model.gguf"), tmp_path / "out.gguf"
    assert quantize("export", model.with_name("packed"), out, "--gguf", original).exit_code == 0
    before, after = (gguf.GGUFReader(path) for path in (original, out))
    assert list(before.fields) == list(after.fields)
    for name, field in before.fields.items():
        changed = {"general.file_type": 2, "GGUF.tensor_count": len(before.tensors) + 1}  # the head of its own
        assert after.fields[name].contents() == changed.get(name, field.contents()), name
    assert {x.tensor_type.name for x in after.tensors} == {"Q4_0", "F32"}
    assert quantize("export", model.with_name("packed"), tmp_path / "again.gguf", "--gguf", original).exit_code == 0
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [0, 32, 64, 256])
def test_every_type_against_the_other_package(bits: int, group: int) -> None:
    k = 768
    codes = torch.randint(2**bits, (5, k), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    scale = torch.linspace(-0.01, 0.02, 5 * (k // (group or k))).view(5, -1).bfloat16().float()
    if bits in (2, 3, 6) and 0 < group < 256:
        with pytest.raises(InputError, match="one scale a row"):
            ggml.integer_type(bits, group, k)
        return
    name = ggml.integer_type(bits, group, k).name
    found = gguf.dequantize(ggml.integer_blocks(codes, scale, bits, group).numpy(), gguf.GGMLQuantizationType[name])
    expected = (codes.float() - 2 ** (bits - 1)) * scale.half().float().repeat_interleave(group or k, 1)
    assert torch.equal(torch.from_numpy(found), expected)
    assert gguf.LlamaFileType(FILE_TYPES[name]).name.startswith(f"MOSTLY_{name}")


def test_weights_in_2_bits_are_known_by_their_rows() -> None:
    """Also where rows are so wide that their norms hardly differ."""
    w, form = torch.randn(2048, 5632, generator=torch.Generator().manual_seed(0)), IntegerFormat(2)
    rounded = form.dequantize(form.pack(nearest(w, form.codebook)), *w.shape)
    norms, theirs = rounded.norm(dim=1), w.norm(dim=1)
    assert correlation(norms, theirs) > 2 * least_correlation(2048)
    assert abs(correlation(norms.flip(0), theirs)) < least_correlation(2048)


def test_scales_that_float16_does_not_hold() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    for bits, most in ((8, 65504.0), (2, 32752.0)):  # Q2_K has twice the scale, too
        assert len(ggml.integer_blocks(codes, torch.tensor([[most]]), bits, 0)) == 1
        with pytest.raises(InputError, match=f"llama.cpp holds up to {int(most)}"):
            ggml.integer_blocks(codes, torch.tensor([[most + 32]]), bits, 0)


def test_golden_bytes() -> None:
    """Column j of the first half of a block in the low four bits of byte j, that of the second half above it."""
    codes = torch.arange(32, dtype=torch.uint8)[None] % 16
    q4 = ggml.integer_blocks(codes, torch.tensor([[1.0]]), 4, 32)
    assert bytes(q4[0].tolist()).hex() == "003c" + "".join(f"{i:x}{i:x}" for i in range(16))
    q8 = ggml.integer_blocks(codes, torch.tensor([[-2.0]]), 8, 0)
    assert bytes(q8[0].tolist()).hex() == "00c0" + 2 * bytes(range(128, 144)).hex()
    form = formats.get("fp6/minifloat", element="e2m1", group_size=32, scale="e8m0")
    assert isinstance(form, ggml.InGgml) and form.ggml_type(64) == "MXFP4"
    with pytest.raises(InputError, match="65504"):
        ggml.integer_blocks(codes, torch.tensor([[1e5]]), 4, 32)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "online": (("quarot", "--rounding", "nearest"), "--offline"),
    "zero-points": (("quarot", *NEAREST, "--asymmetric"), "--symmetric"),
    "cache": (("quarot", *NEAREST, "--kv-bits", "4"), "KV cache"),
    "inputs": (("quarot", *NEAREST, "--activation-bits", "4"), "without --activation-bits"),
    "width": (("quarot", *NEAREST, "--weight-bits", "6"), "a multiple of 256 columns"),
    "element": (("fp6",), "--element e2m1"),
    "signs": (("quip-sharp", "--rounding", "nearest"), "QuIP# cannot be exported"),
    "nothing": (("rotate",), "no weight of it is quantised"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_llama_cpp_does_not_have_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    (command, *options), message = REFUSED[kind]
    assert quantize(command, model, tmp_path / "packed", *options).exit_code == 0
    check_refused(
        quantize("export", tmp_path / "packed", tmp_path / "out.gguf", "--gguf", model.with_name("model.gguf")), message
    )
    assert os.listdir(tmp_path) == ["packed"]


def test_prepacked_is_refused(model: Path, tmp_path: Path) -> None:
    assert quantize("prepack", model.with_name("packed"), tmp_path / "cpu").exit_code == 0
    check_refused(
        quantize("export", tmp_path / "cpu", tmp_path / "out.gguf", "--gguf", model.with_name("model.gguf")),
        "pass the checkpoint that it was made from",
    )


def text(value: bytes) -> bytes:
    """As a GGUF writes it."""
    return struct.pack("<Q", len(value)) + value


DAMAGED: dict[str, tuple[Callable[[Path, bytes], Any], str]] = {
    "missing": (lambda path, _: path.unlink(), "there is no such file"),
    "text": (lambda path, _: path.write_text("not one"), "is no GGUF"),
    "empty": (lambda path, _: path.write_bytes(b""), "is no GGUF"),
    "cut": (lambda path, whole: path.write_bytes(whole[: len(whole) // 2]), "is no GGUF"),
    "counts": (lambda path, whole: path.write_bytes(whole[:8] + b"\xff" * 16 + whole[24:]), "is no GGUF"),
    "architecture": (
        lambda path, whole: path.write_bytes(
            whole.replace(struct.pack("<Q5s", 5, b"llama"), struct.pack("<Q5s", 5, b"bloom"))
        ),
        "of the architecture 'bloom'",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_no_original_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    damage, message = DAMAGED[kind]
    whole, path = model.with_name("model.gguf").read_bytes(), tmp_path / "model.gguf"
    path.write_bytes(whole)
    damage(path, whole)
    check_refused(quantize("export", model.with_name("packed"), tmp_path / "out.gguf", "--gguf", path), message)
    assert not (tmp_path / "out.gguf").exists()


OTHERS: dict[str, tuple[dict[str, int], Callable[[dict[str, Tensor]], Any]]] = {
    "blocks": ({"num_hidden_layers": 3}, lambda tensors: None),
    "a block less": ({"num_hidden_layers": 1}, lambda tensors: None),
    "width": ({"intermediate_size": 128}, lambda tensors: None),
    "query": ({}, lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"].normal_()),
    "value": ({}, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"].mul_(2)),
    "down": ({}, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].normal_()),
    "embedding": ({}, lambda tensors: tensors["model.embed_tokens.weight"].normal_()),
    "norm": ({}, lambda tensors: tensors["model.layers.0.post_attention_layernorm.weight"].mul_(3)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_gguf_of_another_model_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    changes, edit = OTHERS[kind]
    other = saved(tmp_path / "other", "llama", **changes)
    tensors = load_file(other / "model.safetensors")
    edit(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    path = plain_gguf(other, tmp_path / "other.gguf")
    check_refused(
        quantize("export", model.with_name("packed"), tmp_path / "out.gguf", "--gguf", path),
        "pass the GGUF that was made of the very model",
    )
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_that_exists_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    check_refused(
        quantize("export", model.with_name("packed"), tmp_path / "out.gguf", "--gguf", model.with_name("model.gguf")),
        "exists; nothing in it was touched",
    )
    assert (tmp_path / "out.gguf").read_text() == "mine"
