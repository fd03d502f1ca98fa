"""A model that runs from its files, part by part, gives the logits of the loaded model."""

from pathlib import Path

import pytest
import torch
from conftest import quantize
from safetensors.torch import load_file, save_file
from tiny_models import DISTINCT, save_model
from transformers import AutoModel

from ptq.commands import evaluate, verify
from ptq.hf.loading import load_model
from ptq.models.families import FAMILIES
from ptq.pipeline.proof import largest_error
from ptq.pipeline.streamed import Streamed

IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))


def streamed(folder: Path) -> torch.Tensor:
    model = Streamed.open(folder)
    state = model.embed(IDS)
    for index in range(model.blocks):
        state = model.run(index, state)
    return torch.cat(list(model.logits(state)))


def loaded(folder: Path) -> torch.Tensor:
    model = load_model(folder, torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=row, use_cache=False).logits for row in IDS.split(1)])


@pytest.mark.parametrize("model_type", DISTINCT)
def test_an_original(model_type: str, tmp_path: Path) -> None:
    """Products of plain weights go through another library than transformers', so last bits differ."""
    folder = save_model(tmp_path / "model", model_type)
    assert largest_error(streamed(folder), loaded(folder)) < 1e-5


RUNS = {
    "fp6": ("fp6", "--embedding-bits", "8"),
    "quarot": ("quarot", "--rounding", "nearest", "--activation-bits", "4", "--kv-bits", "4"),
    "quip-sharp": ("quip-sharp", "--rounding", "nearest"),
}


@pytest.mark.parametrize("method", RUNS)
def test_a_packed_model_to_the_bit(method: str, tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    assert quantize(RUNS[method][0], model, out, *RUNS[method][1:]).exit_code == 0
    assert torch.equal(streamed(out), loaded(out))


@pytest.mark.parametrize(
    "model_type", [name for name in DISTINCT if FAMILIES[name].renamed or FAMILIES[name].published]
)
def test_a_packed_model_that_was_saved_again(model_type: str, tmp_path: Path) -> None:
    """And whose tensors somebody has given the names that they have in the model, as transformers reads both."""
    model, out, again = save_model(tmp_path / "model", model_type), tmp_path / "out", tmp_path / "again"
    assert quantize("fp6", model, out).exit_code == 0
    load_model(out).save_pretrained(again)
    tensors, family = load_file(again / "model.safetensors"), FAMILIES[model_type]
    renamed = {family.module_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, again / "model.safetensors", {"format": "pt"})
    assert torch.equal(streamed(again), loaded(again))


def test_what_was_saved_without_its_head_is_refused(tmp_path: Path) -> None:
    model, out, again = save_model(tmp_path / "model"), tmp_path / "out", tmp_path / "again"
    assert quantize("fp6", model, out).exit_code == 0
    AutoModel.from_pretrained(out).save_pretrained(again)
    for arguments in (("verify", again, "--against", model), ("dequantize", again, tmp_path / "plain")):
        result = quantize(*arguments)
        assert result.exit_code == 2
        assert "no tensor 'model.embed_tokens.weight'; if AutoModel saved it" in result.stderr.splitlines()[-1]


def test_windows_that_do_not_fit_into_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass through the blocks in groups, which changes no number."""
    model, out, text = save_model(tmp_path / "model"), tmp_path / "out", tmp_path / "text.txt"
    text.write_text("some text of no meaning; " * 30)
    assert quantize("fp6", model, out, "--element", "e2m1").exit_code == 0
    expected = verify.verify(str(out), str(model), text)
    assert expected.tokens == 5 * 127
    embed, calls = Streamed.embed, []
    monkeypatch.setattr(Streamed, "embed", lambda self, ids: calls.append(len(ids)) or embed(self, ids))
    for windows, groups in ((0, [1, 1, 1, 1, 1]), (2, [2, 2, 1])):
        monkeypatch.setattr(verify, "STATE_BYTES", windows * 2 * 4 * 128 * 72)
        assert verify.verify(str(out), str(model), text) == expected
        assert calls[::2] == calls[1::2] == groups
        calls.clear()


def test_perplexities_of_both(tmp_path: Path) -> None:
    model, out, text = save_model(tmp_path / "model"), tmp_path / "out", tmp_path / "text.txt"
    text.write_text("some text of no meaning; " * 30)
    assert quantize("fp6", model, out, "--element", "e2m1").exit_code == 0
    found = verify.verify(str(out), str(model), text)
    windows = verify._windows(model, text)
    for folder, value in ((out, found.perplexity), (model, found.original_perplexity)):
        assert value == pytest.approx(
            evaluate.perplexity(load_model(folder, torch.float32), windows).perplexity, rel=1e-6
        )
    said = quantize("verify", out, "--against", model, "--text", text).stdout.splitlines()[-1]
    growth = found.perplexity / found.original_perplexity - 1
    assert said == f"perplexity {found.perplexity:.4f}, of {model} {found.original_perplexity:.4f} ({growth:+.2%})"
    assert verify.verify(str(out), str(model)).perplexity is None
