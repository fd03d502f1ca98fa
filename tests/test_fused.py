"""Fused projections: one linear of the checkpoint, whose rows play several roles. The oracle is a Llama with the same
numbers in separate linears."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import by_role, check_refused, quantize
from interrupted_runs import check_all_continue, photographed
from interrupted_runs import recipe as gptq
from safetensors.torch import load_file, save_file
from test_fast_layer import counted_layers
from tiny_models import TINY, decode, save_model, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import ptq
from ptq.errors import InputError
from ptq.fast import module_forwards
from ptq.fast.layers import found_layer
from ptq.fast.steps import gated_mlp
from ptq.files.checkpoint import Checkpoint
from ptq.hf.packed_config import PtqConfig
from ptq.kv.packed_cache import PackedCache
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.models.model_shape import shape_of
from ptq.pipeline import rewrite
from ptq.pipeline.job import Job
from ptq.planning.outline import first_row
from ptq.planning.plan import Plan
from quarot.plan import QuarotRecipe, plan

QUIET = ptq.RunOptions(progress=False, report=False)
PLAIN = QuarotRecipe(rounding="nearest")
FOUR = QuarotRecipe(rounding="nearest", activation_bits=8, key_bits=4, value_bits=4)
SIZES = {"query": 80, "key": 40, "value": 40, "attention_output": 72, "gate": 152, "up": 152, "down": 72}
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
IDS = torch.arange(3, 60).reshape(1, -1)


def plan_of(recipe: QuarotRecipe = PLAIN, **row: Any) -> Plan:
    family = dataclasses.replace(FAMILIES["phi3"], **row)
    return plan(shape_of(tiny_config("phi3")), family, recipe, {})


def test_rows_stand_in_the_order_of_the_roles() -> None:
    shape = shape_of(tiny_config("phi3"))
    wanted = {"query": 0, "key": 80, "value": 120, "attention_output": 0, "gate": 0, "up": 152, "down": 0}
    assert {role: first_row(role, shape, FAMILIES["phi3"]) for role in SIZES} == wanted
    assert not any(first_row(role, shape, FAMILIES["llama"]) for role in SIZES)
    made = plan_of(dataclasses.replace(PLAIN, key_bits=4))
    assert {role: part.n for role, part in by_role(made, 0).items()} == SIZES
    for linear in made.linears:
        first = 0
        for part in linear.parts:
            assert first == wanted[part.role]
            first += part.n
    key, up = by_role(made, 1)["key"].balance, by_role(made, 1)["up"].balance
    assert key is not None and up is not None and (key.first, up.first) == (80, 152)


def test_one_linear_is_rounded_and_listed() -> None:
    made = plan_of()
    block = {linear.name.removeprefix("model.layers.0."): linear for linear in made.block(0)}
    assert list(block) == ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert [(linear.n, linear.k) for linear in block.values()] == [(160, 72), (72, 80), (304, 72), (72, 152)]
    qkv = block["self_attn.qkv_proj"]
    assert (qkv.role, qkv.statistics, qkv.output) == ("query+key+value", qkv.name, None) and qkv.format is not None
    assert not any(part.statistics or part.format for part in qkv.parts)
    assert qkv.name in PtqConfig.of(made).linears
    assert plan_of(dataclasses.replace(PLAIN, rotate=False)).linears[1].parts == ()
    kept = plan_of(dataclasses.replace(PLAIN, skip=("*.qkv_proj",))).linears[1]
    assert kept.format is None and [part.role for part in kept.parts] == ["query", "key", "value"]
    with pytest.raises(InputError, match="matches no linear.*qkv_proj"):
        plan_of(dataclasses.replace(PLAIN, skip=("*.q_proj",)))


def test_biases_are_rewritten_part_by_part(tmp_path: Path) -> None:
    """No family has one yet."""
    folder, generator = save_model(tmp_path / "model", "phi3"), torch.Generator().manual_seed(0)
    source = load_file(folder / "model.safetensors")
    biases = {f"model.layers.0.{name}.bias": len(source[f"model.layers.0.{name}.weight"]) for name in FUSED}
    source |= {name: torch.randn(n, generator=generator) for name, n in biases.items()}
    source["model.layers.0.self_attn.qkv_proj.bias"][100] = 1e4  # of a key
    save_file(source, folder / "model.safetensors", {"format": "pt"})
    made, row = plan_of(dataclasses.replace(PLAIN, key_bits=4)), FAMILIES["phi3"]
    signs = {name: rewrite.draw_signs(name, length, 0) for name, length in made.signs.items()}
    job = Job(Checkpoint.open(folder), None, row, PLAIN, made, signs, torch.device("cpu"))
    for role in ("query", "key", "value", "gate", "up"):
        part, first = by_role(made, 0)[role], first_row(role, shape_of(tiny_config("phi3")), row)
        linear = made.linear(part.name)
        assert linear is not None
        found, b = job.bias(linear), source[f"{part.name}.bias"]
        assert found is not None and len(found) == len(b)
        found, b = (x[first : first + SIZES[role]] for x in (found, b))
        assert torch.equal(found, rewrite.bias(part, b, signs, job._factor(part)))
        assert torch.equal(found, b.double()) == (role == "gate")


# --- a Llama with the same numbers ----------------------------------------------------------------------------------


def pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A Phi-3 that turns whole heads, and a Llama with its numbers in separate linears."""
    fused = save_model(folder / "phi3", "phi3", partial_rotary_factor=1.0, **changes)
    separate = save_model(folder / "llama", "llama", attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5, **changes)
    tensors = load_file(fused / "model.safetensors")
    for name in list(tensors):
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        for linear, names in FUSED.items():
            if f"{owner}.{leaf}".endswith(linear):
                sizes = (80, 40, 40) if len(names) == 3 else (152, 152)
                pieces = tensors.pop(name).split(sizes)
                tensors |= {f"{owner}.{n}.weight": w.contiguous() for n, w in zip(names, pieces, strict=True)}
    save_file(tensors, separate / "model.safetensors", {"format": "pt"})
    return fused, separate


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


@pytest.mark.parametrize("recipe", [FOUR, dataclasses.replace(FOUR, online=False, rotate=False)], ids=["W4A8KV4", "no"])
def test_codes_are_those_of_separate_linears(
    recipe: QuarotRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rounded one by one, so every stored number is the same."""
    models = pair(tmp_path)
    torch.testing.assert_close(logits(models[0]), logits(models[1]), rtol=1e-5, atol=1e-5)
    outs = [tmp_path / f"out {model.name}" for model in models]
    for model, out in zip(models, outs, strict=True):
        ptq.quantize(model, out, recipe, QUIET)
    fused, separate = (load_file(out / "model.safetensors") for out in outs)
    for name, tensor in fused.items():
        linear = next((linear for linear in FUSED if f".{linear}." in name), None)
        if linear is None:
            assert torch.equal(tensor, separate[name]), name
        elif not name.endswith(".weight"):  # the guard
            parent = linear.partition(".")[0]
            pieces = [separate[name.replace(linear, f"{parent}.{part}")] for part in FUSED[linear]]
            assert torch.equal(tensor, torch.cat(pieces)), name
    torch.testing.assert_close(logits(outs[0]), logits(outs[1]), rtol=1e-4, atol=1e-4)
    counts, calls, op_of = [], counted_layers(monkeypatch), found_layer._op_of
    monkeypatch.setattr(found_layer, "_op_of", lambda linears: counts.append(len(linears)) or op_of(linears))
    for batch in (1, 3):
        found, wanted = (decode(AutoModelForCausalLM.from_pretrained(out), batch) for out in outs)
        assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))
    assert counts == [4, 4, 7, 7] * 2 and calls == [2] * 16  # weights of a layer in one call


class Swapped(Phi3MLP):
    """Its gate stands behind up."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(hidden_states).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))


@torch.no_grad()
def test_a_fused_gate_of_few_tokens_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls, down = tiny_config("phi3"), [], gated_mlp.down
    assert gated_mlp.gate_of(Swapped(config)) is None
    monkeypatch.setattr(gated_mlp, "down", lambda *given: calls.append(1) or down(*given))
    for mlp in (Phi3MLP(config).eval(), Glm4MLP(config).eval()):
        assert gated_mlp.gate_of(mlp) == gated_mlp.SILU
        fast = copy.deepcopy(mlp)
        module_forwards.install(fast)
        for tokens in (1, 16, 17):
            x = torch.randn(1, tokens, 72, generator=torch.Generator().manual_seed(tokens))
            torch.testing.assert_close(fast(x), mlp(x), rtol=1e-5, atol=1e-6)
    assert len(calls) == 4


# --- through the command --------------------------------------------------------------------------------------------


COMMANDS = {
    "quarot": ("--activation-bits", 8, "--kv-bits", 4, "--group-size", 8),
    "quip-sharp": ("--bits", 4),
    "quip-sharp blocks": ("--bits", 2, "--finetune", "blocks", "--finetune-epochs", 1),
    "fp6": (),
    "fp6 rotate": ("--rotate",),
    "rotate": (),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_method_through_the_command(name: str, calibration_text: Path, tmp_path: Path, fast: None) -> None:
    model, out, method = save_model(tmp_path / "model", "phi3"), tmp_path / "out", name.partition(" ")[0]
    text = ("--calibration", calibration_text, "--samples", 16, "--sequence-length", 32) if method[0] == "q" else ()
    done = quantize(method, model, out, *COMMANDS[name], *text)
    assert done.exit_code == 0, done.output
    checked = quantize("verify", out, "--against", model, "--text", calibration_text)
    assert checked.exit_code == 0, checked.output
    loaded = AutoModelForCausalLM.from_pretrained(out)
    qkv = loaded.model.layers[1].self_attn.qkv_proj
    assert (type(qkv) is QuantLinear) == (method != "rotate")
    loaded.generation_config.eos_token_id = None
    inputs = AutoTokenizer.from_pretrained(out)("once upon", return_tensors="pt", return_token_type_ids=False)
    settings: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    made = loaded.generate(**inputs, **settings)
    assert (type(made.past_key_values) is PackedCache) == (name == "quarot")
    ids = inputs["input_ids"]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, loaded(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made.sequences, ids)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_plan_in_words(tmp_path: Path) -> None:
    shown = quantize(
        "quarot", save_model(tmp_path / "model", "phi3"), tmp_path / "out", "--rounding", "nearest", "--plan"
    )
    assert shown.exit_code == 0
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if "model.layers" in line}
    assert "value: 2 x H20 signs R2.*" in lines["model.layers.*.self_attn.qkv_proj"]
    assert "up: signs R4.*" in lines["model.layers.*.mlp.gate_up_proj"]


def test_a_crash_costs_nothing(tmp_path: Path, fast: None) -> None:
    model = save_model(tmp_path / "model", "phi3", **TINY, num_hidden_layers=1)
    asked = gptq(model, key_bits=4, value_bits=4, activation_bits=8)
    pictures, expected = photographed(model, tmp_path, asked)
    check_all_continue(pictures[::6], expected, model, asked)


# --- rotary embedding, windows --------------------------------------------------------------------------------------

LONG = dict(
    head_dim=16, hidden_size=64, original_max_position_embeddings=16, partial_rotary_factor=0.75, rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
        short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    ),
)  # fmt: skip
"""As Phi-4-mini has it: three quarters of every head, and other frequencies beyond 16 tokens."""


@pytest.mark.parametrize("changes", [LONG, dict(sliding_window=8), dict(partial_rotary_factor=1.0)],
                         ids=["longrope", "window", "whole heads"])  # fmt: skip
@torch.no_grad()
def test_longrope_and_windows(changes: dict[str, Any], tmp_path: Path) -> None:
    """Rotated, it is the original on both sides of the switch; `generate` passes that with the packed cache."""
    model = save_model(tmp_path / "model", "phi3", **changes)
    result = ptq.quantize(model, tmp_path / "rotated", dataclasses.replace(PLAIN, weight_bits=16), QUIET)
    assert result.rotation_error < 1e-5
    original, rotated = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "rotated"))
    for ids in (IDS[:, :12], IDS):
        torch.testing.assert_close(rotated(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    ptq.quantize(model, tmp_path / "out", FOUR, QUIET)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed.generation_config.eos_token_id = None
    made = packed.generate(IDS[:, :12], max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert type(made.past_key_values) is PackedCache
    ids = IDS[:, :12]
    for _ in range(10):
        ids = torch.cat([ids, packed(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made.sequences, ids)


@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_a_share_of_a_head_that_cannot_be_turned_is_refused(factor: float, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "phi3")
    path = model / "config.json"
    path.write_text(path.read_text().replace('"partial_rotary_factor": 0.5', f'"partial_rotary_factor": {factor}'))
    check_refused(quantize("fp6", model, tmp_path / "out"), "partial_rotary_factor must be above 0 and at most 1")
