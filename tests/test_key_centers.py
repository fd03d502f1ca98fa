"""Centres of keys: how they are measured, what they are worth, and checkpoints that hold them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, quantize
from safetensors.torch import load_file
from tiny_models import CACHED, FAMILIES, save_model, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ptq
from ptq.errors import InputError
from ptq.hf.blocks import PartialModel
from ptq.kv import key_centers
from ptq.kv.attention import quantized
from ptq.kv.kv_cache import CacheQuantization, key_rotation
from ptq.models.model_shape import shape_of
from ptq.pipeline import stages
from ptq.statistics import key_means
from quarot.plan import QuarotRecipe, plan

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False, report=False)


def of_text(text: Path, **changes: Any) -> QuarotRecipe:
    common = dict(calibration=str(text), rounding="nearest", samples=4, sequence_length=32, key_bits=3)
    return QuarotRecipe(**{**common, **changes})


# --- the measure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "tokens", "limit"), [(1, 1, 1), (3, 5, 7), (4, 64, 512), (2, 1000, 131072)])
def test_positions_cover_all_that_the_model_has(rows: int, tokens: int, limit: int) -> None:
    found = key_means.spread(rows, tokens, limit)
    assert found.shape == (rows, tokens) and 0 <= int(found.min()) and int(found.max()) < limit
    assert (found.diff(dim=1) >= 0).all() and (found.diff(dim=0) >= 0).all()
    if rows * tokens > 100:
        assert int(found.min()) == 0 and int(found.max()) > 0.9 * limit
        octaves = [int(((found >= low) & (found < 2 * low)).sum()) for low in (limit // 4, limit // 2)]
        assert abs(octaves[0] - octaves[1]) < 0.25 * octaves[1]  # about as many in each


def test_where_the_positions_end() -> None:
    assert key_means.reach(tiny_config("llama", max_position_embeddings=77)) == 77
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}
    config = tiny_config("llama", max_position_embeddings=128)
    config.rope_parameters = {**long, "original_max_position_embeddings": 32}
    assert key_means.reach(config) == 32
    config.rope_parameters, config.original_max_position_embeddings = long, 48
    assert key_means.reach(config) == 48
    config.rope_parameters = {"full_attention": {**long, "original_max_position_embeddings": 16}}
    assert key_means.reach(config) == 16
    without_limit = SimpleNamespace(get_text_config=lambda: None)
    assert key_means.reach(without_limit) == key_means.POSITIONS


def test_the_centre_is_the_mean_key() -> None:
    """Against keys made by hand."""
    config = tiny_config("llama")
    model = tiny_model(config)
    part = PartialModel(config, FAMILIES["llama"], 1, torch.device("cpu"))
    part.load({name: x for name, x in model.state_dict().items() if name.startswith(part.prefix)})
    states = [torch.randn(2, 9, config.hidden_size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    implementation = part.model.config._attn_implementation
    found = key_means.centers(part, states)
    assert part.model.config._attn_implementation == implementation
    block, keys = model.model.layers[1], []
    for state in states:
        with torch.no_grad():
            key = block.self_attn.k_proj(block.input_layernorm(state)).unflatten(2, (-1, config.head_dim))
            cos_sin = model.model.rotary_emb(state, key_means.spread(2, 9, config.max_position_embeddings))
            keys.append(apply_rotary_pos_emb(*[key.transpose(1, 2)] * 2, *cos_sin)[1])
    torch.testing.assert_close(found, torch.cat(keys).double().mean((0, 2)), atol=1e-6, rtol=1e-5)


# --- what they are worth ---------------------------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_attention_does_not_see_a_centre() -> None:
    """In exact numbers nothing changes; of keys that lie far from zero, rounding loses far less."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    center = 20 * torch.randn(3, 16, generator=generator, dtype=torch.float64)
    far = k + center[:, None]
    wanted = attended(q, far, v)
    torch.testing.assert_close(attended(q, key_centers.without(far, center), v), wanted, atol=1e-10, rtol=1e-10)
    settings = CacheQuantization(4, 16, hadamard=key_rotation(16))
    turned = quantized(q, v, CacheQuantization(16, 16, hadamard=settings.hadamard), None)[0]
    errors = []
    for keys in (far, key_centers.without(far, center)):
        seen = quantized(keys.float(), v.float(), settings, None)[0].double()
        errors.append((attended(turned, seen, v) - wanted).norm() / wanted.norm())
    assert errors[1] < 0.2 and errors[0] > 4 * errors[1], errors


def test_keys_with_a_large_bias(tmp_path: Path, text: Path) -> None:
    """A bias in channels that hardly turn is the same for all tokens, and takes the range of the grid of each."""

    def biased(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.bias"):
                slow = tensor.view(-1, tensor.numel() // 2)[:, -4:]
                slow.copy_(40 * torch.ones_like(slow))

    folder = save_model(tmp_path / "model", "qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e9})
    edit_tensors(biased)(folder)
    kl = {}
    for centers in (True, False):
        recipe = of_text(text, weight_bits=16, key_bits=8, key_centers=centers)
        kl[centers] = ptq.quantize(folder, tmp_path / f"out{centers}", recipe, QUIET).kl
    assert kl[True] < 0.2 * kl[False]


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i * i % 17) + " " * (i % 5 == 0) for i in range(6000)))
    return path


@pytest.fixture
def packed(tmp_path: Path, text: Path) -> Path:
    out = tmp_path / "packed"
    ptq.quantize(save_model(tmp_path / "model"), out, of_text(text, value_bits=4), QUIET)
    return out


@pytest.mark.parametrize("model_type", CACHED)
def test_every_family(model_type: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is written, loaded, and used by a cache as without one."""
    measured: list[Tensor] = []
    own = key_means.centers
    monkeypatch.setattr(key_means, "centers", lambda *given: measured.append(own(*given)) or measured[-1])
    out = tmp_path / "out"
    ptq.quantize(save_model(tmp_path / "model", model_type), out, of_text(text, value_bits=4), QUIET)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    family, config = FAMILIES[model_type], model.config
    stored = load_file(out / "model.safetensors")
    names = [key_centers.tensor_name(family, index) for index in range(config.num_hidden_layers)]
    assert len(measured) == len(names) == sum(name.endswith(".key_center") for name in stored)
    for name, wanted in zip(names, measured, strict=True):
        assert torch.equal(stored[name], wanted.float()) and stored[name].abs().max() > 1e-3
        assert torch.equal(model.get_buffer(family.module_name(name)), stored[name])
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        begun = model(ids[:, :5])
        found = model(ids[:, 5:], past_key_values=begun.past_key_values).logits
    assert (found - wanted[:, 5:]).norm() < 0.05 * wanted[:, 5:].norm()


def test_without_text_or_on_request_there_are_none(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "model")
    for name, changes in (("no text", {"calibration": None}), ("none", {"key_centers": False})):
        out = tmp_path / name
        ptq.quantize(folder, out, of_text(text, **changes), QUIET)
        assert not any(tensor.endswith(".key_center") for tensor in load_file(out / "model.safetensors"))
        assert json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache"]["centered"] is False


def test_centres_alone_take_few_rows(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is fitted: `samples` are for weights."""
    rows: list[int] = []
    own = stages.embed
    monkeypatch.setattr(stages, "embed", lambda tasks, found: rows.append(len(found)) or own(tasks, found))
    folder = save_model(tmp_path / "model")
    for samples in (3, 40):
        ptq.quantize(folder, tmp_path / f"{samples}", of_text(text, samples=samples, weight_bits=16), QUIET)
    ptq.quantize(folder, tmp_path / "gptq", of_text(text, samples=20, rounding="gptq"), QUIET)
    assert rows == [8, 8, 20]


def test_a_short_text_is_enough(tmp_path: Path, text: Path) -> None:
    """As much of it as there is; a single row is measured and fitted to."""
    folder, short = save_model(tmp_path / "model"), tmp_path / "short.txt"
    for letters in (130, 1200):
        short.write_text(text.read_text()[:letters])
        result = ptq.quantize(folder, tmp_path / f"out{letters}", of_text(short, sequence_length=None), QUIET)
        assert result.text is not None and ("the model was fitted" in result.text) == (letters == 130)


def test_fewer_layers_than_the_files_have(packed: Path) -> None:
    with pytest.warns(UserWarning, match="the model has 1 blocks, and its files more"):
        model = AutoModelForCausalLM.from_pretrained(packed, num_hidden_layers=1)
    name = "model.layers.0.self_attn.key_center"
    assert torch.equal(model.get_buffer(name), load_file(packed / "model.safetensors")[name])


def test_a_block_that_ran_exactly_has_its_centres_again(tmp_path: Path) -> None:
    """As for GPTAQ, between two chunks of text."""
    config = tiny_config("llama")
    part = PartialModel(config, FAMILIES["llama"], 0, torch.device("cpu"))
    part.load({name: x for name, x in tiny_model(config).state_dict().items() if name.startswith(part.prefix)})
    part.quantize_cache(CacheQuantization(3, 4, hadamard=key_rotation(config.head_dim), centered=True))
    part.load({NAME: torch.randn(config.num_key_value_heads, config.head_dim)})
    state = torch.randn(1, 5, config.hidden_size)
    wanted = part.run(state)
    with part.exact():
        assert not torch.equal(part.run(state), wanted)
    assert torch.equal(part.run(state), wanted)


def test_saved_again_and_in_bfloat16(packed: Path, tmp_path: Path) -> None:
    stored = load_file(packed / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    name = "model.layers.1.self_attn.key_center"
    assert torch.equal(model.get_buffer(name), stored[name].bfloat16())
    AutoModelForCausalLM.from_pretrained(packed).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys() and torch.equal(again[name], stored[name])
    assert torch.equal(AutoModel.from_pretrained(packed).get_buffer(name.removeprefix("model.")), stored[name])
    assert quantize("verify", packed).exit_code == 0
    assert quantize("dequantize", packed, tmp_path / "plain").exit_code == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not any("key_center" in key for key in plain.state_dict())
    assert not any("key_center" in key for key in load_file(tmp_path / "plain" / "model.safetensors"))
    model.dequantize()
    assert not any("key_center" in key for key in model.state_dict())


def _uncentered(folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["kv_cache"]["centered"] = False
    path.write_text(json.dumps(content))


NAME = "model.layers.0.self_attn.key_center"
DAMAGE = {
    "missing": (edit_tensors(lambda x: x.pop(NAME)), f"tensor '{NAME}' is missing"),
    "shape": (edit_tensors(lambda x: x.update({NAME: x[NAME][:1].clone()})), "config.json promises floating-point"),
    "dtype": (edit_tensors(lambda x: x.update({NAME: x[NAME].int()})), f"tensor '{NAME}' is int32"),
    "unread": (_uncentered, "layers.0.self_attn.key_center', of which kv_cache"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(damage: str, packed: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(packed)
    (packed / "ptq.json").unlink()  # which knows what the files were
    with pytest.raises(InputError) as refusal:
        AutoModelForCausalLM.from_pretrained(packed)
    assert message in str(refusal.value)
    check_refused(quantize("verify", packed), message)


def test_a_number_out_of_range_is_found(packed: Path) -> None:
    edit_tensors(lambda x: x[NAME].fill_(torch.nan))(packed)
    (packed / "ptq.json").unlink()
    check_refused(quantize("verify", packed), NAME)


def test_the_plan_of_the_demo_counts_with_its_text(tmp_path: Path) -> None:
    for options, centered in ((), True), (("--no-key-centers",), False):
        shown = quantize("quarot", "demo", tmp_path / "out", "--kv-bits", 4, *options, "--plan")
        assert f"hadamard=sylvester:6 centered={centered}" in shown.stdout and "KV cache: without" not in shown.stderr


def test_records_of_runs_without_cached_keys_are_those_of_before() -> None:
    assert "key_centers" not in QuarotRecipe(value_bits=4).as_dict()
    assert QuarotRecipe(key_bits=4).as_dict()["key_centers"] is True


@pytest.mark.parametrize("head_dim", [66, 96])
def test_clips_where_no_matrix_mixes_a_whole_head(head_dim: int) -> None:
    """Those for channels that may be far larger than others; of 66 channels pairs are mixed, 96 are all."""
    config = tiny_config("llama", head_dim=head_dim, hidden_size=head_dim * 2, num_attention_heads=2)
    family, recipe = FAMILIES["llama"], QuarotRecipe(key_bits=2, value_bits=3)
    cache = plan(shape_of(config), family, recipe, {}).cache
    assert cache is not None
    assert (cache.key_clip, cache.value_clip) == ((0.9, 0.95) if head_dim == 66 else (0.6, 0.8))
