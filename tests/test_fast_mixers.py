"""Mixers that keep a state decode by the ops of `ptq.ops.mixer_ops`: the logits of the models' own code."""

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fast_layer import counted_layers
from tiny_models import decode, save_model, tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
    mamba2_selective_state_update,
)
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_update
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

import ptq
from ptq.fast import whole_model
from ptq.fast.layers import cpu_layer
from ptq.fast.mixers import delta_net, gated_norm, mixer_forwards, mixer_steps, state_space
from quarot.plan import QuarotRecipe

OPS = (
    "conv_step", "causal_conv", "gated_delta_rule", "gated_rms_norm", "delta_net_step", "mamba2_scan", "mamba2_step",
)  # fmt: skip
PROMPT = {"causal_conv", "gated_delta_rule", "gated_rms_norm"}
MAMBA2 = {"causal_conv", "mamba2_scan"}
FAMILIES = {
    "qwen3_next": PROMPT | {"conv_step"},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), PROMPT | {"delta_net_step"}),
    **dict.fromkeys(("granitemoehybrid", "bamba", "nemotron_h"), MAMBA2 | {"gated_rms_norm", "mamba2_step"}),
    "falcon_h1": MAMBA2 | {"conv_step"}, "lfm2": {"causal_conv", "conv_step"},
}  # fmt: skip


class Called(TorchDispatchMode):
    """The ops of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ptq":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def models(family: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    fast = copy.deepcopy(plain)
    whole_model.install(fast)
    return plain, fast


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    plain, fast = models(family)
    for batch in (1, 3):
        with Called() as called:
            found = decode(fast, batch)
        assert {name for name in called.names if name in OPS} == FAMILIES[family]
        for a, b in zip(found, decode(plain, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ids = torch.arange(4, 14).reshape(2, 5)
    for more in ({}, {"num_beams": 2}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}):
        assert torch.equal(
            *(m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **more) for m in (fast, plain))
        )


def test_states_are_those_of_the_own_code() -> None:
    caches = []
    with torch.no_grad():
        for model in models("qwen3_5_text"):
            cache = model(torch.arange(4, 10)[None], use_cache=True).past_key_values
            for token in (5, 7, 9):
                model(torch.tensor([[token]]), past_key_values=cache)
            caches.append(cache)
    compared = 0
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("conv_states", "recurrent_states"):
            for x, y in zip(getattr(a, name, {}).values(), getattr(b, name, {}).values(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared >= 2


def test_a_state_that_nobody_asks_for_stays() -> None:
    step, state = (
        mixer_steps.step_for("torch_recurrent_gated_delta_rule", torch_recurrent_gated_delta_rule),
        torch.ones(1, 2, 4, 4),
    )
    assert step is not None
    given = dict(g=-torch.ones(1, 1, 2), beta=torch.ones(1, 1, 2), initial_state=state)
    assert step(*(torch.ones(1, 1, 2, 4) for _ in range(3)), **given)[1] is None
    assert torch.equal(state, torch.ones(1, 2, 4, 4))


def test_numbers_of_other_dtypes_go_the_own_way() -> None:
    """A and the state in bfloat16; z in float32 beside bfloat16."""
    step = mixer_steps.step_for("mamba2_selective_state_update", mamba2_selective_state_update)
    assert step is not None
    torch.manual_seed(0)
    x, dt, b, c = (torch.randn(2, *shape, dtype=torch.bfloat16) for shape in ((4, 6), (4,), (1, 5), (1, 5)))
    for dtype, z in ((torch.bfloat16, None), (torch.float32, torch.randn(2, 4, 6))):
        decay = torch.rand(4).neg().to(dtype)[:, None, None].expand(4, 6, 5)
        results = []
        for each in (step, mamba2_selective_state_update):
            state = torch.ones(2, 4, 6, 5, dtype=dtype)
            given = dict(dt_softplus=True, z=z)
            results.append((each(state, x, dt[..., None].expand(2, 4, 6), decay, b, c, **given), state))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.03)


def test_gradients_and_hooks_go_the_own_way() -> None:
    plain, fast = models("qwen3_5_text")
    for model in (plain, fast):
        model(torch.arange(4, 10)[None], use_cache=False).logits.sum().backward()
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
    mixer = next(module for module in fast.modules() if hasattr(module, "conv1d"))
    called: list[str] = []
    mixer.conv1d._hf_hook = types.SimpleNamespace(
        pre_forward=lambda module: called.append("before"), post_forward=lambda module, y: called.append("behind")
    )
    for a, b in zip(decode(fast), decode(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert called == ["before", "behind"] * 5


def test_what_only_looks_like_it_is_left_alone() -> None:
    def other(hidden_states: Tensor, conv_state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_conv1d_update(hidden_states, conv_state, *args, **kwargs) * 1.01

    def forgets(hidden_states: Tensor, conv_state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_conv1d_update(hidden_states, conv_state.clone(), *args, **kwargs)

    def in_16_bits(hidden_states: Tensor, conv_state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_conv1d_update(hidden_states, conv_state, *args, **kwargs).bfloat16()

    def slower(*args: Any, **kwargs: Any) -> Any:
        y, state = torch_recurrent_gated_delta_rule(*args, **kwargs)
        return y, state * 0.99

    convolution, delta = "causal_conv1d_update", "torch_recurrent_gated_delta_rule"
    assert mixer_steps.step_for(convolution, causal_conv1d_update) is not None
    assert mixer_steps.step_for(delta, torch_recurrent_gated_delta_rule) is not None
    for name, function in (
        (convolution, other),
        (convolution, forgets),
        (convolution, in_16_bits),
        (delta, slower),
        (delta, causal_conv1d_update),
    ):
        assert mixer_steps.step_for(name, function) is None

    class Twice(Qwen3_5RMSNormGated):
        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states, gate)

    another = Qwen3_5RMSNormGated(8)
    another.activation = "sigmoid"
    assert mixer_forwards.forward_of(Qwen3_5RMSNormGated(8)) is not None
    assert mixer_forwards.forward_of(GraniteMoeHybridRMSNormGated(8, 4)) is not None
    for module in (another, Twice(8), nn.Linear(3, 3), nn.RMSNorm(8)):
        assert mixer_forwards.forward_of(module) is None


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    mixer_forwards._with_steps.cache_clear()
    gated_norm._matches.cache_clear()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
    assert any(mixer_forwards.forward_of(module) is not None for module in model.modules())
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    "family, mixers",
    [("qwen3_5_text", delta_net), *((name, state_space) for name in ("granitemoehybrid", "nemotron_h"))],
)
def test_a_trial_recommends_no_other_package(family: str, mixers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(hub_kernels.logger, "warning_once", said.append)
    mixers._matches.cache_clear()
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert any(mixers.kind_of(module) is not None for module in model.modules()) and not said


# --- delta nets and state spaces in a packed model ------------------------------------------------------------------


PARAMETERS = {
    "qwen3_5_text": ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_a.weight", "in_proj_b.weight"),
    "granitemoehybrid": ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight"),
}
"""By family: what a mixer has besides packed linears."""


@pytest.fixture(params=PARAMETERS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    ptq.quantize(
        save_model(tmp_path / "source", request.param),
        tmp_path / "packed",
        QuarotRecipe(rounding="nearest"),
        ptq.RunOptions(report=False),
    )
    return AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of every call."""
    own, calls = cpu_layer.DECODE, []
    monkeypatch.setattr(cpu_layer, "DECODE", lambda layers, *rest: calls.append(len(layers)) or own(layers, *rest))
    return calls


def by_its_own_code(model: Any) -> Any:
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "GatedDeltaNet", "MambaLayer")):
            del module.forward
    return model


def is_close(model: Any) -> bool:
    pairs = zip(decode(model), decode(by_its_own_code(model)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)


@torch.no_grad()
def test_a_layer_sees_what_becomes_of_its_mixer(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, net = counted(monkeypatch), next(m for m in packed.modules() if hasattr(m, "conv1d"))
    before = decode(packed)
    assert sum(calls) == 8  # two layers, four tokens
    for name in PARAMETERS[packed.config.model_type]:
        parameter = net.get_parameter(name)
        parameter.data = parameter.data.flip(0) + 0.3
        after = decode(packed)
        assert not torch.equal(after[-1], before[-1]) and is_close(packed), name
        before = after
    calls.clear()
    decode(packed.to(torch.bfloat16))
    assert sum(calls) == 8
    calls.clear()

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    packed.to(torch.float32)
    if hasattr(net, "in_proj_a"):
        net.in_proj_a.__class__ = Doubled
        assert is_close(packed) and sum(calls) == 4  # the other layer
        net.in_proj_a.__class__ = nn.Linear
        decode(packed)
    for name in ("A_log", "dt_bias"):
        parameter = net.get_parameter(name)
        calls.clear()
        parameter.data = parameter.data.double()
        assert is_close(packed) and sum(calls) == 4, name
        parameter.data = parameter.data.float()
        decode(packed)


@pytest.mark.parametrize("place", range(6))
def test_what_learns_in_a_mixer(place: int, packed: Any) -> None:
    name = PARAMETERS[packed.config.model_type][place]
    for parameter in packed.parameters():
        parameter.requires_grad_(False)
    next(m for m in packed.modules() if hasattr(m, "conv1d")).get_parameter(name).requires_grad_()
    with torch.no_grad():
        cache = packed(torch.arange(4, 10)[None], use_cache=True).past_key_values
    assert packed(torch.tensor([[5]]), past_key_values=cache).logits.requires_grad


@pytest.mark.parametrize(
    "family, others",
    [("qwen3_5_text", {}), ("granitemoehybrid", {}), ("granitemoehybrid", dict(position_embedding_type="rope"))],
)
def test_mixers_and_attention_are_one_call(
    family: str, others: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ["linear_attention"] * 2 + ["full_attention", "linear_attention"]
    source = save_model(tmp_path / "source", family, num_hidden_layers=4, layer_types=types, **others)
    ptq.quantize(source, tmp_path / "packed", QuarotRecipe(rounding="nearest"), ptq.RunOptions(report=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    single, calls = copy.deepcopy(model), counted_layers(monkeypatch)
    for module in single.modules():
        if type(module).__name__.endswith(("DecoderLayer", "TextModel", "HybridModel")):
            vars(module).pop("forward", None)
    for batch in (1, 3):
        calls.clear()
        assert all(torch.equal(a, b) for a, b in zip(decode(model, batch), decode(single, batch), strict=True))
        assert calls == [4] * 4
    calls.clear()
    ids, mask = torch.arange(4, 14).reshape(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    given = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(*(m.generate(ids, **given) for m in (model, single))) and calls == [2, 1, 1] * 3
