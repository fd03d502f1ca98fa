"""The text model of a model that also reads images, quantised alone (`ptq.hf.text_model`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ptq
from ptq.errors import InputError
from ptq.pipeline.pipeline import plan
from quarot.plan import QuarotRecipe

TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=96)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
EYES = dict(depth=1, embed_dim=32, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
MROPE = dict(rope_type="default", rope_theta=1000.0, mrope_section=[2, 3, 3])
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=12, linear_value_head_dim=20,
    rope_parameters=dict(MROPE, mrope_section=[1, 2, 1], partial_rotary_factor=0.5),
)  # fmt: skip
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"model_type": "gemma3_text"}, {"model_type": "siglip_vision_model", **VISION}),
    "mistral3": ("mistral", {"model_type": "mistral"}, {"model_type": "pixtral", **VISION}),
    "llava": ("llama", {"model_type": "llama"}, {"model_type": "clip_vision_model", **VISION}),
    "qwen2_vl": ("qwen2", {"rope_parameters": MROPE}, {**EYES, "hidden_size": 64}),
    "qwen2_5_vl": ("qwen2", {"rope_parameters": MROPE}, EYES),
    "qwen3_vl": ("qwen3", {"rope_parameters": MROPE}, {**EYES, "deepstack_visual_indexes": [0]}),
    "qwen3_5": ("qwen3_5_text", LINEAR, EYES),
}
"""The type that the text model is taken as, its settings, and those of the other."""
IDS = torch.arange(3, 33).reshape(2, 15)
NEAREST = QuarotRecipe(rounding="nearest")
QUIET = ptq.RunOptions(progress=False, report=False)


def whole(model_type: str, tied: bool) -> Any:
    _, text, vision = WHOLE[model_type]
    config = CONFIG_MAPPING[model_type](
        text_config={**TEXT, **text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = torch.rand_like(parameter) + 0.5
        elif "language_model" in name or "lm_head" in name:
            parameter.data = torch.randn_like(parameter) * (0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(params=[(name, tied) for name in WHOLE for tied in (True, False)], ids=str)
def saved(request: Any, tmp_path: Path) -> tuple[str, bool, Path, torch.Tensor]:
    model = whole(*request.param)
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        return *request.param, tmp_path / "whole", model(IDS).logits


def test_the_text_model_alone(saved: tuple[str, bool, Path, torch.Tensor], tmp_path: Path) -> None:
    model_type, tied, folder, wanted = saved
    result = quantize("rotate", folder, tmp_path / "rotated")
    assert result.exit_code == 0, result.output
    assert f"{model_type}: the text model alone is taken ({WHOLE[model_type][0]})" in result.stderr.replace("\n", " ")
    config = json.loads((tmp_path / "rotated" / "config.json").read_bytes())
    assert config["model_type"] == WHOLE[model_type][0] and "vision_config" not in config
    assert config["architectures"][0].endswith("ForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rotated", dtype=torch.float32).eval()
    assert type(model).__name__ == config["architectures"][0]
    with torch.no_grad():
        found = model(IDS).logits
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    with safe_open(tmp_path / "rotated" / "model.safetensors", "pt") as file:
        assert all(name.startswith(("model.", "lm_head.")) for name in file.keys())


def test_quantised_and_compared_with_the_whole(saved: tuple[str, bool, Path, torch.Tensor], tmp_path: Path) -> None:
    _, _, folder, wanted = saved
    ptq.quantize(folder, tmp_path / "packed", QuarotRecipe(rounding="nearest", weight_bits=8), QUIET)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        assert (model(IDS).logits - wanted).norm() < 0.05 * wanted.norm()
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 18)
    result = quantize("verify", tmp_path / "packed", "--against", folder)
    assert result.exit_code == 0, result.output
    assert "KL" in result.output


def test_a_text_model_that_transformers_does_not_list(tmp_path: Path) -> None:
    """Mistral Small 4: transformers has the class of its text model, but among those that read images alone."""
    kind: Any = CONFIG_MAPPING["mistral3"]
    config = kind(text_config=tiny_config("mistral4").to_dict(), vision_config={"model_type": "pixtral", **VISION})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "whole")
    ptq.quantize(tmp_path / "whole", tmp_path / "packed", QuarotRecipe(rounding="nearest", weight_bits=8), QUIET)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert type(packed).__name__ == "Mistral4ForCausalLM"
    with torch.no_grad():
        wanted, found = model(IDS).logits, packed(IDS).logits
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_a_model_that_hears_is_verified_like_one_that_sees(tmp_path: Path) -> None:
    ears = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=8)
    kind: Any = CONFIG_MAPPING["voxtral"]
    config = kind(text_config={"model_type": "llama", **TEXT}, audio_config=ears)
    torch.manual_seed(0)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(tmp_path / "whole")
    ptq.quantize(tmp_path / "whole", tmp_path / "packed", NEAREST, QUIET)
    result = quantize("verify", tmp_path / "packed", "--against", tmp_path / "whole")
    assert result.exit_code == 0, result.output
    assert "KL 0.0" in result.output


def test_names_of_newer_files_are_known(tmp_path: Path) -> None:
    """`model.language_model.` in front, the head outside."""
    whole("llava", False).save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        renamed[name] = tensor
    save_file(renamed, file, {"format": "pt"})
    target = plan(str(tmp_path / "whole"), NEAREST)
    assert "lm_head.weight" in target.checkpoint.tensors and "model.norm.weight" in target.checkpoint.tensors
    assert "are left out" in target.plan.notes[0]


def test_an_older_qwen_with_its_settings_in_one_object(tmp_path: Path) -> None:
    """As Qwen 2.5 VL was published: no text_config, `mrope` a type of RoPE, the text model's tensors without prefix."""
    model = whole("qwen2_5_vl", False)
    model.save_pretrained(tmp_path / "whole")
    path, file = tmp_path / "whole" / "config.json", tmp_path / "whole" / "model.safetensors"
    config = json.loads(path.read_bytes())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": 1000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert rope["rope_theta"] == 1000.0 and "hidden_size" in flat
    path.write_text(json.dumps(flat))
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    renamed = {}
    for name, tensor in load_file(file).items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    assert "model.norm.weight" in renamed and "visual.merger.mlp.0.weight" in renamed
    save_file(renamed, file, {"format": "pt"})
    assert quantize("rotate", tmp_path / "whole", tmp_path / "rotated").exit_code == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "rotated", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (found(IDS).logits - model(IDS).logits).norm() < 1e-5 * model(IDS).logits.norm()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": {"model_type": "glm4v_text"}}, "a text model of type 'glm4v_text' inside"),
        ({"text_config": {"model_type": ["llama"]}}, "a text model of type ['llama'] inside"),
        ({"text_config": {}}, "a text model of type None inside"),
        ({"text_config": 3}, "model_type 'llava' is not supported"),
        ({"text_config": {"model_type": "llama", "hidden_size": "x"}}, "config.json: transformers refuses it"),
    ],
    ids=str,
)
def test_what_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    whole("llava", False).save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    result = quantize("quarot", tmp_path / "whole", tmp_path / "out", "--rounding", "nearest")
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_not_found_is_refused(tmp_path: Path) -> None:
    """It must not be taken for one that is tied."""
    whole("llava", False).save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    head = "language_model.lm_head.weight"
    tensors[f"thinker.{head}"] = tensors.pop(head)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"is called language_model.lm_head.weight or lm_head.weight; .*thinker"):
        plan(str(tmp_path / "whole"), NEAREST)


def test_a_text_model_of_a_family_that_ties_its_head_may_keep_silent(tmp_path: Path) -> None:
    """Where the whole model says that nothing of its own is tied."""
    whole("gemma3", True).save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_bytes()) | {"tie_word_embeddings": False}
    config["text_config"].pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config))
    assert plan(str(tmp_path / "whole"), NEAREST).config.tie_word_embeddings
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="tensors that may be it: none"):
        plan(str(tmp_path / "whole"), NEAREST)


def test_files_without_a_text_model_are_refused(tmp_path: Path) -> None:
    whole("llava", False).save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    save_file({f"text.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(InputError, match="no tensor of the files is called"):
        plan(str(tmp_path / "whole"), NEAREST)
