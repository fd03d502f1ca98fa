"""What a model does on a GPU, on the CPU: every decision is made as there, ops run on references or CPU kernels."""

import copy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fp6.minifloat import MinifloatFormat
from fp6.plan import Fp6Recipe
from ptq.fast import module_forwards
from ptq.fast.attention import attention_function
from ptq.fast.layers import decoder_layer, gpu_layer
from ptq.fast.layers.merged import merge
from ptq.layers.linear import QuantLinear
from ptq.layers.ready_products import CURRENT, ReadyProducts
from ptq.models.families import FAMILIES
from ptq.ops import hadamard, input_steps, matmul, prefill_attention, steps
from ptq.weights import layouts
from quarot.integer import IntegerFormat
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
CPU = torch.device("cpu")
RECIPES = {
    "W4A16": QuarotRecipe(rounding="nearest", group_size=32),
    "W4A4": QuarotRecipe(rounding="nearest", activation_bits=4),
    "E8P": QuipSharpRecipe(rounding="nearest"),
    "FP6": Fp6Recipe(),
    "cache": QuarotRecipe(rounding="nearest", key_bits=4, value_bits=4),
    "mixed": QuarotRecipe(rounding="nearest", group_size=32, widths=("*.v_proj=8", "*.up_proj=2", "*.down_proj=6")),
}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that counts launches."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import count_launches  # pyright: ignore[reportMissingImports]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield count_launches
    for name in ("count_launches", "random_packed_model"):
        sys.modules.pop(name, None)


def logits(model: Any, count: ModuleType, ids: Tensor) -> Tensor:
    """Of a prompt and of two tokens behind it."""
    cache = count.packed.cache_of(model, 16)
    found = [model(ids, past_key_values=cache, position_ids=torch.arange(ids.shape[1])[None]).logits]
    for i in range(2):
        at = torch.tensor([[ids.shape[1] + i]])
        mask = torch.arange(16) <= at[:, None, :, None]
        more = model(ids[:, i : i + 1], past_key_values=cache, position_ids=at, attention_mask=mask)
        found.append(more.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_a_model_is_the_same_to_the_bit(name: str, count: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four tokens, both ways use the ops of `ptq.ops.steps`; attention over a plain cache is torch's, as it is on
    a GPU in float32."""
    monkeypatch.setattr(prefill_attention, "cpu_ops_serve", lambda *tensors: False)
    model = count.packed.build(RECIPES[name], count.packed.config_of("tiny"), CPU, torch.float32)
    ids = torch.tensor([[5, 9, 200]])
    wanted = logits(model, count, ids)
    calls, run = [], gpu_layer.run
    monkeypatch.setattr(gpu_layer, "run", lambda *given: calls.append(run(*given)) or calls[-1])
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    assert torch.equal(logits(model, count, ids), wanted)
    assert len(calls) == 6 and None not in calls


@torch.no_grad()
def test_the_sum_behind_a_layer_is_left_to_the_next_one(count: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody listens to a layer, or trains one."""
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    model = count.packed.build(RECIPES["W4A16"], count.packed.config_of("tiny"), CPU, torch.float32)
    ids, calls, run = torch.tensor([[5, 9]]), [], gpu_layer.run
    monkeypatch.setattr(gpu_layer, "run", lambda *given: calls.append(given[2]) or run(*given))
    wanted = model(ids).logits
    assert [added is None for added in calls] == [True, False]
    heard = []
    handle = model.model.layers[1].register_forward_hook(lambda layer, given, y: heard.append(y))
    assert torch.equal(model(ids).logits, wanted) and len(heard) == 1
    assert [added is None for added in calls[2:]] == [True, True]
    handle.remove()
    assert torch.equal(model(ids).logits, wanted) and calls[5] is not None
    model.model.layers[1].train()
    torch.testing.assert_close(model(ids).logits, wanted)
    assert len(calls) == 7  # its own code ran


@torch.no_grad()
def test_who_listens_and_who_trains_gets_the_modules_own_code(
    count: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = count.packed.build(RECIPES["W4A16"], count.packed.config_of("tiny"), CPU, torch.float32)
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    ids, heard = torch.tensor([[5, 9]]), []
    wanted = model(ids).logits
    for listened in (model.model.layers[0].mlp.gate_proj, model.model.layers[1].mlp.down_proj):
        handle = listened.register_forward_hook(lambda *given: heard.append(given[1][0].shape))
        assert torch.equal(model(ids).logits, wanted)
        handle.remove()
    assert [shape[-1] for shape in heard] == [128, 256]
    calls, run = [], gpu_layer.run
    monkeypatch.setattr(gpu_layer, "run", lambda *given: calls.append(run(*given)) or calls[-1])
    with torch.enable_grad():
        model(ids)  # something inside of attention may want a gradient, though nothing here does
        assert calls and calls == [None] * len(calls)
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        y = model(inputs_embeds=x).logits
        y.sum().backward()
    torch.testing.assert_close(y, wanted)
    assert x.grad is not None and x.grad.norm() > 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_plain_model_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotary embeddings and gates of any number of tokens."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    fast = copy.deepcopy(plain)
    module_forwards.install(fast)
    decoder_layer.install(fast)
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    ids = torch.arange(3, 22).reshape(1, -1)
    torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_model_that_moves(count: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged weights are made anew on another device, and let go on the CPU."""
    found, steps_of, ids = [], gpu_layer.steps_of, torch.tensor([[5, 9]])
    monkeypatch.setattr(gpu_layer, "steps_of", lambda *parts: found.append(steps_of(*parts)) or found[-1])
    model = count.packed.build(RECIPES["W4A16"], count.packed.config_of("tiny"), CPU, torch.float32)
    with monkeypatch.context() as gpu:
        gpu.setattr(matmul, "lies_on_gpu", lambda x: True)
        wanted = model(ids).logits
        assert torch.equal(model(ids).logits, wanted) and len(found) == len(model.model.layers)
        gpu.setattr(gpu_layer.Steps, "is_over", lambda steps: steps is found[0] or steps is found[1])
        assert torch.equal(model(ids).logits, wanted) and len(found) == 2 * len(model.model.layers)
    known = [layer.forward.on_gpu for layer in model.model.layers]
    assert all(one.found is not None for one in known)
    model(ids)
    assert all(one.found is None for one in known)


def test_a_layer_that_changes_what_attention_is_given_is_left_alone() -> None:
    class Shifted(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, position_ids: Any = None, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, position_ids=None, **kwargs)  # pyright: ignore

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1)
    for cls, known in ((LlamaDecoderLayer, True), (Shifted, False)):
        holder = nn.ModuleList([cls(config, 0)])
        decoder_layer.install(holder)
        assert ("forward" in vars(holder[0])) == known


def test_a_mask_becomes_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.rand(1, 1, 3, 5) < 0.5
    assert attention_function._additive(mask, torch.float32, 0) is mask  # on a CPU
    monkeypatch.setattr(matmul, "lies_on_gpu", lambda x: True)
    made = [attention_function._additive(mask, torch.float32, layer) for layer in (0, 1, 4, 0, 1)]
    assert made[0] is made[1] is made[2] is not made[3] is made[4]  # the second forward makes its own
    assert made[4] is not None and torch.equal(made[4] == 0, mask) and torch.equal(made[4] == -torch.inf, ~mask)
    assert attention_function._additive(made[0], torch.float32, 5) is made[0]
    assert attention_function._additive(None, torch.float32, 5) is None
    mask[0, 0, 0] = True
    changed = attention_function._additive(mask, torch.float32, 2)
    assert changed is not None and torch.equal(changed == 0, mask)
    assert attention_function._additive(mask, torch.bfloat16, 3).dtype == torch.bfloat16  # pyright: ignore
    assert len(attention_function._LAST) == 1
    del mask
    assert not attention_function._LAST


def test_products_that_wait_are_for_one_input() -> None:
    a, x, y = nn.Linear(2, 3), torch.ones(2), torch.ones(3)
    given = ReadyProducts(x, {a: y})  # pyright: ignore[reportArgumentType]
    with given:
        assert CURRENT.given is given
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: CURRENT.given).result() is None
        assert given.product(a, x.clone()) is None  # pyright: ignore[reportArgumentType]
        assert given.product(a, x) is y and given.product(a, x) is None  # pyright: ignore[reportArgumentType]
    assert CURRENT.given is None


# --- the ops --------------------------------------------------------------------------------------------------------


def test_ops_are_what_they_are_made_of() -> None:
    generator = torch.Generator().manual_seed(0)
    x, added, up = (torch.randn(2, 3, 96, generator=generator) for _ in range(3))
    gain, signs = torch.rand(96, generator=generator), torch.randint(0, 2, (96,), generator=generator) * 2.0 - 1
    factors, order = hadamard.dense_factors(12, CPU)
    for bits in (0, 8):
        for treatment in ((None, [], 0, bits, 0.9), (signs, factors, order, bits, 0.9)):
            inputs = x, added, gain, 1e-5, 0.0, True, *treatment
            total, *seen = torch.ops.ptq.norm_input(*inputs)
            alone = torch.ops.ptq.norm_input(total, None, *inputs[2:])
            y = torch.ops.ptq.rms_norm(x + added, gain, 1e-5, 0.0, True)
            gated = torch.ops.ptq.gate_input(x, up, *treatment)
            assert torch.equal(total, x + added) and len(seen) == (2 if bits else 1)
            for found, plain in ((seen, y), (alone, y), (gated, steps.silu_mul(x, up))):
                turned = hadamard.apply(plain, signs, order) if treatment[2] else plain
                if bits:
                    assert found[0].dtype == torch.int8 and found[1].shape == (2, 3)
                    error = found[0] * found[1][..., None] - turned
                    assert (error.abs() <= 0.51 * found[1][..., None] + 0.11 * turned.abs()).all()
                else:
                    torch.testing.assert_close(found[0], turned)
            torch.library.opcheck(
                torch.ops.ptq.norm_input.default, inputs, test_utils=("test_schema", "test_faketensor")
            )
            torch.library.opcheck(
                torch.ops.ptq.gate_input.default, (x, up, *treatment), test_utils=("test_schema", "test_faketensor")
            )
    back = input_steps.transformed_back(x, signs, hadamard.construction(12), torch.bfloat16)
    assert torch.equal(back, hadamard.apply(x, signs, 12, transpose=True).bfloat16())


def test_a_linear_is_its_treatment_its_product_and_its_end(count: ModuleType) -> None:
    model = count.packed.build(RECIPES["E8P"], count.packed.config_of("tiny"), CPU, torch.float32)
    linear: QuantLinear = model.model.layers[0].mlp.down_proj
    x = torch.randn(2, 256)
    seen = torch.ops.ptq.gate_input(x, torch.ones(2, 256), *linear.treatment())
    found = linear.output_of(linear.product_of(seen, x.dtype), x.dtype)
    assert torch.equal(found, linear(torch.ops.ptq.silu_mul(x, torch.ones(2, 256))))


# --- merged weights -------------------------------------------------------------------------------------------------


def packed_linears(form: Any, sizes: tuple[int, ...], bias: bool) -> list[QuantLinear]:
    generator, linears = torch.Generator().manual_seed(0), []
    for n in sizes:
        linear = QuantLinear(64, n, bias, form)
        for name, parameter in linear.named_parameters():
            if name == "weight_scale":
                drawn = torch.rand(parameter.shape, generator=generator).add(0.5).bfloat16().view(torch.int16)
            elif parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator)
            else:
                top = 16 if name == "weight_zero" else 256  # of codes of four bits
                drawn = torch.randint(0, top, parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(drawn)
        linears.append(linear)
    return linears


@pytest.mark.parametrize(
    "form", [IntegerFormat(4, 32, False), IntegerFormat(3, 0, True), MinifloatFormat("e2m3")], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_merged_weights(form: Any, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layouts.LAYOUTS, "cpu", "fragments")
    linears = packed_linears(form, (32, 16, 48), bias)
    stored = [copy.deepcopy(linear.state_dict()) for linear in linears]
    for linear in linears:
        linear.prepack()
    x = torch.randn(3, 5, 64)
    seen = [(x,), torch.ops.ptq.quantize_tokens(x, 8, 1.0)]
    wanted = [[linear.product_of(given, x.dtype) for linear in linears] for given in seen]
    merged = merge(linears)
    assert merged is not None and merged.is_whole() and merged.rows == (32, 16, 48)
    for given, alone in zip(seen, wanted, strict=True):
        again = [linear.product_of(given, x.dtype) for linear in linears]
        for found in (merged.products(given, x.dtype), again):
            assert all(map(torch.equal, found, alone))
    for linear, state in zip(linears, stored, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in linear.state_dict().items())
    linears[1].load_state_dict({**stored[1], "weight_scale": 2 * stored[1]["weight_scale"]})
    twice = merge(linears)
    assert twice is not None and not torch.equal(twice.products((x,), x.dtype)[1], wanted[0][1])
    assert torch.equal(twice.products((x,), x.dtype)[2], wanted[0][2])
    linears[0]._parameters["weight_fragments"].data = twice.parts["fragments"][:2].clone()  # pyright: ignore
    assert not twice.is_whole()


def test_weights_that_do_not_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    form = IntegerFormat(4, 32, True)
    assert merge(packed_linears(form, (32, 32), False)) is None  # not in fragments
    monkeypatch.setitem(layouts.LAYOUTS, "cpu", "fragments")
    for sizes, other in (((32, 24), form), ((32, 32), IntegerFormat(3, 32, True))):
        linears = [*packed_linears(form, sizes[:1], False), *packed_linears(other, sizes[1:], False)]
        for linear in linears:
            linear.prepack()
        assert merge(linears) is None


def test_launches_are_those_of_the_documents(count: ModuleType) -> None:
    """docs/results.md, "CUDA kernels"."""
    for name, before, now in (("INT4 W4A16", 47, 11), ("E8P W2A8", 67, 22)):
        launches = [sum(count.of_layer(count.VARIANTS[name], ours).values()) for ours in (False, True)]
        assert launches == [before, now]
