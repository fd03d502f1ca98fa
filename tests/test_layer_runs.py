"""Decoder layers one behind another in one call (`ptq.fast.layers.layer_runs`): which these are, and when
they are not."""

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from test_fast_layer import counted_layers, without
from test_fast_layer import packed as _packed
from tiny_models import decode, save_model, tiny_config
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import ptq
from ptq.fast import whole_model
from ptq.fast.layers import decoder_layer, layer_runs
from ptq.fast.layers.layer_trial import calls_in_turn
from ptq.kv.attention import CACHE
from ptq.models.families import FAMILIES
from quarot.plan import QuarotRecipe

packed = _packed


def runs_of(model: Any) -> list[int]:
    """The numbers of layers of a model's runs."""
    body = model.get_decoder()
    if getattr(vars(body).get("forward"), "func", None) is not layer_runs._forward:
        return []
    return [len(run.layers) for run in body.forward.args[1].runs()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_runs_of_every_family(family: str) -> None:
    """Layers that are fast one by one and lie behind another are a run."""
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    whole_model.install(model)
    fast = sum(map(decoder_layer.is_fast, model.modules()))
    tables = family in ("granite_swa", "granitemoe_swa")  # which stand-ins do not have
    assert runs_of(model) == ([fast] if fast > 1 and not tables else [])


def test_windows_and_full_attention_are_calls_of_their_own_where_they_see_others(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    source = save_model(tmp_path / "source", "gemma3_text", num_hidden_layers=6, layer_types=types, sliding_window=8)
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    single, calls = without(copy.deepcopy(model), "DecoderLayer", "TextModel"), counted_layers(monkeypatch)
    assert runs_of(model) == [6] and runs_of(single) == []
    assert same(decode(model, steps=6), decode(single, steps=6)) and calls == [3, 1, 2] * 6


@torch.no_grad()
def test_a_base_model_alone(packed, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed("W4A8"), counted_layers(monkeypatch)
    model.save_pretrained(tmp_path)
    body: Any = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    ids, states = torch.arange(4, 12)[None], []
    for each in (body, model.model):
        cache = each(ids, use_cache=True).past_key_values
        states.append(each(input_ids=ids[:, :1], past_key_values=cache).last_hidden_state)
    assert torch.equal(*states) and calls == [2, 2]


def test_windows_that_hide_nothing_are_one_call_with_the_others(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask for all: none, as a window keeps those tokens alone that it shows."""
    source = save_model(tmp_path / "source", "gpt_oss", sliding_window=4)
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    single, calls = without(copy.deepcopy(model), "DecoderLayer", "Model"), counted_layers(monkeypatch)
    assert same(decode(model, steps=6), decode(single, steps=6)) and calls == [2] * 6
    calls.clear()
    ids = torch.arange(4, 14).reshape(2, 5)  # padding is seen by another mask
    given = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), max_new_tokens=4, do_sample=False)
    assert torch.equal(*(m.generate(ids, pad_token_id=0, **given) for m in (model, single))) and calls == [1, 1] * 3


# --- what is not called like that -----------------------------------------------------------------------------------


class Between(LlamaModel):
    """Does something between its layers."""

    def forward(self, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.register_forward_hook(lambda module, given, y: y * 1.5)
        return super().forward(**kwargs)


class Twice(LlamaModel):
    """Goes through its layers two times."""

    def forward(self, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        y = super().forward(inputs_embeds=inputs_embeds, **kwargs).last_hidden_state
        return super().forward(inputs_embeds=y, **kwargs)


class Backwards(LlamaModel):
    def forward(self, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        x = inputs_embeds
        for layer in reversed(self.layers):
            x = layer(x, **kwargs)
        return x


class Numbered(LlamaModel):
    """Gives each layer something else, which may be."""

    def forward(self, inputs_embeds: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        x = inputs_embeds
        for i, layer in enumerate(self.layers):
            x = layer(x, attention_mask=[i], **kwargs)
        return x


class Residual(LlamaModel):
    """Gives each layer also what it is given, in another form."""

    def forward(self, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, residual=(x * 2, None), **kwargs)
        return x


class Positional(LlamaModel):
    def forward(self, inputs_embeds: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


WAYS = (Between, Twice, Backwards, Numbered, Residual, Positional)


@pytest.mark.parametrize("cls", WAYS)
def test_models_that_go_through_their_layers_in_another_way(cls: type[LlamaModel]) -> None:
    model = LlamaModel(tiny_config("llama")).eval()
    assert calls_in_turn(model, list(model.layers))
    model.__class__ = cls
    assert calls_in_turn(model, list(model.layers)) == (cls is Numbered)


class Scaled(LlamaModel):
    """Does something between its layers, but for a prompt."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["inputs_embeds"].shape[1] > 1:
            return super().forward(*args, **kwargs)
        x = kwargs.pop("inputs_embeds")
        for layer in self.layers:
            x = layer(x, **kwargs) * 1.5
        return x


def test_what_is_done_between_layers_of_a_decoded_token_alone() -> None:
    model = LlamaModel(tiny_config("llama")).eval()
    model.__class__ = Scaled
    assert not calls_in_turn(model, list(model.layers))


@pytest.mark.parametrize("how", ("class", "forward"))
def test_a_forward_that_the_class_gets_later(how: str, packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("W4A8")
    before, calls = decode(model), counted_layers(monkeypatch)

    class Steered(LlamaModel):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            cache = kwargs.get(CACHE) or DynamicCache()
            x, first = self.embed_tokens(input_ids), cache.get_seq_length()
            cos_sin = self.rotary_emb(x, torch.arange(first, first + x.shape[1])[None])
            for layer in self.layers:
                x = 1.5 * layer(x, position_embeddings=cos_sin, attention_mask=None, **{CACHE: cache})
            return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: cache})

    if how == "class":
        model.model.__class__ = Steered
    else:
        monkeypatch.setattr(LlamaModel, "forward", Steered.forward)
    found = decode(model)
    assert calls == [1] * 8 and not torch.equal(found[-1], before[-1])
    assert same(found, decode(without(copy.deepcopy(model), "LlamaModel", "Steered")))


# --- what is asked for, and what has been changed ------------------------------------------------------------------


@pytest.mark.parametrize("how", ("argument", "config"))
@torch.no_grad()
def test_hidden_states_are_those_of_every_layer(how: str, packed) -> None:
    model = packed("W4A8")
    decode(model)
    cache = model(torch.arange(4, 10)[None], use_cache=True).past_key_values
    model.config.output_hidden_states = how == "config"
    asked = {} if how == "config" else {"output_hidden_states": True}
    states = model(torch.tensor([[5]]), past_key_values=cache, **asked).hidden_states
    wanted = without(copy.deepcopy(model), "DecoderLayer", "LlamaModel")
    whole = wanted(torch.tensor([[*range(4, 10), 5]]), output_hidden_states=True).hidden_states
    assert len(states) == 3 and not torch.equal(states[1], states[2]) and not torch.equal(states[0], states[1])
    for a, b in zip(states, whole, strict=True):
        torch.testing.assert_close(a, b[:, -1:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_a_model_is_given_besides_goes_the_own_way(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as pictures, whose numbers are added between layers."""
    model, calls = packed("W4A8"), counted_layers(monkeypatch)
    cache = model(torch.arange(4, 10)[None], use_cache=True).past_key_values
    token = torch.tensor([[5]])
    for given, wanted in (({}, [2]), ({"pixels": None}, [2]), ({"pixels": torch.ones(2)}, [1, 1])):
        calls.clear()
        model.model(input_ids=token, past_key_values=cache, **given)
        assert calls == wanted
    calls.clear()
    model.model(token, None, None, cache)
    model.model(inputs_embeds=model.get_input_embeddings()(token), past_key_values=cache)
    assert calls == [1, 1, 2]


def test_other_layers_than_those_that_were_there(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed("W4A8"), counted_layers(monkeypatch)
    two = decode(model)
    gone = weakref.ref(model.model.layers[1].mlp.down_proj)
    body, layers = model.model, list(model.model.layers)

    def check(numbers: list[int], *runs: int) -> list[Tensor]:
        """The logits with these layers, which are decoded in calls of so many."""
        body.layers = nn.ModuleList([copy.deepcopy(layers[i]) for i in numbers])
        for i, layer in enumerate(body.layers):
            layer.self_attn.layer_idx = i
        model.config.num_hidden_layers = len(numbers)
        single = without(copy.deepcopy(model), "LlamaModel")
        calls.clear()
        found = decode(model)
        assert calls == list(runs) * 4 and same(found, decode(single))
        return found

    model.config.layer_types = None
    assert same(check([0, 1], 2), two)
    assert not same(check([0, 1, 1, 0], 4), check([1, 0, 0, 1], 4))
    check([1], 1)
    del layers[1], two
    gc.collect()
    assert gone() is None
    check([0, 0, 0], 3)
    model.config.num_hidden_layers = 2  # the third is passed by
    calls.clear()
    decode(model)
    assert calls == [1] * 8


def test_layers_that_share_a_cache_layer(packed) -> None:
    """The second one sees what the first one has stored, too."""
    model = packed("W4A16")
    model.model.layers[1].self_attn.layer_idx = 0
    assert same(decode(model), decode(without(copy.deepcopy(model), "LlamaModel")))


def test_layers_that_are_not_for_the_op_split_a_run(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source", "llama", num_hidden_layers=6)
    recipe = QuarotRecipe(rounding="nearest", skip=("*layers.2.mlp.down_proj",))
    ptq.quantize(source, tmp_path / "packed", recipe, ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    calls = counted_layers(monkeypatch)
    assert runs_of(model) == [6]
    found = decode(model)
    assert calls == [2, 1, 3] * 4 and same(found, decode(without(copy.deepcopy(model), "LlamaModel")))


def test_a_hook_that_was_there_once_slows_nothing_down(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = packed("W4A8"), counted_layers(monkeypatch)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        cache = model(torch.arange(4, 10)[None], use_cache=True).past_key_values
        model(torch.tensor([[5]]), past_key_values=cache)
        assert calls == [1]
        hook.remove()
        model(torch.tensor([[5]]), past_key_values=cache)
    assert calls == [1, 2]


@torch.no_grad()
def test_signs_that_are_written_to_between_two_tokens(packed) -> None:
    model, ids, logits = packed("W2A8"), torch.arange(4, 10)[None], []
    for each in (model, without(copy.deepcopy(model), "LlamaModel")):
        cache = each(ids, use_cache=True).past_key_values
        each(ids[:, :1], past_key_values=cache)
        signs = each.model.layers[1].self_attn.o_proj.get_parameter("weight_su")
        signs.copy_(torch.linspace(0.5, 1.5, len(signs)).half().view(torch.int16))
        logits.append(each(ids[:, 1:2], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_hidden_states_that_are_elsewhere(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding on the CPU may be all that a model has there."""
    model = packed("W4A8")
    decode(model)
    (run,) = model.model.forward.args[1].runs()
    assert run.known is not None
    away = torch.zeros(1, 1, 72, device="meta")
    assert run._segments(away) == [(0, 2, [])] and run.known is None


def test_a_layer_that_somebody_listens_to_or_has_replaced(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard = packed("W4A8"), []
    wanted, calls = decode(model), counted_layers(monkeypatch)
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, given: heard.append(module))
    assert same(decode(model), wanted) and calls == [1] * 8 and heard == [layer] * 5
    hook.remove()
    calls.clear()
    assert same(decode(model), wanted) and calls == [2] * 4
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) + 1
    calls.clear()
    assert not torch.equal(decode(model)[-1], wanted[-1]) and calls == [1] * 4
    layer.forward = own
    calls.clear()
    assert same(decode(model), wanted) and calls == [2] * 4
    layer.training = True  # not what is in it
    calls.clear()
    decode(model)
    assert calls == [1] * 4


def test_copies_have_runs_of_their_own(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("W4A8")
    wanted = decode(model)
    again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.model.layers[0].mlp.down_proj._parameters["weight_scale"] = nn.Parameter(torch.zeros(1), requires_grad=False)
    calls = counted_layers(monkeypatch)
    for copied in again:
        calls.clear()
        assert same(decode(copied), wanted) and calls == [2] * 4
        body, substitutes = copied.model.forward.args
        assert body is copied.model and substitutes.runs()[0].layers == list(copied.model.layers)


def test_the_names_of_its_arguments_are_known(packed) -> None:
    model = packed("W4A8").model
    found, wanted = (inspect.signature(forward).parameters for forward in (model.forward, LlamaModel.forward))
    assert list(found) == list(wanted)[1:]


def test_a_forward_sees_the_model_but_for_its_layers(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = packed("W4A8").model, []

    def forward(self: Any, **kwargs: Any) -> None:
        self.seen = len(seen)
        seen.append(self)

    monkeypatch.setattr(layer_runs, "_substitutes", lambda model, layers: [nn.Identity])
    monkeypatch.setattr(LlamaModel, "forward", forward)
    model(input_ids=torch.tensor([[5]]), **{CACHE: DynamicCache()})
    model(input_ids=torch.tensor([[5]]))
    view, own = seen
    assert own is model and view is not model and model.seen == 1
    assert isinstance(view, LlamaModel) and str(type(view)) == str(LlamaModel) and vars(view) is vars(model)
    assert view.layers == [nn.Identity] and view.norm is model.norm and dict(view.named_modules()).keys() >= {"layers"}
    assert isinstance(model.layers, nn.ModuleList)
