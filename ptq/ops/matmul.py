"""Products with plain weights on the CPU, where torch's default library is slow.

Many tokens, float32: oneDNN, which is two to three times as fast on AMD, and twice as fast again `in_bfloat16`. Few
tokens: `ptq::dense_linear`, a kernel that reads the weight at the speed of memory; its sums are float32, the same for
any number of tokens and threads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.ops import native
from ptq.ops.op_declarations import declare, takes_forward_derivatives, wants_gradient

FEW_ROWS = 64
"""Below this, a product waits for its weight: oneDNN would read it twice, and hold a second copy meanwhile."""

FEW_TOKENS = 16
"""Up to so many are multiplied by `ptq::dense_linear`, and by linears that share an input, in one call. For more, torch
is as fast, and the products take longest."""

FEW_DTYPES = (torch.float32, torch.bfloat16)
GPU_DTYPES = (*FEW_DTYPES, torch.float16)

PIECE_BYTES = 32 << 20
"""Of a weight that is multiplied at a time: oneDNN copies what it is given into an order of its own."""


class _Products(threading.local):
    bfloat16 = False


PRODUCTS = _Products()
"""How this thread multiplies float32, see `in_bfloat16`."""


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Within it, in this thread, `linear` on many tokens and packed linears multiply float32 as a model in bfloat16
    does: factors and result are brought to bfloat16, sums are float32."""
    before, PRODUCTS.bfloat16 = PRODUCTS.bfloat16, True
    try:
        yield
    finally:
        PRODUCTS.bfloat16 = before


def has_bfloat16() -> bool:
    """Whether the CPU has products of bfloat16 that are faster, so that `in_bfloat16` gains time."""
    level = native.cpu_level()
    return level == "amx" or (level == "avx512bf16" and not native.has_slow_pairs())


def product(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    """a @ b."""
    if _fits(a, b):
        # oneDNN falls back to a loop a thousand times slower for operands that are slices of rows: these are copied.
        b = b if b.is_contiguous() else b.t().contiguous().t()
        return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b.t(), None, "none", [], "")
    return a @ b


def linear(
    x: Float[Tensor, "*batch k"], w: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None
) -> Float[Tensor, "*batch n"]:
    """x Wᵀ + b; torch's own where nothing faster applies: other devices and dtypes. A bfloat16 W may meet float32 x."""
    if dense_linear_serves(x, w, bias):
        return torch.ops.ptq.dense_linear(x, w, bias)
    w = w.to(x.dtype)
    if x.numel() < FEW_ROWS * w.shape[1] or not _placed(x, w):
        return torch.nn.functional.linear(x, w, bias)
    if wants_gradient(x, w, bias):
        return cast(Tensor, _Differentiable.apply(x, w, bias))
    x, w = x.contiguous(), w.contiguous()
    if PRODUCTS.bfloat16:
        x = x.bfloat16()
    rows = max(1, PIECE_BYTES // (x.itemsize * w.shape[1]))
    if len(w) <= rows:
        return _many(x, w, bias)
    y = torch.empty(*x.shape[:-1], len(w), dtype=torch.float32)
    for start in range(0, len(w), rows):
        here = slice(start, start + rows)
        part = None if bias is None else bias[here]
        y[..., here] = _many(x, w[here], part)
    return y


def _many(x: Tensor, w: Float32[Tensor, "n k"], bias: Tensor | None) -> Float32[Tensor, "*batch n"]:
    if x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    y = torch.nn.functional.linear(x, w.to(x.dtype)).float()
    return y if bias is None else y.add_(bias)


def few_tokens_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, faster for few tokens; not where autocast would give another dtype."""
    changed = torch.is_autocast_enabled("cpu") and x.dtype != torch.get_autocast_dtype("cpu")
    if not changed and dense_linear_serves(x, w, bias):
        return torch.ops.ptq.dense_linear(x, w, bias)
    return torch.nn.functional.linear(x, w, bias)


def cpu_ops_serve_few(tokens: int, *tensors: Tensor) -> bool:
    """Whether the ops for few tokens are made for this: as `cpu_ops_serve`, and few."""
    return 0 < tokens <= FEW_TOKENS and cpu_ops_serve(*tensors)


def cpu_ops_serve(*tensors: Tensor) -> bool:
    """On the CPU, float32 or bfloat16, one dtype, no gradients, forward ones neither, and not under torch.compile."""
    dtype = tensors[0].dtype
    if dtype not in FEW_DTYPES or torch.compiler.is_compiling() or takes_forward_derivatives():
        return False
    for x in tensors:
        if x.dtype != dtype or not x.is_cpu:
            return False
    return not wants_gradient(*tensors)


def lies_on_gpu(x: Tensor) -> bool:
    """Whether a tensor lies where the CUDA kernels are. Not under torch.compile, which could not look."""
    return x.is_cuda and not torch.compiler.is_compiling() and native.has_cuda()


def gpu_ops_serve(*tensors: Tensor) -> bool:
    """Whether the CUDA kernels of `ptq.ops.steps` and `ptq.ops.input_steps` are made for this: on one GPU, one dtype of
    at most 32 bits, no gradients, forward ones neither, no autocast, and not under torch.compile, which fuses small
    steps itself."""
    first = tensors[0]
    if not lies_on_gpu(first) or first.dtype not in GPU_DTYPES or takes_forward_derivatives():
        return False
    if any(x.dtype != first.dtype or x.device != first.device for x in tensors):
        return False
    return not wants_gradient(*tensors) and not torch.is_autocast_enabled("cuda")


def ops_serve(*tensors: Tensor) -> bool:
    """Whether `ptq.ops.steps` serves these, on a CPU or a GPU."""
    return gpu_ops_serve(*tensors) or cpu_ops_serve(*tensors)


def dense_linear_serves(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether `ptq::dense_linear` is made for this: few tokens, on the CPU, one dtype (W may be bfloat16 in any case),
    no gradients, forward ones neither."""
    if not 0 < x.numel() <= FEW_TOKENS * w.shape[1] or x.dtype not in FEW_DTYPES or takes_forward_derivatives():
        return False
    tensors = (x, w) if bias is None else (x, w, bias)
    if w.dtype not in (x.dtype, torch.bfloat16) or (bias is not None and bias.dtype != x.dtype):
        return False
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    return not wants_gradient(*tensors)


class _Differentiable(torch.autograd.Function):
    """`linear` with gradients, for whatever of x, W and the bias wants one; once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return linear(x, w, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            product(rows, w).view_as(x) if ctx.needs_input_grad[0] else None,
            product(rows.t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _fits(a: Tensor, b: Tensor) -> bool:
    return _placed(a, b) and not wants_gradient(a, b)


def _placed(a: Tensor, b: Tensor) -> bool:
    on_cpu = a.device.type == b.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    return on_cpu and a.numel() > 0 and torch.backends.mkldnn.is_available() and not takes_forward_derivatives()


declare(
    "dense_linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=lambda x, weight, bias: torch.nn.functional.linear(x, weight.to(x.dtype), bias),
    fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
