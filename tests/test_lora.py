"""Adapters by peft on packed linears."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantize
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora.config import KasaConfig
from tiny_models import save_model

from ptq.errors import InputError
from ptq.hf.loading import load_model
from ptq.hf.lora import PackedLora, prepared

IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
RUNS = {
    "fp6": ("fp6",),
    "quarot": ("quarot", "--rounding", "nearest"),
    "quip-sharp": ("quip-sharp", "--rounding", "nearest", "--activation-bits", "16"),
}


def packed(folder: Path, method: str = "fp6", model_type: str = "llama") -> Any:
    out = folder / f"{method}-{model_type}"
    if not out.exists():
        assert (
            quantize(RUNS[method][0], save_model(folder / "model", model_type), out, *RUNS[method][1:]).exit_code == 0
        )
    return load_model(out)


def trained(model: Any) -> Any:
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.03)
    losses = []
    for _ in range(8):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("method", RUNS)
def test_an_adapter_is_trained_saved_loaded_and_merged(method: str, tmp_path: Path) -> None:
    """On every packed linear, and no other; merged into the plain model, it gives the same logits."""
    model = packed(tmp_path, method)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    adapted = get_peft_model(model, prepared(config, model))
    assert sum(isinstance(module, PackedLora) for module in adapted.modules()) == 14
    assert config.target_modules == "all-linear" and config._custom_modules is None
    expected = logits(trained(adapted))
    adapted.save_pretrained(tmp_path / "adapter")
    again = packed(tmp_path, method)
    config = prepared(LoraConfig.from_pretrained(tmp_path / "adapter"), again)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(again, tmp_path / "adapter", config=config)), expected)
    plain: Any = PeftModel.from_pretrained(
        packed(tmp_path, method).dequantize(), tmp_path / "adapter"
    ).merge_and_unload()
    torch.testing.assert_close(logits(plain), expected, atol=1e-4, rtol=1e-4)


def test_what_needs_the_weight_is_refused(tmp_path: Path) -> None:
    model = packed(tmp_path)
    with pytest.raises(InputError, match="take adapters of a LoraConfig, found a IA3Config"):
        prepared(IA3Config(target_modules=["k_proj"], feedforward_modules=[]), model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a PromptTuningConfig asks nothing of linears: give it to peft as it is"):
        prepared(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), model)  # type: ignore[arg-type]
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"kasa_config": KasaConfig()}):
        with pytest.raises(InputError, match=rf"{next(iter(options))}.*model\.dequantize\(\)"):
            get_peft_model(model, prepared(LoraConfig(target_modules=["q_proj"], **options), model))  # type: ignore[arg-type]
    model = packed(tmp_path)
    adapted: Any = get_peft_model(model, prepared(LoraConfig(target_modules=["q_proj"]), model))
    before = logits(adapted)
    with pytest.raises(InputError, match="cannot be merged into packed weights"):
        adapted.merge_and_unload()
    assert torch.equal(logits(adapted), before)


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["embed_tokens"]},
     {"trainable_token_indices": [3]}, {"task_type": "SEQ_CLS"}],
    ids=str,
)  # fmt: skip
def test_what_is_trained_of_the_ends(options: Any, tmp_path: Path) -> None:
    """It would not fit the plain model that an adapter is merged into, whose ends are turned."""
    config = LoraConfig(**{"target_modules": ["q_proj"], **options})
    with pytest.warns(UserWarning, match=r"fits this packed model alone.* --offline"):
        prepared(config, packed(tmp_path, "quarot"))
    prepared(config, packed(tmp_path, "fp6"))  # says nothing


def test_experts(tmp_path: Path) -> None:
    model = packed(tmp_path, model_type="qwen3_moe")
    for targets in (["q_proj", "gate_proj"], ["model.layers.1.mlp.experts.0.up_proj"], ".*_proj"):
        with pytest.raises(InputError, match="peft puts no adapter on experts"):
            prepared(LoraConfig(target_modules=targets), model)
    adapted = get_peft_model(model, prepared(LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"), model))
    found = {name.rpartition(".")[2] for name, module in adapted.named_modules() if isinstance(module, PackedLora)}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trained(adapted)


def test_which_linears_are_all(tmp_path: Path) -> None:
    """Those inside of an adapter, too; without what is excluded; of a plain model, none."""
    model = packed(tmp_path)
    get_peft_model(model, prepared(LoraConfig(target_modules=["q_proj"]), model))
    names = set(prepared(LoraConfig(target_modules="all-linear"), model).target_modules or ())
    assert len(names) == 14 and "model.layers.0.self_attn.q_proj" in names
    mamba = packed(tmp_path / "mamba", model_type="falcon_h1")  # where peft puts none on out_proj
    get_peft_model(mamba, prepared(LoraConfig(target_modules="all-linear", exclude_modules=["out_proj"]), mamba))
    with pytest.raises(InputError, match="no linear of the model is packed"):
        prepared(LoraConfig(target_modules="all-linear"), load_model(tmp_path / "model"))


def test_a_model_that_no_gradient_passes(tmp_path: Path) -> None:
    assert (
        quantize("quip-sharp", save_model(tmp_path / "model"), tmp_path / "out", "--rounding", "nearest").exit_code == 0
    )
    with pytest.raises(InputError, match=r"no gradient passes .* --activation-bits 16"):
        prepared(LoraConfig(target_modules=["q_proj"]), load_model(tmp_path / "out"))
