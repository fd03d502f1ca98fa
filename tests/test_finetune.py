"""The training loop, and the layer through which the gradient passes, against finite differences."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ptq.errors import RunError
from ptq.files.json_numbers import six_digits
from ptq.layers.linear import Online, QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, stored_signs
from ptq.ops import activations, hadamard, matmul
from ptq.ops.activations import Activation
from ptq.pipeline import finetune
from ptq.pipeline.finetune import Task, Values, fit
from ptq.pipeline.trainable import Trained, TunedLinear, unscaled
from ptq.weights import formats
from ptq.weights.formats import Format, Parts
from ptq.weights.grouped import SCALE, stored_scale
from ptq.weights.rounding import nearest


def silent(text: str, share: float) -> None:
    """No progress bar."""


def least_squares(folder: Path, rate: float = 0.1, dtype: torch.dtype = torch.float32, epochs: int = 12) -> Task:
    """Six numbers to be found; the two batches see three of them each, the held-out rows all."""
    wanted = torch.linspace(-1, 1, 6)

    def gradients(values: Values, number: int) -> float:
        here = slice(3 * number, 3 * number + 3)
        loss = (values["a"][here] - wanted[here]).square().sum()
        loss.backward()
        return float(loss.detach())

    trained = {"a": Trained(torch.zeros(6), dtype, rate)}
    held_out = lambda values: float((values["a"] - wanted).square().sum())  # noqa: E731
    return Task("test", 0, trained, gradients, held_out, 2, epochs, folder / "state.safetensors")


def test_the_loss_falls_and_the_best_is_kept(tmp_path: Path) -> None:
    task = least_squares(tmp_path)
    best, losses = fit(task, silent)
    assert losses[0] == pytest.approx(2.8)
    assert min(losses) < 0.3 and task.held_out(best) == min(losses)


def test_a_rate_that_is_too_large_is_halved_and_nothing_ends_worse(tmp_path: Path) -> None:
    task = least_squares(tmp_path, rate=50.0)
    best, losses = fit(task, silent)
    assert len(losses) == 1 + finetune.PATIENCE and min(losses[1:]) > losses[0]
    assert torch.equal(best["a"], torch.zeros(6))


def test_each_number_can_have_a_rate_of_its_own(tmp_path: Path) -> None:
    task = least_squares(tmp_path, epochs=1)
    rates = torch.tensor([0.1, 0, 0.1, 0, 0.2, 0])
    trained = {"a": Trained(torch.zeros(6), torch.float32, rates)}
    best, losses = fit(replace(task, trained=trained), silent)
    assert (best["a"] != 0).tolist() == (rates != 0).tolist() and min(losses) < losses[0]


def test_with_nothing_to_train_the_loss_is_measured(tmp_path: Path) -> None:
    task = replace(least_squares(tmp_path), trained={}, held_out=lambda values: 3.0)
    assert fit(task, silent) == ({}, [3.0])


def test_what_is_measured_is_what_will_be_written(tmp_path: Path) -> None:
    task = least_squares(tmp_path, dtype=torch.bfloat16)
    best, losses = fit(task, silent)
    assert torch.equal(best["a"], best["a"].bfloat16().float())
    assert task.held_out(best) == min(losses) < losses[0]


def test_stopped_after_any_epoch_it_goes_on_to_the_same_values(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    expected, losses = fit(least_squares(tmp_path / "once"), silent)
    for epoch in range(1, 12):

        def killed(text: str, share: float, number: int = epoch) -> None:
            if f"epoch {number + 1} of" in text:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            fit(least_squares(tmp_path), killed)
    best, found = fit(least_squares(tmp_path), silent)
    assert torch.equal(best["a"], expected["a"]) and found == losses


def test_damage_on_the_way_is_undone_and_at_the_start_refused(tmp_path: Path) -> None:
    task = least_squares(tmp_path)

    def broken(values: Values, number: int) -> float:
        (values["a"].sum() * float("nan")).backward()
        return float("nan")

    best, losses = fit(Task(**{**vars(task), "gradients": broken}), silent)
    assert torch.equal(best["a"], torch.zeros(6)) and six_digits(losses)[1:] == [None] * finetune.PATIENCE
    (tmp_path / "state.safetensors").unlink()
    with pytest.raises(RunError, match="test: before fine-tuning the loss"):
        fit(Task(**{**vars(task), "held_out": lambda values: float("nan")}), silent)


def test_a_part_of_the_chunks_is_held_out() -> None:
    assert [finetune.training_chunks(count) for count in (2, 8, 15, 16, 128)] == [1, 7, 14, 14, 112]


# --- the layer ------------------------------------------------------------------------------------------------------


def layer(
    kind: str = "signs", bias: bool = True, activation: Activation | None = None, n: int = 12, k: int = 24
) -> tuple[TunedLinear, Values]:
    """A layer in float64, as QuIP# has it, with vectors that are no signs any more, or as QuaRot has it, with scales of
    groups of eight."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    both = kind == "signs"
    online = Online(hadamard.construction(k), hadamard.construction(n) if both else None, both, activation)
    vectors = {INPUT_SIGNS: 1 + 0.1 * draw(k), OUTPUT_SIGNS: 1 + 0.1 * draw(n)} if both else {SCALE: draw(n, 3)}
    vectors |= {"bias": draw(n)} if bias else {}
    scale = None if both else torch.ones(n, 3, dtype=torch.float64)
    return TunedLinear(draw(n, k), scale, online, bias), vectors


@pytest.mark.parametrize("kind", ["signs", "scales"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_finite_differences(kind: str, bias: bool) -> None:
    module, vectors = layer(kind, bias)
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    names = list(vectors)

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *(vectors[name].requires_grad_() for name in names)))


def test_the_rounding_of_the_input_has_the_gradient_of_the_identity() -> None:
    (plain, vectors), (rounded, _) = layer(), layer(activation=Activation(8, 1.0))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    grads, outputs = [], []
    for module in (plain, rounded):
        values = {name: vector.float().detach().requires_grad_() for name, vector in vectors.items()}
        y = torch.func.functional_call(module.float(), values, (x,))
        y.sum().backward()
        outputs.append(y.detach())
        grads.append(values[INPUT_SIGNS].grad)
    assert torch.equal(grads[0], grads[1])
    assert 0 < (outputs[0] - outputs[1]).abs().max() < 0.1


@pytest.mark.parametrize("activation", [None, Activation(8, 1.0)])
def test_it_computes_what_the_packed_layer_computes(activation: Activation | None) -> None:
    module, vectors = layer(activation=activation)
    vectors = {name: vector.half().float() if name != "bias" else vector.float() for name, vector in vectors.items()}
    packed = QuantLinear(24, 12, True, formats.get("dense"), module.online)
    stored = {name: stored_signs(vector) if name != "bias" else vector for name, vector in vectors.items()}
    packed.load_state_dict({"weight": packed.weight, "weight_dense": module.weight.float(), **stored})
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    found = torch.func.functional_call(module.float(), vectors, (x,))
    torch.testing.assert_close(found, packed(x), atol=2e-5, rtol=1e-5)


def rounded(format: Format, n: int, k: int) -> Parts:
    assert format.codebook is not None
    return format.pack(nearest(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), format.codebook))


@pytest.mark.parametrize(
    "format",
    [
        formats.get("quarot/integer", bits=3, group_size=8),
        formats.get("quarot/integer", bits=4, symmetric=False),
        formats.get("fp6/minifloat", element="e2m1", group_size=8),
        formats.get("fp6/minifloat", element="e2m3"),
    ],
    ids=str,
)
def test_scales_times_what_is_left_without_them_are_the_weight(format: Format) -> None:
    parts = rounded(format, 12, 24)
    module = TunedLinear(*unscaled(format, parts, 12, 24), Online(), False)
    torch.testing.assert_close(module(torch.eye(24)).T, format.dequantize(parts, 12, 24), rtol=1e-6, atol=0)
    assert torch.equal(stored_scale(module.get_parameter(SCALE)), parts["scale"]) and module.weight.abs().max() > 1


@pytest.mark.parametrize(
    "format",
    [
        formats.get("quarot/integer", bits=3, group_size=8, scale="integer"),
        formats.get("fp6/minifloat", scale="e8m0", group_size=8),
        formats.get("quip_sharp/e8p", bits=2),
    ],
    ids=str,
)
def test_other_scales_stand_still(format: Format) -> None:
    parts = rounded(format, 16, 24)
    weight, scale = unscaled(format, parts, 16, 24)
    assert scale is None and torch.equal(weight, format.dequantize(parts, 16, 24))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("rows", [(70,), (3, 64)])
def test_fast_products_have_gradients(wanted: tuple[int, ...], rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((*rows, 24), (12, 24), (12,))]
    up, found = torch.randn(*rows, 12, generator=generator), []
    for run, dtype in ((matmul.linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
        leaves = [t.to(dtype, copy=True).requires_grad_(index in wanted) for index, t in enumerate(tensors)]
        run(*leaves).backward(up.to(dtype))
        assert [leaf.grad is not None for leaf in leaves] == [index in wanted for index in range(3)]
        found.append([leaves[index].grad for index in wanted])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_op_that_rounds_still_refuses_to_be_differentiated() -> None:
    x = torch.randn(2, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient through quantised activations"):
        activations.dequantize(*Activation(8, 1.0).quantize(x)).sum().backward()
