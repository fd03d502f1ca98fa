"""Decoding through the few steps of `ptq.fast.layers.decoder_layer` and `ptq.fast.attention.decoded_attention`: the
logits of the models' own code."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CACHED, DISTINCT, LATENT_ATTENTION, PLAIN_ATTENTION, decode, save_model, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

import ptq
from fp6.plan import Fp6Recipe
from ptq.fast import whole_model
from ptq.fast.attention import decoded_attention
from ptq.fast.experts import moe_block
from ptq.fast.layers import cpu_layer, decoder_layer
from ptq.kv.attention import CACHE
from ptq.models.families import FAMILIES
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

KINDS = {
    "qwen3": "heads", "gemma3_text": "heads", "qwen3_moe": "heads", "exaone4": "heads",
    "apertus": "heads", "exaone_moe": "heads", "hy_v3": "heads", "kolibri1": "heads", "flint": "heads",
    "glm4_moe": "heads", "sarvam_moe": "heads", "dots1": "heads", "mellum": "heads", "minimax_m2": "whole",
    "flex_olmo": "whole", "olmo2": "whole", "olmo3": "whole", "olmoe": "whole",
}  # fmt: skip
OWN_ATTENTION = {
    "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "gemma2",
    "vaultgemma", "cohere", "cohere2", "cohere2_moe", "phi", "stablelm",
    "opt", "gpt2", "llama4_text", "nanochat",
}  # fmt: skip
"""Families whose rotary embedding is another one, or which have none, that do more to queries and keys, or attend in
another way."""
WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa", "flint"}
WITHOUT_TURNS = {"granite_swa", "granitemoe_swa", "cohere_compass_text"}
"""Families some of whose blocks are given no positions."""
OTHERS = (
    dict.fromkeys(("olmo2", "olmo3", "olmo", "apertus", "nemotron", *sorted(OWN_ATTENTION)), [])
    | dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", *LATENT_ATTENTION), ["all"] * 2)
    | {"qwen3_next": ["all"], "flint": ["all"]}
)
"""Families whose attention, norms or MLP are others, whose rotary embedding is in float32 (OLMo), or which have
delta nets, state spaces or latent attention: what one call does of two layers."""
RECIPES = {
    "W4A16": QuarotRecipe(rounding="nearest"),
    "W4A8": QuarotRecipe(rounding="nearest", activation_bits=8),
    "W4A4KV4": QuarotRecipe(rounding="nearest", activation_bits=4, key_bits=4, value_bits=4),
    "W6A16": Fp6Recipe(),
    "W6A8 rotated": Fp6Recipe(rotate=True, activation_bits=8),
    "W2A8": QuipSharpRecipe(rounding="nearest", bits=2),
    "W4A16 on the lattice": QuipSharpRecipe(rounding="nearest", bits=4, activation_bits=16),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed model by recipe."""
    folder, made = tmp_path_factory.mktemp("packed"), set()

    def load(name: str, family: str = "llama") -> Any:
        packed = folder / f"{family} {name}"
        if packed not in made:
            source = save_model(folder / f"{family} {name} source", family)
            ptq.quantize(source, packed, RECIPES[name], ptq.RunOptions(report=False))
            made.add(packed)
        return AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)

    return load


def without(model: nn.Module, *ends: str) -> nn.Module:
    """The model with the own code of modules whose class has one of these endings."""
    for module in model.modules():
        if type(module).__name__.endswith(ends):
            vars(module).pop("forward", None)
    return model


def fast_decode_is_off(model: nn.Module) -> None:
    """Modules run their own code."""
    without(model, "DecoderLayer", "Attention")


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """Whether each call of a function gave something."""
    own, calls = getattr(module, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(module, name, call)
    return calls


def counted_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many layers each call of their op is."""
    own, calls = cpu_layer.run, []

    def run(layers: list[cpu_layer.FoundLayer], *args: Any) -> Any:
        found = own(layers, *args)
        calls.extend([] if found is None else [len(layers)])
        return found

    monkeypatch.setattr(cpu_layer, "run", run)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    calls = counted(monkeypatch, decoded_attention, "decoded")
    for batch in (1, 3):
        for a, b in zip(decode(fast, batch), decode(plain, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if family not in PLAIN_ATTENTION:
        return
    own = [module for module in plain.modules() if type(module).__name__.endswith("Attention")]
    kinds = [decoded_attention.kind_of(module) for module in own]
    in_part = family in ("phi3", "glm4_moe", "sarvam_moe", "minimax_m2", "nemotron")
    more = family == "gpt_oss", family in WITH_SINKS, family == "ministral3", family in WITHOUT_TURNS
    first = kinds[1] if family == "flint" else kinds[0]  # whose first block turns nothing
    assert first == (None if family in OWN_ATTENTION else (KINDS.get(family, ""), in_part, False, *more))
    fast = [kind for kind in kinds if kind is not None]
    assert calls == [bool(step) for _ in range(2) for step in range(5) for _ in fast]


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
@torch.no_grad()
def test_heads_are_turned_in_part_where_the_family_does_it(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    whole_model.install(model)
    attention, cache = model.model.layers[0].self_attn, model(torch.arange(3, 9)[None]).past_key_values
    kind = decoded_attention.kind_of(attention)
    assert kind is not None
    for d, wanted in ((20, True), (10, family == "glm4_moe"), (22, False)):
        cos_sin = torch.ones(1, 1, d), torch.ones(1, 1, d)
        found = kind.cache_layers([(attention, kind)], cos_sin, torch.ones(1, 1, 72), **{CACHE: cache})
        assert (found is not None) == wanted


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_layers_give_the_bits_of_single_ops(
    recipe: str, family: str, packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Phi-3 have fused projections, and turn a half of every head."""
    model = packed(recipe, family)
    calls, rows = counted_layers(monkeypatch), (1, 3, 16)
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        calls.clear()
        found = [decode(model, batch) for batch in rows]
        assert calls == [2] * 4 * 3
        assert {in_one_call(layer) for layer in model.get_decoder().layers} == {"all"}
        single = without(copy.deepcopy(model), "DecoderLayer")
        for batch, logits in zip(rows, found, strict=True):
            for a, b in zip(logits, decode(single, batch), strict=True):
                assert torch.equal(a, b)


class Unpacking(Qwen3MoeDecoderLayer):
    """A layer that takes what its experts give with or without the router's logits."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        y = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        z = self.mlp(self.post_attention_layernorm(y))
        return y + (z[0] if isinstance(z, tuple) else z)


class GivingLogits(Qwen3MoeSparseMoeBlock):
    """Experts that give the router's logits, too."""

    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states), None


@pytest.mark.parametrize("in_layer", (True, False))
def test_experts_that_give_their_logits_too(in_layer: bool, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source", "qwen3_moe", mlp_only_layers=[])
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    wanted, calls = decode(model), counted_layers(monkeypatch)
    if not in_layer:
        monkeypatch.setattr(moe_block, "moe_of", lambda mlp: None)
    for layer in model.model.layers:
        del layer.forward
        layer.__class__ = Unpacking
        layer.mlp.__class__ = GivingLogits
    decoder_layer.install(model)
    assert all(torch.equal(a, b) for a, b in zip(decode(model), wanted, strict=True))
    assert calls == ([2] * 4 if in_layer else [1] * 8)


CLIPS = {
    "one for each input": ((0.9, 0.9, 0.9, 0.8, 0.7, 0.7, 0.6), "all"),
    "k has another": ((0.9, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9), "nothing"),
    "up has another": ((0.9, 0.9, 0.9, 0.9, 0.8, 0.9, 0.9), "attention"),
}


def in_one_call(layer: Any) -> str:
    found = layer.forward.on_cpu.found
    return "nothing" if found is None else "all" if found.has_mlp else "attention"


@pytest.mark.parametrize(("clips", "wanted"), CLIPS.values(), ids=CLIPS)
def test_clips_of_a_whole_layer(clips: tuple[float, ...], wanted: str, packed) -> None:
    model = packed("W4A4KV4")
    for layer in model.get_decoder().layers:
        names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        for name, clip in zip(names, clips, strict=True):
            linear = layer.get_submodule(name)
            linear.online = replace(linear.online, activation=replace(linear.online.activation, clip=clip))
            linear.shared = None
    single = without(copy.deepcopy(model), "DecoderLayer")
    for a, b in zip(decode(model), decode(single), strict=True):
        assert torch.equal(a, b)
    assert {in_one_call(layer) for layer in model.get_decoder().layers} == {wanted}


@pytest.mark.parametrize("family", DISTINCT)
def test_whole_layers_of_every_family(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source", family)
    cache = dict(key_bits=4, value_bits=4) if family in CACHED else {}
    recipe = QuarotRecipe(rounding="nearest", activation_bits=8, **cache)
    ptq.quantize(source, tmp_path / "packed", recipe, ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    single, calls, own = without(copy.deepcopy(model), "DecoderLayer"), [], cpu_layer.run

    def run(layers: list[cpu_layer.FoundLayer], *args: Any) -> Any:
        y = own(layers, *args)
        if y is not None:
            calls.extend("all" if layer.has_mlp else "attention" for layer in layers)
        return y

    monkeypatch.setattr(cpu_layer, "run", run)
    for a, b in zip(decode(model), decode(single), strict=True):
        assert torch.equal(a, b)
    assert calls == 4 * OTHERS.get(family, ["all"] * 2 if family in PLAIN_ATTENTION else [])


def test_padding_and_given_caches(packed) -> None:
    model = packed("W4A8")
    plain: Any = without(copy.deepcopy(model), "DecoderLayer", "Attention")
    ids = torch.arange(4, 14).reshape(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for inputs in ({"attention_mask": mask}, {}, {"past_key_values": DynamicCache()}):
        found, wanted = (
            m.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True,
                       **copy.deepcopy(inputs))
            for m in (model, plain)
        )  # fmt: skip
        assert torch.equal(found.sequences, wanted.sequences)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)


def test_what_only_looks_like_it_is_left_alone() -> None:
    class Attention(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            y, weights = super().forward(*args, **kwargs)
            return y * 1.01, weights

    class Layer(LlamaDecoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.01

    config = tiny_config("llama")
    assert decoded_attention.kind_of(LlamaAttention(config, 0)) == decoded_attention.AttentionKind("", False, False)
    assert decoder_layer._layout_of(LlamaDecoderLayer(config, 0)) == decoder_layer.LAYOUTS[0]
    assert (
        decoded_attention.kind_of(Attention(config, 0)) is None and decoder_layer._layout_of(Layer(config, 0)) is None
    )

    class MlpIsGivenMore(LlamaDecoderLayer):
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            y = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
            return y + self.mlp(self.post_attention_layernorm(y), factor=2)

    class MlpGivesTwo(LlamaDecoderLayer):
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            y = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
            z, _ = self.mlp(self.post_attention_layernorm(y))
            return y + z

    assert decoder_layer._layout_of(MlpIsGivenMore(config, 0)) is None
    assert decoder_layer._layout_of(MlpGivesTwo(config, 0)) == decoder_layer.LAYOUTS[0]  # as experts do

    class Twice(GraniteDecoderLayer):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            added = super().forward(hidden_states, *args, **kwargs) - hidden_states
            return hidden_states + added * self.residual_multiplier

    for multiplier in (1.0, 0.3):  # one class, two functions
        config = tiny_config("granite")
        config.residual_multiplier = multiplier
        assert decoder_layer._layout_of(GraniteDecoderLayer(config, 0)) == decoder_layer.LAYOUTS[0]
        assert decoder_layer._layout_of(Twice(config, 0)) is None


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_autocast_where_some_linears_are_plain(family: str, tmp_path: Path) -> None:
    """These give another dtype then."""
    source = save_model(tmp_path / "source", family)
    recipe = QuarotRecipe(rounding="nearest", skip=("*gate_proj", "*k_proj"))
    ptq.quantize(source, tmp_path / "packed", recipe, ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = decode(model)
    for a, b in zip(found, decode(model), strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_autocast_of_plain_linears() -> None:
    plain = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(decode(fast), decode(plain), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("size", [64, 10, 9, 8, 6, 3])
def test_layers_with_a_window_among_others(size: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = dict(num_hidden_layers=6, use_sliding_window=True, sliding_window=size, max_window_layers=3)
    source = save_model(tmp_path / "source", "qwen3", **window)
    recipe = QuarotRecipe(rounding="nearest")  # 8-bit inputs would turn a last bit into a step of their grid
    ptq.quantize(source, tmp_path / "packed", recipe, ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    single, calls = without(copy.deepcopy(model), "DecoderLayer"), counted_layers(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(decode(model), decode(single), strict=True))
    assert calls == 4 * [6]  # a window keeps what it shows: no layer has a mask
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    fast_decode_is_off(plain)
    for a, b in zip(decode(model, steps=6), decode(plain, steps=6), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    calls.clear()
    found = decode(model, 3, padded=True)
    assert calls == 4 * [3, 3]
    for a, b in zip(found, decode(plain, 3, padded=True), strict=True):
        torch.testing.assert_close(a[:, -1], b[:, -1], rtol=1e-4, atol=1e-4)
    ids, logits = torch.arange(4, 20)[None], []
    for each in (model, plain):
        cache = each(ids[:, :9], use_cache=True).past_key_values
        logits.append(each(ids[:, 9:12], past_key_values=cache).logits)
        logits.append(each(ids[:, 12:], past_key_values=cache).logits)
    torch.testing.assert_close(logits[:2], logits[2:], rtol=1e-4, atol=1e-4)
