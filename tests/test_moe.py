"""A router and its experts as one op (`ptq::integer_moe`, `ptq::minifloat_moe`, `ptq::e8p_moe`), and which modules are
taken for them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, at_level
from test_expert_ops import ASYMMETRIC, CASES, FLOATS, LATTICE, arguments, op_of
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

import fp6.expert_ops
import quarot.expert_ops
import quip_sharp.expert_ops
from ptq.fast import fast_moe
from ptq.hf import experts
from ptq.layers.packed_weight import stored_signs
from ptq.ops.expert_ops import rows_of
from ptq.ops.matmul import few_tokens_linear

CLAMPED = next(case for case in CASES if "clamped" in case)
HELD = {"integers": ASYMMETRIC, "small floats": FLOATS, "clamped gates, biases": CLAMPED, "lattice": LATTICE}
RUN = torch.ops.ptq.run_experts


@pytest.fixture(params=("portable", "avx2", "avxvnni", "avx512bf16", SLOW_PAIRS, "dotprod"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def moe_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """The op that holds experts of a format, and its reference."""
    if op_of(case)[0] == torch.ops.ptq.integer_experts.default:
        return torch.ops.ptq.integer_moe, quarot.expert_ops.moe
    if op_of(case)[0] == torch.ops.ptq.e8p_experts.default:
        return torch.ops.ptq.e8p_moe, quip_sharp.expert_ops.moe
    return torch.ops.ptq.minifloat_moe, fp6.expert_ops.moe


def given_of(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, list[Any]]:
    """A router for three experts, and these, as the op takes them."""
    given = arguments(dtype, "experts in common", **case)
    if case is LATTICE:  # signs of any size, to which float16 is no loss
        given[6:8] = [[sign.half().float() for sign in side] for side in given[6:8]]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, given[0].shape[1], generator=generator).to(dtype), given[4:]


def stored(parts: list[Any], case: dict[str, Any]) -> list[Any]:
    """The same with signs as they are stored."""
    if case is not LATTICE:
        return parts
    return [*parts[:2], *([stored_signs(sign) for sign in side] for side in parts[2:4]), *parts[4:]]


def of_chosen(parts: list[Any], chosen: list[int], case: dict[str, Any]) -> list[Any]:
    """Of all lists of weights, what belongs to the experts that were chosen."""
    found, each = [], len(parts[0]) // 3
    for place, part in enumerate(parts):
        if case is LATTICE and place == 2:
            found.append([part[0], *(part[1 + expert] for expert in chosen)])
        elif isinstance(part, list) and len(part) == 3 * each:
            found.append([part[role * each + expert] for role in range(3) for expert in chosen])
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((1,), (2, 2), (20,)))
@pytest.mark.parametrize("case", HELD.values(), ids=HELD)
def test_the_bits_of_single_ops(case: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
    (router, parts), (hold, reference) = given_of(case, dtype), moe_of(case)
    x = torch.randn(*shape, router.shape[1]).to(dtype)
    rows = x.flatten(0, -2)
    for normed in (False, True):
        for rounded in (False, True):
            p = few_tokens_linear(rows, router).softmax(-1, dtype=torch.float32)
            shares, index = p.topk(2)
            shares = shares / shares.sum(-1, keepdim=True) if normed else shares
            shares = shares.to(dtype) if rounded else shares
            chosen, found = rows_of(index.tolist(), shares.tolist())

            wanted = op_of(case)[0](rows, *found, *of_chosen(parts, chosen, case)).view(x.shape)
            kind = router, 2, normed, rounded
            held = hold(*kind, *stored(parts, case))
            assert torch.equal(RUN(held, x), wanted)
            strided = torch.cat((x, x), -1)[..., : x.shape[-1]]
            assert torch.equal(RUN(held, strided), wanted)
            assert torch.equal(vars(reference(*kind, *stored(parts, case)))["run"](rows).view(x.shape), wanted)


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_what_does_not_fit_is_refused(case: dict[str, Any], level: str) -> None:
    (router, parts), (hold, _) = given_of(case, torch.float32), moe_of(case)
    parts = stored(parts, case)
    x = torch.randn(2, router.shape[1])
    held = hold(router, 2, True, True, *parts)
    for wrong in (held.clone(), torch.zeros(1, dtype=torch.uint8), torch.empty(0), x):
        with pytest.raises(RuntimeError, match="expected what an op on experts gave, not a copy of it"):
            RUN(wrong, x)
    for wrong in (router[:2], router[0], torch.cat((router, router))):
        with pytest.raises(RuntimeError, match="three weights for each row"):
            hold(wrong, 2, True, True, *parts)
    for chosen in (0, -1, 4):
        with pytest.raises(RuntimeError, match="cannot be chosen"):
            hold(router, chosen, True, True, *parts)
    for wrong in (x[0], x[:0], x[:, 1:], x.half()):
        with pytest.raises(RuntimeError):
            RUN(held, wrong)


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_schema_and_fake(case: dict[str, Any]) -> None:
    (router, parts), (hold, _) = given_of(case, torch.float32), moe_of(case)
    parts = stored(parts, case)
    for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(hold.default, (router, 2, True, True, *parts), test_utils=check)


# --- which modules are taken ----------------------------------------------------------------------------------------


def block(
    cls: type[nn.Module] = Qwen3MoeSparseMoeBlock,
    router: type[nn.Module] = Qwen3MoeTopKRouter,
    hidden: int = 8,
    count: int = 4,
    chosen: int = 2,
) -> Any:
    """A block of experts, taken apart."""
    sizes = dict(hidden_size=hidden, num_experts_per_tok=chosen)
    if cls is MixtralSparseMoeBlock:
        config: Any = MixtralConfig(**sizes, intermediate_size=16, num_local_experts=count)
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=16, num_experts=count)
    config._experts_implementation = "eager"
    made: Any = cls(config)
    made.gate.__class__ = router
    experts.separate(made, experts.NAMES[0])
    return made


class Sharpened(Qwen3MoeTopKRouter):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(2 * hidden_states)


class Halved(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states) / 2


class Asks(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: Any, mask: Any) -> Any:
        return super().forward(hidden_states) if mask else None


def test_routers_are_tried() -> None:
    def router_of(made: Any) -> Any:
        return None if fast_moe._parts(made) is None else fast_moe._router_of(made)

    assert router_of(block()) == (2, False, True)
    normed = block()
    normed.gate.norm_topk_prob = True
    assert router_of(normed) == (2, True, True)
    assert router_of(block(MixtralSparseMoeBlock, MixtralTopKRouter)) == (2, True, False)
    for other in (block(router=Sharpened), block(Halved), block(Asks)):
        assert router_of(other) is None
    more, parameter = block(), block()
    more.shared = nn.Linear(8, 8)
    parameter.scale = nn.Parameter(torch.ones(()))
    for other in (more, parameter, nn.Identity(), nn.Linear(2, 2)):
        assert router_of(other) is None


@pytest.mark.parametrize("hidden", (72, 2048, 5120))
@pytest.mark.parametrize("count, chosen", ((4, 2), (32, 4), (64, 8), (256, 8), (128, 1)))
def test_routers_of_real_sizes(hidden: int, count: int, chosen: int) -> None:
    for normed in (False, True):
        made = block(hidden=hidden, count=count, chosen=chosen)
        made.gate.norm_topk_prob = normed
        unclear = normed and chosen == 1  # shares of 1, however they are rounded
        assert fast_moe._router_of(made) == (None if unclear else (chosen, normed, True))
    made = block(MixtralSparseMoeBlock, MixtralTopKRouter, hidden, count, chosen)
    assert fast_moe._router_of(made) == (None if chosen == 1 else (chosen, True, False))
