"""Integer scales: bytes, fit, and every kernel against Python's integers, to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import LEVELS, ops_at
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import ptq
from ptq.commands import prepack
from ptq.errors import InputError
from ptq.ops import bitstream, native
from ptq.weights import formats
from ptq.weights.prepacked import PrepackedFormat
from ptq.weights.rounding import nearest
from quarot import integer_scales
from quarot.integer import IntegerFormat
from quarot.plan import QuarotRecipe

BITS = (2, 3, 4)
SHAPES = [(1, 32, 32), (48, 256, 128), (50, 256, 64), (33, 96, 32), (17, 4096, 128), (70, 1152, 128), (5, 2304, 768)]
"""n, k, group size: no multiples of sixteen rows; groups within a panel, and across."""


@pytest.fixture(params=("reference", *LEVELS))
def implementation(request):
    yield from ops_at(request.param)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integer_format(bits: int = 4, group_size: int = 128) -> IntegerFormat:
    return IntegerFormat(bits, group_size, scale="integer")


def random_parts(format: IntegerFormat, n: int, k: int, extreme: bool = False) -> formats.Parts:
    """Any code, any multiple of either sign; or the largest products that there are."""
    generator, g, top = draw(n * k + format.bits), k // format.group_size, 2**format.bits
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, generator=generator)
    signs = 2 * torch.randint(0, 2, (n, g), generator=generator) - 1
    multiples = torch.randint(1, 16, (n, g), generator=generator) * signs
    multiples[:, 0] = torch.randint(8, 16, (n,), generator=generator)
    if extreme:
        codes, multiples = torch.zeros_like(codes), torch.full_like(multiples, 15)
    exponents = torch.randint(100, 140, (n, 1), generator=generator)
    scale = torch.cat((exponents, multiples), 1).to(torch.int8).view(torch.uint8)
    return {"codes": bitstream.pack(codes, format.bits), "scale": scale}


def exact_product(q: Tensor, q_scale: Tensor, format: IntegerFormat, parts: formats.Parts, bias: Tensor) -> Tensor:
    """The definition from the bytes: Python integers, and float32 at the end."""
    k = q.shape[1]
    codes = bitstream.unpack(parts["codes"], format.bits, k).long() - 2 ** (format.bits - 1)
    multiples = parts["scale"][:, 1:].contiguous().view(torch.int8).long().repeat_interleave(format.group_size, 1)
    whole = q.long() @ (codes * multiples).t()
    step = torch.tensor([2.0 ** (int(e) - 127) for e in parts["scale"][:, 0]])
    return whole.float() * step * q_scale[:, None] + bias


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_golden_bytes():
    scale = torch.tensor([[0.5, -0.25, 0.0625], [15, 1, -8], [-(2.0**-100), 2.0**-103, 1.875 * 2.0**-100]])
    stored = integer_scales.encode(scale, "integer")
    assert [bytes(row.tolist()).hex() for row in stored] == ["7b08fc01", "7f0f01f8", "18f8010f"]
    assert torch.equal(integer_scales.numbers(stored), scale)


@pytest.mark.parametrize("bits", BITS)
def test_unpack_inverts_pack_in_every_layout(bits):
    w = torch.randn(37, 512, generator=draw(bits))
    format = integer_format(bits)
    rounded = nearest(w, format.codebook)
    parts = format.pack(rounded)
    formats.check_parts(format, parts, 37, 512)
    for layout in ("tiles", "fragments"):
        laid_out = format.lay_out(parts, layout)
        codes, scales = format.unpack(laid_out, 37, 512)
        assert torch.equal(codes, rounded.codes) and torch.equal(scales["scale"], rounded.scales["scale"])
        back = format.unprepack(laid_out)
        assert set(back) == set(parts) and all(torch.equal(back[part], parts[part]) for part in parts)


def test_every_multiple_of_every_step_is_a_bfloat16_number():
    multiples = torch.cat((torch.arange(-15, 0), torch.arange(1, 16))).to(torch.int8).view(torch.uint8)
    for exponent in range(1, 251):
        stored = torch.cat((torch.tensor([exponent], dtype=torch.uint8), multiples))[None]
        assert torch.equal(integer_scales.encode(integer_scales.numbers(stored), "integer"), stored)
        bfloat16 = integer_scales.words(stored).view(torch.bfloat16)
        assert torch.equal(bfloat16.float(), integer_scales.numbers(stored))


def test_true_bits():
    parts = integer_format().prepack(random_parts(integer_format(), 64, 1024), "cpu")
    assert sum(t.nbytes for t in parts.values()) * 8 / (64 * 1024) == 4 + 8 / 128 + 8 / 1024


def test_prepacked_for_a_gpu_and_a_cpu():
    inner = integer_format()
    parts = random_parts(inner, 20, 256)
    for target in ("cpu", "sm_80"):
        format = PrepackedFormat(target, of={"format": inner.name, "version": inner.version, **inner.options()})
        laid_out = format.lay_out(parts)
        formats.check_parts(format, laid_out, 20, 256)
        assert torch.equal(format.dequantize(laid_out, 20, 256), inner.dequantize(parts, 20, 256))


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_the_multiple_is_the_better_of_the_two_beside_the_best_scale(bits):
    w = torch.randn(9, 512, generator=draw(0)) * torch.logspace(-2, 0, 512)
    best = replace(integer_format(bits, 64), scale="bfloat16").codebook.fit(w)["scale"]
    found = integer_format(bits, 64).codebook.fit(w)["scale"]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def loss(row: int, group: int, scale: float) -> float:
        x = w[row, group * 64 : group * 64 + 64].double()
        return ((x / scale).round().clamp(low, high) * scale - x).square().sum().item()

    clipped = 0
    for row in range(9):
        exponent = 2.0 ** int(best[row].abs().max().log2().floor() - 3)
        for group in range(8):
            given, chosen = best[row, group].item(), found[row, group].item()
            below = abs(given) // exponent
            tries = [min(max(m, 1), 15) * exponent * (-1 if given < 0 else 1) for m in (below, below + 1)]
            assert chosen in tries
            assert loss(row, group, chosen) <= min(loss(row, group, scale) for scale in tries) * (1 + 1e-5)
            clipped += below < 1 or below > 14
    assert clipped  # the ends are met too


def test_error_on_gaussian_rows():
    """A hundredth more than with scales in bfloat16, a tenth of what groups gain over whole rows."""
    w = torch.randn(64, 4096, generator=draw(1))

    def error(format: IntegerFormat) -> float:
        rounded = nearest(w, format.codebook)
        return ((format.codebook.decode(rounded.codes, rounded.scales) - w).norm() / w.norm()).item()

    whole, group, integer = error(IntegerFormat(4)), error(IntegerFormat(4, 128)), error(integer_format())
    assert group < integer < 1.015 * group < whole


def test_rows_and_groups_of_zeros():
    w = torch.randn(4, 256, generator=draw(2)) * 1e-3
    w[0], w[1, :128] = 0, 0
    w[2, 128:] *= 1e-36
    format = integer_format()
    rounded = nearest(w, format.codebook)
    decoded = format.dequantize(format.pack(rounded), 4, 256)
    assert not decoded[0].any() and not decoded[1, :128].any() and not decoded[2, 128:].any()
    alone = nearest(w[1:2, 128:], format.codebook)
    assert torch.equal(decoded[1:2, 128:], format.codebook.decode(alone.codes, alone.scales))


def test_rows_can_be_done_in_pieces(monkeypatch):
    w = torch.randn(7, 256, generator=draw(3))
    whole = integer_format().codebook.fit(w)["scale"]
    monkeypatch.setattr(integer_scales, "PIECE", 256 * 3)
    assert torch.equal(integer_format().codebook.fit(w)["scale"], whole)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_quantised_tokens_to_the_bit(bits, implementation):
    for n, k, group in SHAPES:
        format = integer_format(bits, group)
        parts, bias = random_parts(format, n, k), torch.randn(n, generator=draw(n))
        tiled = format.prepack(parts, "cpu")
        weight = (tiled["tiles"], tiled["scale"], None)
        for t in (0, 1, 2, 3, 4, 8, 9, 16, 17, 32, 33):
            q = torch.randint(-128, 128, (t, k), dtype=torch.int8, generator=draw(t))
            q_scale = torch.rand(t, generator=draw(t))
            y = implementation["integer_linear_quantized"](q, q_scale, *weight, bias, n, bits, group, torch.float32)
            assert torch.equal(y, exact_product(q, q_scale, format, parts, bias)), (n, k, group, t)


@pytest.mark.parametrize("group", [128, 512, 8192])
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_products_of_the_longest_rows(bits, group, implementation):
    """Sums up to 120 * 128 * 65536, half of what 32 bits hold; in float32 they would be rounded on the way."""
    n, k = 17, 65536
    format = integer_format(bits, group)
    parts = random_parts(format, n, k, extreme=True)
    tiled = format.prepack(parts, "cpu")
    q = torch.full((9, k), -128, dtype=torch.int8)
    q[1], q[2] = 127, torch.randint(64, 128, (k,), dtype=torch.int8, generator=draw(3))
    for t in (3, 9):
        weight = (tiled["tiles"], tiled["scale"], None, None, n, bits, group)
        y = implementation["integer_linear_quantized"](q[:t], torch.ones(t), *weight, torch.float32)
        assert torch.equal(y, exact_product(q[:t], torch.ones(t), format, parts, torch.zeros(n)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_floats_are_those_of_the_same_scales_in_bfloat16(bits, dtype, implementation):
    for n, k, group in SHAPES:
        format = integer_format(bits, group)
        other, parts = replace(format, scale="bfloat16"), random_parts(format, n, k)
        tiled = format.prepack(parts, "cpu")
        same = other.prepack({**parts, "scale": integer_scales.words(parts["scale"])}, "cpu")
        for t in (1, 3, 16, 33):
            x = torch.randn(t, k, generator=draw(t)).to(dtype)
            y, wanted = (
                implementation["integer_linear_tiled"](x, p["tiles"], p["scale"], None, None, n, bits, group)
                for p in (tiled, same)
            )
            assert torch.equal(y, wanted)


@pytest.mark.parametrize("bits", BITS)
def test_stored_parts_and_single_rows(bits):
    format = integer_format(bits, 48)  # no whole super-blocks: there are no tiles
    parts = random_parts(format, 9, 192)
    assert set(format.prepack(parts, "cpu")) == {"codes", "scale"}
    w, x = format.dequantize(parts, 9, 192), torch.randn(3, 192, generator=draw(4))
    torch.testing.assert_close(format.linear(x, parts), x @ w.t(), rtol=1e-4, atol=1e-4 * float(w.abs().max()))
    q, q_scale = torch.randint(-128, 128, (3, 192), dtype=torch.int8, generator=draw(5)), torch.rand(3)
    y = format.linear_quantized(q, q_scale, parts, None, torch.float32)
    assert torch.equal(y, exact_product(q, q_scale, format, parts, torch.zeros(9)))
    tiled = integer_format(bits, 32)
    parts, index = random_parts(tiled, 40, 96), torch.tensor([39, 0, 17, 17])
    for held in (parts, tiled.prepack(parts, "cpu"), tiled.lay_out(parts, "fragments")):
        assert torch.equal(tiled.rows(held, index, 96), tiled.dequantize(parts, 40, 96)[index])


# --- a checkpoint -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_from_end_to_end(tmp_path: Path):
    """Weights of more than four bits keep bfloat16; what is loaded gives the logits that the run measured, and its own
    bytes back."""
    widths = ("*.0.mlp.up_proj=8",)
    recipe = QuarotRecipe(rounding="nearest", group_size=32, scale="integer", activation_bits=8, widths=widths)
    source = save_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    ptq.quantize(source, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = {module.format for module in model.modules() if hasattr(module, "format")}
    assert found == {integer_format(4, 32), IntegerFormat(8, 32)}
    model.save_pretrained(tmp_path / "again")
    one, two = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again"))
    assert one == two


def test_recipes_without_integer_scales_are_what_they_were():
    assert "scale" not in QuarotRecipe(calibration="c4").as_dict()
    assert QuarotRecipe(calibration="c4", group_size=64, scale="integer").as_dict()["scale"] == "integer"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(scale="integers"), "bfloat16 or integer, found 'integers'"),
        (dict(scale="integer"), "a group size of 0"),
        (dict(scale="integer", group_size=64, bits=5), "5 bits"),
        (dict(scale="integer", group_size=64, symmetric=False), "without zero-points"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(InputError, match=words):
        IntegerFormat(**options)
    if options["scale"] == "integer":
        recipe = {("weight_bits" if key == "bits" else key): value for key, value in options.items()}
        with pytest.raises(InputError, match=words):
            QuarotRecipe(rounding="nearest", **recipe)


def test_rows_that_are_too_long():
    with pytest.raises(InputError, match="up to 65536 columns, found 65664"):
        integer_format().buffers(1, 65536 + 128)


def test_bytes_that_no_scales_have():
    format = integer_format(4, 32)
    parts = random_parts(format, 4, 64)
    parts["scale"][1, 1:] = 99  # no multiple of a sixteenth of itself
    with pytest.raises(InputError, match="no integer scales"):
        format.unprepack(format.lay_out(parts, "fragments"))


@pytest.mark.parametrize("part, number", [("scale", 16), ("scale", 256 - 128), ("zero", 16)])
def test_files_with_numbers_that_kernels_have_no_room_for(part, number, tmp_path: Path):
    options = dict(scale="integer") if part == "scale" else dict(symmetric=False)
    recipe = QuarotRecipe(rounding="nearest", group_size=32, **options)
    out, target = tmp_path / "out", tmp_path / "prepacked"
    source = save_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    ptq.quantize(source, out, recipe, ptq.RunOptions(progress=False))
    prepack.prepack(Path(out), target, "cpu")
    for folder in (out, target):
        file, name = folder / "model.safetensors", f"model.layers.1.mlp.up_proj.weight_{part}"
        tensors = load_file(file)
        tensors[name][:, 1 if part == "scale" else 0] = number
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(InputError, match="layers.1.mlp.up_proj: .*damaged"):
            AutoModelForCausalLM.from_pretrained(folder)


def test_the_op_refuses_what_would_overflow():
    if not native.load():
        pytest.skip("native kernels are not built")
    q, scale = torch.zeros(1, 32, dtype=torch.int8), torch.zeros(1, 2, 16, dtype=torch.uint8)
    weight = (torch.zeros(1, 1, 64 * 5, dtype=torch.uint8), scale, None, None, 16, 5, 32, torch.float32)
    with pytest.raises(RuntimeError, match="at most 4 bits"):
        torch.ops.ptq.integer_linear_quantized(q, torch.ones(1), *weight)
