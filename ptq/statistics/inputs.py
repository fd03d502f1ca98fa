"""The inputs of linears while a block runs, and their cross moments with those of the model that is not quantised.

GPTQ makes a layer give W x̂ for the input x̂ that it sees behind quantised layers, although the model should have W x,
with x the input in the model that is not quantised. GPTAQ (Li et al. 2025, arXiv:2504.02692) calls it asymmetric
calibration when both count: with C = sum (x - x̂) x̂ᵀ, |W x - Ŵ x̂|² is least, without rounding, for
W + W C (sum x̂ x̂ᵀ)⁻¹, and that is rounded (docs/math.md, section 5).
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ptq.hf.blocks import PartialModel
from ptq.layers.linear import QuantLinear
from ptq.ops import gram, matmul

CROSS = "cross"
"""What C is called in the files, behind the name of the linear."""


class _Seen(Exception):
    """Every input of the block has been seen."""


def run_until_seen(
    part: PartialModel, names: Iterable[str], state: Float[Tensor, "batch t k"], see: Callable[[str, Tensor], None]
) -> None:
    """Run a block until each of the named linears has had its input. `see` is given name and input [t, k]: where a
    linear transforms it, or quantises it, as its weight sees it."""
    missing = set(names)

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = module.effective_input(inputs[0]) if isinstance(module, QuantLinear) else inputs[0]
            see(name, x.flatten(0, -2).float().contiguous())
            missing.discard(name)
            if not missing:
                raise _Seen

        return module.register_forward_pre_hook(hook)

    with suppress(_Seen), ExitStack() as hooks:  # what comes after the last input is not needed
        for name in sorted(missing):
            hooks.enter_context(watch(name, part.module(name)))
        part.run(state)


class CrossMoments:
    """C = sum (x - x̂) x̂ᵀ of some inputs of a block whose weights are not rounded yet, in float32.

    For every chunk first `expect`, with what enters the block in the model that is not quantised, then `add`, with the
    inputs in the other one. Both models must give a linear the same tokens, so it is not for experts.
    """

    def __init__(self, part: PartialModel, names: Iterable[str]) -> None:
        self.part, self.names = part, sorted(names)
        widths = {name: int(part.module(name).in_features) for name in self.names}  # pyright: ignore[reportArgumentType]
        self.sums: dict[str, Float32[Tensor, "k k"]] = {
            name: torch.zeros(k, k, device=part.device) for name, k in widths.items()
        }
        self._expected: dict[str, Float32[Tensor, "t k"]] = {}

    def expect(self, state: Float[Tensor, "batch t k"]) -> None:
        """Keep the inputs x of a chunk."""
        with self.part.exact():
            run_until_seen(self.part, self.names, state, self._expect)

    def add(self, name: str, x: Float32[Tensor, "t k"]) -> None:
        """Add what belongs to an input x̂ of the same chunk, where its C is wanted."""
        if name in self._expected:
            gram.add_cross_(self.sums[name], self._expected.pop(name).sub_(x), x, matmul.PRODUCTS.bfloat16)

    def _expect(self, name: str, x: Float32[Tensor, "t k"]) -> None:
        self._expected[name] = x.clone()  # x may be what the block goes on with
