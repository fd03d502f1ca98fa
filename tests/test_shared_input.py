"""Linears that are given the same tensor share the work: the same bits in every order, and nothing is kept alive."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ptq.layers import shared_input
from ptq.layers.linear import Online, QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, frozen, stored_signs
from ptq.ops.activations import Activation
from quarot.integer import IntegerFormat

K, N = 128, (64, 40, 17)


def fill(linear: QuantLinear, generator: torch.Generator) -> None:
    """Random parts and bias, before they are put into tiles."""
    for part, (shape, dtype) in linear.format.buffers(linear.out_features, K).items():
        number = torch.randint(0, 16 if part == "zero" else 256, shape, generator=generator)
        if part == "scale":
            number = torch.rand(shape, generator=generator).bfloat16().view(torch.int16)
        linear._parameters[f"weight_{part}"] = frozen(number.to(dtype))
    if linear.bias is not None:
        linear.get_parameter("bias").copy_(torch.randn(linear.out_features, generator=generator))


INT8 = Activation(8, 1.0)


def parent(activation: Activation | None = INT8, seed: int = 0) -> nn.Module:
    """Three linears a, b, c, packed and attached, and one more that treats its input in another way."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Module()
    for name, n in zip("abcd", (*N, 8), strict=True):
        format = IntegerFormat(4, 32, symmetric=seed % 2 == 0)
        linear = QuantLinear(K, n, name != "b" or seed < 2, format, Online(activation=activation))
        if name == "d":
            linear.online = Online(activation=Activation(4, 0.9))
        fill(linear, generator)
        linear.prepack()
        made.add_module(name, linear)
    shared_input.attach(made)
    return made


def tokens(t: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, t, K).to(dtype)


def alone(module: nn.Module, name: str, x: Tensor) -> Tensor:
    linear = module.get_submodule(name)
    assert isinstance(linear, QuantLinear)
    shared, linear.shared = linear.shared, None
    y = linear(x)
    linear.shared = shared
    return y


def shared_of(module: nn.Module, name: str = "a") -> shared_input.SharedInput:
    found = module.get_submodule(name).shared
    assert isinstance(found, shared_input.SharedInput)
    return found


def sizes_of_groups(shared: shared_input.SharedInput) -> list[int]:
    """How many linears each of those multiplies for that lead others."""
    return [len(first.leads.members) for first in shared._firsts.values() if first.leads is not None]


def step(module: nn.Module, order: str = "abc", t: int = 1, dtype: torch.dtype = torch.float32) -> None:
    x = tokens(t, dtype)
    for name in order:
        y = module.get_submodule(name)(x)
        assert y.dtype == dtype and torch.equal(y, alone(module, name, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [Activation(8, 1.0), Activation(4, 0.9), None])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_the_same_bits(seed: int, activation: Activation | None, dtype: torch.dtype, level: str) -> None:
    module = parent(activation, seed)
    for t in (1, 1, 3, 4, 16, 17, 1):
        step(module, t=t, dtype=dtype)
    assert sizes_of_groups(shared_of(module)) == [3]


@pytest.mark.parametrize("late", [True, False])
@torch.no_grad()
def test_both_sides_transformed(late: bool) -> None:
    """Linears with the same signs share; where the signs of one change later, before or after they have been seen
    together, they don't any more."""
    module, generator = nn.Module(), torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (K,), generator=generator) * 2.0 - 1
    for name in "ab":
        format = IntegerFormat(4, 32)
        linear = QuantLinear(K, 64, True, format, Online("sylvester:7", "sylvester:6", True, Activation(8, 1.0)))
        fill(linear, generator)
        linear._parameters["weight_su"] = frozen(stored_signs(signs))
        linear.prepack()
        module.add_module(name, linear)
    shared_input.attach(module)
    for _ in range(3 * late):
        step(module, "ab")
    assert sizes_of_groups(shared_of(module)) == [2] * late
    other = module.get_submodule("b")
    assert isinstance(other, QuantLinear)
    other.get_parameter("weight_su").copy_(stored_signs(-signs))
    other._signs.clear()
    for _ in range(3):
        step(module, "ab")


@torch.no_grad()
def test_only_linears_that_treat_their_input_alike() -> None:
    module = parent()
    assert len({id(shared_of(module, name)) for name in "abc"}) == 1
    assert module.get_submodule("d").shared is None


@torch.no_grad()
def test_any_order() -> None:
    module = parent()
    for order in ("abc", "cba", "acb", "a", "ab", "bc", "abcabc", "aab", "c", "abc", "abc"):
        step(module, order)
        step(module, order)


@torch.no_grad()
def test_one_that_is_called_alone_is_let_go_and_a_false_first_is_not_believed_again() -> None:
    module = parent()
    for _ in range(4):
        step(module, "c")
    assert module.get_submodule("c").shared is None
    for order in ("ab", "ab", "a", "ab", "ab"):
        step(module, order)
    assert not sizes_of_groups(shared_of(module))


@torch.no_grad()
def test_nothing_is_kept_alive() -> None:
    module = parent()
    step(module)
    step(module)
    x = tokens()
    module.get_submodule("a")(x)
    waiting = shared_of(module)._last
    assert waiting is not None and len(waiting.ready) == 2
    products = [weakref.ref(y) for y in waiting.ready.values()]
    del waiting
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and all(y() is None for y in products) and shared_of(module)._last is None
    step(module)
    last = shared_of(module)._last
    assert last is None or not last.ready


@torch.no_grad()
def test_an_input_that_is_changed_in_place() -> None:
    module = parent()
    step(module)
    step(module)
    x = tokens()
    module.get_submodule("a")(x)
    x.mul_(-2)
    for name in "bc":
        assert torch.equal(module.get_submodule(name)(x), alone(module, name, x))


@torch.no_grad()
def test_hooks_copies_and_pickles() -> None:
    module = parent()
    step(module)
    step(module)
    seen: list[Tensor] = []
    handle = module.get_submodule("b").register_forward_hook(lambda linear, args, y: seen.append(y) or y * 2)
    x = tokens()
    module.get_submodule("a")(x)
    assert torch.equal(module.get_submodule("b")(x), 2 * seen[0])
    handle.remove()
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert shared_of(again) is not shared_of(module)
        for _ in range(3):
            step(again)
        assert sizes_of_groups(shared_of(again)) == [3]


def test_who_listens_to_all_modules_hears_every_linear() -> None:
    """`products`, which an MLP asks for gate and up, calls them then."""
    module, heard = parent(), []
    linears = [module.get_submodule(name) for name in "abc"]
    step(module)
    step(module)
    x = tokens()
    alone = shared_input.products(linears, x)
    handle = register_module_forward_pre_hook(lambda linear, args: heard.append(linear))
    try:
        found = shared_input.products(linears, x)
    finally:
        handle.remove()
    assert heard == linears and all(map(torch.equal, found, alone))


def test_gradients_go_the_plain_way() -> None:
    module = parent(None)
    with torch.no_grad():
        step(module)
        step(module)
    x = tokens().requires_grad_()
    total = sum(module.get_submodule(name)(x).sum() for name in "abc")
    assert isinstance(total, Tensor)
    total.backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_a_bias_that_learns_goes_the_plain_way() -> None:
    module = parent(None)
    with torch.no_grad():
        step(module)
        step(module)
    bias = module.get_submodule("b").get_parameter("bias").requires_grad_()
    x = tokens()
    total = sum(module.get_submodule(name)(x).sum() for name in "abc")
    assert isinstance(total, Tensor)
    total.backward()
    assert bias.grad is not None and bias.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@torch.no_grad()
def test_forward_derivatives_are_refused() -> None:
    module = parent(None)
    step(module)
    step(module)
    with pytest.raises(RuntimeError, match="no forward derivatives"):
        torch.func.jvp(module.get_submodule("a"), (tokens(),), (tokens(),))


def test_weights_that_are_elsewhere_are_not_watched() -> None:
    with torch.device("meta"):
        module = nn.ModuleList(QuantLinear(K, 8, False, IntegerFormat(4, 32)) for _ in range(2))
    shared_input.attach(module)
    assert all(linear.shared is None for linear in module)


@torch.no_grad()
def test_a_weight_that_has_left() -> None:
    module = parent()
    step(module)
    step(module)
    linear = module.get_submodule("b")
    held = dict(linear._parameters)
    linear._parameters.update({name: frozen(p.to("meta")) for name, p in held.items() if p is not None})
    x = tokens()
    module.get_submodule("a")(x)
    linear._parameters.update(held)
    assert torch.equal(linear(x), alone(module, "b", x))


@torch.no_grad()
def test_lists_of_weights(level: str) -> None:
    module = parent(seed=1)
    parts = [module.get_submodule(name).parts() for name in "abc"]  # pyright: ignore
    tiles, scale, zero = ([part[key] for part in parts] for key in ("tiles", "scale", "zero"))
    bias = [module.get_submodule(name).bias for name in "abc"]
    q, q_scale = torch.randint(-128, 128, (2, K)).to(torch.int8), torch.rand(2)
    weights = (tiles, scale, zero, bias, list(N))
    inputs = (q, q_scale, *weights, 4, 32, torch.bfloat16)
    torch.library.opcheck(torch.ops.ptq.integer_linears_quantized.default, inputs, test_utils="test_schema")
    for t in (0, 1, 2, 9):
        x, s = torch.randint(-128, 128, (t, K)).to(torch.int8), torch.rand(t)
        found = torch.ops.ptq.integer_linears_quantized(x, s, *weights, 4, 32, torch.float16)
        for i, n in enumerate(N):
            one = torch.ops.ptq.integer_linear_quantized(
                x, s, tiles[i], scale[i], zero[i], bias[i], n, 4, 32, torch.float16
            )
            assert torch.equal(found[i], one)
        floats = torch.ops.ptq.integer_linears_tiled(x.float(), *weights, 4, 32)
        for i, n in enumerate(N):
            one = torch.ops.ptq.integer_linear_tiled(x.float(), tiles[i], scale[i], zero[i], bias[i], n, 4, 32)
            assert torch.equal(floats[i], one)
    for bad in ([], zero[:2]):
        with pytest.raises(RuntimeError):
            torch.ops.ptq.integer_linears_tiled(q.float(), tiles if bad else [], scale, bad, bias, list(N), 4, 32)


def test_kept_signs_move_with_their_layer() -> None:
    """`Module.to` puts other memory into the same parameter, and counts no version."""
    linear = QuantLinear(K, 64, False, IntegerFormat(4), Online("sylvester:7", "sylvester:6", True, Activation(8, 1.0)))
    kept = linear.signs(INPUT_SIGNS)
    assert kept is not None and linear.signs(INPUT_SIGNS) is kept
    stored, version, _ = linear._signs[INPUT_SIGNS]
    linear._signs[INPUT_SIGNS] = stored, version, kept.to("meta")  # as if it came from there
    here = linear.signs(INPUT_SIGNS)
    assert here is not None and torch.equal(here, kept)
