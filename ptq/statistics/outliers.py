"""Outliers, measured: the inputs of linear layers channel by channel, and predictions position by position.

The numbers are small: a run keeps them beside its probe, block by block, and its report draws them.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor, nn

from ptq.hf.blocks import PartialModel
from ptq.layers.linear import QuantLinear
from ptq.ops import activations
from ptq.ops.activations import Activation
from ptq.planning.plan import Plan
from ptq.statistics.divergence import divergence

OBSERVED = ("query", "attention_output", "mixer_input", "mixer_output", "gate", "up", "down")
"""Roles whose inputs are measured; that of `up` where there is no gate."""
CHUNK = 256
"""Tokens that are measured at once, and positions whose log-softmax is held at once: bounds the memory."""


@dataclass(frozen=True)
class MeasuredInput:
    """The input x of one linear layer over some tokens, after the online transform and before it is quantised."""

    peak: Float32[Tensor, " k"]
    """Largest magnitude of every channel."""
    sums: Float64[Tensor, " 5"]
    """Over the tokens: their number; kurtosis; max|x| / rms(x); squared error of the quantised token relative to its
    square, 0 where nothing is quantised; mean square."""

    @property
    def tokens(self) -> int:
        return int(self.sums[0])

    @property
    def kurtosis(self) -> float:
        """Mean of mean(x^4) / mean(x^2)^2 of a token: 3 for a Gaussian one, k where a single channel holds it all."""
        return float(self.sums[1] / self.sums[0])

    @property
    def peak_to_rms(self) -> float:
        """Mean of max|x| / rms(x) of a token: how many of its usual sizes its quantisation range must span."""
        return float(self.sums[2] / self.sums[0])

    @property
    def rounding_error(self) -> float:
        """Mean over the tokens of |x - q(x)|^2 / |x|^2."""
        return float(self.sums[3] / self.sums[0])

    @property
    def rms(self) -> float:
        """Root of the mean square over all tokens and channels."""
        return float(self.sums[4] / self.sums[0]) ** 0.5

    def __add__(self, other: "MeasuredInput") -> "MeasuredInput":
        """Both sets of tokens together."""
        return MeasuredInput(torch.maximum(self.peak, other.peak), self.sums + other.sums)


def observed(plan: Plan, index: int) -> dict[str, tuple[str, ...]]:
    """One linear of block `index` for each of the inputs that linears share, and all those that are measured together
    with it: the same linear of every expert. An MLP beside experts is left out: it has another width."""
    block = list(plan.block(index))
    found, roles = {}, {role for linear in block for role in linear.role.split("+")}
    for role in OBSERVED:
        if role == "up" and "gate" in roles:  # whose input it reads
            continue
        linears = [x for x in block if role in x.role.split("+")]
        names = tuple(x.name for x in linears if x.expert is not None) or tuple(x.name for x in linears[:1])
        found |= {first: names for first in names[:1]}
    return found


def measure(x: Float[Tensor, "*batch k"], activation: Activation | None = None) -> MeasuredInput:
    """Measure the tokens x; `activation` says how their rounding error is taken. A token of zeros counts as flat."""
    pieces = [_measure(piece.float(), activation) for piece in x.reshape(-1, x.shape[-1]).split(CHUNK)]
    return functools.reduce(operator.add, pieces)


def _measure(x: Float32[Tensor, "t k"], activation: Activation | None) -> MeasuredInput:
    square = x.double().square()
    mean = square.mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    kurtosis = square.square().mean(-1) / mean.square()
    spread = square.amax(-1) / mean
    flat = spread == 0
    error = torch.zeros_like(mean)
    if activation is not None:
        error = (activations.dequantize(*activation.quantize(x)) - x).double().square().mean(-1) / mean
    kurtosis, spread = torch.where(flat, 1.0, kurtosis), torch.where(flat, 1.0, spread.sqrt())
    per_token = (torch.ones_like(mean), kurtosis, spread, error, torch.where(flat, 0.0, mean))
    return MeasuredInput(x.abs().amax(0).cpu(), torch.stack([values.sum() for values in per_token]).cpu())


@contextmanager
def watching(
    part: PartialModel, names: Mapping[str, Iterable[str]], activation: Activation | None = None
) -> Iterator[dict[str, MeasuredInput]]:
    """Measure the inputs of linears of a block in every forward pass inside the `with`: those that a name stands for,
    together.

    Where a linear transforms its input online, the input is taken after the transform. `activation`: the grid of the
    rounding error, whether the linear quantises its input or not.
    """
    found: dict[str, MeasuredInput] = {}
    with ExitStack() as hooks:
        for name, linears in names.items():
            for linear in linears:
                hooks.enter_context(_watch(part.module(linear), name, found, activation))
        yield found


def _watch(module: nn.Module, name: str, found: dict[str, MeasuredInput], activation: Activation | None):
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = module.transformed_input(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
        seen = measure(x, activation)
        found[name] = found[name] + seen if name in found else seen

    return module.register_forward_pre_hook(add)


def to_tensors(inputs: Mapping[str, MeasuredInput]) -> dict[str, Tensor]:
    """The measurements as tensors to store: `<linear>.peak` and `<linear>.sums`."""
    return {f"{name}.{leaf}": value for name, found in inputs.items() for leaf, value in vars(found).items()}


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, MeasuredInput]:
    """Inverse of `to_tensors`; other tensors are passed over."""
    names = [name.removesuffix(".peak") for name in tensors if name.endswith(".peak")]
    return {name: MeasuredInput(tensors[f"{name}.peak"], tensors[f"{name}.sums"]) for name in names}


def by_position(
    original: Float[Tensor, "rows t v"], packed: Float[Tensor, "rows t v"], ids: Int[Tensor, "rows t"]
) -> Float64[Tensor, "3 rows t-1"]:
    """What the predictions of ids[:, 1:] lose, in nats: both losses, the original's first, and KL(original || packed).

    Rows are independent, so results of several calls can be joined along axis 1.
    """
    rows, t = ids.shape
    found = torch.empty(3, rows, t - 1, dtype=torch.float64)
    for start in range(0, t - 1, CHUNK):
        chunk = slice(start, min(start + CHUNK, t - 1))
        targets = ids[:, chunk.start + 1 : chunk.stop + 1, None].to(original.device)
        for row in range(rows):
            log_p = original[row, chunk].float().log_softmax(-1)
            log_q = packed[row, chunk].float().log_softmax(-1)
            kl = divergence(log_p, log_q).double()
            losses = (-log.gather(-1, targets[row])[:, 0].double() for log in (log_p, log_q))
            found[:, row, chunk] = torch.stack([*losses, kl]).cpu()
    return found
