"""Quantised activations: the definition against brute force, kernels against the reference to the bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ptq
from ptq.layers.linear import Online, QuantLinear
from ptq.ops import activations, hadamard, native
from ptq.ops.activations import Activation
from ptq.weights.formats import DenseFormat

LEVELS = ("portable", "avx2", "avx512") if native.load() else ()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def brute(token: list[float], bits: int, clip: float) -> tuple[list[int], float]:
    """The definition, one number at a time in float32."""
    f = np.float32
    share = f(clip / (2 ** (bits - 1) - 1))
    top = max((abs(f(v)) for v in token), default=f(0))
    scale = f(top * share) if top > 0 else f(1)
    rounded = [round(float(f(f(v) * f(f(1) / scale)))) for v in token]  # Python rounds halves to even
    return [min(max(v, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) for v in rounded], float(scale)


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    scales = [torch.where(scale.isnan(), -1.0, scale) for scale in (found[1], wanted[1])]
    return torch.equal(found[0], wanted[0]) and torch.equal(*scales)


# --- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("clip", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("bits", range(2, 9))
def test_against_brute_force(bits: int, clip: float, dtype: torch.dtype) -> None:
    x = random(3, 37, dtype=dtype, seed=bits)
    x[0, :4] = torch.tensor([4.0, 0.5, -1.5, -4.0])  # halves, and both ends, where the scale is a power of two
    q, scale = Activation(bits, clip).quantize(x)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    for row in range(3):
        assert (q[row].tolist(), scale[row].item()) == brute(x[row].tolist(), bits, clip)


def test_halves_round_to_even() -> None:
    """With clip 1 and 3 bits, 3 is the largest number and the scale is one."""
    q, scale = Activation(3, 1.0).quantize(torch.tensor([3.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -3.0]))
    assert scale == 1 and q.tolist() == [3, 0, 2, 2, 0, -2, -2, -3]


def test_the_error_is_half_a_step_where_nothing_is_cut() -> None:
    x = random(50, 200).double()
    for bits in range(2, 9):
        q, scale = Activation(bits, 1.0).quantize(x.float())
        error = (activations.dequantize(q, scale).double() - x).abs()
        assert (error <= scale.double()[:, None] * (0.5 + 1e-6)).all()
        assert error.max() > 0.4 * scale.max()


def test_the_largest_number_reaches_the_last_integer_and_beyond_the_clip_it_is_cut() -> None:
    x = torch.tensor([[2.0, -2.0, 1.0]])
    for bits in range(2, 9):
        top = 2 ** (bits - 1) - 1
        assert Activation(bits, 1.0).quantize(x)[0][0, :2].tolist() == [top, -top]
        assert Activation(bits, 0.5).quantize(x)[0][0].tolist() == [top, -top - 1, top]


@pytest.mark.parametrize("construction", [None, "sylvester:6"])
def test_tokens_do_not_disturb_each_other(construction: str | None) -> None:
    """Zeros, NaN, infinity, and numbers whose scale would be no number."""
    x = random(7, 64)
    alone = [Activation(8, 0.9).quantize(row, construction) for row in x]
    x[0], x[1, 5], x[2, 7], x[3, 9] = 0, torch.nan, torch.inf, -torch.inf
    x[4] = 1e-38
    q, scale = Activation(8, 0.9).quantize(x, construction)
    assert scale[0] == 1 and not q[0].any()
    assert scale[1:4].isnan().all() and not q[1:4].any()
    assert scale[4] == 1 and not q[4].any()
    for row in (5, 6):
        assert same((q[row], scale[row]), alone[row])


def test_with_the_transform() -> None:
    """Against the matrix in float64: integers may differ by one only where the number lies between two."""
    for k, order in ((152, 152), (72, 36), (64, 64), (36, 12)):
        x, h = random(9, k), hadamard.matrix(order) * order**-0.5
        wanted = x.double() @ torch.block_diag(*[h] * (k // order)).T
        q, scale = Activation(8, 0.9).quantize(x, hadamard.construction(order))
        torch.testing.assert_close(scale.double(), wanted.abs().amax(1) * 0.9 / 127, rtol=1e-5, atol=0)
        steps = (wanted / scale.double()[:, None]).clamp(-128, 127)
        assert ((q.double() - steps).abs() < 0.5 + 1e-3).all()


# --- ops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 3, 12, 63, 64, 65, 144, 344, 1376, 4096])
def test_every_level_is_the_reference_to_the_bit(k: int, dtype: torch.dtype, set_level: Callable[..., str]) -> None:
    factors, order = hadamard.dense_factors(hadamard.largest_block(k), torch.device("cpu"))
    for name in LEVELS or (None,):
        if name is not None:
            set_level(name)
        for t in (1, 2, 19):
            x = random(t, k, dtype=dtype, seed=t)
            x[-1, k // 2] = torch.nan if t > 2 else 0
            for bits, clip in ((8, 0.9), (4, 1.0), (2, 0.5), (6, 1e-5)):
                wanted = activations.reference(x, bits, clip)
                assert same(torch.ops.ptq.quantize_tokens(x, bits, clip), wanted), (name, t, bits)
                signs = None if bits == 8 else random(k, seed=t)  # any numbers: fine-tuning moves them
                turned = torch.ops.ptq.hadamard(x.float(), signs, factors, order, -1, False)
                fused = torch.ops.ptq.hadamard_quantize(x, signs, factors, order, bits, clip)
                assert same(fused, activations.reference(turned, bits, clip)), (name, t, bits)


@pytest.mark.parametrize("shape", [(12,), (0, 12), (2, 0, 12), (2, 3, 5, 24), (3, 0)])
@pytest.mark.parametrize("construction", [None, "paley1:11"])
def test_shapes(shape: tuple[int, ...], construction: str | None) -> None:
    q, scale = Activation(4, 0.9).quantize(random(*shape), construction)
    assert q.shape == shape and scale.shape == shape[:-1] and q.is_contiguous()
    assert shape[-1] or scale.eq(1).all()


def test_strides() -> None:
    x = random(6, 8, 48)
    for view in (x[::2, 1::3, ::2], x.transpose(0, 2)[..., :6].transpose(0, 2), x[..., 24:]):
        for construction in (None, "paley1:11,sylvester:1"):
            wanted = Activation(6, 0.9).quantize(view.contiguous(), construction)
            assert same(Activation(6, 0.9).quantize(view, construction), wanted)


def test_threads_do_not_change_the_result() -> None:
    x, threads, results = random(300, 1376), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append([Activation(8, 0.9).quantize(x, name) for name in (None, "paley1:343,sylvester:2")])
    finally:
        torch.set_num_threads(threads)
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_opcheck() -> None:
    factors, order = hadamard.dense_factors(12, torch.device("cpu"))
    for x in (random(3, 24), random(3, 24, dtype=torch.bfloat16)):
        torch.library.opcheck(torch.ops.ptq.quantize_tokens.default, (x, 8, 0.9))
        torch.library.opcheck(torch.ops.ptq.hadamard_quantize.default, (x, None, factors, order, 8, 0.9))


def test_a_gradient_is_refused_not_forgotten() -> None:
    layer = dense_layer(Activation(8, 0.9))
    with pytest.raises(RuntimeError, match="no gradient through quantised activations"):
        layer(random(2, 24).requires_grad_()).sum().backward()


@pytest.mark.parametrize("bits, clip", [(1, 0.9), (9, 0.9), (8, 0.0), (8, 1.5), (8, float("nan")), (True, 0.9),
                                        (8.0, 0.9), (8, 9e-6), (8, "0.9"), (8, True)])  # fmt: skip
def test_values_out_of_range(bits: Any, clip: Any) -> None:
    with pytest.raises(ptq.InputError, match="activation"):
        activations.parse({"bits": bits, "clip": clip})


@pytest.mark.skipif(not native.load(), reason="checks of the kernel")
@pytest.mark.parametrize("bits, clip", [(1, 0.9), (9, 0.9), (8, 0.0), (8, 9e-6), (8, 1.5), (8, float("nan"))])
def test_the_kernel_checks_too(bits: int, clip: float) -> None:
    with pytest.raises(RuntimeError, match="bits|clip"):
        torch.ops.ptq.quantize_tokens(random(2, 4), bits, clip)


# --- the layer ------------------------------------------------------------------------------------------------------


def dense_layer(activation: Activation | None, construction: str | None = None) -> QuantLinear:
    layer = QuantLinear(24, 5, True, DenseFormat(), Online(construction, activation=activation))
    layer.weight_dense.data = random(5, 24, seed=1)
    layer.bias.data = random(5, seed=2)
    return layer


@pytest.mark.parametrize("construction", [None, "paley1:11,sylvester:1"])
def test_a_dense_layer_multiplies_what_it_was_quantised_to(construction: str | None) -> None:
    x, layer = random(2, 3, 24), dense_layer(Activation(4, 0.9), construction)
    seen = activations.dequantize(*Activation(4, 0.9).quantize(x, construction))
    assert torch.equal(layer.effective_input(x), seen)
    torch.testing.assert_close(layer(x), seen @ layer.weight_dense.T + layer.bias)
    assert "Activation(bits=4, clip=0.9)" in repr(layer)
    assert not torch.allclose(dense_layer(None, construction)(x), layer(x), atol=1e-3)


class WithIntegers(DenseFormat):
    """A format that says what it was given."""

    def linear_quantized(
        self, q: Tensor, q_scale: Tensor, parts: Any, bias: Any, dtype: torch.dtype, input_bits: int = 8
    ) -> Tensor:
        return (activations.dequantize(q, q_scale) @ parts["dense"].T + bias + 1000).to(dtype)


def test_a_format_that_takes_integers_gets_them() -> None:
    layer = QuantLinear(24, 5, True, WithIntegers(), Online(activation=Activation(8, 0.9)))
    layer.weight_dense.data, layer.bias.data = random(5, 24, seed=1), random(5, seed=2)
    x = random(3, 24)
    torch.testing.assert_close(layer(x), dense_layer(Activation(8, 0.9))(x) + 1000)
    layer.online = Online()
    torch.testing.assert_close(layer(x), dense_layer(None)(x))
