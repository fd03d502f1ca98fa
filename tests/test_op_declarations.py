"""Calls of ops that have a gradient: the kernel that records it is only called where somebody asks for one."""

import warnings

import pytest
import torch

from fp6.minifloat import MinifloatFormat
from ptq.ops import hadamard
from ptq.ops.op_declarations import call
from quarot.integer import IntegerFormat
from quip_sharp.e8p_format import E8PFormat

LIBRARY = torch.library.Library("ptq_test_calls", "DEF")
RECORDED: list[bool] = []


@pytest.fixture(scope="module")
def double():
    """y = 2 x, whose autograd kernel says that it was called."""
    LIBRARY.define("double(Tensor x) -> Tensor")
    LIBRARY.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
    op = torch.ops.ptq_test_calls.double.default

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return op(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def record(x):
        RECORDED.append(True)
        return Double.apply(x)

    LIBRARY.impl("double", record, "Autograd")
    torch.library.register_fake("ptq_test_calls::double", lambda x: torch.empty_like(x))
    return op


@pytest.fixture(autouse=True)
def _forget():
    RECORDED.clear()


def test_nothing_is_recorded_without_gradients(double):
    x = torch.arange(3.0, requires_grad=True)
    with torch.no_grad():
        y = call(double, x)
    assert not RECORDED
    assert not y.requires_grad
    assert y.tolist() == [0, 2, 4]


def test_gradients_are_recorded_otherwise(double):
    x = torch.arange(3.0, requires_grad=True)
    y = call(double, x)
    y.sum().backward()
    assert RECORDED
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_a_call_leaves_autograd_as_it_was(double):
    x = torch.arange(3.0, requires_grad=True)
    with torch.no_grad():
        call(double, x)
        with pytest.raises(RuntimeError):
            call(double, "no tensor")
    assert call(double, x).requires_grad


def test_a_graph_holds_the_op_itself(double):
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        y = torch.compile(lambda x: call(double, x), backend=backend, fullgraph=True)(torch.ones(2))
    assert y.tolist() == [2, 2]
    assert seen == [double]


@pytest.mark.parametrize("format", [IntegerFormat(4), MinifloatFormat("e2m3"), E8PFormat(2)], ids=lambda f: f.name)
def test_products_with_quantised_tokens_refuse_a_gradient_in_our_words(format) -> None:
    parts = {part: torch.zeros(shape, dtype=dtype) for part, (shape, dtype) in format.buffers(16, 32).items()}
    parts = format.prepack(parts, "cpu")
    q_scale = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = format.linear_quantized(torch.ones(2, 32, dtype=torch.int8), q_scale, parts, None, torch.float32)
        with pytest.raises(RuntimeError, match="no gradient through quantised activations"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_runs_where_gradients_are_recorded() -> None:
    """torch.compile looks at the backward pass before anybody asks for it: it is refused when it runs."""
    factors, order = hadamard.dense_factors("paley1:19", torch.device("cpu"))
    format = IntegerFormat(4)
    stored = format.buffers(16, 20).items()
    parts = format.prepack({part: torch.ones(shape, dtype=dtype) for part, (shape, dtype) in stored}, "cpu")

    def product(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, scale = torch.ops.ptq.hadamard_quantize(x, None, factors, order, 8, 1.0)
        weight = (parts["tiles"], parts["scale"], None, bias, 16, 4, 0)
        return torch.ops.ptq.integer_linear_quantized(q, scale, *weight, torch.float32)

    x, bias = torch.randn(3, 20, requires_grad=True), torch.ones(16, requires_grad=True)
    compiled = torch.compile(product, backend="aot_eager_decomp_partition")
    y = compiled(x, bias)
    assert torch.equal(y, product(x, bias)) and y.requires_grad
    with pytest.raises(RuntimeError, match="no gradient through quantised activations"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("format", [IntegerFormat(4), MinifloatFormat("e2m3"), E8PFormat(2), None], ids=repr)
def test_a_forward_derivative_is_refused_not_zero(format, recorded: bool) -> None:
    """torch would go on with zeros. What has none of its own is as always."""
    stored = {} if format is None else format.buffers(16, 32)
    parts = {part: torch.zeros(shape, dtype=dtype) for part, (shape, dtype) in stored.items()}
    parts = {} if format is None else format.prepack(parts, "cpu")

    def product(x: torch.Tensor) -> torch.Tensor:
        return hadamard.apply(x, None, 32) if format is None else format.linear(x, parts)

    x = torch.ones(2, 32)
    with torch.set_grad_enabled(recorded):
        with pytest.raises(RuntimeError, match="no forward derivatives"):
            torch.func.jvp(product, (x,), (x,))
        found = torch.func.jvp(lambda y: product(x).sum() * y, (x,), (x,))
    assert all(torch.equal(one, product(x).sum() * x) for one in found)
