"""Damaged and unknown checkpoints in FP8: one sentence, and nothing is touched (`ptq.files.fp8_source`)."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, listing, quantize
from test_fp8_source import FORMS, FP8, NAME, compressed, fp8_config, published
from tiny_models import TINY, save_model
from torch import Tensor

from ptq.files.checkpoint import Checkpoint
from ptq.files.fp8_source import dequantized

pytestmark = pytest.mark.usefixtures("fast")
SCALE = NAME + "_scale_inv"
Tensors = dict[str, Tensor]
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scale": (edit_tensors(lambda t: t.pop(SCALE)), f"'{NAME}' is float8_e4m3fn, so its scales '{SCALE}' or"),
    "two scales": (edit_tensors(lambda t: t.update({NAME + "_scale": torch.ones(1)})), "are needed; found 2"),
    "a scale of another shape": (
        edit_tensors(lambda t: t.update({SCALE: torch.ones(2, 3)})),
        f"'{SCALE}' has shape [2, 3], but scales of a weight of shape [24, 16] must have [1, 1], [], [1], [24] or",
    ),
    "a scale of columns": (edit_tensors(lambda t: t.update({SCALE: torch.ones(16)})), "has shape [16], but scales of"),
    "integer scales": (
        edit_tensors(lambda t: t.update({SCALE: torch.ones(1, 1, dtype=torch.uint8)})), f"'{SCALE}' is uint8: scales of"
    ),
    "a scale without a weight": (
        edit_tensors(lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)})),
        "'model.norm.weight_scale_inv' is a scale, but beside it is no weight that is float8_e4m3fn",
    ),
    "a weight that is not FP8": (
        edit_tensors(lambda t: t.update({NAME: t[NAME].bfloat16()})), f"'{SCALE}' is a scale, but beside it"
    ),
    "another FP8": (
        edit_tensors(lambda t: t.update({NAME: t[NAME].float().to(torch.float8_e5m2)})), f"'{SCALE}' is a scale, but"
    ),
    "no FP8 at all": (
        edit_tensors(lambda t: [t.pop(n) if n.endswith("_inv") else t.update({n: t[n].bfloat16()}) for n in list(t)]),
        "says that weights are FP8, but no tensor is float8_e4m3fn",
    ),
    "experts in one tensor": (
        edit_tensors(lambda t: t.update({NAME: t[NAME][None].repeat(2, 1, 1)})), "of shape [2, 24, 16]: only matrices"
    ),
    "a norm in FP8": (
        edit_tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(FP8)})), "of shape [16]: only"
    ),
    "an empty weight": (edit_tensors(lambda t: t.update({NAME: t[NAME][:0]})), "of shape [0, 16]: only matrices"),
    "a weight of another shape": (
        edit_tensors(lambda t: t.update({NAME: t[NAME][:8]})), f"'{NAME}' has shape [8, 16], but config.json says [24"
    ),
    "no quantization_config": (edit_config(quantization_config=None), "has no quantization_config that says how"),
    **{
        f"block size {size!r}": (edit_config(**fp8_config(size)), "expected two positive whole numbers")
        for size in ([128], [128, -1], [0, 128], [True, 128], [128.0, 128], "128", {}, 128, [1, 2, 3], "12")
    },
    "no block structure": (
        edit_config(quantization_config=compressed("block")), "block_structure of FP8 weights is None, expected two"
    ),
    "two block sizes": (
        edit_config(quantization_config=compressed("block", [8, 8]), compression_config=compressed("block", [4, 4])),
        "FP8 scales of several block sizes, [(4, 4), (8, 8)]; expected one",
    ),
    **{
        f"not FP8: {number}": (edit_config(quantization_config=config), "quantised already")
        for number, config in enumerate(
            (
                "fp8", [], 3, {}, {"quant_method": ["fp8"]}, {"quant_method": "fbgemm_fp8"},
                {"quant_method": "compressed-tensors"}, compressed("channel", num_bits=4),
                compressed("channel", type="int"),
                compressed("channel") | {"format": "pack-quantized"}, compressed("channel") | {"format": None},
                compressed("channel") | {"config_groups": {"a": 3}}, compressed("channel") | {"config_groups": {}},
                compressed("channel") | {"config_groups": {"a": {"weights": None}}},
                compressed("channel") | {"config_groups": {"a": {"weights": compressed("x"), "format": ["x"]}}},
            )
        )
    },
    "FP8 and something else": (edit_config(compression_config={"quant_method": "gptq"}), "quantised already"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small Llama in FP8. Do not write to it."""
    plain = save_model(tmp_path_factory.mktemp("tiny-fp8") / "plain", dtype=torch.bfloat16, **TINY)
    return published(plain, FORMS["blocks of 128"])


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(damage: Callable[[Path], None], message: str, tiny_fp8: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_fp8, tmp_path / "model")
    damage(model)
    before = listing(tmp_path)
    check_refused(quantize("fp6", model, tmp_path / "out"), message)
    check_refused(quantize("fp6", model, tmp_path / "out", "--plan"), message)
    assert listing(tmp_path) == before


def spoilt(name: str, value: float) -> Callable[[Path], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[name] = tensors[name].float().flatten().index_fill(0, torch.tensor(0), value).view(
            tensors[name].shape).to(tensors[name].dtype)  # fmt: skip

    return edit_tensors(spoil)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NAME, float("nan"), f"tensor '{NAME}' holds 1 NaN and 0 Inf of 384 values, the first at [0, 0]"),
        (SCALE, float("nan"), f"tensor '{SCALE}' holds 1 scales that are negative or not finite, the first is nan"),
        (SCALE, float("inf"), f"tensor '{SCALE}' holds 1 scales that are negative or not finite, the first is inf"),
        (SCALE, -0.5, f"tensor '{SCALE}' holds 1 scales that are negative or not finite, the first is -0.5"),
        (SCALE, 3e38, f"tensor '{NAME}' holds 0 NaN and"),  # products too large for bfloat16
    ],
    ids=str,
)
def test_numbers_that_cannot_be(name: str, value: float, message: str, tiny_fp8: Path, tmp_path: Path) -> None:
    """Seen when the weight is read."""
    model = shutil.copytree(tiny_fp8, tmp_path / "model")
    spoilt(name, value)(model)
    check_refused(quantize("fp6", model, tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_a_block_of_zeros_may_have_the_scale_zero(tiny_fp8: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_fp8, tmp_path / "model")
    spoilt(SCALE, 0.0)(model)
    assert not dequantized(Checkpoint.open(model))[0].read(NAME).any()


def test_an_fp8_weight_without_scales_and_config(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    edit_tensors(lambda t: t.update({NAME: t[NAME].to(FP8)}))(model)
    message = f"tensor '{NAME}' is float8_e4m3fn: weights must be float32, float16 or bfloat16, or FP8"
    check_refused(quantize("fp6", model, tmp_path / "out"), message)
