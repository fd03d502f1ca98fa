"""The steps between products as one op each: numbers at every level, and models of every family that use them."""

import copy
import pickle
import re

import pytest
import torch
from tiny_models import LATENT_ATTENTION, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ptq.fast import module_forwards
from ptq.fast.layers import decoder_layer
from ptq.fast.steps import rms_norm
from ptq.models.families import FAMILIES
from ptq.ops import steps

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 15, 16, 63, 64, 200, 2048])
def test_norm_against_float64(k: int, dtype: torch.dtype, level: str) -> None:
    x, gain = draw(3, 2, k, dtype=dtype), draw(k, dtype=dtype, seed=1)
    for eps, offset, first in ((1e-6, 0.0, True), (0.5, 0.0, False), (1e-5, 1.0, False)):
        found = torch.ops.ptq.rms_norm(x, gain, eps, offset, first)
        y = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        wanted = y * (gain.double() + offset)
        place = 2**-7 if dtype == torch.bfloat16 else 2**-21
        assert found.dtype == dtype and ((found.double() - wanted).abs() <= place * wanted.abs() + 1e-30).all()
        same = (found == steps.rms_norm(x, gain, eps, offset, first)).double().mean()
        assert same > (0.99 if dtype == torch.bfloat16 else 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b, h, groups, t, d, before, r", [
    (1, 8, 4, 1, 64, 96, 64), (2, 2, 3, 3, 24, 130, 24), (1, 1, 1, 1, 2, 0, 2), (3, 2, 5, 2, 130, 300, 130),
    (1, 2, 1, 4, 128, 600, 128), (2, 2, 3, 1, 128, 40, 96), (1, 3, 1, 3, 24, 9, 2),
    (1, 2, 7, 3, 24, 510, 24), (2, 1, 2, 1, 64, 511, 64), (2, 1, 8, 1, 64, 1300, 64),  # parts of 512
])  # fmt: skip
def test_attention_against_float64(
    b: int, h: int, groups: int, t: int, d: int, before: int, r: int, dtype: torch.dtype, level: str
) -> None:
    q, k, v = (draw(b, t, n * d, dtype=dtype, seed=n) for n in (h * groups, h, h))
    cos, sin = draw(1, t, r, dtype=dtype, seed=2), draw(1, t, r, dtype=dtype, seed=3)
    keys, values = (draw(b, h, before + t + 3, d, dtype=dtype, seed=seed) for seed in (4, 5))
    mine = keys.clone(), values.clone()
    found = torch.ops.ptq.decode_attention(q, k, v, cos, sin, keys, values, before, d**-0.5)
    wanted = steps.decode_attention(q, k, v, cos, sin, *mine, before, d**-0.5)
    assert torch.equal(keys, mine[0]) and torch.equal(values, mine[1])
    turned = steps.rotary(q.view(b, t, -1, d).transpose(1, 2), k.view(b, t, h, d).transpose(1, 2), cos, sin)[0]
    seen = [x[:, :, : before + t].double().repeat_interleave(groups, 1) for x in mine]
    later = torch.ones(t, before + t, dtype=torch.bool).triu(before + 1)
    score = (turned.double() @ seen[0].mT * d**-0.5).masked_fill(later, -torch.inf)
    exact = (score.softmax(-1) @ seen[1]).transpose(1, 2).reshape(q.shape)
    place = 2**-8 if dtype == torch.bfloat16 else 2**-20
    for y in (found, wanted):
        assert y.dtype == dtype and ((y.double() - exact).abs() <= place * exact.abs() + 2e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", (-200.0, 0.0, 30.0, 1e6))
@pytest.mark.parametrize("b, t, before", [(2, 3, 40), (1, 1, 1300)])
def test_attention_with_sinks(b: int, t: int, before: int, shift: float, dtype: torch.dtype, level: str) -> None:
    h, groups, d = 2, 3, 24
    q, k, v = (draw(b, t, n * d, dtype=dtype, seed=n) for n in (h * groups, h, h))
    cos, sin = torch.ones(1, t, d, dtype=dtype), torch.zeros(1, t, d, dtype=dtype)
    rooms = [draw(b, h, before + t, d, dtype=dtype, seed=seed) for seed in (4, 5)]
    seen = torch.ones(b, 1, t, before + t, dtype=torch.bool).tril(before)
    seen[0, ..., :7] = False
    given = draw(6, dtype=torch.float32) + shift
    for sinks, mask in ((given, None), (given.to(dtype), seen)):
        inputs = q, k, v, cos, sin, *rooms, before, 1.0, mask, sinks
        found = torch.ops.ptq.decode_attention(*inputs)
        key, value = (x.double().repeat_interleave(groups, 1) for x in rooms)
        visible = torch.ones(t, before + t, dtype=torch.bool).tril(before) if mask is None else mask
        score = (q.view(b, t, -1, d).transpose(1, 2).double() @ key.mT).masked_fill(~visible, -torch.inf)
        score = torch.cat((score, sinks.double()[:, None, None].expand(b, -1, t, 1)), -1)
        exact = (score.softmax(-1)[..., :-1] @ value).transpose(1, 2).reshape(q.shape)
        place = 2**-8 if dtype == torch.bfloat16 else 2**-19
        for y in (found, steps.decode_attention(*inputs)):
            assert ((y.double() - exact).abs() <= place * exact.abs() + 4e-6).all()
        assert bool(found.any()) == (shift < 1e6)
    for wrong in (sinks[:5], sinks.half(), sinks[None]):
        with pytest.raises(RuntimeError, match=r"decode_attention: sinks must be \[6\]"):
            torch.ops.ptq.decode_attention(q, k, v, cos, sin, *rooms, before, 1.0, None, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b, t, before", [(3, 1, 40), (2, 1, 700), (4, 1, 1300), (2, 3, 600)])
def test_attention_behind_a_mask(b: int, t: int, before: int, dtype: torch.dtype, level: str) -> None:
    """Padding of a few tokens, of whole chunks and parts, holes, and a row that sees nothing."""
    h, groups, d = 2, 3, 24
    q, k, v = (draw(b, t, n * d, dtype=dtype, seed=n) for n in (h * groups, h, h))
    cos = draw(b, t, d, dtype=dtype)
    rooms = [draw(b, h, before + t, d, dtype=dtype, seed=seed) for seed in (4, 5)]
    mask = torch.ones(b, 1, t, before + t, dtype=torch.bool)
    mask[0, ..., : min(before, 650)] = False
    mask[1, ..., 20:30] = mask[1, ..., 33] = False
    if b > 2:
        mask[2] = False
    if b > 3:
        mask[3, ..., :before] = False  # it sees itself alone
    triangle = torch.ones(t, before + t, dtype=torch.bool).tril(before)
    mask[:1] &= triangle  # the tokens of the others see each other
    for seen in (mask, mask[:1]):
        found = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, seen)
        turned = steps.rotary(q.view(b, t, -1, d).transpose(1, 2), k.view(b, t, h, d).transpose(1, 2), cos, cos)[0]
        key, value = (x.double().repeat_interleave(groups, 1) for x in rooms)
        score = (turned.double() @ key.mT * d**-0.5).masked_fill(~seen, -torch.inf)
        exact = (score.softmax(-1).nan_to_num(0) @ value).transpose(1, 2).reshape(q.shape)
        place = 2**-8 if dtype == torch.bfloat16 else 2**-20
        wanted = steps.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, seen)
        for y in (found, wanted):
            assert ((y.double() - exact).abs() <= place * exact.abs() + 2e-6).all()
    plain = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5)
    assert not torch.equal(found, plain)
    everything = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, triangle[None, None])
    assert torch.equal(everything, plain)
    foreign = mask.to(torch.uint8).mul(255).view(torch.bool)  # any byte but 0 is true
    found = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, foreign)
    assert torch.equal(found, torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, mask))
    spread = torch.stack([mask, mask], -1)[..., 0]  # of other strides
    same = (torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, m) for m in (mask, spread))
    assert torch.equal(*same)
    for wrong in (mask[..., 1:], mask.float(), mask[:, 0], mask.expand(b, 2, t, -1), torch.cat([mask, mask])):
        with pytest.raises(RuntimeError, match="mask"):
            torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, d**-0.5, wrong)


def test_attention_over_the_end_of_a_room(level: str) -> None:
    q, k, v = (draw(2, 1, n * 32, dtype=torch.float32, seed=n) for n in (6, 3, 3))
    cos, rooms = draw(1, 1, 32, dtype=torch.float32), [draw(2, 3, 60, 32, dtype=torch.float32, seed=n) for n in (7, 8)]
    ends = [room[:, :, 20:].clone() for room in rooms]
    found = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *(room[:, :, 20:] for room in rooms), 30, 0.2)
    assert torch.equal(found, torch.ops.ptq.decode_attention(q, k, v, cos, cos, *ends, 30, 0.2))
    for seed, room, end in zip((7, 8), rooms, ends, strict=True):
        before = draw(2, 3, 60, 32, dtype=torch.float32, seed=seed)
        assert torch.equal(room[:, :, 20:], end) and torch.equal(room[:, :, :20], before[:, :, :20])
        assert (room != before).any(-1).sum() == 6  # one token of three heads of two rows
    for other in (ends[1], rooms[1][:, :, :40], rooms[1].transpose(1, 2).contiguous().transpose(1, 2)[:, :, 20:]):
        if other.stride() != rooms[0].stride():
            with pytest.raises(RuntimeError, match="contiguous"):
                torch.ops.ptq.decode_attention(q, k, v, cos, cos, rooms[0][:, :, 20:], other, 30, 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [6, 24, 40, 64])
def test_attention_does_not_see_the_room_behind(d: int, dtype: torch.dtype, level: str) -> None:
    q, k, v = (draw(2, 1, n * d, dtype=dtype, seed=n) for n in (6, 3, 3))
    cos, rooms = draw(1, 1, d, dtype=dtype), [draw(2, 3, 60, d, dtype=dtype, seed=seed) for seed in (7, 8)]
    found = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, 50, 0.2)
    for room in rooms:
        room[:, :, 51:] = torch.nan
    assert found.isfinite().all()
    assert torch.equal(found, torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, 50, 0.2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_some_tokens_is_that_of_each(dtype: torch.dtype, level: str) -> None:
    """To the bit, also where a part begins between them."""
    for before in (100, 509, 1022):
        q, k, v = (draw(1, 4, n * 32, dtype=dtype, seed=n) for n in (6, 3, 3))
        cos = draw(1, 4, 32, dtype=dtype)
        rooms = [draw(1, 3, before + 4, 32, dtype=dtype, seed=seed) for seed in (7, 8)]
        found = torch.ops.ptq.decode_attention(q, k, v, cos, cos, *rooms, before, 0.2)
        for i in range(4):
            one = (x[:, i : i + 1].contiguous() for x in (q, k, v, cos, cos))
            assert torch.equal(torch.ops.ptq.decode_attention(*one, *rooms, before + i, 0.2), found[:, i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [390, 1500])
def test_attention_of_any_thread_count_and_damage(before: int, dtype: torch.dtype, level: str) -> None:
    q, k, v = (draw(2, 1, n * 32, dtype=dtype, seed=n) for n in (6, 3, 3))
    room = before + 10
    cos, keys, values = draw(2, 1, 32, dtype=dtype), *(draw(2, 3, room, 32, dtype=dtype) for _ in "kv")
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(torch.ops.ptq.decode_attention(q, k, v, cos, cos, keys, values, before, 0.2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    keys[1, 2, 50] = torch.nan
    damaged = torch.ops.ptq.decode_attention(q, k, v, cos, cos, keys, values, before, 0.2).view(2, 3, 2, 32)
    assert damaged[1, 2].isnan().all() and damaged.isnan().sum() == 64
    keys[1, 2, 50] = 0
    k[1, 0, 64:] = torch.nan
    for place in (0, 100, min(512, before), min(513, before), before):  # alone in its part, too
        damaged = torch.ops.ptq.decode_attention(q, k, v, cos, cos, keys, values, place, 0.2).view(2, 3, 2, 32)
        assert damaged[1, 2].isnan().all() and damaged.isnan().sum() == 64
    empty = (x[:, :0] for x in (q, k, v, cos, cos))
    assert torch.ops.ptq.decode_attention(*empty, keys, values, 0, 0.2).shape == (2, 0, 6 * 32)
    wrong = [(keys.transpose(1, 2), values, 0), (keys, values[:, :, :5], 0)]
    for place in (room, -1, 2**63 - 1, -(2**63)):  # the sum with the number of tokens would wrap around
        wrong.append((keys, values, place))
    for cache in wrong:
        with pytest.raises(RuntimeError):
            torch.ops.ptq.decode_attention(q, k, v, cos, cos, *cache, 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_the_mlp(dtype: torch.dtype, level: str) -> None:
    for shape in ((3, 70), (1, 1, 4096), (0, 5)):
        gate, up = 30 * draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
        found, wanted = torch.ops.ptq.silu_mul(gate, up), steps.silu_mul(gate, up)
        torch.testing.assert_close(found, wanted, rtol=2**-20 if dtype == torch.float32 else 2**-7, atol=1e-30)
        assert shape[0] == 0 or (found == wanted).double().mean() > (0.5 if dtype == torch.float32 else 0.99)
        found, wanted = torch.ops.ptq.sigmoid_mul(gate, up), steps.sigmoid_mul(gate, up)
        torch.testing.assert_close(found, wanted, rtol=2**-19 if dtype == torch.float32 else 2**-7, atol=1e-30)
        assert shape[0] == 0 or (found == wanted).double().mean() > (0.3 if dtype == torch.float32 else 0.99)
        gate = gate / 10  # far below zero torch's 1 + tanh loses its digits
        found = torch.ops.ptq.gelu_mul(gate, up)
        wanted = torch.nn.functional.gelu(gate.double(), approximate="tanh").to(dtype) * up
        torch.testing.assert_close(found, wanted, rtol=2**-19 if dtype == torch.float32 else 2**-6, atol=1e-12)
        assert shape[0] == 0 or (found == wanted).double().mean() > (0.2 if dtype == torch.float32 else 0.9)
        gate, up = 3 * gate, 10 * up  # some beyond the limit on either side
        found, wanted = torch.ops.ptq.clamped_swiglu(gate, up, 1.7, 7.0), steps.clamped_swiglu(gate, up, 1.7, 7.0)
        torch.testing.assert_close(found, wanted, rtol=2**-20 if dtype == torch.float32 else 2**-6, atol=1e-30)
        assert shape[0] == 0 or (found == wanted).double().mean() > (0.5 if dtype == torch.float32 else 0.99)
    ends = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [3e38, 3e38], [-3e38, 1.0], [0.0, -3e38]], dtype=dtype)
    found = torch.ops.ptq.clamped_swiglu(*ends.t(), 1.7, 7.0)
    torch.testing.assert_close(found, steps.clamped_swiglu(*ends.t(), 1.7, 7.0), equal_nan=True)
    assert found.isnan().tolist() == [True, True, False, False, False]
    for op in (torch.ops.ptq.silu_mul, torch.ops.ptq.gelu_mul):
        assert op(torch.full((4,), torch.nan), torch.ones(4)).isnan().all()
        far = torch.tensor([-3e38, -1e13, -200.0, 0.0, 200.0, 1e13, 3e38])
        assert torch.equal(op(far, torch.ones(7)), far.clamp(min=0) + 0.0)


def test_ops_and_refusals(level: str) -> None:
    x, gain = draw(1, 2, 8, dtype=torch.float32), draw(8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.ptq.rms_norm.default, (x, gain, 1e-5, 0.0, True))
    q, cos = draw(1, 2, 3, 8, dtype=torch.float32), draw(1, 3, 8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.ptq.rotary.default, (q, q.clone(), cos, cos.clone()))
    torch.library.opcheck(torch.ops.ptq.rotary_pairs.default, (q.bfloat16(), q.bfloat16(), cos, cos.clone()))
    torch.library.opcheck(torch.ops.ptq.silu_mul.default, (x, x.clone()))
    torch.library.opcheck(torch.ops.ptq.gelu_mul.default, (x, x.clone()))
    torch.library.opcheck(torch.ops.ptq.sigmoid_mul.default, (x, x.clone()))
    torch.library.opcheck(torch.ops.ptq.clamped_swiglu.default, (x, x.clone(), 1.7, 7.0))
    heads = draw(1, 1, 16, dtype=torch.float32)
    room = [draw(1, 2, 5, 8, dtype=torch.float32) for _ in "kv"]
    arguments = (heads, heads.clone(), heads.clone(), cos[:, :1], cos[:, 1:2], *room, 3, 0.3)
    torch.library.opcheck(torch.ops.ptq.decode_attention.default, arguments)
    torch.library.opcheck(torch.ops.ptq.decode_attention.default, (*arguments, torch.ones(1, 1, 1, 4).bool()))
    assert torch.ops.ptq.rms_norm(x[:, :0], gain, 1e-5, 0.0, True).shape == (1, 0, 8)
    for bad in (lambda: torch.ops.ptq.rms_norm(x, gain[:5], 1e-5, 0.0, True),
                lambda: torch.ops.ptq.rotary(q, q, cos[..., :3], cos[..., :3]),
                lambda: torch.ops.ptq.rotary(q, q, cos[..., :4], cos[..., :2]),
                lambda: torch.ops.ptq.rotary(q[..., :6], q, cos, cos),
                lambda: torch.ops.ptq.rotary(q.bfloat16(), q.bfloat16(), cos, cos),
                lambda: torch.ops.ptq.rotary_pairs(q, q, cos.bfloat16(), cos.bfloat16()),
                lambda: torch.ops.ptq.rotary_pairs(q, q, cos, cos[..., :4]),
                lambda: torch.ops.ptq.rotary_pairs(q, q, cos[:, :2], cos[:, :2])):  # fmt: skip
        with pytest.raises(RuntimeError):
            bad()


@pytest.mark.parametrize("cls, kind", [
    (LlamaRMSNorm, (0.0, True)), (Olmo2RMSNorm, (0.0, False)), (GemmaRMSNorm, (1.0, False)),
])  # fmt: skip
def test_norms_are_told_apart_by_their_numbers(cls: type[nn.Module], kind: tuple[float, bool]) -> None:
    assert rms_norm.kind_of(cls(40, eps=1e-4)) == (1e-4, *kind)


def test_norms_of_one_class_are_told_apart_by_what_they_hold() -> None:
    class Either(LlamaRMSNorm):
        def __init__(self, k: int, offset: float) -> None:
            super().__init__(k)
            self.offset = offset

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            turned = hidden_states.float()
            turned = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (turned * (self.offset + self.weight.float())).type_as(hidden_states)

    assert rms_norm.kind_of(Either(16, 0.0)) == (1e-6, 0.0, False)
    assert rms_norm.kind_of(Either(16, 1.0)) == (1e-6, 1.0, False)


def test_what_only_looks_like_a_norm_is_left_alone() -> None:
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 1.001

    class Wide(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.abs())

    for cls in (Other, Wide):
        assert rms_norm.kind_of(cls(40)) is None
    assert rms_norm.kind_of(nn.LayerNorm(8)) is None and rms_norm.kind_of(nn.Linear(3, 3)) is None


WITH_LAYER_NORM = {
    "nemotron", "jais2", "starcoder2", "stablelm", "olmo", "cohere", "cohere2", "phi", "gpt_neox", "cohere2_moe",
    "cohere_compass_text", "phimoe", "opt", "gpt2",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_of_every_family(family: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    fast = copy.deepcopy(plain)
    module_forwards.install(fast)
    norms = [
        m for m in fast.modules() if type(m).__name__.endswith("RMSNorm") and m._parameters.get("weight") is not None
    ]
    attention = [m for m in fast.modules() if re.search("(?<!Lightning)(?<!Delta)Attention$", type(m).__name__)]
    others = (
        "deepseek_v32", "glm_moe_dsa", "gemma4_text", "gpt_oss", "nemotron_h", "gemma4_unified_text",
        "jamba", "opt", "gpt2", "nanochat", "bailing_hybrid", "axk2", "llama4_text",
    )  # fmt: skip
    turned = family not in others  # as the ops do it
    has_gains = family not in WITH_LAYER_NORM and FAMILIES[family].norm_tensors
    assert bool(norms) >= has_gains and all("forward" in vars(m) for m in norms)
    replaced = turned or family in LATENT_ATTENTION or family == "gpt_oss"  # where decoded tokens go through an op
    assert attention and all(("forward" in vars(m)) == replaced for m in attention)
    ids = torch.arange(3, 12).reshape(1, -1)
    for count in (3, 9):
        some = ids[:, :count]
        torch.testing.assert_close(fast(some).logits, plain(some).logits, rtol=1e-4, atol=1e-5)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(again(ids[:, :2]).logits, fast(ids[:, :2]).logits)
        norm = again.get_submodule(FAMILIES[family].final_norm)
        assert not has_gains or norm.forward.args[0] is norm
    with torch.enable_grad():
        assert fast(ids[:, :2]).logits.requires_grad


@torch.no_grad()
def test_a_model_in_training_drops_what_it_dropped() -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        tiny_config("seed_oss", attention_dropout=0.0, residual_dropout=0.5)
    ).train()
    fast = copy.deepcopy(plain)
    module_forwards.install(fast)
    decoder_layer.install(fast)
    found = []
    for model in (plain, fast):
        torch.manual_seed(1)
        found.append(model(torch.arange(3, 5)[None]).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
