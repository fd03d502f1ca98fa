"""float32 products on the CPU through oneDNN, which is two to three times as fast as torch's default library on AMD."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

FEW_ROWS = 64
"""Below this, a product waits for its weight: oneDNN would read it twice, and hold a second copy meanwhile."""


PIECE_BYTES = 32 << 20
"""Of a weight that is multiplied at a time: oneDNN copies what it is given into an order of its own."""


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
    """x Wᵀ + b; torch's own where oneDNN does not apply: other devices and dtypes, gradients."""
    if not (x.numel() >= FEW_ROWS * w.shape[1] and _fits(x, w)):
        return torch.nn.functional.linear(x, w, bias)
    x, w = x.contiguous(), w.contiguous()
    rows = max(1, PIECE_BYTES // (4 * w.shape[1]))
    if len(w) <= rows:
        return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    y = torch.empty(*x.shape[:-1], len(w))
    for start in range(0, len(w), rows):
        here = slice(start, start + rows)
        part = None if bias is None else bias[here]
        y[..., here] = torch.ops.mkldnn._linear_pointwise(x, w[here], part, "none", [], "")
    return y


def _fits(a: Tensor, b: Tensor) -> bool:
    on_cpu = a.device.type == b.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return on_cpu and a.numel() > 0 and not differentiated and torch.backends.mkldnn.is_available()
