"""A router with its experts as the forward of the module whose parts they are, and what becomes of it when something
changes: always the numbers of the module's own code."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_few_experts import RECIPES, one_by_one
from test_few_experts import packed as whole
from tiny_models import decode
from torch import nn

from ptq.fast.experts import moe_block
from ptq.fast.experts.moe_block import FastMoe
from ptq.layers.linear import QuantLinear


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that went through the op."""
    run, made = moe_block.RUN, []
    monkeypatch.setattr(moe_block, "RUN", lambda moe, x: made.append(x.shape[:2].numel()) or run(moe, x))
    return made


def packed(*args: Any, **kwargs: Any) -> Any:
    """A packed model whose layers are called part by part."""
    model = whole(*args, **kwargs)
    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "Model")):
            vars(module).pop("forward", None)
    return model


def block_of(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(vars(module).get("forward"), FastMoe))


def alike(model: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(decode(model), decode(one_by_one(model)), strict=True))


def other_correction(block: Any) -> None:
    block.gate.e_score_correction_bias = torch.tensor([0.0, 1.0, 2.0, 3.0])


def written_correction(block: Any) -> None:
    block.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))


def other_factor(block: Any) -> None:
    block.gate.routed_scaling_factor = 0.3


def fewer_chosen(block: Any) -> None:
    block.gate.top_k = 1


def not_normed(block: Any) -> None:
    block.gate.norm_topk_prob = False


def other_shared(block: Any) -> None:
    linear = next(module for module in block.shared_experts.modules() if isinstance(module, QuantLinear))
    old = linear.get_parameter("weight_scale")
    linear.register_parameter("weight_scale", nn.Parameter(torch.zeros_like(old), requires_grad=False))


def other_gate(block: Any) -> None:
    block.gate.weight.data = block.gate.weight.data.flip(0)


def own_product(block: Any) -> None:
    del block.gate.forward
    block.gate.weight.data = block.gate.weight.data.flip(0)


def in_half(block: Any) -> None:
    block.gate.weight.data = block.gate.weight.data.flip(0).half()


def heard(block: Any) -> None:
    block.shared_experts.register_forward_hook(lambda module, given, y: 2 * y)


CHANGES: tuple[Callable[[Any], None], ...] = (
    other_correction, written_correction, other_factor, fewer_chosen, not_normed, other_shared, other_gate, own_product,
    in_half, heard,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_changes_are_seen(change: Callable[[Any], None], tmp_path: Path, calls: list[int]) -> None:
    model = packed(tmp_path, "deepseek_v3", RECIPES["W4A8"])
    before = decode(model)
    assert calls == [6, 1, 1, 1, 1]
    change(block_of(model))
    assert not torch.equal(decode(model)[-1], before[-1]) and alike(model)


@torch.no_grad()
def test_names_of_ways_are_seen(tmp_path: Path, calls: list[int]) -> None:
    model = packed(tmp_path, "deepseek_v2", RECIPES["W4A8"])
    block_of(model).gate.topk_method = "greedy"
    assert alike(model) and calls
    block_of(model).gate.topk_method = "group_limited_greedy"
    assert alike(model)


@pytest.mark.parametrize("model_type", ("deepseek_v3", "ernie4_5_moe", "gpt_oss"))
@torch.no_grad()
def test_autocast(model_type: str, tmp_path: Path) -> None:
    model = packed(tmp_path, model_type, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for batch in (1, 24):
            pairs = zip(decode(model, batch), decode(one_by_one(model), batch), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def test_sums_that_vanish(tmp_path: Path) -> None:
    """Ernie divides by 1e-12 at least."""
    model = packed(tmp_path, "ernie4_5_moe")
    gate = block_of(model).gate
    gate.weight.data *= 600
    gate.moe_statics.e_score_correction_bias.data.copy_(torch.tensor([[3.0, 2.0, 0.0, 0.0]]))
    assert alike(model) and all(bool(logits.isfinite().all()) for logits in decode(model))


@torch.no_grad()
def test_it_is_fast_again_when_nobody_listens(tmp_path: Path, calls: list[int]) -> None:
    model = packed(tmp_path, "deepseek_v3")
    block = block_of(model)
    linear = next(module for module in block.experts.modules() if isinstance(module, QuantLinear))
    prompt = torch.arange(4, 24)[None]
    for listened in (linear, block.experts, block.gate, block.shared_experts):
        handle = listened.register_forward_hook(lambda *_: None)
        decode(model)
        handle.remove()
        model(prompt)
        calls.clear()
        decode(model)
        assert calls == [6, 1, 1, 1, 1]
    block.gate.train()
    decode(model)
    model.eval()(prompt)
    calls.clear()
    decode(model)
    assert calls == [6, 1, 1, 1, 1]


def test_what_learns_goes_the_own_way(tmp_path: Path, calls: list[int]) -> None:
    model = packed(tmp_path, "deepseek_v3")
    block = block_of(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(1, 3, model.config.hidden_size)
    block(x)
    assert calls == [3]
    block.gate.weight.requires_grad_()
    block(x).sum().backward()
    assert bool(block.gate.weight.grad.any()) and calls == [3]


@torch.no_grad()
def test_copies_have_experts_of_their_own(tmp_path: Path, calls: list[int]) -> None:
    model = packed(tmp_path, "deepseek_v3")
    wanted = decode(model)
    other = copy.deepcopy(model)
    other_factor(block_of(other))
    assert alike(other) and not torch.equal(decode(other)[-1], wanted[-1])
    assert torch.equal(decode(model)[-1], wanted[-1])
    block, x = block_of(model), torch.randn(2, 1, model.config.hidden_size)
    assert torch.equal(block(hidden_states=x), block(x))  # by name it is the module's own code


class ReadsConfig(nn.Module):
    """A router that looks at its config with every call."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.config = router.weight, type("Config", (), {"normed": True})()

    def forward(self, x: torch.Tensor) -> Any:
        logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        shares, index = logits.softmax(-1).topk(2)
        return logits, shares / shares.sum(-1, keepdim=True) if self.config.normed else shares, index


@torch.no_grad()
def test_a_config_that_is_read_later(tmp_path: Path) -> None:
    model = packed(tmp_path, "deepseek_v3")
    block = block_of(model)
    block.gate = ReadsConfig(block.gate)
    results = []
    for block.gate.config.normed in (True, False):  # torch's product has other last bits in other memory
        results.append(decode(model)[-1])
        torch.testing.assert_close(results[-1], decode(one_by_one(model))[-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(*results, rtol=1e-2)
