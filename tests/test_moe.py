"""A router and its experts as one op (`ptq::moe` on `ptq::integer_all_experts` and the like), and which modules are
taken for them."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import SLOW_PAIRS, at_level
from test_expert_ops import ASYMMETRIC, CASES, FLOATS, LATTICE, arguments, op_of
from test_few_experts import OTHER_ROUTERS, WITH_GATES
from tiny_models import tiny_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

import fp6.expert_ops
import quarot.expert_ops
import quip_sharp.expert_ops
from ptq.fast import module_forwards, whole_model
from ptq.fast.experts import routers
from ptq.hf import experts
from ptq.layers.packed_weight import stored_signs
from ptq.ops import expert_ops, moe_ops
from ptq.ops.moe_ops import Choosing, RouterWeights, choice

CLAMPED = next(case for case in CASES if "clamped" in case)
HELD = {"integers": ASYMMETRIC, "small floats": FLOATS, "clamped gates, biases": CLAMPED, "lattice": LATTICE}
RUN = torch.ops.ptq.run_moe


@pytest.fixture(params=("portable", "avx2", "avxvnni", "avx512bf16", SLOW_PAIRS, "dotprod"))
def level(request) -> Iterator[str]:
    yield from at_level(request.param)


def all_experts_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """The op that holds experts of a format, and its reference."""
    if op_of(case)[0] == torch.ops.ptq.integer_experts.default:
        return torch.ops.ptq.integer_all_experts, quarot.expert_ops.all_experts
    if op_of(case)[0] == torch.ops.ptq.e8p_experts.default:
        return torch.ops.ptq.e8p_all_experts, quip_sharp.expert_ops.all_experts
    return torch.ops.ptq.minifloat_all_experts, fp6.expert_ops.all_experts


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
    """Three experts behind a router; two, and one that all tokens choose, maybe with a gate; and three beside another
    one in a handle of its own."""
    (router, parts), (hold, reference) = given_of(case, dtype), all_experts_of(case)
    x = torch.randn(*shape, router.shape[1]).to(dtype)
    rows, op, how = x.flatten(0, -2), op_of(case)[0], Choosing(2, normed=0.0, rounded=True)
    first = of_chosen(parts, [0], case)
    for weight, gate, other in (
        (router, None, False), (router[:2], None, False), (router[:2], router[2:], False), (router, router[2:], True),
    ):  # fmt: skip
        weights = RouterWeights(weight, shared_gate=gate)
        chosen, found, shares = choice(rows, weights, how, len(weight) < 3)
        wanted = op(rows, *found, *of_chosen(parts, chosen, case))
        if other:
            alone = moe_ops._shared_shares(rows, weights)
            wanted = wanted + op(rows, *expert_ops.rows_of([[0]] * len(rows), alone)[1], *first)
        results = []
        for make in (hold, reference):
            held = [make(*stored(part, case)) for part in ((parts, first) if other else (parts,))]
            results.append(held)
        made = torch.ops.ptq.moe(results[0], *weights, *how)
        strided = torch.cat((x, x), -1)[..., : x.shape[-1]]
        for y, given in (
            RUN(made, x),
            RUN(made, strided),
            moe_ops._run_moe(moe_ops._moe(results[1], *weights, *how), x),
        ):
            assert torch.equal(y, wanted.view(x.shape)) and torch.equal(given, shares) and given.dtype == shares.dtype


same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
WAYS = [
    Choosing(2), Choosing(3, normed=0.0, rounded=True), Choosing(4, wide=True, sigmoid=True, normed=1e-20, scale=1.7),
    Choosing(2, single=False, late=True), Choosing(3, late=True, rounded=True), Choosing(1, sigmoid=True, late=True),
    Choosing(3, single=False, sigmoid=True, normed=1e-6, scale=0.3), Choosing(3, wide=True, rounded=True, sorted=False),
    Choosing(3, wide=True, sigmoid=True, groups=4, kept_groups=2, normed=1e-20, scale=2.5, sorted=False),
    Choosing(4, single=False, groups=2, kept_groups=1, normed=0.0), Choosing(8, normed=0.0, sorted=False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("how", WAYS, ids=lambda how: " ".join(map(str, how)))
def test_ways_to_choose(how: Choosing, dtype: torch.dtype, level: str) -> None:
    """Of eight experts, as torch would do it."""
    _, parts = given_of(ASYMMETRIC, dtype)
    k = 64
    lists = [[part[role] for role in range(0, 9, 3) for _ in range(8)] if len(part) == 9 else part
             for part in parts if isinstance(part, list)]  # fmt: skip
    parts = [lists.pop(0) if isinstance(part, list) else part for part in parts]
    hold, reference = all_experts_of(ASYMMETRIC)
    generator = torch.Generator().manual_seed(0)
    weight, bias, correction = (torch.randn(*n, generator=generator) for n in ((8, k), (8,), (1, 8)))
    for t in (1, 5, 20):
        x = torch.randn(t, k, generator=generator).to(dtype)
        x[0] *= 30
        for b, c, w in itertools.product((None, bias.to(dtype)), (None, correction, correction.to(dtype)), (0.2, -9.0)):
            weights = RouterWeights((w * weight).to(dtype), b, c)
            y, shares = RUN(torch.ops.ptq.moe([hold(*parts)], *weights, *how), x)
            wanted, theirs = moe_ops._run_moe(moe_ops._moe([reference(*parts)], *weights, *how), x)
            same(shares, theirs)  # numbers that are none among them: 0 / 0
            same(y, wanted)
            if how.wide:
                single = weights._replace(weight=weights.weight.float())
                same(RUN(torch.ops.ptq.moe([hold(*parts)], *single, *how), x)[0], y)


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_what_does_not_fit_is_refused(case: dict[str, Any], level: str) -> None:
    (router, parts), (hold, _) = given_of(case, torch.float32), all_experts_of(case)
    parts = stored(parts, case)
    x = torch.randn(2, router.shape[1])
    handle = hold(*parts)

    def moe(handles: list[Tensor], router: Tensor, how: Choosing, **others: Tensor) -> Tensor:
        return torch.ops.ptq.moe(handles, *RouterWeights(router, **others), *how)

    held, good = moe([handle], router, Choosing(2)), Choosing(2)
    for wrong in (held.clone(), torch.zeros(1, dtype=torch.uint8), torch.empty(0), x, handle):
        with pytest.raises(RuntimeError, match=r"expected what ptq::moe gave, not a copy of it"):
            RUN(wrong, x)
    for wrong in (handle.clone(), held, x):
        with pytest.raises(RuntimeError, match="expected what an op on all experts gave, not a copy of it"):
            moe([wrong], router, good)
    for handles in ([], [handle] * 3):
        with pytest.raises(RuntimeError, match="expected experts, and maybe another one"):
            moe(handles, router, good)
    with pytest.raises(RuntimeError, match="one other expert"):
        moe([handle] * 2, router, good)
    for wrong in (router[:1], router[0], torch.cat((router, router)), router[:0]):
        with pytest.raises(RuntimeError, match="a row of the router for each of 3 experts, or for all but one"):
            moe([handle], wrong, good)
    for chosen in (0, -1, 4):
        with pytest.raises(RuntimeError, match="cannot be chosen"):
            moe([handle], router, Choosing(chosen))
    for groups, kept in ((0, 1), (2, 1), (3, 1), (1, 0), (1, 2)):
        with pytest.raises(RuntimeError, match="groups of 3 experts"):
            moe([handle], router, Choosing(1, groups=groups, kept_groups=kept))
    for name in ("bias", "correction"):
        with pytest.raises(RuntimeError, match="a number for each of 3 experts"):
            moe([handle], router, good, **{name: torch.ones(2)})
    gate = torch.ones(1, router.shape[1])
    assert moe([handle], router[:2], good, shared_gate=gate).numel() == 1
    for rows, wrong in ((3, gate), (2, gate[0]), (2, gate[:0]), (2, torch.cat((gate, gate))), (2, gate[:, 1:])):
        with pytest.raises(RuntimeError, match="a gate .* of an expert that every token chooses"):
            moe([handle], router[:rows], good, shared_gate=wrong)
    for wrong in (x[0], x[:0], x[:, 1:], x.half()):
        with pytest.raises(RuntimeError):
            RUN(held, wrong)


@pytest.mark.parametrize("case", (ASYMMETRIC, FLOATS, LATTICE), ids=("integers", "small floats", "lattice"))
def test_schema_and_fake(case: dict[str, Any]) -> None:
    (_, parts), (hold, _) = given_of(case, torch.float32), all_experts_of(case)
    parts = stored(parts, case)
    for check in ("test_schema", "test_faketensor", "test_autograd_registration"):
        torch.library.opcheck(hold.default, tuple(parts), test_utils=check)
    with FakeTensorMode():  # handles must not be copied, as `opcheck` does it
        handle, x = torch.empty(1, dtype=torch.uint8), torch.empty(2, 3, 64)
        made = torch.ops.ptq.moe([handle], *RouterWeights(torch.empty(3, 64)), *Choosing(2))
        y, shares = RUN(made, x)
    assert y.shape == x.shape and y.dtype == x.dtype and len(shares) == 6


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
    module_forwards.install(made)
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


def found_of(made: nn.Module) -> Any:
    """How a router chooses; None where there is none."""
    found = None if routers.parts_of(made) is None else routers.router_of(made)
    return None if found is None else found.how


SOFTMAX = Choosing(2, rounded=True, sorted=True)


def test_routers_are_tried() -> None:
    assert found_of(block()) == SOFTMAX
    normed = block()
    normed.gate.norm_topk_prob = True
    assert found_of(normed) == SOFTMAX._replace(normed=0.0)
    assert found_of(block(MixtralSparseMoeBlock, MixtralTopKRouter)) == SOFTMAX._replace(normed=0.0, rounded=False)
    for other in (block(router=Sharpened), block(Halved), block(Asks)):
        assert found_of(other) is None
    more, parameter = block(), block()
    more.shared = nn.Linear(8, 8)
    parameter.scale = nn.Parameter(torch.ones(()))
    for other in (more, parameter, nn.Identity(), nn.Linear(2, 2)):
        assert found_of(other) is None


@pytest.mark.parametrize("hidden", (72, 2048, 5120))
@pytest.mark.parametrize("count, chosen", ((4, 2), (32, 4), (64, 8), (256, 8), (128, 1)))
def test_routers_of_real_sizes(hidden: int, count: int, chosen: int) -> None:
    for normed in (False, True):
        made = block(hidden=hidden, count=count, chosen=chosen)
        made.gate.norm_topk_prob = normed
        unclear = normed and chosen == 1  # shares of 1, whatever the scores are
        assert found_of(made) == (None if unclear else SOFTMAX._replace(chosen=chosen, normed=0.0 if normed else None))
    wanted = None if chosen == 1 else SOFTMAX._replace(chosen=chosen, normed=0.0, rounded=False)
    assert found_of(block(MixtralSparseMoeBlock, MixtralTopKRouter, hidden, count, chosen)) == wanted


@pytest.mark.parametrize("model_type", WITH_GATES)
def test_routers_of_every_family(model_type: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    experts.separate(model, experts.NAMES[0])
    whole_model.install(model)
    blocks = [module for module in model.modules() if any(hasattr(part, "few_tokens") for part in module.children())]
    found = [found_of(module) for module in blocks]
    assert blocks and all((how is None) == (model_type in OTHER_ROUTERS) for how in found)
