"""R1 at the ends of a model with a tied head (`ptq.hf.residual`): what is stored, what is loaded, and what is
refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, edit_tensors, quantize
from safetensors.torch import load_file
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import ptq
from fp6.plan import Fp6Recipe
from ptq.errors import InputError, RunError
from ptq.files.checkpoint import Checkpoint
from ptq.layers.embedding import PackedEmbedding
from ptq.layers.packed_weight import stored_signs
from ptq.pipeline import proof, rewrite
from ptq.recipe import Recipe
from ptq.reporting.contents import summary
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False)
IDS = torch.arange(3, 40).reshape(1, -1)
EMBEDDING, NORM = "model.embed_tokens.residual_signs", "model.norm.residual_signs"
INT4 = QuarotRecipe(rounding="nearest", group_size=8)
RECIPES: dict[str, Recipe] = {
    "INT4": INT4,
    "16 bits": QuarotRecipe(rounding="nearest", weight_bits=16),
    "FP6": Fp6Recipe(rotate=True),
    "INT4, packed embedding": QuarotRecipe(rounding="nearest", group_size=8, embedding_bits=8),
}


def load(folder: Path, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    model, info = kind.from_pretrained(folder, **{"dtype": torch.float32, "output_loading_info": True, **options})
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


@pytest.fixture(params=RECIPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = save_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    ptq.quantize(source, tmp_path / "out", RECIPES[request.param], QUIET)
    return tmp_path / "out"


def test_another_embedding_is_refused(checkpoint: Path) -> None:
    """It would not turn what it gives; one that is resized is the same one."""
    model = load(checkpoint)
    with pytest.raises(InputError, match="rotates what it gives"):
        model.set_input_embeddings(torch.nn.Embedding(96, 72))
    if not isinstance(model.get_input_embeddings(), PackedEmbedding):
        expected = logits(model)
        model.resize_token_embeddings(100, mean_resizing=False)
        assert torch.equal(logits(model)[..., :96], expected)


def test_one_matrix_and_two_vectors_of_signs(checkpoint: Path) -> None:
    held, config = load_file(checkpoint / "model.safetensors"), json.loads((checkpoint / "config.json").read_text())
    assert config["tie_word_embeddings"] and not any(name.startswith("lm_head") for name in held)
    assert config["quantization_config"]["residual_rotation"] == {"version": 1, "hadamard": "paley2:17,sylvester:1"}
    drawn = stored_signs(rewrite.draw_signs("R1", 72, 0))
    assert torch.equal(held[EMBEDDING], drawn) and torch.equal(held[NORM], drawn)
    assert summary(Checkpoint.open(checkpoint)).nbytes == sum(tensor.nbytes for tensor in held.values())
    assert "R1 (paley2:17,sylvester:1): behind the embedding" in quantize("inspect", checkpoint).stdout


def test_loading_saving_and_copying(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    expected = logits(model)
    if hasattr(model.lm_head, "out_features"):
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert torch.equal(logits(load(tmp_path / "saved")), expected)
    with torch.no_grad():
        alone = load(checkpoint, AutoModel)
        assert torch.equal(alone(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    spilled = dict(device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    torch.testing.assert_close(logits(load(checkpoint, **spilled)), expected, rtol=1e-3, atol=1e-3)
    half = logits(load(checkpoint, dtype=torch.bfloat16)).float()
    assert (half - expected).norm() < 0.05 * expected.norm()
    classifier = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(classifier.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_token_by_token_and_prepacked(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    with torch.no_grad():
        whole, cache, steps = model(IDS).logits, None, []
        for i in range(IDS.shape[1]):
            out = model(IDS[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache, steps = out.past_key_values, [*steps, out.logits]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-3)
    found = quantize("prepack", checkpoint, tmp_path / "prepacked", "--target", "cpu")
    if found.exit_code == 0:  # with 16 bits there is nothing to prepack
        assert torch.equal(logits(load(tmp_path / "prepacked")), whole)
    assert quantize("verify", checkpoint).exit_code == 0


def test_more_tokens_keep_the_rotation(tmp_path: Path) -> None:
    """transformers resizes the embedding, and the head that is tied to it."""
    source = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    ptq.quantize(source, tmp_path / "out", INT4, QUIET)
    model = load(tmp_path / "out")
    expected, size = logits(model), model.config.vocab_size
    model.resize_token_embeddings(size + 5, mean_resizing=False)
    found = logits(model)
    assert found.shape[-1] == size + 5 and torch.equal(found[..., :size], expected)


@pytest.mark.parametrize("change, sentence", [
    (lambda held: held.pop(NORM), "tensor 'model.norm.residual_signs' is missing"),
    (lambda held: held.update({EMBEDDING: torch.zeros(7).short()}), "shape \\[7\\], config.json says \\[72\\]"),
    (lambda held: held.update({EMBEDDING: torch.ones(72)}), "is float32, expected int16"),
    (lambda held: held[EMBEDDING][3:4].neg_(), "must be the same numbers, 1 and -1"),
    (lambda held: [held[name].zero_() for name in (EMBEDDING, NORM)], "must be the same numbers, 1 and -1"),
])  # fmt: skip
def test_damaged_signs_are_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    ptq.quantize(source, tmp_path / "out", INT4, QUIET)
    edit_tensors(change)(tmp_path / "out")
    with pytest.raises(InputError, match=sentence):
        load(tmp_path / "out")


def test_signs_that_were_written_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    reload = proof.reload

    def damaged(checkpoint: Checkpoint, *rest: Any) -> None:
        edit_tensors(lambda held: held[EMBEDDING].neg_())(checkpoint.folder)
        reload(Checkpoint.open(checkpoint.folder), *rest)

    monkeypatch.setattr(proof, "reload", damaged)
    with pytest.raises(RunError, match="residual_signs' is not that of the run"):
        ptq.quantize(source, tmp_path / "out", INT4, QUIET)


def test_entries_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    ptq.quantize(source, tmp_path / "out", INT4, QUIET)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    good = {"version": 1, "hadamard": "paley2:17,sylvester:1"}
    for change, sentence in (
        ("yes", "expected an object"),
        ({"version": 1}, "expected an object"),
        (good | {"signs": True}, "expected an object"),
        (good | {"version": 2}, "has version 2"),
        (good | {"version": True}, "has version True"),
        (good | {"hadamard": "paley1:3," * 2000}, "is no construction"),
        (None, "holds tensor 'model.embed_tokens.residual_signs'"),
        (good | {"hadamard": 72}, "must be a string"),
        (good | {"hadamard": "sylvester:6"}, "does not divide hidden_size 72"),
        (good | {"hadamard": "paley1:7000000"}, "expected paley1:Q"),
    ):
        edit_config(quantization_config=entry | {"residual_rotation": change})(tmp_path / "out")
        with pytest.raises(InputError, match=sentence):
            load(tmp_path / "out")
    edit_config(quantization_config=entry)(tmp_path / "out")
    logits(load(tmp_path / "out"))
