"""Ops of a router and all experts of a block, for few tokens on the CPU: `ptq::moe` gives a handle, as those of
`ptq.ops.layer_ops`, and `ptq::run_moe` takes tokens x [*, k] through it; it also gives the shares [t, chosen] of what
they have chosen.

`experts` is what an op `ptq::..._all_experts` gave (`ptq.ops.expert_ops`). Their number is that of the rows of the
router, or one more: every token has chosen the last one, with a share of 1, or of sigmoid(shared_gate x). An expert of
another kind, such as another width, comes in a handle of its own, and what it gives is added.

The router: logits = W x + bias, `wide`: in float32 of float32 numbers; `single`: then as float32. Scores are their
softmax, or with `sigmoid` that of each. The `chosen` largest of scores + `correction` count; of several `groups` only
within the `kept_groups` whose two best have the largest sums (DeepSeek V3, arXiv 2412.19437, section 2.1.2). With
`late` logits take the place of the scores so far, and scores are those of the chosen alone. `normed`: scores are
divided by their sum + so much, or by `least`, should that be more, in the order in which torch gives them, `sorted` or
not; then multiplied by `scale`, and with `rounded` rounded to x's dtype.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ptq.ops.expert_ops import ExpertRows, rows_of
from ptq.ops.matmul import few_tokens_linear
from ptq.ops.op_declarations import declare


class RouterWeights(NamedTuple):
    """The tensors of a router, in the order of the arguments of `ptq::moe`."""

    weight: Float[Tensor, "experts k"]
    bias: Float[Tensor, " experts"] | None = None
    correction: Float[Tensor, " experts"] | None = None
    shared_gate: Float[Tensor, "1 k"] | None = None


class Choosing(NamedTuple):
    """How tokens choose: the other arguments of `ptq::moe`, in their order."""

    chosen: int
    wide: bool = False
    single: bool = True
    sigmoid: bool = False
    late: bool = False
    groups: int = 1
    kept_groups: int = 1
    sorted: bool = True
    normed: float | None = None
    least: float = 0.0
    scale: float = 1.0
    rounded: bool = False


def choice(
    x: Float[Tensor, "t k"], weights: RouterWeights, how: Choosing, shared: bool = False
) -> tuple[list[int], ExpertRows, Float[Tensor, "t chosen"]]:
    """The experts that tokens choose, those of low numbers first, their rows, and the shares of the router's choice.
    `shared`: tokens choose also one behind those of the router."""
    index, shares = chosen_of(logits_of(x, weights, how.wide), weights.correction, how, x.dtype)
    chosen, weighed = index.tolist(), shares.tolist()
    if shared:
        chosen = [[*row, len(weights.weight)] for row in chosen]
        weighed = [[*row, *last] for row, last in zip(weighed, _shared_shares(x, weights), strict=True)]
    return *rows_of(chosen, weighed), shares


def _shared_shares(x: Float[Tensor, "t k"], weights: RouterWeights) -> list[list[float]]:
    """Those of an expert that all tokens choose, for each of them."""
    gate = weights.shared_gate
    return [[1.0]] * len(x) if gate is None else few_tokens_linear(x, gate).sigmoid().tolist()


def logits_of(x: Float[Tensor, "t k"], weights: RouterWeights, wide: bool) -> Float[Tensor, "t experts"]:
    """What a router multiplies."""
    weight, bias = weights.weight, weights.bias
    if wide:
        return few_tokens_linear(x.float(), weight.float(), None if bias is None else bias.float())
    return few_tokens_linear(x, weight, bias)


def chosen_of(
    logits: Float[Tensor, "t experts"], correction: Tensor | None, how: Choosing, dtype: torch.dtype
) -> tuple[Int64[Tensor, "t chosen"], Float[Tensor, "t chosen"]]:
    """Numbers and shares of the experts that tokens of a dtype choose."""
    scores = logits.float() if how.single else logits
    scores = scores if how.late else _activated(scores, how)
    wanted = scores if correction is None else scores + correction.flatten()
    wanted = wanted if how.groups == 1 else _within_groups(wanted, how)
    index = wanted.topk(how.chosen, sorted=how.sorted)[1]
    shares = scores.gather(1, index)
    shares = _activated(shares, how) if how.late else shares
    if how.normed is not None:
        shares = shares / (shares.sum(-1, keepdim=True) + how.normed).clamp(min=how.least)
    shares = shares if how.scale == 1 else shares * how.scale
    return index, shares.to(dtype) if how.rounded else shares


def _activated(scores: Tensor, how: Choosing) -> Tensor:
    return scores.sigmoid() if how.sigmoid else scores.softmax(-1)


def _within_groups(wanted: Float[Tensor, "t experts"], how: Choosing) -> Float[Tensor, "t experts"]:
    in_groups = wanted.unflatten(1, (how.groups, -1))
    best = in_groups.topk(2)[0].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(how.kept_groups, sorted=False)[1], True)
    return in_groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _moe(experts, weight, bias, correction, shared_gate, *how):
    weights, choosing = RouterWeights(weight, bias, correction, shared_gate), Choosing(*how)
    if not all("experts" in vars(handle) for handle in experts):
        raise RuntimeError("moe: expected what an op on all experts gave, not a copy of it")
    (count, compute), *others = (vars(handle)["experts"] for handle in experts)
    has_shared = count - len(weight) + len(others)
    if shared_gate is not None and (not has_shared or shared_gate.shape != (1, weight.shape[1])):
        raise RuntimeError("moe: expected a gate [1, k] of an expert that every token chooses")
    if weight.dim() != 2 or count - len(weight) not in (0, 1):
        raise RuntimeError(f"moe: expected a row of the router for each of {count} experts, or for all but one")

    def run(x):
        *chosen, shares = choice(x, weights, choosing, count > len(weight))
        y = compute(x, *chosen)
        for _, other in others:
            y = y + other(x, *rows_of([[0]] * len(x), _shared_shares(x, weights)))
        return y, shares

    handle = torch.empty(1, dtype=torch.uint8)
    vars(handle)["run"] = run
    return handle


def _run_moe(moe, x):
    if "run" not in vars(moe):
        raise RuntimeError("run_moe: expected what ptq::moe gave, not a copy of it")
    y, shares = vars(moe)["run"](x.flatten(0, -2))
    return y.view(x.shape), shares


declare(
    "moe",
    "(Tensor[] experts, Tensor router, Tensor? bias, Tensor? correction, Tensor? shared_gate, int chosen, bool wide, "
    "bool single, bool sigmoid, bool late, int groups, int kept_groups, bool sorted, float? normed, float least, "
    "float scale, bool rounded) -> Tensor",
    reference=_moe,
    fake=lambda *rest: torch.empty(1, dtype=torch.uint8),
)
declare(
    "run_moe",
    "(Tensor moe, Tensor x) -> (Tensor, Tensor)",
    reference=_run_moe,
    fake=lambda moe, x: (x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), 0)),
)
