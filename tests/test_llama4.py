"""Llama 4: experts whose input has the router's weights, blocks with and without experts, RoPE, norms of queries and
keys, and chunks; the text model inside of the whole one. What the tests of all families ask is not asked again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, quantize
from safetensors.torch import load_file
from test_gemma4 import IDS, QUIET, load, relative
from tiny_models import save_model, tiny_config, tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

import ptq
from ptq.hf import experts
from ptq.hf.routing import Routes
from ptq.kv.packed_cache import PackedCache
from ptq.pipeline import pipeline, rewrite
from quarot.plan import QuarotRecipe

METHODS = {
    "quarot": ("--calibration", "TEXT", "--group-size", "0", "--activation-bits", "8", "--kv-bits", "8"),
    "quip-sharp": ("--calibration", "TEXT", "--bits", "4", "--activation-bits", "16"),
    "fp6": ("--rotate",),
}
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
    projector_input_dim=32, projector_output_dim=32, vision_output_dim=32,
)  # fmt: skip
CHUNKS = dict(attention_chunk_size=16)
pytestmark = pytest.mark.usefixtures("fast")


class Biased(Llama4TextExperts):
    """Experts that make something of a row of zeros."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + ~hidden_states.any(-1, keepdim=True)


def test_rows_of_zeros_must_stay_zeros() -> None:
    config = tiny_config("llama4_text")
    for cls, is_known in ((Llama4TextExperts, True), (Biased, False)):
        model = nn.Sequential(cls(config))
        if is_known:
            assert experts.separate(model, experts.NAMES[0]) and type(model[0]) is experts.SortedExperts
            continue
        with pytest.raises(ptq.InputError, match="0: Biased are experts of a kind that ptq does not know"):
            experts.separate(model, experts.NAMES[0])


@torch.no_grad()
def test_an_expert_is_given_its_own_tokens_alone(tmp_path: Path) -> None:
    """So that Hessians and their counts of tokens are those of the chosen experts."""
    folder, seen = save_model(tmp_path / "model", "llama4_text", num_experts_per_tok=1), []
    ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    model = load(tmp_path / "out")
    for name, module in model.named_modules():
        if name.endswith("up_proj") and ".experts." in name:
            module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    model(IDS)
    assert sum(seen) == IDS.numel() and len(seen) <= 4


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [({}, [1]), (dict(interleave_moe_layer_step=1), [0, 1]), (dict(moe_layers=[0]), [0]), (dict(moe_layers=[]), [])],
    ids=str,
)
def test_which_blocks_have_experts(changes: dict[str, Any], sparse: list[int], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama4_text", **changes)
    found = pipeline.plan(str(folder), QuarotRecipe(rounding="nearest")).plan.linears
    assert sorted({int(x.name.split(".")[2]) for x in found if x.expert is not None}) == sparse
    widths = {int(x.name.split(".")[2]): x.n for x in found if x.name.endswith("feed_forward.up_proj")}
    assert widths == {index: 136 for index in {0, 1} - {*sparse}}
    assert ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET).rotation_error < 1e-5


@pytest.mark.parametrize("normed", [True, False])
def test_keys_are_balanced_where_they_are_not_normed(normed: bool, tmp_path: Path) -> None:
    """Maverick norms none; blocks without RoPE never do."""
    folder = save_model(tmp_path / "model", "llama4_text", use_qk_norm=normed)
    recipe = QuarotRecipe(rounding="nearest", key_bits=4)
    plan = pipeline.plan(str(folder), recipe).plan
    assert {x.balance is None for x in plan.linears if x.role in ("query", "key")} == {normed}
    assert ptq.quantize(folder, tmp_path / "out", recipe, QUIET).rotation_error < 1e-5


def test_a_wrong_router_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its logits: of the scores most are zeros in any case, and the others may be near 1."""
    real = rewrite.weight

    def broken(linear: Any, *rest: Any) -> Tensor:
        return real(linear, *rest) * (1.01 if linear.role == "router" else 1)

    folder = save_model(tmp_path / "model", "llama4_text")
    monkeypatch.setattr(rewrite, "weight", broken)
    with pytest.raises(ptq.RunError, match="block 1: the rotated block differs from the original by 1"):
        ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    scores, logits = torch.zeros(3, 4), torch.ones(3, 4)
    assert Routes(1).logits_in((scores, logits)) is logits


@torch.no_grad()
def test_many_chunks_over_the_packed_cache(tmp_path: Path) -> None:
    """Tokens behind the first chunk, where masks and the temperature of blocks without RoPE are others."""
    folder = save_model(tmp_path / "model", "llama4_text", **CHUNKS)
    ptq.quantize(folder, tmp_path / "out", QuarotRecipe(rounding="nearest", key_bits=8, value_bits=8), QUIET)
    model = load(tmp_path / "out")
    wanted = model(IDS, use_cache=False).logits
    found, cache = [], None
    for ids in IDS.split((20, 1, 1, 3, 15), dim=1):
        out = model(ids, cache=cache)
        found.append(out.logits)
        cache = out.cache
    assert type(cache) is PackedCache and relative(torch.cat(found, 1), wanted) < 1e-4
    assert type(model.model(IDS).cache) is PackedCache
    assert relative(wanted, load(folder)(IDS).logits) < 0.5


def whole(folder: Path) -> Llama4ForConditionalGeneration:
    """A model that also sees, in files as it is published."""
    text = tiny_config("llama4_text", tie_word_embeddings=False, **CHUNKS)
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text.to_dict(), vision_config=VISION)).eval()
    state = AutoModelForCausalLM.from_pretrained(
        save_model(folder / "text", "llama4_text", tie_word_embeddings=False, **CHUNKS)
    )
    model.language_model.load_state_dict(state.state_dict())
    model.save_pretrained(folder / "whole")
    tokenizer().save_pretrained(folder / "whole")
    return model


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_the_text_model_inside(method: str, calibration_text: Path, tmp_path: Path) -> None:
    model, out = whole(tmp_path), tmp_path / "out"
    names = load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in names
    options = [calibration_text if option == "TEXT" else option for option in METHODS[method]]
    text = ("--samples", 8, "--sequence-length", 64) if calibration_text in options else ()
    result = quantize(method, tmp_path / "whole", out, *options, *text)
    assert result.exit_code == 0, result.output
    assert "llama4: the text model alone is taken (llama4_text)" in result.stderr.replace("\n", " ")
    packed = load(out)
    packed.generation_config.eos_token_id = None
    assert type(packed).__name__ == "Llama4ForCausalLM" and packed.config.model_type == "llama4_text"
    assert relative(packed(IDS).logits, model.language_model(IDS).logits) < 0.6
    generated = packed.generate(IDS[:, :30], max_new_tokens=6, do_sample=False)
    for length in range(30, 36):
        assert torch.equal(packed(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])
    result = quantize("verify", out, "--against", tmp_path / "whole")
    assert result.exit_code == 0 and "KL" in result.output, result.output
    assert json.loads((out / "config.json").read_bytes())["architectures"] == ["Llama4ForCausalLM"]


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama4_text", **CHUNKS)
    check_refused(quantize("rotate", folder, tmp_path / "out"), "the experts of llama4_text must be quantised")
    sinks = ("--rounding", "nearest", "--kv-bits", 4, "--kv-sinks", 4)
    result = quantize("quarot", folder, tmp_path / "out", *sinks)
    check_refused(result, "sinks do not go with sliding-window or chunked attention")
