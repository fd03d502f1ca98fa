"""The text model of a model that also reads images, quantised alone (`ptq.text_model`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ptq
from ptq.errors import InputError
from ptq.pipeline import plan
from quarot.plan import QuarotRecipe

TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=96)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
WHOLE = {
    "gemma3": ("gemma3_text", "siglip_vision_model"),
    "mistral3": ("mistral", "pixtral"),
    "llava": ("llama", "clip_vision_model"),
}
"""The types of the text model and of the other."""
IDS = torch.arange(3, 33).reshape(2, 15)
NEAREST = QuarotRecipe(rounding="nearest")
QUIET = ptq.RunOptions(progress=False, report=False)


def whole(model_type: str, tied: bool) -> Any:
    text, vision = WHOLE[model_type]
    config = CONFIG_MAPPING[model_type](
        text_config={"model_type": text, **TEXT, "tie_word_embeddings": tied},
        vision_config={"model_type": vision, **VISION},
        tie_word_embeddings=tied,
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
        assert (model(IDS).logits - wanted).norm() < 0.02 * wanted.norm()
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 18)
    result = quantize("verify", tmp_path / "packed", "--against", folder)
    assert result.exit_code == 0, result.output
    assert "KL" in result.output


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": {"model_type": "qwen3_vl_text"}}, "a text model of type 'qwen3_vl_text' inside"),
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


def test_files_without_a_text_model_are_refused(tmp_path: Path) -> None:
    whole("llava", False).save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    save_file({f"text.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(InputError, match="no tensor of the files is called"):
        plan(str(tmp_path / "whole"), NEAREST)
