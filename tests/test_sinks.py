"""Attention whose heads have sinks: prompts and decoded tokens go through the ops, with the numbers of the models' own
code, which makes the scores of all tokens at once."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model, tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

import ptq
from ptq.fast import whole_model
from ptq.fast.attention import decoded_attention, sinks
from ptq.fast.attention.decoding import WITHOUT_SDPA
from quarot.plan import QuarotRecipe

FAMILIES = {"gpt_oss": 2, "granite_swa": 2, "granitemoe_swa": 2, "flint": 1}
"""How many attention modules of two decode by one op: those whose rotary embedding it does."""


class Called(TorchDispatchMode):
    """How often the ops run with sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = self.decoded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("prefill_attention", "decode_attention"):
            if func is getattr(torch.ops.ptq, name).default and isinstance(args[-1], Tensor) and args[-1].dim() == 1:
                self.prompts += name == "prefill_attention"
                self.decoded += name == "decode_attention"
        return func(*args, **(kwargs or {}))


def models(family: str, **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family, **config)).eval()
    for module in plain.modules():
        if sinks.SINKS in module._parameters:
            module.sinks.data = torch.randn(module.sinks.shape) * 2
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    return plain, fast


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if sinks.SINKS in module._parameters]


@torch.no_grad()
def logits(model: Any, batch: int = 1, prompt: int = 9) -> list[Tensor]:
    """Of a prompt, of tokens one by one, and of three at once."""
    ids = torch.arange(3, 3 + batch * (prompt + 7)).reshape(batch, -1) % 90
    cache = DynamicCache(config=model.config)
    found = [model(ids[:, :prompt], past_key_values=cache).logits]
    for i in range(prompt, prompt + 4):
        found.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    return [*found, model(ids[:, -3:], past_key_values=cache).logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    plain, fast = models(family)
    assert plain.config._attn_implementation == "eager" and fast.config._attn_implementation == WITHOUT_SDPA
    for batch in (1, 3):
        with Called() as called:
            found = logits(fast, batch, 9)
        count = len(attentions(fast))
        assert called.prompts + called.decoded == 6 * count and called.prompts >= count
        assert called.decoded == 5 * FAMILIES[family]
        for a, b in zip(found, logits(plain, batch, 9), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ids = torch.arange(4, 14).reshape(2, 5)
    for more in ({}, {"num_beams": 2}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}):
        assert torch.equal(
            *(m.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **more) for m in (fast, plain))
        )


def test_past_a_window() -> None:
    plain, fast = models("gpt_oss", sliding_window=4)
    assert {kind.sliding_window for kind in attentions(plain)} == {4, None}
    for prompt in (3, 4, 40):
        for a, b in zip(logits(fast, 2, prompt), logits(plain, 2, prompt), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_packed(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss")
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert model.config._attn_implementation == WITHOUT_SDPA
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    with Called() as called:
        found = logits(model, 2)
    layers = [layer.forward.on_cpu.found for layer in model.model.layers]
    assert called.prompts == 2 and not called.decoded and all(layer.has_mlp for layer in layers)  # in the layer's call
    with Called() as called:
        wanted = logits(own, 2)
    assert not called.prompts and not called.decoded
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(logits(again, 2), found, strict=True))
    was = found[-1]
    attentions(model)[0].sinks.data.add_(3)
    other = logits(model, 2)[-1]
    own.model.layers[0].self_attn.sinks.data.add_(3)
    torch.testing.assert_close(other, logits(own, 2)[-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, was, atol=1e-3)


def test_who_asks_for_weights_gets_them() -> None:
    plain, fast = models("gpt_oss")
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        found = fast(ids, output_attentions=True)
        wanted = plain(ids, output_attentions=True)
        for cached in (found, wanted):
            model = fast if cached is found else plain
            cached.next = model(ids[:, :1], past_key_values=cached.past_key_values, output_attentions=True)
    for a, b in ((found, wanted), (found.next, wanted.next)):
        assert len(a.attentions) == len(b.attentions) == 2
        for x, y in zip(a.attentions, b.attentions, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_and_other_dtypes() -> None:
    plain, fast = models("gpt_oss")
    ids = torch.arange(4, 12)[None]
    with Called() as called:
        for m in (plain, fast):
            m(ids).logits.float().logsumexp(-1).sum().backward()
    assert not called.prompts
    for a, b in zip(attentions(plain), attentions(fast), strict=True):
        torch.testing.assert_close(a.sinks.grad, b.sinks.grad, rtol=1e-3, atol=1e-5)
        assert bool(a.sinks.grad.any())
    with Called() as called, torch.no_grad():
        found, wanted = (m.half()(ids).logits for m in (fast, plain))
    assert not called.prompts
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_static_cache() -> None:
    plain, fast = models("gpt_oss")
    ids, found = torch.arange(4, 12)[None], []
    with torch.no_grad():
        for m in (plain, fast):
            cache = StaticCache(config=m.config, max_cache_len=20)
            m(ids, past_key_values=cache)
            found.append(m(ids[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_what_only_looks_like_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sinks.serves(nn.Linear(3, 3))
    for family in ("gemma2", "llama"):
        assert not sinks.serves(AutoModelForCausalLM.from_config(tiny_config(family, attn_implementation="eager")))
    plain, _ = models("gpt_oss")
    kind = decoded_attention.AttentionKind("", in_part=False, gated=False, halved=True, sinks=True)
    assert sinks.serves(plain) and decoded_attention.kind_of(attentions(plain)[0]) == kind

    class Shifted(GptOssAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            y, weights = super().forward(*args, **kwargs)
            return y + (0.1 if weights is None else 0), weights

    for module in attentions(plain):
        module.__class__ = Shifted
    assert not sinks.serves(plain)
    own = modeling_gpt_oss.eager_attention_forward

    def squared(module: Any, *args: Any, **kwargs: Any) -> Any:
        y, weights = own(module, *args, **kwargs)
        return y * y, weights

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", squared)

    class Squared(GptOssAttention):
        pass

    for module in attentions(plain):
        module.__class__ = Squared
    assert not sinks.serves(plain) and decoded_attention.kind_of(attentions(plain)[0]) is None


class Mine(GptOssAttention):
    """Of a file that has no attention function."""


class Whole(GptOssAttention):
    """The same, with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_classes_of_other_files() -> None:
    for cls in (Mine, Whole):
        plain, _ = models("gpt_oss")
        for module in attentions(plain):
            module.__class__ = cls
        fast = copy.deepcopy(plain)
        whole_model.install(fast)
        assert (fast.config._attn_implementation == WITHOUT_SDPA) == (cls is Mine)
        ids = torch.arange(4, 12)[None]
        for given in ({}, {"output_attentions": True}):
            torch.testing.assert_close(fast(ids, **given).logits, plain(ids, **given).logits, rtol=1e-4, atol=1e-5)
        for a, b in zip(logits(fast), logits(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_config_that_asks_for_weights(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss")
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32, output_attentions=True)
    with torch.no_grad():
        out = model(torch.arange(4, 12)[None])
        assert [x.shape for x in out.attentions] == [(1, 4, 8, 8)] * 2
        out = model(torch.tensor([[5]]), past_key_values=out.past_key_values)
    assert [x.shape for x in out.attentions] == [(1, 4, 1, 9)] * 2


def test_attention_in_both_directions() -> None:
    plain, fast = models("gpt_oss")
    ids, found = torch.arange(4, 20)[None], []
    for model in (plain, fast):
        model.config.is_causal = False
        with torch.no_grad():
            found.append(model(ids, use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
