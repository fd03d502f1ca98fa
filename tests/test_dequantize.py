"""A packed model as a plain one: `quantize dequantize`, and `model.dequantize()`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, listing, quantize
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import TINY, WRITTEN_PLAIN, save_model
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from ptq.errors import InputError
from ptq.hf.loading import load_model
from ptq.hf.lora import prepared
from ptq.layers.packed_weight import PackedWeight
from ptq.models.families import FAMILIES
from ptq.pipeline.proof import largest_error

IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
EXACT = {
    "fp6": ("fp6", "--embedding-bits", "8"),
    "quarot": ("quarot", "--rounding", "nearest"),
    "quip-sharp": ("quip-sharp", "--rounding", "nearest", "--activation-bits", "16"),
}
"""Runs whose models round nothing when they run."""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def check_plain(folder: Path, packed: Path) -> None:
    """A plain checkpoint computes what the packed one does, in memory and in files."""
    stated = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in stated
    expected = logits(load_model(packed))
    assert largest_error(logits(load_model(folder)), expected) < 1e-5
    model = load_model(packed)
    assert model.dequantize() is model
    assert largest_error(logits(model), expected) < 1e-5
    assert not hasattr(model.config, "quantization_config") and not model.is_quantized
    assert not any(isinstance(module, PackedWeight) for module in model.modules())


@pytest.mark.parametrize("tied", [False, True], ids=["two ends", "tied"])
@pytest.mark.parametrize("method", EXACT)
def test_every_method(method: str, tied: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tie_word_embeddings=tied)
    assert quantize(EXACT[method][0], model, tmp_path / "out", *EXACT[method][1:]).exit_code == 0
    result = quantize("dequantize", tmp_path / "out", tmp_path / "plain")
    count = 14 + (0 if method != "fp6" else 1 if tied else 2)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'plain'}: {count} weights as plain numbers\n")
    check_plain(tmp_path / "plain", tmp_path / "out")
    assert (tmp_path / "plain" / "tokenizer.json").is_file()


FAMILIES_OF_KINDS = (
    "gemma", "gemma4_text", "qwen3_moe", "granitemoehybrid", "olmo", "nanochat", "deepseek_v3", "qwen3_next",
    "gpt_neox",
)  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES_OF_KINDS)
def test_families(model_type: str, tmp_path: Path) -> None:
    """Norms with an offset, or without gains; experts; mixers; other names; tied, where they can be."""
    model = save_model(tmp_path / "model", model_type)
    assert quantize("quarot", model, tmp_path / "out", "--rounding", "nearest", "--embedding-bits", "8").exit_code == 0
    assert quantize("dequantize", tmp_path / "out", tmp_path / "plain").exit_code == 0
    check_plain(tmp_path / "plain", tmp_path / "out")


def test_the_numbers_that_the_codes_stand_for(tmp_path: Path) -> None:
    """Without rotations, the weight is what the format says; in the dtype of the config."""
    model = save_model(tmp_path / "model", dtype=torch.bfloat16, **TINY)
    assert quantize("fp6", model, tmp_path / "out", "--element", "e4m2").exit_code == 0
    assert quantize("dequantize", tmp_path / "out", tmp_path / "plain").exit_code == 0
    plain, source = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "model"))
    assert plain.keys() == source.keys()
    packed = load_model(tmp_path / "out")
    for name, tensor in plain.items():
        assert tensor.dtype == torch.bfloat16 and tensor.shape == source[name].shape
        if name.endswith("proj.weight"):
            module: Any = packed.get_submodule(name.removesuffix(".weight"))
            expected = module.format.dequantize(module.parts(), *tensor.shape).bfloat16()
            assert torch.equal(tensor, expected) and not torch.equal(tensor, source[name])
        else:
            assert torch.equal(tensor, source[name])


def test_it_is_said_what_a_plain_model_does_not_round(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", **TINY)
    options = ("--rounding", "nearest", "--activation-bits", "8", "--kv-bits", "4")
    assert quantize("quarot", model, tmp_path / "out", *options).exit_code == 0
    result = quantize("dequantize", tmp_path / "out", tmp_path / "plain")
    assert "rounds inputs of linears, in 8 bits;" in result.stdout and "rounds keys and values" in result.stdout
    made: Any = load_model(tmp_path / "out").dequantize()
    assert largest_error(logits(made), logits(load_model(tmp_path / "plain"))) < 1e-6
    assert largest_error(logits(made), logits(load_model(tmp_path / "out"))) > 1e-3
    made(input_ids=IDS, labels=IDS).loss.backward()


def test_settings_of_generation_stay(tmp_path: Path) -> None:
    assert quantize("fp6", save_model(tmp_path / "model", **TINY), tmp_path / "out").exit_code == 0
    model: Any = load_model(tmp_path / "out")
    model.generation_config.temperature = 0.37
    assert model.dequantize().generation_config.temperature == 0.37


@pytest.mark.parametrize("tied", [False, True], ids=["two ends", "tied"])
def test_the_model_keeps_what_is_set_on_it(tied: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tie_word_embeddings=tied)
    options = ("--rounding", "nearest", "--kv-bits", "4")
    assert quantize("quarot", model, tmp_path / "out", *options).exit_code == 0
    packed: Any = load_model(tmp_path / "out")
    seen: list[Any] = []
    packed.register_forward_hook(lambda *_: seen.append(_))
    packed.mine, name = 1, packed.name_or_path
    packed.requires_grad_(False)
    packed.train().dequantize()
    assert packed.training and packed.model.layers[0].training and packed.mine == 1
    assert packed.name_or_path == packed.config.name_or_path == name == str(tmp_path / "out")
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    packed.eval()
    assert logits(packed).isfinite().all() and len(seen) == 1
    assert isinstance(packed(IDS).past_key_values, DynamicCache)
    assert packed.generate(IDS[:1], max_new_tokens=2, do_sample=False).shape == (1, 26)
    packed.save_pretrained(tmp_path / "saved")
    assert largest_error(logits(load_model(tmp_path / "saved")), logits(packed)) < 1e-6


def test_a_model_that_was_saved_is_made_plain_all_the_same(tmp_path: Path) -> None:
    """Saving leaves the name of the dtype in the config."""
    model = save_model(tmp_path / "model", dtype=torch.bfloat16, **TINY)
    quantize("fp6", model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded.save_pretrained(tmp_path / "again")
    plain = loaded.dequantize()
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}


def test_the_attention_that_was_chosen_stays(tmp_path: Path) -> None:
    assert quantize("fp6", save_model(tmp_path / "model"), tmp_path / "out").exit_code == 0
    for chosen, found in ((None, "sdpa"), ("eager", "eager")):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=chosen)
        assert model.dequantize().config._attn_implementation == found


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    """Its tensors have other names, for which transformers would draw numbers."""
    assert quantize("fp6", save_model(tmp_path / "model"), tmp_path / "out").exit_code == 0
    model: Any = load_model(tmp_path / "out")
    adapted: Any = get_peft_model(model, prepared(LoraConfig(target_modules=["q_proj"]), model))
    expected = logits(model)
    with pytest.raises(InputError, match="adapters that were put into it must be taken out first"):
        model.dequantize()
    assert torch.equal(logits(model), expected) and model.is_quantized
    assert largest_error(logits(adapted.unload().dequantize()), logits(load_model(tmp_path / "out"))) < 1e-5


def test_weights_on_a_disk_are_refused(tmp_path: Path) -> None:
    assert quantize("fp6", save_model(tmp_path / "model"), tmp_path / "out").exit_code == 0
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
              "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", device_map=places, offload_folder=tmp_path / "off"
    )
    with pytest.raises(InputError, match="not in memory; use `quantize dequantize`"):
        model.dequantize()


def test_what_comes_out_of_it_can_be_trained_and_quantised(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", **TINY)
    assert quantize("quip-sharp", model, tmp_path / "out", "--rounding", "nearest").exit_code == 0
    made: Any = load_model(tmp_path / "out").dequantize(torch.float32)
    made(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    made.save_pretrained(tmp_path / "saved")
    assert largest_error(logits(load_model(tmp_path / "saved")), logits(made)) < 1e-6
    assert quantize("dequantize", tmp_path / "out", tmp_path / "plain").exit_code == 0
    assert quantize("fp6", tmp_path / "plain", tmp_path / "again").exit_code == 0


def test_a_model_without_a_head(tmp_path: Path) -> None:
    """Of a model whose ends turn, the last norm gives vectors that are turned back, which no plain norm does."""
    for tied in (False, True):
        model, out = save_model(tmp_path / f"model{tied}", tie_word_embeddings=tied), tmp_path / f"out{tied}"
        assert quantize("quarot", model, out, "--rounding", "nearest").exit_code == 0
        packed: Any = AutoModel.from_pretrained(out).eval()
        if tied:
            with pytest.raises(InputError, match="without its head"):
                packed.dequantize()
            continue
        with torch.no_grad():
            expected = packed(IDS).last_hidden_state
            assert largest_error(packed.dequantize()(IDS).last_hidden_state, expected) < 1e-5


def test_bad_input(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", **TINY)
    check_refused(quantize("dequantize", model, tmp_path / "out"), "is not quantised: its weights are plain numbers")
    assert quantize("fp6", model, tmp_path / "out").exit_code == 0
    before = listing(tmp_path)
    check_refused(
        quantize("dequantize", tmp_path / "out", model),
        "model: holds a model; nothing in it was touched. Name another folder",
    )
    assert listing(tmp_path) == before


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss"])
def test_families_of_another_form(model_type: str, tmp_path: Path) -> None:
    assert model_type not in WRITTEN_PLAIN and FAMILIES[model_type]
    model = save_model(tmp_path / "model", model_type)
    assert quantize("fp6", model, tmp_path / "out").exit_code == 0
    check_refused(
        quantize("dequantize", tmp_path / "out", tmp_path / "plain"), "transformers reads its weights in another"
    )
    assert not (tmp_path / "plain").exists()
