"""The rewriter against explicit dense matrices in float64, with a single cast at the end."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import DISTINCT, UNTURNED, WRITTEN_PLAIN, save_model
from torch import Tensor

import ptq
from ptq.ops import hadamard
from ptq.pipeline import rewrite
from ptq.pipeline.work import Record, read_record
from ptq.planning.plan import LinearPlan, Rotation
from quarot.plan import QuarotRecipe


def dense(rotation: Rotation, signs: rewrite.Signs) -> Tensor:
    """R = (I x H) diag(s) as a matrix."""
    blocks = rotation.size // rotation.order
    h = hadamard.matrix(rotation.order) / rotation.order**0.5
    s = torch.ones(rotation.size).double()
    if rotation.signs is not None:
        stored = signs[rotation.signs].double()
        s = torch.cat([stored] * (rotation.size // len(stored)))
    return torch.kron(torch.eye(blocks).double(), h) @ torch.diag(s)


def oracle(linear: LinearPlan, w: Tensor, gain: Tensor | None, signs: rewrite.Signs) -> Tensor:
    """R_out W diag(g) R_inᵀ, multiplied out."""
    w = w.double()
    if linear.norm is not None:
        assert gain is not None
        w = w @ torch.diag(gain.double())
    if linear.input is not None:
        w = w @ dense(linear.input, signs).T
    if linear.output is not None:
        w = dense(linear.output, signs) @ w
    return w


LINEAR = LinearPlan("q", 24, 40, "q.weight")
CASES = [
    LINEAR,
    dataclasses.replace(LINEAR, norm="g"),
    dataclasses.replace(LINEAR, input=Rotation(40, 40, "a")),
    dataclasses.replace(LINEAR, input=Rotation(40, 20), norm="g"),
    dataclasses.replace(LINEAR, output=Rotation(24, 1, "b")),
    dataclasses.replace(LINEAR, output=Rotation(24, 12, "c")),
    dataclasses.replace(LINEAR, input=Rotation(40, 8, "a"), output=Rotation(24, 24, "b"), norm="g"),
]


@pytest.mark.parametrize("linear", CASES)
def test_weights_and_biases_are_the_dense_products(linear: LinearPlan) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = {"a": 40, "b": 24, "c": 12}  # c is shorter than what it turns: one per head
    signs = {name: rewrite.draw_signs(name, length, 0) for name, length in lengths.items()}
    w, b, gain = (torch.randn(size, generator=generator) for size in ((24, 40), (24,), (40,)))
    result = rewrite.weight(linear, w, gain, signs)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, oracle(linear, w, gain, signs), rtol=0, atol=1e-13)
    expected = b.double() if linear.output is None else dense(linear.output, signs) @ b.double()
    torch.testing.assert_close(rewrite.bias(linear, b, signs), expected, rtol=0, atol=1e-13)
    if linear.input is not None:  # the layer's function does not change
        x = torch.randn(5, 40, generator=generator).double()
        turned = rewrite.rotate(x, linear.input, signs) @ rewrite.weight(linear, w, gain, signs).T
        plain = dataclasses.replace(linear, input=None)
        torch.testing.assert_close(turned, x @ oracle(plain, w, gain, signs).T, rtol=0, atol=1e-12)


def is_cast_of(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `found` is `exact` rounded once: bit for bit, but where the last bit of a float64 sum decides, in zeros
    and in halves of 16-bit numbers."""
    low, high = ((exact + side).to(found.dtype) for side in (-1e-14, 1e-14))
    return bool(((low <= found) & (found <= high)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model_type", [name for name in DISTINCT if name in WRITTEN_PLAIN and name not in UNTURNED])
def test_a_rotated_checkpoint_is_the_dense_product_cast_once(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit, every tensor of the file: a cast on the way would show in some of them."""
    model = save_model(tmp_path / "model", model_type, dtype)
    recipe = QuarotRecipe(rounding="nearest", weight_bits=16, online=False)
    ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    source, found = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    made = ptq.plan(str(model), recipe).plan
    signs = Record(**stored_fields(tmp_path / "out")).sign_vectors(made)
    for linear in made.linears:
        gain = source[linear.norm].double() + made.norm_offset if linear.norm else None
        parts = linear.parts or (linear,)
        pieces = source[linear.source].split([part.n for part in parts])
        expected = torch.cat([oracle(part, w, gain, signs) for part, w in zip(parts, pieces, strict=True)])
        assert is_cast_of(found.pop(f"{linear.name}.weight"), expected), linear.name
        if f"{linear.name}.bias" in source:
            b = source[f"{linear.name}.bias"].double()
            turned = b if linear.output is None else dense(linear.output, signs) @ b
            assert is_cast_of(found.pop(f"{linear.name}.bias"), turned), linear.name
    for name in made.unit_norms:
        assert torch.equal(found.pop(name), torch.full_like(source[name], 1 - made.norm_offset))
    for name in made.kept:
        assert torch.equal(found.pop(name), source[name])
    assert not found


def stored_fields(out: Path) -> dict[str, Any]:
    record = read_record(out / "ptq.json")
    return {field.name: record[field.name] for field in dataclasses.fields(Record)}


def test_signs_are_those_that_were_always_drawn() -> None:
    """Golden: another generator would make every stored checkpoint unrepeatable."""
    text = {(name, seed): "".join("+-"[int(s < 0)] for s in rewrite.draw_signs(name, 24, seed))
            for name, seed in (("R1", 0), ("R1", 1), ("R2.0", 0), ("R4.11", 0))}  # fmt: skip
    assert text == {
        ("R1", 0): "-------------+-+++--++-+",
        ("R1", 1): "++-+--+++-+-+-++++++++++",
        ("R2.0", 0): "-+--+---+---+---+--+-+-+",
        ("R4.11", 0): "-------+---+--+-+--+-+-+",
    }


def test_signs_are_fair_and_leave_the_global_state_alone() -> None:
    state = torch.get_rng_state()
    drawn = rewrite.draw_signs("R1", 100_000, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn.abs().eq(1).all() and abs(drawn.float().mean()) < 0.02
    assert torch.equal(drawn, rewrite.draw_signs("R1", 100_000, 0))
