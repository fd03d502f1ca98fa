"""The inputs of a layer's products as one op each, with what comes before them; and a product's way back.

- `ptq::norm_input`: RMSNorm of x, or of x + added; then the Hadamard transform of `order` (0: none) after `signs`; then
  with `bits` the integers of each token (`ptq.ops.activations`). Gives [x + added, if there is such,] and the numbers,
  or the integers and their scales.
- `ptq::gate_input`: the same behind silu(gate) * up.
- `ptq::hadamard_to`: the Hadamard transform of float32 numbers, rounded to `dtype` once.

Numbers are those of the single ops (`ptq.ops.steps`), one after the other on the same device, to the bit. On a GPU each
is one launch, but for a gate in front of a transform, which is two; elsewhere they are what stands here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ptq.ops import activations, hadamard, steps  # noqa: F401 (their ops)
from ptq.ops.op_declarations import reference_of

_TREATMENT = "Tensor? signs, Tensor[] factors, int order, int bits, float clip"


class Treatment(NamedTuple):
    """What is done to an input, as the ops above take it."""

    signs: Tensor | None
    factors: list[Tensor]
    """The dense factors of the Hadamard transform."""
    order: int
    """0: no transform."""
    bits: int
    """0: it is not quantised."""
    clip: float


def treated(
    x: Float[Tensor, "*t k"], signs: Tensor | None, factors: list[Tensor], order: int, bits: int, clip: float
) -> tuple[Tensor, ...]:
    """x as weights see it: numbers, or integers and their scales. The arguments behind x are those of a `Treatment`."""
    if bits and order:
        return torch.ops.ptq.hadamard_quantize(x, signs, factors, order, bits, clip)
    if bits:
        return torch.ops.ptq.quantize_tokens(x, bits, clip)
    return (torch.ops.ptq.hadamard(x, signs, factors, order, -1, False) if order else x,)


def _shapes(x: Tensor, bits: int) -> list[Tensor]:
    if not bits:
        return [x.new_empty(x.shape)]
    return [x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)]


def _fake_norm(x, added, gain, eps, offset, round_first, signs, factors, order, bits, clip):
    return [*([] if added is None else [x.new_empty(x.shape)]), *_shapes(x, bits)]


@reference_of(
    "norm_input",
    f"(Tensor x, Tensor? added, Tensor gain, float eps, float offset, bool round_first, {_TREATMENT}) -> Tensor[]",
    _fake_norm,
)
def norm_input(
    x: Float[Tensor, "*t k"],
    added: Float[Tensor, "*t k"] | None,
    gain: Float[Tensor, " k"],
    eps: float,
    offset: float,
    round_first: bool,
    signs: Float32[Tensor, " k"] | None,
    factors: list[Tensor],
    order: int,
    bits: int,
    clip: float,
) -> list[Tensor]:
    """`ptq::norm_input` step by step."""
    total = [] if added is None else [x + added]
    normed = torch.ops.ptq.rms_norm(total[0] if total else x, gain, eps, offset, round_first)
    return [*total, *treated(normed, signs, factors, order, bits, clip)]


@reference_of(
    "gate_input",
    f"(Tensor gate, Tensor up, {_TREATMENT}) -> Tensor[]",
    lambda gate, up, signs, factors, order, bits, clip: _shapes(gate, bits),
)
def gate_input(
    gate: Float[Tensor, "*t k"],
    up: Float[Tensor, "*t k"],
    signs: Float32[Tensor, " k"] | None,
    factors: list[Tensor],
    order: int,
    bits: int,
    clip: float,
) -> list[Tensor]:
    """`ptq::gate_input` step by step."""
    return list(treated(torch.ops.ptq.silu_mul(gate, up), signs, factors, order, bits, clip))


@reference_of(
    "hadamard_to",
    "(Tensor x, Tensor? signs, Tensor[] factors, int order, bool transpose, ScalarType dtype) -> Tensor",
    lambda x, signs, factors, order, transpose, dtype: x.new_empty(x.shape, dtype=dtype),
)
def hadamard_to(
    x: Float32[Tensor, "*t n"],
    signs: Float32[Tensor, " n"] | None,
    factors: list[Tensor],
    order: int,
    transpose: bool,
    dtype: torch.dtype,
) -> Float[Tensor, "*t n"]:
    """`ptq::hadamard_to` step by step."""
    y = torch.ops.ptq.hadamard(x, signs, factors, order, -1, transpose)
    return y if y.dtype == dtype else y.to(dtype)


def transformed_back(
    x: Float32[Tensor, "*t n"], signs: Float32[Tensor, " n"] | None, construction: str, dtype: torch.dtype
) -> Float[Tensor, "*t n"]:
    """`ptq::hadamard_to` with the transposed matrix that `construction` names."""
    factors, order = hadamard.dense_factors(construction, x.device)
    return torch.ops.ptq.hadamard_to(x, signs, factors, order, True, dtype)
