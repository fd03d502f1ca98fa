"""`quantize verify`: damage is found and named, and the original compared with."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from safetensors.torch import load_file, save_file
from tiny_models import TINY, save_model
from transformers import AutoModelForCausalLM

import ptq

pytestmark = pytest.mark.usefixtures("fast")


def test_verify(packed: Path, tiny: Path) -> None:
    result = quantize("verify", packed)
    assert result.exit_code == 0 and "every one as it was written" in result.stdout
    found = json.loads(quantize("verify", packed, "--json").stdout)
    assert found["files"] == 5 and found["tensors"] == len(load_file(packed / "model.safetensors"))
    against = json.loads(quantize("verify", packed, "--against", tiny, "--json").stdout)
    assert against["tokens"] == 127 and 0.3 < against["kl"] < 1.3 and 0.3 < against["top1"] < 1
    check_refused(quantize("verify", tiny), "nothing to check it by")


def test_verify_against_the_original_on_a_text(packed: Path, tiny: Path, calibration_text: Path) -> None:
    ids = torch.tensor([ord(character) - 29 for character in calibration_text.read_text()])
    rows = ids[: len(ids) // 128 * 128].view(-1, 128)
    logits = []
    for folder in (tiny, packed):
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(rows).logits[:, :-1])
    p, q = (found.double().log_softmax(-1) for found in logits)
    kls = (p.exp() * (p - q)).sum(-1).mean(-1)
    kl, standard_error = kls.mean().item(), (kls.std() / len(kls) ** 0.5).item()
    found = json.loads(quantize("verify", packed, "--against", tiny, "--text", calibration_text, "--json").stdout)
    assert found["kl_standard_error"] == pytest.approx(standard_error, rel=1e-2)
    asked = {"checkpoint": str(packed), "against": str(tiny), "text": str(calibration_text), "max_kl": None}
    assert asked.items() <= found.items()
    assert found["tokens"] == 127 * len(rows) and found["kl"] == pytest.approx(kl, rel=1e-3)
    assert found["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item(), abs=0.002)
    documents = calibration_text.with_suffix(".jsonl")
    documents.write_text(json.dumps({"text": calibration_text.read_text()}))
    again = json.loads(quantize("verify", packed, "--against", tiny, "--text", documents, "--json").stdout)
    assert again == found | {"text": str(documents)}
    said = quantize("verify", packed, "--against", tiny, "--text", calibration_text).stdout.splitlines()[1]
    kl = f"KL {found['kl']:.5f} ± {found['kl_standard_error']:.5f} nats per token"
    assert said.startswith(f"against {tiny}: {kl}") and f" {127 * len(rows)} tokens" in said


def test_verify_against_what_is_not_the_original(packed: Path, tiny: Path, tmp_path: Path) -> None:
    for size, value, own in (("vocab_size", 97, 96), ("hidden_size", 24, 16), ("num_hidden_layers", 3, 2)):
        other = save_model(tmp_path / size, **{**TINY, size: value})
        message = f"{other}: is not the original of {packed}: its {size} is {value}, not {own}"
        check_refused(quantize("verify", packed, "--against", other), message)
    (tmp_path / "shortest.txt").write_text("a")
    messages = {"none": "none: cannot be read", "shortest.txt": "shortest.txt has 1 tokens, too few for one window"}
    for name, message in messages.items():
        result = quantize("verify", packed, "--against", tiny, "--text", tmp_path / name)
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]
    (tmp_path / "short.txt").write_text("nine ones")
    found = quantize("verify", packed, "--against", tiny, "--text", tmp_path / "short.txt", "--json")
    assert json.loads(found.stdout)["tokens"] == 8  # the first is but read
    said = quantize("verify", packed, "--against", tiny, "--text", tmp_path / "short.txt").stdout
    assert "tokens in one window, so without a standard error" in said
    again = ptq.verify(packed, tiny, str(tmp_path / "short.txt"))
    assert again.tokens == 8 and again.kl == pytest.approx(json.loads(found.stdout)["kl"], rel=1e-5)


def test_verify_against_another_model_of_the_same_sizes(
    packed: Path, tiny: Path, tmp_path: Path, calibration_text: Path
) -> None:
    """It is compared with, and said to be another one; without a record nobody can tell."""
    other = shutil.copytree(tiny, tmp_path / "other")
    not_it = f"{other} is not what was quantised: ptq.json of {packed} records"
    assert not_it not in quantize("verify", packed, "--against", other).stdout  # a copy is the same model
    edit_tensors(lambda content: content["model.norm.weight"].mul_(-1))(other)
    result = quantize("verify", packed, "--against", other)
    assert result.exit_code == 0 and not_it in result.stdout
    found = [json.loads(quantize("verify", packed, "--against", m, "--json").stdout) for m in (tiny, other)]
    assert [result["source"] for result in found] == [True, False] and found[1]["kl"] > 2 * found[0]["kl"]
    judged = quantize("verify", packed, "--against", other, "--text", calibration_text, "--max-kl", 100, "--json")
    assert judged.exit_code == 1 and json.loads(judged.stdout)["passed"] is False
    assert f"{other}: is not what {packed} was made from" in judged.stderr
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(packed).save_pretrained(saved)
    shutil.copy(tiny / "tokenizer.json", saved)
    assert json.loads(quantize("verify", saved, "--against", other, "--json").stdout)["source"] is None


def test_a_limit_to_the_divergence(packed: Path, tiny: Path, calibration_text: Path) -> None:
    """What was found is printed in any case; the exit code says whether it is within the limit."""
    compared = ["verify", packed, "--against", tiny, "--text", calibration_text]
    found = json.loads(quantize(*compared, "--json").stdout)
    assert found["passed"] is None
    within = quantize(*compared, "--json", "--max-kl", found["kl"] * 1.01)
    limits = [{"max_kl": found["kl"] * factor, "passed": factor > 1} for factor in (1.01, 0.99)]
    assert within.exit_code == 0 and json.loads(within.stdout) == found | limits[0]
    above = quantize(*compared, "--json", "--max-kl", found["kl"] * 0.99)
    assert above.exit_code == 1 and json.loads(above.stdout) == found | limits[1]
    assert re.fullmatch(
        r"quantize: \S+: KL \d\.\d+ from \S+ on the text, above --max-kl \d\.\d+\n",
        above.stderr,
    )
    check_refused(quantize("verify", packed, "--max-kl", 1), "--max-kl does nothing without --against")
    check_refused(quantize("verify", packed, "--against", tiny, "--max-kl", 1), "--max-kl needs --text FILE")


def test_a_folder_that_is_no_model_is_no_original(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    check_refused(quantize("verify", packed, "--against", tmp_path), "an adapter (LoRA) is no model")


def flip(name: str, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip("model.safetensors", -1), "SHA-256 differs"),
    "a config that was edited": (edit_config(rms_norm_eps=1e-3), "SHA-256 differs"),
    "a config that is lost": (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
    "weights that are lost": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
    "a second file of weights": (
        lambda f: shutil.copy(f / "model.safetensors", f / "more.safetensors"),
        "no file of this checkpoint; remove it",
    ),
    "another tokenizer": (flip("tokenizer.json", 40), "tokenizer.json: is not the file"),
    "other settings of generation": (flip("generation_config.json", -2), "generation_config.json: is not the file"),
    "settings that are lost": (lambda folder: (folder / "generation_config.json").unlink(), "json: is missing"),
    "a record that is damaged": (lambda folder: (folder / "ptq.json").write_text("{"), "or quantise again"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_verify_detects_damage(damage: Callable[[Path], Any], message: str, packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    damage(copy)
    check_refused(quantize("verify", copy), message)


def test_verify_leaves_added_files_alone(packed: Path, tmp_path: Path) -> None:
    """What somebody put beside the weights was not written by the run, and damages nothing."""
    copy = shutil.copytree(packed, tmp_path / "copy")
    plain = quantize("verify", copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "LICENSE").write_text("from which no model is loaded")
    result = quantize("verify", copy)
    assert result.exit_code == 0
    assert (
        result.stdout
        == plain.stdout + "put beside them since, and a model may be loaded from it: chat_template.jinja\n"
    )
    assert json.loads(quantize("verify", copy, "--json").stdout)["added"] == ["chat_template.jinja"]


def test_verify_without_a_record(packed: Path, tmp_path: Path) -> None:
    """save_pretrained writes no ptq.json: what can be checked is checked, and the output says what cannot."""
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(packed).save_pretrained(saved)
    result = quantize("verify", saved)
    assert result.exit_code == 0 and "changed bytes" in result.stdout and "as it was written" not in result.stdout
    assert json.loads(quantize("verify", saved, "--json").stdout)["recorded"] is False
    tensors = load_file(saved / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    save_file({**tensors, name: tensors[name][:-1].clone()}, saved / "model.safetensors", {"format": "pt"})
    check_refused(quantize("verify", saved), name)
    spoiled = tensors[name].clone()
    spoiled.view(torch.bfloat16)[-1] = torch.nan
    save_file({**tensors, name: spoiled}, saved / "model.safetensors", {"format": "pt"})
    result = quantize("verify", saved)
    assert result.exit_code == 2 and "the weights of 'model.layers.0.mlp.down_proj' are not finite" in result.stderr
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    result = quantize("verify", saved)
    check_refused(result, f"quantize: {saved}/model.safetensors: tensor 'model.norm.weight' holds 1 NaN")


def test_a_text_is_the_name_of_a_file(packed: Path, tiny: Path) -> None:
    with pytest.raises(ptq.InputError, match="must be the name of a file, found 9 characters of text"):
        ptq.verify(packed, tiny, "two\nlines")
