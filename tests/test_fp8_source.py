"""Models that were published in FP8 as the source of everything (`ptq.files.fp8_source`).

The oracle is the same model as a plain checkpoint: its weights are the products of codes and scales in float64, rounded
to float32 and then to its dtype.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, quantize
from safetensors.torch import load_file, save_file
from tiny_models import TINY, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ptq
from fp6.plan import Fp6Recipe
from ptq.commands.verify import verify
from ptq.files.checkpoint import Checkpoint
from ptq.files.fp8_source import dequantized, stated
from ptq.files.scaled_codes import dequantize
from ptq.hf.loading import load_model
from ptq.pipeline.pipeline import plan
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False)
NEAREST = QuarotRecipe(rounding="nearest")
FP8 = torch.float8_e4m3fn
FILE = "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


def fp8_config(block: Any = (128, 128), **changes: Any) -> dict[str, Any]:
    config = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=block)
    return {"quantization_config": config | changes}


def compressed(strategy: str, block: Any = None, **changes: Any) -> dict[str, Any]:
    weights = dict(num_bits=8, type="float", strategy=strategy, block_structure=block, symmetric=True)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | changes, "input_activations": None}}
    return dict(quant_method="compressed-tensors", format="float-quantized", config_groups=groups, ignore=["lm_head"])


@dataclass(frozen=True)
class Form:
    """A way to publish in FP8. `block`: rows and columns that share a scale, 0 for all of them; `shape`: of the stored
    scales, None for a matrix."""

    config: dict[str, Any]
    block: tuple[int, int]
    leaf: str = "weight_scale_inv"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = None
    beside: tuple[str, ...] = ()
    of_cache: bool = False


FORMS = {
    "blocks of 128": Form(fp8_config(), (128, 128)),
    "blocks of 128, which is not said": Form({"quantization_config": {"quant_method": "fp8"}}, (128, 128)),
    "blocks of 16": Form(fp8_config([16, 16]), (16, 16), dtype=torch.bfloat16),
    "flat blocks of powers of two": Form(fp8_config([1, 32]), (1, 32), dtype=torch.float8_e8m0fnu),
    "blocks larger than any weight": Form(fp8_config([16, 10**15]), (16, 0)),
    "one scale": Form(
        fp8_config(None, activation_scheme="static"), (0, 0), dtype=torch.bfloat16, shape=(),
        beside=("activation_scale",),
    ),
    "one scale in a list": Form(
        fp8_config(None), (0, 0), leaf="weight_scale", shape=(1,), beside=("input_scale", "output_scale")
    ),
    "compressed rows": Form(
        {"quantization_config": compressed("channel")}, (1, 0), leaf="weight_scale", dtype=torch.bfloat16
    ),
    "compressed rows in a list": Form(
        {"compression_config": compressed("channel")}, (1, 0), "weight_scale", shape=(-1,)
    ),
    "compressed whole": Form(
        {"quantization_config": compressed("tensor")}, (0, 0), "weight_scale", shape=(1,), beside=("input_scale",)
    ),
    "compressed rows, and an FP8 cache": Form(
        {"quantization_config": compressed("channel")}, (1, 0), leaf="weight_scale", of_cache=True
    ),
    "compressed blocks": Form({"quantization_config": compressed("block", [16, 128])}, (16, 128), "weight_scale"),
}  # fmt: skip


def published(folder: Path, form: Form, skip: tuple[str, ...] = ("embed", "norm", ".gate.weight", "vision", "lm_head")):
    """The model of a folder in FP8, beside it; the folder itself then holds the weights that this one means."""
    fp8 = shutil.copytree(folder, folder.with_name("fp8"))
    said = json.loads((folder / "config.json").read_bytes())
    dtype = getattr(torch, said.get("dtype") or said["text_config"]["dtype"])
    stored, meant = {}, {}
    for name, w in load_file(folder / FILE).items():
        if w.dim() != 2 or any(part in name for part in skip):
            stored[name] = meant[name] = w
            continue
        codes, scales, product = rounded(w.double(), form)
        owner = name.removesuffix(".weight")
        stored |= {name: codes, f"{owner}.{form.leaf}": scales}
        stored |= {f"{owner}.{leaf}": torch.tensor(0.5) for leaf in form.beside}
        if form.of_cache and owner.endswith("self_attn.k_proj"):
            attention = owner.removesuffix(".k_proj")
            stored |= {f"{attention}.{leaf}": torch.tensor([0.5]) for leaf in ("q_scale", "k_scale", "v_scale")}
        meant[name] = product.float().to(dtype)
    save_file(stored, fp8 / FILE, {"format": "pt"})
    save_file(meant, folder / FILE, {"format": "pt"})
    edit_config(**form.config)(fp8)
    return fp8


def rounded(w: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they mean, exactly."""
    (n, k), (rows, columns) = w.shape, (form.block[0] or w.shape[0], form.block[1] or w.shape[1])
    codes, meant = torch.zeros(n, k, dtype=FP8), torch.zeros_like(w)
    scales = torch.zeros(len(range(0, n, rows)), len(range(0, k, columns)), dtype=torch.float64)
    for i, top in enumerate(range(0, n, rows)):
        for j, left in enumerate(range(0, k, columns)):
            piece = slice(top, top + rows), slice(left, left + columns)
            scale = w[piece].abs().max() / 448
            if form.dtype == torch.float8_e8m0fnu:
                scale = 2 ** scale.log2().ceil()
            scales[i, j] = scale.float().to(form.dtype).double()
            codes[piece] = (w[piece] / scales[i, j]).clamp(-448, 448).float().to(FP8)
            meant[piece] = codes[piece].double() * scales[i, j]
    stored = scales.float().to(form.dtype)
    return codes, stored if form.shape is None else stored.view(form.shape), meant


def same_result(one: Path, other: Path) -> bool:
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in (FILE, "config.json"))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_bytes_of_the_plain_model(form: Form, tmp_path: Path) -> None:
    """72 x 152 and so on: no block divides these."""
    plain = save_model(tmp_path / "plain", dtype=torch.bfloat16)
    fp8 = published(plain, form)
    found = load_file(plain / FILE)
    checkpoint, notes = dequantized(Checkpoint.open(fp8))
    assert checkpoint.tensors.keys() == found.keys() and len(notes) == 1
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in found.items())
    assert all(info.dtype == found[name].dtype for name, info in checkpoint.tensors.items())
    assert checkpoint.nbytes == Checkpoint.open(plain).nbytes
    assert "14 weights are read as bfloat16, each times its scale" in notes[0]
    assert ("scales of activations or of a KV cache are left out" in notes[0]) == bool(form.beside or form.of_cache)
    for model in (plain, fp8):
        ptq.quantize(model, tmp_path / f"{model.name}-out", Fp6Recipe(), QUIET)
    assert same_result(tmp_path / "plain-out", tmp_path / "fp8-out")
    assert "quantization_config" in json.loads((tmp_path / "fp8-out" / "config.json").read_bytes())
    own, other = (verify(str(tmp_path / "fp8-out"), str(model)) for model in (fp8, plain))
    assert own == replace(other, source=True) and other.source is False


@pytest.mark.parametrize("model_type", ["llama", "minimax_m2"])
def test_with_calibration(model_type: str, calibration_text: Path, tmp_path: Path) -> None:
    """GPTQ, experts, float32, and a report that counts the bytes of the files."""
    plain = save_model(tmp_path / "plain", model_type)
    fp8 = published(plain, FORMS["blocks of 128"])
    recipe = QuarotRecipe(calibration=str(calibration_text), samples=8, sequence_length=64, group_size=8)
    results = [ptq.quantize(model, tmp_path / f"{model.name}-out", recipe, QUIET) for model in (plain, fp8)]
    assert same_result(results[0].out, results[1].out)
    assert results[0].kl == results[1].kl and results[0].rotation_error == results[1].rotation_error < 1e-5
    reports = [json.loads((result.out / "report.json").read_bytes()) for result in results]
    sizes = [sum(t.nbytes for t in load_file(model / FILE).values()) for model in (plain, fp8)]
    assert [report["bytes_before"] for report in reports] == sizes
    assert [sum(share["before"] for share in report["shares"]) for report in reports] == sizes
    assert "published in FP8" in reports[1]["notes"][0]


def test_rotate_gives_a_plain_checkpoint(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", dtype=torch.bfloat16, **TINY)
    fp8 = published(plain, FORMS["one scale"])
    for model in (plain, fp8):
        result = quantize("rotate", model, tmp_path / f"{model.name}-out")
        assert result.exit_code == 0, result.output
    assert same_result(tmp_path / "plain-out", tmp_path / "fp8-out")
    assert "quantization_config" not in json.loads((tmp_path / "fp8-out" / "config.json").read_bytes())
    assert "14 scales of activations or of a KV cache are left out" in " ".join(result.stderr.split())


def test_the_commands(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", dtype=torch.bfloat16, **TINY)
    fp8 = published(plain, FORMS["blocks of 128"])
    tables = [quantize("quarot", model, tmp_path / "out", "--rounding", "nearest", "--plan") for model in (plain, fp8)]
    assert [result.exit_code for result in tables] == [0, 0] and tables[0].stdout == tables[1].stdout
    assert "published in FP8: 14 weights are read as bfloat16" in tables[1].stderr
    assert quantize("fp6", fp8, tmp_path / "out").exit_code == 0
    said = quantize("verify", tmp_path / "out", "--against", fp8)
    assert said.exit_code == 0 and "KL 0." in said.stdout
    check_refused(quantize("verify", fp8), "nothing to check it by")
    check_refused(quantize("prepack", fp8, tmp_path / "no"), "quantised by 'fp8', not by ptq")
    inside = quantize("inspect", fp8)
    assert inside.exit_code == 0 and "published in FP8" in inside.stdout
    stored = sum(tensor.nbytes for tensor in load_file(fp8 / FILE).values())
    assert json.loads(quantize("inspect", fp8, "--json").stdout)["bytes"] == stored


def test_scales_in_another_file(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", dtype=torch.bfloat16, **TINY)
    fp8 = published(plain, FORMS["blocks of 128"])
    wanted = load_file(plain / FILE)
    tensors = load_file(fp8 / FILE)
    (fp8 / FILE).unlink()
    files = {name: "b.safetensors" if name.endswith("_inv") else "a.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, fp8 / file, {"format": "pt"})
    (fp8 / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    checkpoint = plan(str(fp8), NEAREST).checkpoint
    assert checkpoint.tensors.keys() == wanted.keys()
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in wanted.items())


def test_the_text_model_of_a_larger_one(tmp_path: Path) -> None:
    """As Ministral 3 is published: what is FP8 stands at the top of config.json, the text model below it."""
    text = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=16, vocab_size=96, pad_token_id=0)  # fmt: skip
    eyes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                patch_size=14)  # fmt: skip
    config = CONFIG_MAPPING["mistral3"](
        text_config={"model_type": "ministral3", **text}, vision_config={"model_type": "pixtral", **eyes}
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(tmp_path / "plain")
    fp8 = published(tmp_path / "plain", FORMS["one scale"], ("embed", "norm", "vision", "projector", "lm_head"))
    targets = [plan(str(model), NEAREST) for model in (tmp_path / "plain", fp8)]
    assert targets[0].plan.notes == (targets[1].plan.notes[0], *targets[1].plan.notes[2:])  # the bytes of other parts
    assert "the text model alone is taken (ministral3)" in targets[1].plan.notes[0]
    assert targets[1].plan.notes[1].startswith("published in FP8: 14 weights are read as bfloat16")
    for model in (tmp_path / "plain", fp8):
        ptq.quantize(model, tmp_path / f"{model.name}-out", NEAREST, QUIET)
    assert same_result(tmp_path / "plain-out", tmp_path / "fp8-out")
    checks = [verify(str(tmp_path / "fp8-out"), str(model)) for model in (tmp_path / "plain", fp8)]
    assert checks[1] == replace(checks[0], source=True)
    inner = json.loads((fp8 / "config.json").read_bytes())
    inner["text_config"]["quantization_config"] = inner.pop("quantization_config")
    (fp8 / "config.json").write_text(json.dumps(inner))
    assert plan(str(fp8), NEAREST).plan.notes == targets[1].plan.notes
    assert verify(str(tmp_path / "fp8-out"), str(fp8)) == checks[0]


@pytest.mark.parametrize("form", [Form(fp8_config([8, 8]), (8, 8)), FORMS["one scale"]], ids=["blocks", "one scale"])
@pytest.mark.parametrize("model_type", ["qwen3", "minimax_m2"])
@torch.no_grad()
def test_transformers_reads_the_same_weights(model_type: str, form: Form, tmp_path: Path) -> None:
    """It wants sizes that the blocks divide."""
    fp8 = published(save_model(tmp_path / "plain", model_type, torch.bfloat16), form)
    edit_config(
        quantization_config=form.config["quantization_config"] | {"modules_to_not_convert": ["gate", "lm_head"]}
    )(fp8)
    how = FineGrainedFP8Config(
        dequantize=True, weight_block_size=form.config["quantization_config"]["weight_block_size"]
    )
    theirs = AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.bfloat16, quantization_config=how)
    ours = load_model(fp8)
    assert ours.dtype == torch.bfloat16
    weights = ours.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.state_dict().items())
    ids = torch.arange(3, 33).reshape(2, 15)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        (None, "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        (["x"], "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
    ],
)
def test_the_dtype_of_the_config(said: Any, dtype: str, tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", dtype=torch.bfloat16, **TINY)
    fp8 = published(plain, FORMS["blocks of 128"])
    edit_config(dtype=said)(fp8)
    checkpoint, notes = dequantized(Checkpoint.open(fp8))
    assert checkpoint.read(NAME).dtype == checkpoint.tensors[NAME].dtype == getattr(torch, dtype)
    assert f"read as {dtype}," in notes[0]
    assert checkpoint.config["dtype"] == (None if said is None else dtype)
    edit_config(dtype=None, torch_dtype=said)(fp8)
    assert dequantized(Checkpoint.open(fp8))[0].read(NAME).dtype == getattr(torch, dtype)


def test_dequantize_is_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, k, rows, columns in ((300, 7, 128, 3), (1, 1, 1, 1), (129, 33, 1, 33), (257, 40, 257, 8), (5, 300, 2, 128)):
        codes = torch.randn(n, k, generator=generator).to(FP8)
        scale = torch.rand(-(-n // rows), -(-k // columns), generator=generator)
        i, j = torch.arange(n)[:, None] // rows, torch.arange(k) // columns
        found = dequantize(codes, scale, (rows, columns), torch.float32)
        assert torch.equal(found, (codes.double() * scale.double()[i, j]).float())


def test_a_plain_checkpoint_is_left_alone(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    assert dequantized(checkpoint) == (checkpoint, ()) and stated(checkpoint.config) is None
