"""A router and its experts in one op, for few tokens on the CPU: as a part of a decoder layer
(`ptq.fast.layers.cpu_layer`), or as the forward of the module whose parts they are.

No family is named. A module that is nothing but a router, `ptq.hf.experts.Experts`, and maybe an MLP that every token
goes through, with a gate or without one, is tried on random numbers: its router must be one of `ptq.ops.moe_ops`, to
the bit (`ptq.fast.experts.routers`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptq.fast.attention.decoding import MOST_DECODED
from ptq.fast.experts import routers
from ptq.fast.experts.few_token_experts import MOST_TOKENS, FewTokenExperts, HeldExperts
from ptq.fast.trials import PLAIN
from ptq.fast.watched import Watched, forward_is_ours
from ptq.layers.linear import QuantLinear
from ptq.layers.replaceable import must_be_called
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve
from ptq.ops.moe_ops import RouterWeights
from ptq.ops.op_declarations import wants_gradient

RUN = torch.ops.ptq.run_moe.default


@dataclass(eq=False)
class HeldMoe:
    """A router and experts that an op holds."""

    handle: Tensor
    """Stands for them (`ptq.ops.moe_ops`)."""
    experts: HeldExperts
    cls: type[nn.Module]
    """That of the experts."""
    modules: tuple[nn.Module, ...]
    """All that it takes the place of, but for experts and packed linears, which are observed."""
    weights: RouterWeights
    wide: bool
    """Whether the router multiplies in float32, whatever its weight is."""
    gives: str
    """What the module gives besides (`ptq.fast.experts.routers`)."""

    def __post_init__(self) -> None:
        self.expert_forward = self.cls.forward
        self.plain: list[tuple[dict[str, Any], str, Any]] = []
        """Numbers and buffers that say what is computed, such as how many experts are chosen."""
        for module in self.modules:
            values = vars(module)
            plain = ((name, x) for name, x in values.items() if name[0] != "_" and isinstance(x, PLAIN))
            self.plain += [(values, name, x) for name, x in plain]
            self.plain += [(module._buffers, name, x) for name, x in module._buffers.items()]

    def floats(self) -> list[Tensor]:
        """What must have the dtype of tokens."""
        weight, bias, _, shared_gate = self.weights
        held = (shared_gate,) if self.wide else (weight, bias, shared_gate)
        return [x for x in held if x is not None]

    def may_run(self, dtype: torch.dtype) -> bool:
        """Whether tokens of this dtype go through an op now: nothing learns, all is where and what the op takes, and no
        autocast gives another dtype."""
        weights = [x for x in self.weights if x is not None]
        if torch.is_grad_enabled() and (self.experts.has_biases or wants_gradient(*weights)):
            return False
        if not all(x.dtype in FEW_DTYPES and x.is_cpu for x in weights):
            return False
        return not torch.is_autocast_enabled("cpu") or (dtype == torch.get_autocast_dtype("cpu") and not self.wide)

    def is_over(self) -> bool:
        """Whether they compute something else now."""
        changed = self.experts.ended or self.cls.forward is not self.expert_forward
        return changed or not all(_is_still(held.get(name), x) for held, name, x in self.plain)


def _is_still(now: Any, x: Any) -> bool:
    return now is x or (not isinstance(x, Tensor) and now == x)


def moe_of(mlp: nn.Module) -> HeldMoe | None:
    """A router and its experts as an op holds them; None where none does."""
    parts = routers.parts_of(mlp)
    if parts is None or must_be_called(parts.experts) or not _is_defined_here(type(parts.experts).forward):
        return None
    others = [mlp, *(part for part in (parts.router, parts.shared, parts.shared_gate) if part is not None)]
    modules = tuple(module for part in others[1:] for module in part.modules() if type(module) is not QuantLinear)
    if any(module.training or not forward_is_ours(vars(module).get("forward")) for module in (mlp, *modules)):
        return None
    found, few = routers.router_of(mlp), parts.experts.few_tokens
    experts = (
        few.handles_of(parts.experts, parts.shared) if found is not None and isinstance(few, FewTokenExperts) else None
    )
    if found is None or experts is None:
        return None
    weights = routers.weights_of(mlp, found)
    handle = torch.ops.ptq.moe.default(experts.handles, *weights, *found.how)
    return HeldMoe(handle, experts, type(parts.experts), (mlp, *modules), weights, found.how.wide, found.gives)


def _is_defined_here(forward: Any) -> bool:
    return getattr(forward, "__module__", "").startswith("ptq.")


def looked_at(mlp: nn.Module) -> list[nn.Module]:
    """The modules that decide whether an op may hold a router and its experts, where none does now."""
    return [mlp, *mlp.children()]


class FastMoe:
    """The forward of a router with experts that `install` has made fast. (Slots, because who wraps a forward copies its
    `__dict__`.)"""

    __slots__ = ("known", "module", "own")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, type(module).forward
        self.known: tuple[HeldMoe | None, Watched] | None = None

    def __getstate__(self) -> nn.Module:
        return self.module  # copies and pickles find out anew

    def __setstate__(self, module: nn.Module) -> None:
        self.module, self.own, self.known = module, type(module).forward, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = None
        if len(args) == 1 and not kwargs and not self.module.training and not torch.compiler.is_compiling():
            [x] = args
            self._look_again(x)
            if x.dim() == 3 and x.is_cpu and 0 < x.shape[0] * x.shape[1] <= MOST_TOKENS and x.numel():
                moe = self._current()
                if moe is not None and moe.may_run(x.dtype) and cpu_ops_serve(x, *moe.floats()):
                    y, shares = RUN(moe.handle, x)
                    found = (y, shares) if moe.gives == routers.SHARES else y
        return type(self.module).forward(self.module, *args, **kwargs) if found is None else found

    def _look_again(self, x: Tensor) -> None:
        """With a prompt, where nothing was held: who listened may be gone. Off the CPU nothing is kept."""
        failed = self.known is not None and self.known[0] is None
        if not x.is_cpu or (failed and x.dim() == 3 and x.shape[1] > MOST_DECODED):
            self.known = None

    def _current(self) -> HeldMoe | None:
        """What an op holds now; None where the module's own code must run."""
        known = self.known  # another thread may look
        if known is None or not known[1].is_same():
            known = self.known = self._find()
        return None if known[1].must_be_called() else known[0]

    def _find(self) -> tuple[HeldMoe | None, Watched]:
        self.known = None  # replaced weights go before others are held
        moe = moe_of(self.module) if type(self.module).forward is self.own else None
        if moe is None or moe.gives == routers.MORE:
            return None, Watched(looked_at(self.module), [])
        watched = Watched([*moe.modules], [], moe.modules[1:])
        watched.expires_with(moe)
        return moe, watched


def install(model: nn.Module) -> None:
    """Make the routers and experts of a model fast where an op may take their place."""
    for module in model.modules():
        if "forward" not in vars(module) and routers.parts_of(module) is not None:
            module.forward = FastMoe(module)
