"""Few tokens through plain layers: `ptq::dense_linear` at every level, and a loaded model that uses it."""

import copy
from typing import Any, cast

import pytest
import torch
from tiny_models import save_model, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ptq
from ptq.fast import whole_model
from ptq.fast.attention import attention_function, decoded_attention
from ptq.fast.layers import decoder_layer
from ptq.fast.steps import dense_products, rms_norm, rotary_embedding
from ptq.ops import matmul
from quarot.plan import QuarotRecipe

SHAPES = [(1, 1), (3, 63), (50, 64), (17, 200), (64, 1000)]  # n, k


def draw(n: int, k: int, t: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    return [torch.randn(size, generator=generator).to(dtype) for size in ((t, k), (n, k), (n,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, k", SHAPES)
def test_against_float64(n: int, k: int, dtype: torch.dtype, level: str) -> None:
    x, w, bias = draw(n, k, 7, dtype)
    exact = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().abs().t() + bias.double().abs()
    half_a_place = 2**-8 if dtype == torch.bfloat16 else 2**-24
    for b, wanted in ((None, exact), (bias, exact + bias.double())):
        y = torch.ops.ptq.dense_linear(x, w, b)
        error = (y.double() - wanted).abs()
        assert y.dtype == dtype and (error <= size * 2**-20 + wanted.abs() * half_a_place).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_tokens_and_threads(dtype: torch.dtype, level: str) -> None:
    x, w, bias = draw(300, 900, 7, dtype)
    alone = torch.cat([torch.ops.ptq.dense_linear(row, w, bias)[None] for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for t in range(8):
                assert torch.equal(torch.ops.ptq.dense_linear(x[:t], w, bias), alone[:t])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n, k", SHAPES)
def test_a_bfloat16_weight_meets_float32_tokens(n: int, k: int, level: str) -> None:
    x, w, bias = draw(n, k, 5, torch.float32)
    w = w.bfloat16()
    y, exact = torch.ops.ptq.dense_linear(x, w, bias), x.double() @ w.double().t() + bias.double()
    size = x.double().abs() @ w.double().abs().t() + bias.double().abs()
    assert y.dtype == torch.float32 and ((y.double() - exact).abs() <= size * 2**-20).all()
    assert torch.equal(torch.cat([matmul.linear(row[None], w, bias) for row in x]), y)
    torch.testing.assert_close(matmul.linear(x, w, bias), y, rtol=1e-4, atol=1e-3)
    for wrong in ((x.bfloat16(), w.float(), None), (x, w, bias.bfloat16())):
        with pytest.raises(RuntimeError):
            torch.ops.ptq.dense_linear(*wrong)


def test_damage_shows(level: str) -> None:
    x, w, _ = draw(5, 70, 1, torch.bfloat16)
    x[0, 69] = torch.nan
    assert torch.ops.ptq.dense_linear(x, w, None).isnan().all()
    x[0, 69], w[:, 69] = 1, torch.inf
    assert (torch.ops.ptq.dense_linear(x, w, None) == torch.inf).all()


def test_views_and_refusals() -> None:
    x, w, _ = draw(6, 64, 4, torch.float32)
    half_x, half_w = x[:, ::2], w[:, ::2]
    wanted = torch.ops.ptq.dense_linear(half_x.contiguous(), half_w.contiguous(), None)
    assert torch.equal(torch.ops.ptq.dense_linear(half_x, half_w, None), wanted)
    with pytest.raises(RuntimeError):
        torch.ops.ptq.dense_linear(x, w[:, :63], None)
    torch.library.opcheck(torch.ops.ptq.dense_linear.default, (x, w, None))


@pytest.mark.parametrize("k", [1, 31, 64, 100, 2048])
def test_the_numbers_of_a_weight_alone_matter(k: int, level: str) -> None:
    """Not whether they are stored as float32 or as bfloat16."""
    x, w = torch.randn(3, k), torch.randn(9, k).bfloat16()
    assert torch.equal(*(torch.ops.ptq.dense_linear(x, weight, None) for weight in (w, w.float())))


def test_what_it_is_made_for() -> None:
    serves = matmul.dense_linear_serves
    x, w, bias = draw(6, 64, matmul.FEW_TOKENS + 1, torch.float32)
    assert serves(x[:-1], w, bias) and not serves(x, w, bias)
    assert not serves(x[:0], w, bias) and not serves(x[:1].half(), w.half(), None)
    assert serves(x[:1], w.bfloat16(), None) and not serves(x[:1].bfloat16(), w, None)
    assert not serves(x[:1], w.to("meta"), None)
    learned = w.clone().requires_grad_()
    matmul.linear(x[:1], learned, None).sum().backward()
    assert learned.grad is not None and torch.equal(learned.grad, x[:1].expand(6, -1))
    with torch.no_grad():
        assert serves(x[:1], learned, None)


@torch.no_grad()
def test_the_default_dtype_of_the_caller_changes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "PIECE_BYTES", 1 << 13)  # some rows at a time
    x, w = torch.randn(64, 128), torch.randn(96, 128)
    wanted = matmul.linear(x, w, None)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(matmul.linear(x, w, None), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_autocast_gives_one_dtype_for_any_number_of_tokens() -> None:
    x, w, _ = draw(6, 64, matmul.FEW_TOKENS + 1, torch.float32)
    plain = dense_products.FewTokensLinear(64, 6, bias=False)
    plain.weight.copy_(w)
    with torch.autocast("cpu", torch.bfloat16):
        for tokens in (1, matmul.FEW_TOKENS, matmul.FEW_TOKENS + 1):
            assert plain(x[:tokens]).dtype == torch.bfloat16
            assert torch.equal(plain(x[:tokens]), torch.nn.functional.linear(x[:tokens], plain.weight))
    assert plain(x[:1]).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("tokens", [1, matmul.FEW_ROWS])
@torch.no_grad()
def test_forward_derivatives_of_plain_products(tokens: int) -> None:
    x, w, _ = draw(6, 64, tokens, torch.float32)
    dx = draw(6, 64, tokens + 1, torch.float32)[0][1:]
    plain = dense_products.FewTokensLinear(64, 6, bias=False)
    plain.weight.copy_(w)
    for product in (plain, lambda x: matmul.linear(x, w, None), lambda x: matmul.product(x, w.t())):
        torch.testing.assert_close(torch.func.jvp(product, (x,), (dx,))[1], dx @ w.t())


@pytest.mark.parametrize("heads, groups, d", [(8, 2, 16), (6, 1, 24), (4, 4, 8)])
def test_attention_is_that_of_torch(heads: int, groups: int, d: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    key, value = (torch.randn(2, groups, 33, d, generator=generator) for _ in range(2))
    module = nn.Module()
    object.__setattr__(module, "num_key_value_groups", heads // groups)
    for tokens in (1, 3):
        query = torch.randn(2, heads, tokens, d, generator=generator)
        mask = torch.rand(2, 1, tokens, 33, generator=generator) < 0.5
        for m in (None, mask):
            found, _ = attention_function.attention(module, query, key, value, m, scaling=0.3, is_causal=False)
            wanted, _ = sdpa_attention_forward(module, query, key, value, m, scaling=0.3, is_causal=False)
            torch.testing.assert_close(found, wanted)


def test_a_loaded_model(tmp_path) -> None:
    """Decoding step by step gives the logits of a whole sequence, and saving gives the same tensors."""
    source = save_model(tmp_path / "source")
    ptq.quantize(source, tmp_path / "out", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(model.lm_head) is dense_products.FewTokensLinear and isinstance(model.lm_head, nn.Linear)
    assert model.config._attn_implementation == attention_function.ATTENTION
    ids = torch.randint(model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, cache, steps = model(ids).logits, None, []
        for i in range(ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache, steps = out.past_key_values, [*steps, out.logits]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert torch.equal(copy.deepcopy(model).lm_head.weight, model.lm_head.weight)


def test_continuous_batching() -> None:
    """transformers takes no attention but its own for that, and gives ours back."""
    model: Any = tiny_model(tiny_config("llama"))
    whole_model.install(model)
    rows = [list(range(4, 16)), list(range(20, 27))]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = [model.generate(torch.tensor([row]), generation_config=settings)[0, len(row) :].tolist() for row in rows]
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    found = model.generate_batch(rows, settings, small, warmup=False)
    assert [row.generated_tokens for row in found.values()] == wanted
    assert model.config._attn_implementation == attention_function.ATTENTION


@torch.no_grad()
def test_a_gate_is_known_by_its_activation_not_by_its_class() -> None:
    ids, logits = torch.arange(3, 6)[None], {}
    for order in (("silu", "gelu"), ("gelu", "silu")):
        for activation in order:
            plain = tiny_model(tiny_config("llama", hidden_act=activation))
            fast = copy.deepcopy(plain)
            whole_model.install(fast)
            torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
            logits[activation] = plain(ids).logits
    assert not torch.allclose(logits["silu"], logits["gelu"], atol=1e-3)


@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")])
def test_defaults_of_the_caller_change_nothing(dtype: torch.dtype, device: str) -> None:
    """Scripts set them before they load a model; what a module is, is remembered for the process."""
    usual = tiny_model(tiny_config("qwen3"))
    other = copy.deepcopy(usual)
    whole_model.install(usual)
    found = decoded_attention._tried, rms_norm._tried, decoder_layer._tried, rotary_embedding.with_fast_rotary
    for remembered in found:
        cast(Any, remembered).cache_clear()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            whole_model.install(other)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert [installed(module) for module in other.modules()] == [installed(module) for module in usual.modules()]
    assert decoded_attention.kind_of(other.get_decoder().layers[0].self_attn) == decoded_attention.AttentionKind(
        "heads", in_part=False, gated=False
    )


def installed(module: nn.Module) -> tuple[Any, ...] | None:
    """The forward that was put into a module, and what it was told of it."""
    forward: Any = vars(module).get("forward")
    if isinstance(forward, decoder_layer.FastForward):
        return decoder_layer.FastForward, forward.on_cpu.layout
    return None if forward is None else (forward.func, *(x for x in forward.args if isinstance(x, str | float | bool)))


def test_installing_leaves_the_random_numbers_of_the_caller_alone() -> None:
    model = tiny_model(tiny_config("qwen3", head_dim=12))  # of a kind that no other test has tried
    before = torch.get_rng_state()
    whole_model.install(model)
    assert torch.equal(torch.get_rng_state(), before)
