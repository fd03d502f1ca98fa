"""How ops of the library `ptq::` are declared: schema, fake kernel (shapes, for `torch.compile`), reference in PyTorch.

The reference serves every device for which no native kernel is registered (`ptq.ops.native`). Autograd does not see
what a kernel changes in place (`Tensor(a!)` in the schema): that is for tensors without a history.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from ptq.ops import native

Reference = TypeVar("Reference", bound=Callable[..., Any])


def call(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    """`op(*arguments)`, for ops that have a gradient: under `torch.no_grad` without the kernel that would record it.
    That one is in Python and takes 3 µs, a fiftieth of the time of a linear layer of 4096 x 4096 on one token. Raises
    RuntimeError where a forward derivative would be lost.
    """
    if torch.compiler.is_compiling():
        return op(*arguments)
    if takes_forward_derivatives():
        refuse_forward_derivative(*arguments)
    if torch.is_grad_enabled():
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


@contextmanager
def lasting() -> Iterator[None]:
    """Around the making of tensors that are kept for later calls: those of inference mode could not be used outside of
    it, and those of a mode that traces stand for no numbers."""
    with torch.inference_mode(False), torch.no_grad(), _python_dispatch._disable_current_modes():
        yield


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass through something that is made of these tensors would be recorded now."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def takes_forward_derivatives() -> bool:
    """Whether somebody takes forward derivatives, as `torch.func.jvp` does. Ops of a library have none, and torch goes
    on with zeros in their place."""
    return forward_ad._current_level >= 0


def refuse_forward_derivative(*arguments: Any) -> None:
    """Raise RuntimeError where one of these is a tensor with a forward derivative."""
    tensors = (x for x in arguments if isinstance(x, Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("ptq: its ops have no forward derivatives; take those of the original model")


REFERENCES: dict[str, Callable[..., Any]] = {}
"""Of every op that has been declared, by name."""


def declare(op: str, schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Declare `ptq::<op>`, and load the native kernels."""
    torch.library.define(f"ptq::{op}", schema)
    torch.library.impl(f"ptq::{op}", "CompositeExplicitAutograd")(reference)
    torch.library.register_fake(f"ptq::{op}")(fake)
    REFERENCES[op] = reference
    native.load()


def reference_of(op: str, schema: str, fake: Callable[..., Any]) -> Callable[[Reference], Reference]:
    """Decorates the reference of `ptq::<op>`, and declares the op."""

    def declared(reference: Reference) -> Reference:
        declare(op, schema, reference, fake)
        return reference

    return declared


def like_first(x: Tensor, *rest: Any) -> Tensor:
    """The fake kernel of an op whose result has the shape and dtype of its first argument."""
    return x.new_empty(x.shape)


def declare_linear(op: str, weight: str, numbers: str, dequantize: Callable[..., Tensor]) -> None:
    """Declare `ptq::<op>(x, weight ..., bias, numbers ...)`: x Wᵀ + bias for floating-point x [*t, k], with gradients.

    `weight` and `numbers` are the parts of the schema that name the weight's tensors and its numbers; the first number
    is `int n`, else n is the number of rows of the first tensor. `dequantize(weight ..., numbers ..., k)` gives W
    [n, k] in float32. It is computed in float32, the result is in x's dtype; native kernels differ from the reference
    in the last bits. Weights are frozen: gradients go to x and to the bias only.
    """
    tensors = weight.count("Tensor")

    def split(arguments):
        x, w, bias, rest = arguments[0], arguments[1 : tensors + 1], arguments[tensors + 1], arguments[tensors + 2 :]
        return x, w, bias, (*rest, x.shape[-1])

    def reference(*arguments):
        x, w, bias, rest = split(arguments)
        bias = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), dequantize(*w, *rest), bias).to(x.dtype)

    def fake(*arguments):
        x, w, _, rest = split(arguments)
        return x.new_empty(*x.shape[:-1], _rows(numbers, w, rest))

    def setup(ctx, inputs, output):
        _, w, bias, ctx.rest = split(inputs)
        ctx.save_for_backward(*w)
        ctx.bias_dtype = None if bias is None else bias.dtype

    def backward(ctx, grad):
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = (grad.float() @ dequantize(*ctx.saved_tensors, *ctx.rest)).to(grad.dtype)
        if ctx.needs_input_grad[tensors + 1]:
            to_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return to_x, *[None] * tensors, to_bias, *[None] * (len(ctx.rest) - 1)

    declare(op, f"(Tensor x, {weight}, Tensor? bias, {numbers}) -> Tensor", reference, fake)
    torch.library.register_autograd(f"ptq::{op}", backward, setup_context=setup)


def declare_quantized_linear(op: str, weight: str, numbers: str, reference: Callable[..., Tensor]) -> None:
    """Declare `ptq::<op>(q, q_scale, weight ..., bias, numbers ..., dtype)`: the product with quantised tokens q int8
    [*t, k], q_scale [*t], in `dtype`. `weight` and `numbers` are as above; n must be the first number. Its gradient is
    refused.
    """
    tensors = weight.count("Tensor")

    def fake(q, q_scale, *rest):
        return q.new_empty(*q.shape[:-1], _rows(numbers, rest, rest[tensors + 1 :]), dtype=rest[-1])

    schema = f"(Tensor q, Tensor q_scale, {weight}, Tensor? bias, {numbers}, ScalarType dtype) -> Tensor"
    declare(op, schema, reference, fake)
    refuse_gradient(op)


def declare_tokens_linear(op: str, weight: str, numbers: str, quantized: str) -> None:
    """Declare `ptq::<op>(x, weight ..., bias, numbers ..., input_bits, clip, dtype)`: the op `quantized` (see
    `declare_quantized_linear`) on the tokens of x as `ptq::quantize_tokens` makes them: in one call, to the bit. Its
    gradient is refused.
    """
    tensors = weight.count("Tensor")

    def reference(x, *rest):
        *rest, bits, clip, dtype = rest
        tokens = torch.ops.ptq.quantize_tokens(x, bits, clip)
        return getattr(torch.ops.ptq, quantized)(*tokens, *rest, dtype)

    def fake(x, *rest):
        return x.new_empty(*x.shape[:-1], _rows(numbers, rest, rest[tensors + 1 :]), dtype=rest[-1])

    schema = f"(Tensor x, {weight}, Tensor? bias, {numbers}, int input_bits, float clip, ScalarType dtype) -> Tensor"
    declare(op, schema, reference, fake)
    refuse_gradient(op)


def refuse_gradient(op: str) -> None:
    """Let the backward pass through `ptq::<op>`, which rounds its input, raise RuntimeError: when it runs, and not
    already when `torch.compile` looks at it, which it does wherever gradients are not turned off."""

    def setup(ctx, inputs, output):
        ctx.shapes = [[None] * len(x) if isinstance(x, list) else getattr(x, "shape", None) for x in inputs]

    def backward(ctx, *gradients):
        some = next(gradient for gradient in gradients if gradient is not None and gradient.is_floating_point())
        return tuple(
            torch.ops.ptq.no_gradient(some, shape) if needed is True else shape if isinstance(shape, list) else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )

    torch.library.register_autograd(f"ptq::{op}", backward, setup_context=setup)


def _no_gradient(gradient: Tensor, shape: list[int]) -> Tensor:
    raise RuntimeError("ptq: there is no gradient through quantised activations; take that of the original model")


declare(
    "no_gradient",
    "(Tensor gradient, SymInt[] shape) -> Tensor",
    reference=_no_gradient,
    fake=lambda gradient, shape: gradient.new_empty(shape),
)


def _rows(numbers: str, weight: tuple[Any, ...], values: tuple[Any, ...]) -> int | torch.SymInt:
    return values[0] if numbers.startswith("int n,") else weight[0].shape[0]
