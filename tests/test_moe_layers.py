"""A router and its experts as a part of their layer, and what becomes of that when they change."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_few_experts import RECIPES, in_layers, one_by_one, packed
from tiny_models import decode
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from ptq.fast.experts import moe_block
from ptq.hf.experts import Experts
from ptq.kv.attention import CACHE
from ptq.layers.changes import ObservedDict, observe
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import stored_signs
from ptq.ops.activations import Activation


def replaced_scale(block: Any) -> None:
    for expert in block.experts.children():
        if isinstance(expert, nn.ModuleDict):
            linear = expert.get_submodule("down_proj")
            scale = linear.get_parameter("weight_scale")
            linear._parameters["weight_scale"] = nn.Parameter(torch.zeros_like(scale), requires_grad=False)


def written_scale(block: Any) -> None:
    for linear in linears_of(block):
        linear.get_parameter("weight_scale").data.zero_()


def other_memory(block: Any) -> None:
    for linear in linears_of(block):
        scale = linear.get_parameter("weight_scale")
        scale.data = torch.zeros_like(scale)


def other_clip(block: Any) -> None:
    for linear in linears_of(block):
        linear.online = replace(linear.online, activation=Activation(8, 0.3))


def other_linears(block: Any) -> None:
    for expert in block.experts.children():
        if isinstance(expert, nn.ModuleDict):
            old: Any = expert["up_proj"]
            expert["up_proj"] = nn.Linear(old.in_features, old.out_features, bias=False)


def other_forward(block: Any) -> None:
    for linear in linears_of(block):
        linear.forward = lambda x, own=linear.forward: 2 * own(x)


def other_experts(block: Any) -> None:
    for number in range(block.experts.count):
        block.experts.add_module(str(number), block.experts._modules["0"])


def other_router(block: Any) -> None:
    weight = block.gate.weight
    block.gate.weight = nn.Parameter(weight.flip(0), requires_grad=False)


def fewer_chosen(block: Any) -> None:
    class One(type(block.gate)):
        def forward(self, hidden_states: Any) -> Any:
            logits, shares, index = super().forward(hidden_states)
            return logits, shares[:, :1], index[:, :1]

    del block.gate.forward
    block.gate.weight.data = block.gate.weight.data.clone()  # torch's products differ by where weights begin
    block.gate.__class__ = One


class Twice(Experts):
    def forward(self, *given: Any) -> Any:
        return 2 * super().forward(*given)


def other_class(block: Any) -> None:
    block.experts.__class__ = Twice


def one_chosen(block: Any) -> None:
    block.gate.top_k = 1


def others_normed(block: Any) -> None:
    block.gate.norm_topk_prob = not block.gate.norm_topk_prob


def other_activation(block: Any) -> None:
    block.experts.clamped, block.experts.act_fn = None, nn.GELU()


def linears_of(block: Any) -> list[QuantLinear]:
    return [module for module in block.modules() if isinstance(module, QuantLinear)]


CHANGES: tuple[Callable[[Any], None], ...] = (
    replaced_scale, written_scale, other_memory, other_clip, other_linears, other_forward, other_experts, other_router,
    fewer_chosen, one_chosen, others_normed, other_class, other_activation,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_layer_sees_what_becomes_of_its_experts(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = packed(tmp_path, recipe=RECIPES["W4A8"])
    before = decode(model)
    assert in_layers(model) > 0
    blocks = [module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock)]
    change(blocks[0])
    found, wanted = decode(model), decode(one_by_one(model))
    assert not torch.equal(found[-1], before[-1])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@torch.no_grad()
def test_a_layer_sees_signs_that_are_written_to(tmp_path: Path) -> None:
    model = packed(tmp_path, recipe=RECIPES["W2A8"])
    found = decode(model)
    assert in_layers(model) > 0
    block = next(module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock))
    for name in ("weight_su", "weight_sv"):
        for linear in linears_of(block):
            linear.get_parameter(name).copy_(stored_signs(torch.rand(linear.get_parameter(name).shape) + 0.5))
            if name == "weight_su" and linear.in_features == 72:  # gates and ups of a block share it
                linear.get_parameter(name).copy_(linears_of(block)[0].get_parameter(name))
        before, found = found, decode(model)
        assert not torch.equal(found[-1], before[-1])
        assert all(torch.equal(a, b) for a, b in zip(found, decode(one_by_one(model)), strict=True))


@torch.no_grad()
def test_who_listens_is_heard(tmp_path: Path) -> None:
    model = packed(tmp_path)
    wanted = decode(model)
    assert in_layers(model) > 0
    block = next(module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock))
    linears = linears_of(block)
    for module in (block, block.gate, block.experts, linears[0], linears[-1]):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            heard: list[Any] = []
            handle = register(lambda *given, heard=heard: heard.append(given))
            many = linears if module in linears else []  # one alone may not be chosen
            others = [each.register_forward_hook(lambda *given, heard=heard: heard.append(given)) for each in many]
            assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
            assert len(heard) >= 5
            for one in (handle, *others):
                one.remove()
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))


@torch.no_grad()
def test_logits_of_the_router_are_recorded(tmp_path: Path) -> None:
    model = packed(tmp_path)
    cache = model(torch.full((1, 5), 5), use_cache=True)[CACHE]
    alone = one_by_one(model)
    token = torch.tensor([[3]])
    for asked in ({}, {"output_router_logits": True}, {}):
        found, wanted = (m(token, **{CACHE: copy.deepcopy(cache)}, use_cache=True, **asked) for m in (model, alone))
        assert torch.equal(found.logits, wanted.logits)
        if asked:
            assert len(found.router_logits) == len(wanted.router_logits) > 0
            assert all(torch.equal(a, b) for a, b in zip(found.router_logits, wanted.router_logits, strict=True))
    model.config.output_router_logits = alone.config.output_router_logits = True
    found, wanted = (m(token, **{CACHE: copy.deepcopy(cache)}, use_cache=True) for m in (model, alone))
    assert all(torch.equal(a, b) for a, b in zip(found.router_logits, wanted.router_logits, strict=True))


def without_last(block: Any, in_experts: bool) -> None:
    count = block.experts.count - 1
    block.gate.weight = nn.Parameter(block.gate.weight[:count].clone(), requires_grad=False)
    if in_experts:
        del block.experts._modules[str(count)]


@pytest.mark.parametrize("in_experts", (False, True))
@torch.no_grad()
def test_experts_that_are_gone(in_experts: bool, tmp_path: Path) -> None:
    model = packed(tmp_path)
    decode(model)
    without_last(next(module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock)), in_experts)
    assert all(torch.equal(a, b) for a, b in zip(decode(model), decode(one_by_one(model)), strict=True))


@torch.no_grad()
def test_autocast(tmp_path: Path) -> None:
    model = packed(tmp_path)
    decode(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(decode(model), decode(one_by_one(model)), strict=True))


@torch.no_grad()
def test_hidden_states_that_were_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, own = packed(tmp_path), [], Experts.forward
    decode(model)
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(router._forward_hooks for router in model.modules() if isinstance(router, Qwen3MoeTopKRouter))
    monkeypatch.setattr(Experts, "forward", lambda self, *given: calls.append(1) or own(self, *given))
    decode(model)
    assert calls  # a patched class is called
    monkeypatch.undo()
    decode(model)
    run = moe_block.RUN
    monkeypatch.setattr(moe_block, "RUN", lambda *given: calls.append(1) or run(*given))
    calls.clear()
    decode(model)
    assert len(calls) == in_layers(model) > 0  # of the prompt


@torch.no_grad()
def test_eval_before_a_request_is_no_change(tmp_path: Path) -> None:
    model = packed(tmp_path)
    decode(model)
    layers = [layer.forward.on_cpu.found for layer in model.model.layers]
    held = [layer.moe for layer in layers if layer.moe is not None]
    model.eval()
    assert held and not any(moe.is_over() for moe in held)
    model.train()
    assert all(moe.is_over() for moe in held)


@torch.no_grad()
def test_old_weights_go_with_the_next_token(tmp_path: Path) -> None:
    model = packed(tmp_path)
    decode(model)
    assert in_layers(model) > 0
    ups = [module for name, module in model.named_modules() if name.endswith("up_proj") and ".experts." in name]
    old = [weakref.ref(parameter) for up in ups for parameter in up.parameters()]
    for block in (module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock)):
        other_linears(block)
    del ups
    decode(model)
    gc.collect()
    assert len(old) >= 12 and not any(one() is not None for one in old)


def test_copies_and_pickles_tell_nobody() -> None:
    class Listener:
        def hear(self) -> None:
            calls.append(1)

    linear, calls, listener = nn.Linear(2, 2), [], Listener()
    observe(linear, listener.hear)
    observe(linear, listener.hear)
    observe(linear, Listener().hear)  # which is gone
    held = vars(linear)["_parameters"]
    assert type(held) is ObservedDict and type(vars(copy.deepcopy(linear))["_parameters"]) is dict
    assert not calls
    for change in (
        lambda: linear._parameters.update(bias=None), lambda: linear._parameters.pop("bias"),
        lambda: linear.register_parameter("bias", None), lambda: linear._parameters.setdefault("more", None),
        lambda: linear._parameters.popitem(), lambda: linear._parameters.__ior__({"bias": None}),
        lambda: linear._parameters.__delitem__("bias"), lambda: linear._parameters.clear(),
        lambda: linear.add_module("more", None),
    ):  # fmt: skip
        calls.clear()
        change()
        assert calls == [1]


@torch.no_grad()
def test_a_layer_is_whole_again_when_nobody_listens(tmp_path: Path) -> None:
    model = packed(tmp_path)
    block = next(module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock))
    for listened in (block.experts, linears_of(block)[0]):
        handle = listened.register_forward_hook(lambda *_: None)
        decode(model)
        assert in_layers(model) == 0
        handle.remove()
        model(torch.arange(4, 24)[None])
        decode(model)
        assert in_layers(model) == 1
