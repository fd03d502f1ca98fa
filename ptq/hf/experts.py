"""Experts as linears of their own, in the place of the two 3-D parameters in which transformers holds them.

While a run quantises a block, and in a packed model that is loaded, every expert is three `nn.Linear`: to the plan, the
rewriter, the Hessians, `QuantLinear` and the files they are linears like any other. No family is named: a module of
fused experts is known by its parameters, and tried on random numbers before another takes its place.
"""

import inspect
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.fast import fast_steps
from ptq.fast.fast_experts import FewTokens
from ptq.fast.trials import hollow, trial
from ptq.files.header import TensorInfo
from ptq.layers.shared_input import products
from ptq.models.family import Experts as Names
from ptq.models.family import Family
from ptq.ops import steps
from ptq.ops.matmul import has_steps
from ptq.planning.plan import Plan

FUSED = ("gate_up_proj", "down_proj")
"""Parameters of a module of fused experts: [experts, 2 width, hidden], gate above up; [experts, hidden, width]."""
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What the files of a checkpoint may call gate, up and down of an expert."""
EXPERT_LINEAR = re.compile(r"\.experts\.\d+\.([^.]+)$")
IN_FILES, IN_MODEL = ".block_sparse_moe.", ".mlp."
"""Mixtral's files have the first where its modules have the second; transformers renames tensors when it loads them."""


def module_name(name: str) -> str:
    """What a model calls a linear of its checkpoint's files."""
    return name.replace(IN_FILES, IN_MODEL)


def is_fused_parameter(name: str) -> bool:
    """Whether this is a tensor in which transformers holds all experts of a block."""
    owner, _, leaf = name.rpartition(".")
    return leaf in FUSED and owner.endswith(".experts")


class Experts(nn.Module):
    """The experts 0, 1, ... of a block, each with linears of the given `names`: y = sum_e p_e down_e(act(gate_e x) *
    up_e x) over the experts e that were chosen for a token x. Sums are taken in the order of the experts.
    """

    def __init__(
        self, names: tuple[str, str, str], count: int, hidden: int, width: int, act_fn: nn.Module, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.names = names
        shapes = dict(zip(names, ((hidden, width), (hidden, width), (width, hidden)), strict=True))
        for number in range(count):
            linears = {
                name: nn.Linear(*shape, bias=False, device="meta", dtype=dtype) for name, shape in shapes.items()
            }
            self.add_module(str(number), nn.ModuleDict(linears))
        self.act_fn = act_fn
        self.is_silu = _is_silu(act_fn)
        self.few_tokens = FewTokens()

    def forward(
        self,
        hidden_states: Float[Tensor, "t k"],
        top_k_index: Int[Tensor, "t chosen"],
        top_k_weights: Float[Tensor, "t chosen"],
    ) -> Float[Tensor, "t k"]:
        """The weighted sum over the chosen experts of every token."""
        found = self.few_tokens(self, hidden_states, top_k_index, top_k_weights) if self.is_silu else None
        if found is not None:
            return found
        if len(hidden_states) == 1:
            return self._of_one(hidden_states, top_k_index, top_k_weights)
        total = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == number)
            y = self._mlp(number, hidden_states[tokens])
            total.index_add_(0, tokens, (y * top_k_weights[tokens, places, None]).to(total.dtype))
        return total

    def _of_one(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Float[Tensor, "1 k"]:
        """The same of one token, without gathering: the products alone take time then."""
        total = torch.zeros_like(x)
        for number, place in sorted((number, place) for place, number in enumerate(top_k_index[0].tolist())):
            total = total + (self._mlp(number, x) * top_k_weights[0, place]).to(total.dtype)
        return total

    def _mlp(self, number: int, x: Float[Tensor, "t k"]) -> Float[Tensor, "t k"]:
        expert = cast(nn.ModuleDict, self._modules[str(number)])
        gate_linear, up_linear, down_linear = (expert._modules[name] for name in self.names)
        assert gate_linear is not None and up_linear is not None and down_linear is not None
        if self.is_silu and len(x) and has_steps(x):
            gate, up = products([gate_linear, up_linear], x)
            if not (torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)):
                return fast_steps.down(down_linear, gate, up)
        else:
            gate, up = gate_linear(x), up_linear(x)
        return down_linear(self.act_fn(gate) * up)


def as_published(tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of files with one matrix for each linear of an expert, as models are published. Where files hold all
    experts of a block in one tensor, as `save_pretrained(save_original_format=False)` writes it, that is the same bytes
    under names of their own."""
    names, found = family.experts, {}
    if names is None:
        return dict(tensors)
    inside = module_name(f".{names.experts}")
    for name, info in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if not (owner.endswith(inside) and leaf in FUSED and len(info.shape) == 3 and info.nbytes):
            found[_in_files(name, names)] = info
            continue
        parts = names.linears[:2] if leaf == FUSED[0] else names.linears[2:]
        count, rows, columns = info.shape[0], info.shape[1] // len(parts), info.shape[2]
        block, nbytes = owner.removesuffix(inside), rows * columns * info.dtype.itemsize
        for place, (number, part) in enumerate(itertools.product(range(count), parts)):
            piece = replace(info, shape=(rows, columns), offset=info.offset + place * nbytes, nbytes=nbytes)
            found[f"{block}.{names.experts}.{number}.{part}.weight"] = piece
    return found


def check_loadable(plan: Plan, family: Family) -> None:
    """Raise InputError where the experts of a plan, written one by one, would be nothing to transformers."""
    formats = [linear.format for linear in plan.linears if linear.expert is not None]
    if family.experts is not None and family.experts.fused and formats and not any(formats):
        raise InputError(
            f"the experts of {family.model_type} must be quantised, some of them at least: as plain weights they are "
            "written one by one, and transformers reads them only from one tensor for a whole block"
        )


def _in_files(name: str, names: Names) -> str:
    """What published files call a tensor, which may have the name that the model gives it."""
    for own in (f".{names.router}.weight", *(f".{kept}" for kept in names.kept)):
        name = name.replace(module_name(own), own) if name.endswith(module_name(own)) else name
    return name


def names_in(linears: Iterable[str]) -> tuple[str, str, str] | None:
    """What these linears of a checkpoint call gate, up and down of an expert; None where none belongs to an expert."""
    leaves = {found[1] for name in linears if (found := EXPERT_LINEAR.search(name))}
    return next((names for names in NAMES if leaves & set(names)), None)


def separate(model: nn.Module, names: tuple[str, str, str] | None) -> bool:
    """Put `Experts` without weights, whose linears have these names, in the place of all fused experts of a model;
    nothing with None. Whether there were any. Raises InputError for experts that compute something else."""
    if names is None:
        return False
    found = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    for name, module in found:
        kind = type(module), type(module.act_fn)
        if kind not in _KINDS:
            _KINDS[kind] = _gives_its_numbers(module)
        if not _KINDS[kind]:
            raise InputError(f"{name}: {kind[0].__name__} are experts of a kind that ptq does not know")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _separated(module, names))
    return bool(found)


def _is_fused(module: nn.Module) -> bool:
    parameters = module._parameters
    return (
        parameters.keys() == set(FUSED)
        and "act_fn" in module._modules
        and all(parameter is not None and parameter.dim() == 3 for parameter in parameters.values())
    )


def _separated(module: nn.Module, names: tuple[str, str, str]) -> Experts:
    down = module.get_parameter(FUSED[1])
    count, hidden, width = down.shape
    return Experts(names, count, hidden, width, cast(nn.Module, module.act_fn), down.dtype)


def take_apart(
    gate_up: Float[Tensor, "e m k"], down: Float[Tensor, "e k n"], names: tuple[str, str, str]
) -> dict[str, Tensor]:
    """The weights of `Experts` from the fused ones."""
    found = {}
    for number, (both, last) in enumerate(zip(gate_up, down, strict=True)):
        parts = (*both.chunk(2), last)
        found |= {f"{number}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    return found


# --- trials ---------------------------------------------------------------------------------------------------------

_KINDS: dict[tuple[type, type], bool] = {}
_SILU: dict[type, bool] = {}


@trial()
def _gives_its_numbers(module: nn.Module) -> bool:
    """Whether fused experts compute what `Experts` do."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 24, 8, generator=generator, dtype=torch.float64)
    last = torch.randn(3, 8, 12, generator=generator, dtype=torch.float64)
    alone = hollow(module)
    alone.act_fn, alone.num_experts = module.act_fn, 3
    for name, weight in zip(FUSED, (gate_up, last), strict=True):
        alone.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    ours = _separated(alone, NAMES[0])
    ours.load_state_dict(take_apart(gate_up, last, NAMES[0]), assign=True)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 1], [0, 2]])
    shares = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    try:
        found = inspect.unwrap(type(module).forward)(alone, x, chosen, shares)
    except (RuntimeError, TypeError, AttributeError):
        return False  # it wants something else
    return isinstance(found, Tensor) and torch.allclose(found, ours(x, chosen, shares), rtol=1e-9)


@trial()
def _is_silu(act_fn: nn.Module) -> bool:
    """Whether a gate is what `ptq.ops.steps.silu_mul` computes, to the bit."""
    kind = type(act_fn)
    if kind not in _SILU:
        gate, up = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
        _SILU[kind] = torch.equal(act_fn(gate) * up, steps.silu_mul(gate, up))
    return _SILU[kind]
