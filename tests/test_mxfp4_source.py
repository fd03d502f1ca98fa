"""Models that were published in MXFP4 as the source of everything (`ptq.files.mxfp4_source`), and what is refused.

The test publishes a model itself, byte by byte; what its codes mean is asked of transformers.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, listing, quantize
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ptq
from fp6.plan import Fp6Recipe
from ptq.commands.verify import verify
from ptq.files.checkpoint import Checkpoint
from ptq.files.published import form
from ptq.files.scaled_codes import PAIRS, dequantize
from ptq.hf import fused
from ptq.hf.loading import load_model
from ptq.layers.packed_weight import format_of
from ptq.models.families import FAMILIES
from ptq.pipeline.pipeline import plan
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False)
NEAREST = QuarotRecipe(rounding="nearest")
FILE = "model.safetensors"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
IDS = torch.arange(3, 60).reshape(3, 19)
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=False)
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}


def published(folder: Path) -> Path:
    """The model of a folder in MXFP4, beside it; the folder itself then holds the weights that this one means."""
    mxfp4 = shutil.copytree(folder, folder.with_name("mxfp4"))
    stored, meant = {}, {}
    for name, w in load_file(folder / FILE).items():
        if w.dim() != 3:
            stored[name] = meant[name] = w
            continue
        blocks, scales = rounded(w.transpose(1, 2).float())
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=w.dtype)
        assert 0.01 < ((meant[name] - w).norm() / w.norm()).item() < 0.2  # it is that weight
    save_file(stored, mxfp4 / FILE, {"format": "pt"})
    save_file(meant, folder / FILE, {"format": "pt"})
    edit_config(**MXFP4)(mxfp4)
    return mxfp4


def rounded(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [e, n, k / 32, 16] and scales [e, n, k / 32] of a weight [e, n, k]."""
    groups = w.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    numbers = PAIRS[:16, 0]  # 0, 0.5, ..., 6, and their opposites
    codes = (groups / exponent.exp2()[..., None])[..., None].sub(numbers).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in bfloat16, and the same in MXFP4. Do not write to them."""
    plain = save_model(tmp_path_factory.mktemp("mxfp4") / "plain", "gpt_oss", torch.bfloat16, **SIZES)
    return plain, published(plain)


def same_result(one: Path, other: Path) -> bool:
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in (FILE, "config.json"))


def test_every_matrix_of_an_expert_is_read_by_itself(models: tuple[Path, Path]) -> None:
    """From codes, and from transformers' own tensors."""
    plain, mxfp4 = models
    names = FAMILIES["gpt_oss"].experts
    assert names is not None
    whole = load_file(plain / FILE)
    wanted = {name: tensor for name, tensor in whole.items() if not fused.is_fused_parameter(name)}
    for name in whole.keys() - wanted.keys():
        owner, _, leaf = name.rpartition(".")
        parts = fused.take_apart({leaf: whole[name]}, fused.FusedLayout(True, True), names.linears)
        wanted |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    assert wanted["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (96, 64)
    for folder in models:
        checkpoint = plan(str(folder), NEAREST).checkpoint
        assert checkpoint.tensors.keys() == wanted.keys()
        for name, tensor in wanted.items():
            found, info = checkpoint.read(name), checkpoint.tensors[name]
            assert torch.equal(found, tensor) and found.is_contiguous()
            assert (info.dtype, info.shape) == (torch.bfloat16, tensor.shape) and info.nbytes == 2 * tensor.numel()
        stored = sum(tensor.nbytes for tensor in load_file(folder / FILE).values())
        assert sum(info.stored_bytes for info in checkpoint.tensors.values()) == stored


RECIPES = {
    "quarot": NEAREST,
    "quarot W4A8": QuarotRecipe(rounding="nearest", activation_bits=8, group_size=16),
    "fp6": Fp6Recipe(),
    "quip-sharp": QuipSharpRecipe(rounding="nearest"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_bytes_of_the_plain_model(recipe: Any, models: tuple[Path, Path], tmp_path: Path) -> None:
    results = [ptq.quantize(model, tmp_path / model.name, recipe, QUIET) for model in models]
    assert same_result(results[0].out, results[1].out)
    assert results[0].kl == results[1].kl and results[0].rotation_error == results[1].rotation_error < 1e-5
    own, other = (verify(str(results[1].out), str(model)) for model in reversed(models))
    assert own.source and not other.source and (own.kl, own.top1) == (other.kl, other.top1)


def test_with_calibration(models: tuple[Path, Path], calibration_text: Path, tmp_path: Path) -> None:
    recipe = QuarotRecipe(calibration=str(calibration_text), samples=8, sequence_length=64, group_size=16)
    results = [ptq.quantize(model, tmp_path / model.name, recipe, QUIET) for model in models]
    assert same_result(results[0].out, results[1].out)
    reports = [json.loads((result.out / "report.json").read_bytes()) for result in results]
    sizes = [sum(tensor.nbytes for tensor in load_file(model / FILE).values()) for model in models]
    assert [report["bytes_before"] for report in reports] == sizes
    assert [sum(share["before"] for share in report["shares"]) for report in reports] == sizes
    assert reports[1]["notes"][0] == "published in MXFP4: 4 weights are read as bfloat16, each times its scale"


@torch.no_grad()
def test_small_floats_lose_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    """e2m1 in groups of 32 with a power of two: the very same numbers. Attention is as it was where it is left out."""
    plain, mxfp4 = models
    recipe = Fp6Recipe(element="e2m1", scale="e8m0", skip=("*self_attn*",))
    result = ptq.quantize(mxfp4, tmp_path / "out", recipe, QUIET)
    checkpoint, stored = plan(str(mxfp4), recipe).checkpoint, load_file(result.out / FILE)
    config = json.loads((result.out / "config.json").read_bytes())["quantization_config"]
    assert len(config["linears"]) == 24
    for name, scheme in config["linears"].items():
        w = checkpoint.read(f"{name}.weight")
        format = format_of(config["schemes"][scheme], name, *w.shape)
        parts = {part: stored[f"{name}.weight_{part}"] for part in ("codes", "scale")}
        assert torch.equal(format.dequantize(parts, *w.shape), w.float())
        assert torch.equal(stored[f"{name}.bias"], checkpoint.read(f"{name}.bias"))
    assert result.kl < 1e-9 and result.top1 == 1
    packed, original = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (result.out, plain))
    torch.testing.assert_close(packed(IDS).logits, original(IDS).logits, rtol=1e-4, atol=1e-4)


def test_the_commands(models: tuple[Path, Path], tmp_path: Path) -> None:
    plain, mxfp4 = models
    tables = [quantize("quarot", model, tmp_path / "out", "--rounding", "nearest", "--plan") for model in models]
    assert [result.exit_code for result in tables] == [0, 0] and tables[0].stdout == tables[1].stdout
    assert "published in MXFP4: 4 weights are read as bfloat16" in tables[1].stderr
    assert quantize("fp6", mxfp4, tmp_path / "out").exit_code == 0
    said = quantize("verify", tmp_path / "out", "--against", mxfp4)
    assert said.exit_code == 0 and "KL 0." in said.stdout
    inside = quantize("inspect", mxfp4)
    assert inside.exit_code == 0 and "published in MXFP4" in inside.stdout
    stored = sum(tensor.nbytes for tensor in load_file(mxfp4 / FILE).values())
    assert json.loads(quantize("inspect", mxfp4, "--json").stdout)["bytes"] == stored
    assert form(Checkpoint.open(mxfp4).config) == "MXFP4" and form(Checkpoint.open(plain).config) is None
    check_refused(quantize("prepack", mxfp4, tmp_path / "no"), "quantised by 'mxfp4', not by ptq")
    check_refused(quantize("rotate", mxfp4, tmp_path / "no"), "the experts of gpt_oss must be quantised")
    check_refused(
        quantize("quarot", mxfp4, tmp_path / "no", "--rounding", "nearest", "--kv-bits", 4), "sinks of its own"
    )


@torch.no_grad()
def test_the_weights_of_transformers(models: tuple[Path, Path]) -> None:
    """Which reads MXFP4 itself, where it finds kernels or makes 16 bits of it."""
    ours, theirs = load_model(models[1]), AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    found = ours.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_codes_and_scales_in_files_of_their_own(models: tuple[Path, Path], tmp_path: Path) -> None:
    """As large models are published."""
    wanted, tensors = plan(str(models[1]), NEAREST).checkpoint, load_file(models[1] / FILE)
    folder = shutil.copytree(models[1], tmp_path / "model")
    (folder / FILE).unlink()
    files = {name: "b.safetensors" if name.endswith("_scales") else "a.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = plan(str(folder), NEAREST).checkpoint
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.tensors)


def test_every_code_and_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 1, 16).repeat_interleave(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(16, -1, -1)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).flatten(0, 1)
    factors = scales.contiguous().view(torch.float8_e8m0fnu).float()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(blocks.flatten(2).flatten(0, 1), factors, (1, 32), dtype), wanted.to(dtype))


# --- what is refused ------------------------------------------------------------------------------------------------

BLOCKS, SCALES, BIAS = f"{GATE_UP}_blocks", f"{GATE_UP}_scales", f"{GATE_UP}_bias"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (edit_tensors(lambda t: t.pop(SCALES)), f"'{BLOCKS}' needs its scales '{SCALES}', which the files do"),
    "no codes": (edit_tensors(lambda t: t.pop(BLOCKS)), f"'{SCALES}' is a scale, but beside it is no '{BLOCKS}'"),
    "fewer rows": (
        edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS][:, 2:].clone()})),
        f"'{SCALES}' has shape [4, 192, 2], but codes of shape [4, 190, 2, 16] need one scale for every 16 bytes",
    ),
    "shorter groups": (
        edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].clone()})),
        f"'{BLOCKS}' has shape [4, 192, 2, 8], but codes of MXFP4 are [experts, rows, groups, 16]",
    ),
    "no axes": (edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS].flatten()})), "has shape [24576], but codes of"),
    "no rows": (edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS][:, :0].clone()})), "has shape [4, 0, 2, 16], but"),
    "other codes": (edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS].char()})), f"'{BLOCKS}' is int8: MXFP4 is"),
    "other scales": (
        edit_tensors(lambda t: t.update({SCALES: t[SCALES].float()})), f"'{SCALES}' is float32: MXFP4 is stored as"
    ),
    "twice": (
        edit_tensors(lambda t: t.update({GATE_UP: torch.ones(4, 64, 192)})), f"'{GATE_UP}' is there twice: as it is"
    ),
    "fewer rows and scales": (
        edit_tensors(lambda t: t.update({n: t[n][:, 2:].clone() for n in (BLOCKS, SCALES)})),
        "experts.0.gate_proj.weight' has shape [95, 64], but config.json says [96, 64]",
    ),
    "half a pair": (
        edit_tensors(lambda t: t.update({n: t[n][:, 1:].clone() for n in (BLOCKS, SCALES)})),
        f"'{GATE_UP}' has shape [4, 191, 64]: 191 rows are not those of gate and up",
    ),
    "fewer experts": (
        edit_tensors(lambda t: t.update({n: t[n][1:].clone() for n in (BLOCKS, SCALES)})),
        f"'{GATE_UP}' has shape [3, 192, 64], but config.json says 4 experts: the config belongs to another",
    ),
    "a name for each would not fit into memory": (
        edit_tensors(lambda t: t.update({BIAS: torch.ones(10**7, 1, dtype=torch.uint8)})),
        f"'{BIAS}' has shape [10000000, 1], but config.json says 4 experts",
    ),
    "no biases": (
        edit_tensors(lambda t: t.pop(BIAS)),
        f"no tensor '{BIAS}', nor 'model.layers.1.mlp.experts.0.gate_proj.bias', but its config.json promises it",
    ),
    "fewer biases": (
        edit_tensors(lambda t: t.update({BIAS: t[BIAS][:, 2:].clone()})), "gate_proj.bias' has shape [95], but config"
    ),
    "no sinks": (
        edit_tensors(lambda t: t.pop("model.layers.0.self_attn.sinks")), "no tensor 'model.layers.0.self_attn.sinks'"
    ),
    "no codes at all": (
        edit_tensors(lambda t: [t.pop(n) for n in list(t) if n.endswith(("_blocks", "_scales"))]),
        "says that weights are MXFP4, but no tensor's name ends in '_blocks'",
    ),
    "no quantization_config": (
        edit_config(quantization_config=None), "as in MXFP4, but config.json has no quantization_config that says so"
    ),
    "also something else": (edit_config(compression_config={"quant_method": "gptq"}), "quantised already (compression"),
    "another method": (edit_config(quantization_config={"quant_method": "mxfp8"}), "quantised already (quantization"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(
    damage: Callable[[Path], None], message: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = shutil.copytree(models[1], tmp_path / "model")
    damage(model)
    before = listing(tmp_path)
    check_refused(quantize("fp6", model, tmp_path / "out"), message)
    check_refused(quantize("quarot", model, tmp_path / "out", "--rounding", "nearest", "--plan"), message)
    assert listing(tmp_path) == before


def test_a_file_that_ends_early(models: tuple[Path, Path], tmp_path: Path) -> None:
    model = shutil.copytree(models[1], tmp_path / "model")
    (model / FILE).write_bytes((model / FILE).read_bytes()[:-1])
    check_refused(quantize("fp6", model, tmp_path / "out"), f"{FILE}: truncated")


@pytest.mark.parametrize(
    ("scale", "message"),
    [(255, f"'{SCALES}' holds 1 scales that are negative or not finite, the first is nan"), (254, "holds 0 NaN and")],
)
def test_numbers_that_cannot_be(scale: int, message: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """Seen when the weight is read."""
    model = shutil.copytree(models[1], tmp_path / "model")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[SCALES][0, 0, 0], tensors[BLOCKS][0, 0, 0] = scale, 0x77

    edit_tensors(spoil)(model)
    check_refused(quantize("fp6", model, tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()
