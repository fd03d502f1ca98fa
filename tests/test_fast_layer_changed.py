"""Decoding in few steps after somebody has changed the model: hooks, other forwards, other numbers, copies."""

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from test_fast_layer import RECIPES, counted_layers, without
from test_fast_layer import packed as _packed
from tiny_models import decode
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

from ptq.fast import watched
from ptq.fast.layers import decoder_layer

packed = _packed
OWN = ("DecoderLayer", "Attention", "MLP", "Model")
"""Ends of names of classes whose own code gives the numbers to compare with."""


def test_copies_pickles_and_hooks(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("W4A8")
    wanted = decode(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = again.get_decoder().layers[0]
        assert layer.forward.layer is layer
        assert all(torch.equal(a, b) for a, b in zip(decode(again), wanted, strict=True))
    calls = counted_layers(monkeypatch)
    heard = []
    for name in ("mlp.up_proj", "self_attn", "input_layernorm"):
        module = model.get_decoder().layers[0].get_submodule(name)
        hook = module.register_forward_hook(lambda *args: heard.append(args[0]))
        calls.clear()
        assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
        hook.remove()
        assert calls == [1] * 4 and heard.count(module) == 5


def test_who_wraps_a_forward_sees_its_arguments(packed) -> None:
    """As accelerate does it: what it puts there is not ours, and brings nothing of ours along."""
    model = packed("W4A8")
    wanted, layer = decode(model), model.get_decoder().layers[0]
    own = layer.forward
    assert str(inspect.signature(own)).startswith("(hidden_states: ")
    layer.forward = functools.update_wrapper(functools.partial(lambda *args, **kwargs: own(*args, **kwargs)), own)
    assert vars(layer.forward) == {"__module__": own.__module__, "__doc__": own.__doc__, "__wrapped__": own}
    assert (
        not decoder_layer.is_fast(layer) and watched.forward_is_ours(own) and not watched.forward_is_ours(layer.forward)
    )
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))


@pytest.mark.parametrize("late", [False, True], ids=["before it decodes", "while it decodes"])
def test_forwards_that_somebody_has_replaced_are_called(late: bool, packed) -> None:
    model = packed("W4A8")
    wanted, called = decode(copy.deepcopy(model)), []
    if late:
        decode(model)
    layer = model.get_decoder().layers[0]
    for name in ("self_attn", "mlp", "mlp.down_proj", "input_layernorm"):
        module = layer.get_submodule(name)

        def forward(*args: Any, name: str = name, own: Any = module.forward, **kwargs: Any) -> Any:
            called.append(name)
            return own(*args, **kwargs)

        module.forward = forward
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
    assert {called.count(name) for name in ("self_attn", "mlp", "mlp.down_proj", "input_layernorm")} == {5}


@pytest.mark.parametrize("place", ["self_attn", "mlp", "input_layernorm", ""], ids=str)
@torch.no_grad()
def test_the_forward_of_a_class_may_be_replaced(place: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody who patches transformers: in a model that decodes already, and before another one is loaded."""
    model = packed("W4A8")
    wanted, ids = decode(model), torch.arange(4, 10)[None]
    own, cls = {}, type(model.get_decoder().layers[0].get_submodule(place))
    own["forward"] = cls.forward

    def louder(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = own["forward"](self, *args, **kwargs)
        return (y[0] * 1.5, *y[1:]) if isinstance(y, tuple) else y * 1.5

    monkeypatch.setattr(cls, "forward", louder)
    plain = without(copy.deepcopy(model), *OWN)
    expected, later = decode(plain), packed("W4A8")
    assert not torch.equal(expected[-1], wanted[-1])
    for changed in (model, later):
        torch.testing.assert_close(changed(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(decode(changed)[-1], expected[-1], rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))


@torch.no_grad()
def test_a_module_may_get_another_class(packed) -> None:
    model = packed("W4A8")
    wanted, mlp = decode(model), model.get_decoder().layers[0].mlp

    class Louder(type(mlp)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.5

    mlp.__class__ = Louder
    found = decode(model)
    assert not torch.equal(found[-1], wanted[-1])
    expected = decode(without(copy.deepcopy(model), *OWN))
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_layers_that_are_repeated_by_shallow_copies(packed) -> None:
    """With the same weights, and places of their own in the cache."""

    def repeated(model: Any) -> Any:
        inner, layers = model.get_decoder(), []
        for place, number in enumerate([0, 1, 0, 1]):
            layer = copy.copy(inner.layers[number])
            layer._modules = dict(layer._modules)
            layer.self_attn = copy.copy(layer.self_attn)
            layer.self_attn.layer_idx = place
            layers.append(layer)
        inner.layers = nn.ModuleList(layers)
        model.config.num_hidden_layers = inner.config.num_hidden_layers = len(layers)
        return model

    expected = decode(repeated(without(packed("W4A8"), *OWN)))
    for found, wanted in zip(decode(repeated(packed("W4A8"))), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_that_are_made_of_others(packed) -> None:
    """Pruning and parametrizations take `weight` out of the parameters."""
    model = packed("W4A8")
    wanted = decode(model)
    prune.identity(model.lm_head, "weight")
    prune.identity(model.get_decoder().layers[0].input_layernorm, "weight")
    torch.testing.assert_close(decode(model)[-1], wanted[-1], rtol=1e-4, atol=1e-4)


def test_hooks_on_all_modules_hear_a_decoded_token(packed) -> None:
    model, heard = packed("W4A8"), []
    wanted = decode(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module).__name__))
    found = decode(model)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert heard.count("LlamaMLP") == 5 * 2


@torch.no_grad()
def test_hidden_states_that_were_asked_for_once_slow_nothing_down(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves its hooks in the layers."""
    model, calls = packed("W4A8"), counted_layers(monkeypatch)
    wanted = decode(model)
    found = model(torch.arange(4, 10)[None], output_hidden_states=True, use_cache=True)
    assert any(module._forward_hooks for module in model.get_decoder().layers[0].modules())
    calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
    assert calls == [2] * 4
    states = model(torch.tensor([[5]]), output_hidden_states=True, past_key_values=found.past_key_values).hidden_states
    whole = model(torch.tensor([[*range(4, 10), 5]]), output_hidden_states=True).hidden_states
    assert len(states) == 3
    for a, b in zip(states, whole, strict=True):
        torch.testing.assert_close(a, b[:, -1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_other_numbers_under_functional_call(recipe: str, packed) -> None:
    model = packed(recipe)
    doubled = {name: p * 2 for name, p in model.named_parameters() if "layernorm" in name}
    changed = copy.deepcopy(model)
    changed.load_state_dict(doubled, strict=False)
    ids, before = torch.arange(4, 10)[None], decode(model)
    found, wanted = [], []
    caches = [model(ids, use_cache=True).past_key_values for _ in range(2)]
    for token in ids[0, :3]:
        one = token.view(1, 1)
        found.append(functional_call(model, doubled, (one,), {"past_key_values": caches[0]}).logits)
        wanted.append(changed(one, past_key_values=caches[1]).logits)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(decode(model), before, strict=True))


def test_a_changed_weight_is_seen(packed) -> None:
    model = packed("W4A8")
    before = decode(model)
    layer = model.get_decoder().layers[0]
    scale = layer.mlp.down_proj._parameters["weight_scale"]
    layer.mlp.down_proj._parameters["weight_scale"] = nn.Parameter(torch.zeros_like(scale), requires_grad=False)
    changed = decode(model)
    assert not torch.equal(changed[-1], before[-1])
    assert torch.equal(changed[-1], decode(without(copy.deepcopy(model), "DecoderLayer"))[-1])
    layer.self_attn.q_proj = nn.Linear(layer.self_attn.q_proj.in_features, layer.self_attn.q_proj.out_features)
    with torch.no_grad():
        layer.self_attn.q_proj.weight.zero_()
    assert torch.equal(decode(model)[-1], decode(without(copy.deepcopy(model), "DecoderLayer"))[-1])


@pytest.mark.parametrize("name", ["k_proj.weight_su", "o_proj.weight_su", "v_proj.weight_sv"])
def test_signs_that_are_written_to_are_seen(name: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("W2A8")
    before = decode(model)
    signs = model.get_decoder().layers[1].self_attn.get_parameter(name)
    signs.copy_(torch.linspace(0.5, 1.5, len(signs)).half().view(torch.int16))  # as `load_state_dict` does
    single, calls = without(copy.deepcopy(model), "DecoderLayer"), counted_layers(monkeypatch)
    changed = decode(model)
    assert not torch.equal(changed[-1], before[-1])
    assert all(torch.equal(a, b) for a, b in zip(changed, decode(single), strict=True))
    assert calls == 4 * ([1] if name[0] == "k" else [2])  # of q, k and v, only k has other signs


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ["o_proj.bias", "k_proj.bias", "k_proj.weight_scale", "q_proj.weight_tiles"])
@torch.no_grad()
def test_what_is_written_to_a_held_layer_is_seen(name: str, dtype: torch.dtype, packed) -> None:
    """As `load_state_dict` does it; behind torch's back; with other memory, as `Module.to` does; and again."""
    model = packed("W4A8").to(dtype)
    before = decode(model)
    x = dict(model.get_decoder().layers[1].self_attn.named_parameters())[name]
    for how in ("in place", "data", "other memory", "data", "out of order", "data"):
        new = x.flip(0)
        if how == "in place":
            x.copy_(new)
        elif how == "data":
            x.data.copy_(new)
        else:
            x.data = new if how == "other memory" else torch.stack([new, new], -1)[..., 0]
        changed = decode(model)
        assert not torch.equal(changed[-1], before[-1]), how
        single = decode(without(copy.deepcopy(model), "DecoderLayer"))
        assert all(torch.equal(a, b) for a, b in zip(changed, single, strict=True)), how
        before = changed


def test_a_dropout_that_drops_is_asked(packed) -> None:
    model, calls = packed("W4A8", "phi3"), []
    wanted = decode(model)
    dropout = model.get_decoder().layers[1].resid_mlp_dropout
    dropout.p = 1.0
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
    single = without(copy.deepcopy(model), "DecoderLayer")
    for each in (model, single):
        each.get_decoder().layers[1].resid_mlp_dropout.train()
    dropped = decode(model)
    assert not torch.equal(dropped[-1], wanted[-1])
    assert all(torch.equal(a, b) for a, b in zip(dropped, decode(single), strict=True))
    dropout.eval().register_forward_hook(lambda *_: calls.append(1))
    decode(model)
    assert len(calls) == 5


@torch.no_grad()
def test_what_stands_in_the_place_of_a_dropout_is_asked(packed) -> None:
    model = packed("W4A8", "phi3")
    wanted = decode(model)
    model.get_decoder().layers[1].resid_mlp_dropout = torch.nn.Tanh()
    found, single = decode(model), decode(without(copy.deepcopy(model), "DecoderLayer"))
    assert not torch.equal(found[-1], wanted[-1])
    assert all(torch.equal(a, b) for a, b in zip(found, single, strict=True))


def test_what_is_changed_between_tokens_is_seen(packed) -> None:
    model = packed("W4A8")
    single = without(copy.deepcopy(model), "DecoderLayer")
    decode(model)
    for each in (model, single):
        for layer in each.get_decoder().layers:
            layer.self_attn.scaling *= 2
    assert all(torch.equal(a, b) for a, b in zip(decode(model), decode(single), strict=True))
    for each in (model, single):  # dropout in the second layer alone
        each.get_decoder().layers[1].self_attn.train()
        each.get_decoder().layers[1].self_attn.attention_dropout = 1.0
    assert all(torch.equal(a, b) for a, b in zip(decode(model), decode(single), strict=True))


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "o_proj.bias"), ("llama", "q_proj.bias"), ("qwen3", "q_norm.weight")],
)
def test_what_learns_alone_goes_the_own_way(family: str, name: str, packed) -> None:
    model = packed("W4A16", family).requires_grad_(False)
    cache = model(torch.full((1, 4), 5), use_cache=True).past_key_values
    learned = model.get_decoder().layers[1].self_attn.get_parameter(name).requires_grad_()
    model(torch.tensor([[3]]), past_key_values=cache).logits.sum().backward()
    assert learned.grad is not None and learned.grad.abs().sum() > 0
