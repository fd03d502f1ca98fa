"""The command line: exit codes, one sentence for every error, nothing half-written, options that stay."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import TINY, check_refused, edit_config, listing, quantize, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ptq
from fp6.plan import Fp6Recipe
from ptq import cli, preflight
from ptq.cli import app
from ptq.kv_cache import CacheQuantization
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture(scope="module")
def packed(tiny: Path) -> Path:
    """A finished checkpoint. Do not write to it."""
    out = tiny.with_name("packed")
    assert quantize("quarot", tiny, out, "--rounding", "nearest").exit_code == 0
    return out


def test_a_finished_result_is_left_as_it_is(packed: Path, tiny: Path) -> None:
    result = quantize("quarot", tiny, packed, "--rounding", "nearest")
    assert result.exit_code == 0 and "nothing was done" in result.stderr and "proven" not in result.stderr


# --- bad options ----------------------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no calibration": ([], "--calibration"),
    "no such text": (["--calibration", "{tmp}/none.txt"], "none.txt"),
    "too short a text": (["--calibration", "{tmp}/short.txt"], "lower --samples"),
    "text that is no UTF-8": (["--calibration", "{tmp}/latin1.txt"], "not UTF-8"),
    "a sequence above the limit": (["--calibration", "{tmp}/short.txt", "--sequence-length", "129"], "limit is 128"),
    "a sequence of nothing": (["--sequence-length", "0"], "sequence_length must be at least 1"),
    "no samples": (["--samples", "0"], "samples must be at least 1"),
    "groups that do not divide": (["--rounding", "nearest", "--group-size", "7"], "try --group-size"),
    "a negative group": (["--rounding", "nearest", "--group-size", "-1"], "group size"),
    "one bit": (["--weight-bits", "1"], "weight bits must be 2 to 8"),
    "no damping": (["--damping", "0"], "damping must be above 0"),
    "odd activation bits": (["--activation-bits", "5"], "activation bits must be 4, 6 or 8, or 16"),
    "an activation clip above one": (
        ["--activation-bits", "8", "--activation-clip", "1.01"],
        "activation clip must lie above 0",
    ),
    "no activation clip": (["--activation-bits", "8", "--activation-clip", "0"], "activation clip must lie above 0"),
    "an activation clip that is no number": (
        ["--activation-bits", "8", "--activation-clip", "nan"],
        "activation clip must lie above 0",
    ),
    "damping of nothing": (["--rounding", "nearest", "--damping", "0.5"], "--damping does nothing with"),
    "groups of nothing": (["--weight-bits", "16", "--group-size", "32"], "--group-size does nothing with"),
    "offline without rotations": (["--no-rotate", "--offline"], "--offline does nothing with"),
    "a seed beyond 64 bits": (["--seed", "99999999999999999999"], "seed must be at least 0 and below 2^63"),
    "a clip of activations that are left alone": (["--activation-clip", "0.9"], "does nothing without"),
    "sinks of a cache that is left alone": (["--kv-sinks", "4"], "does nothing without"),
    "one bit of a key": (["--kv-bits", "4", "--key-bits", "1"], "key_bits must be one of"),
    "too many bits of a value": (["--kv-bits", "9"], "bits must be one of"),
    "a KV clip above one": (["--kv-bits", "4", "--kv-clip", "1.5"], "clip must be above 0"),
    "less than no sinks": (["--kv-sinks", "-1"], "sinks must be a whole number"),
    "an unknown device": (["--rounding", "nearest", "--device", "tpu"], "--device must be auto, cpu or cuda"),
    "a pattern that matches nothing": (["--rounding", "nearest", "--skip", "*.dwn_proj"], "matches no linear"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option(options: list[str], message: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9" * 1000)
    before = listing(tmp_path)
    filled = [option.format(tmp=tmp_path) for option in options]
    check_refused(quantize("quarot", tiny, tmp_path / "out", *filled), message)
    assert listing(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_cuda_device(tiny: Path, tmp_path: Path) -> None:
    check_refused(quantize("rotate", tiny, tmp_path / "out", "--device", "cuda"), "no CUDA device")
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("arguments", [["quarot"], ["quarot", "demo", "out", "--no-such-option"],
                                       ["quarot", "demo", "out", "--rounding", "up"], ["no-such-command"]])  # fmt: skip
def test_wrong_usage(arguments: list[str]) -> None:
    result = quantize(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr and "Traceback" not in result.stderr


# --- bad places -----------------------------------------------------------------------------------------------------


def test_an_output_folder_that_holds_something_else(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not lose me")
    (tmp_path / "file").write_text("nor me")
    before = listing(tmp_path)
    for out in ("out", "file"):
        for extra in ([], ["--restart"]):
            check_refused(quantize("rotate", tiny, tmp_path / out, *extra), "nothing in it was touched")
    assert listing(tmp_path) == before


def test_an_empty_output_folder_is_used(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert quantize("rotate", tiny, ".").exit_code == 0
    assert os.listdir(tmp_path) == ["out"]
    assert "config.json" in os.listdir(tmp_path / "out")


def test_a_changed_recipe_on_unfinished_work(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ptq.pipeline._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        result = quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest")
    check_refused(result, "interrupted; the same command continues", code=1)
    before = listing(tmp_path)
    again = ("quarot", tiny, tmp_path / "out", "--rounding", "nearest")
    check_refused(quantize(*again, "--weight-bits", "3"), "weight_bits: 4 -> 3")
    check_refused(quantize("fp6", tiny, tmp_path / "out"), "another run (another method, quarot)")
    check_refused(quantize("inspect", tmp_path / "out.work"), "unfinished work; repeat the command")
    assert listing(tmp_path) == before
    finished = quantize(*again)
    assert finished.exit_code == 0 and "continues: 14 of 14 linears are done" in finished.stderr


def test_a_full_disk(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    check_refused(quantize("rotate", tiny, tmp_path / "out"), "No space left on device", code=1)
    assert [name for name in listing(tmp_path) if name != "out.work"] == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check_refused(quantize("rotate", tiny, tmp_path / "out"), "Permission denied", code=1)
    tmp_path.chmod(0o700)


def test_a_path_that_cannot_be_a_folder(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_refused(quantize("rotate", tiny, tmp_path / "file" / "out"), "Not a directory", code=1)


def test_what_cannot_fit_is_refused_before_it_starts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preflight.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10_000_000}))
        check_refused(quantize("rotate", tiny, tmp_path / "out"), "of memory, 10 MB are free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    check_refused(quantize("rotate", tiny, tmp_path / "out"), "of disk, 1 KB are free")
    assert listing(tmp_path) == {}


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    check_refused(quantize("rotate", "org/model", tmp_path / "out"), "check the network", code=1)
    check_refused(quantize("rotate", "no such thing", tmp_path / "out"), "no such folder")
    assert listing(tmp_path) == {}


# --- what a command prints ------------------------------------------------------------------------------------------


def test_a_run_reports_its_proofs(tiny: Path, tmp_path: Path) -> None:
    result = quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest", "--weight-bits", "8")
    assert result.exit_code == 0 and result.stdout == ""
    for text in ("bits per quantised weight", "rotated model equals the original", "logits", "estimate:"):
        assert text in result.stderr
    assert "KL" not in result.stderr and "its quality was not measured" in result.stderr
    assert "no longer the embedding's own weight: 96 x 16 numbers" in result.stderr


def test_plan_touches_nothing(tiny: Path, tmp_path: Path) -> None:
    before = listing(tiny)
    result = quantize("quarot", tiny, tmp_path / "out", "--plan", "--skip", "*.1.*.o_proj")
    assert result.exit_code == 0
    assert "needs --calibration" in result.stderr and "estimate: " in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    lines = dict(zip([" ".join(row[:2]) for row in rows], result.stdout.splitlines(), strict=True))
    assert "bits=4" in lines["model.layers.*.self_attn.q_proj 0-1"]
    assert "clip" not in result.stdout and "KV cache" not in result.stdout
    assert "signs R1" in next(line for line in lines.values() if "model.embed_tokens" in line)
    assert "signs R2.*" in lines["model.layers.*.self_attn.o_proj 0"]
    assert lines["model.layers.*.self_attn.o_proj 1"].endswith("as it is")
    assert lines["model.layers.*.mlp.down_proj 0-1"].count("H24") == 2  # in the weight, and online
    assert "H64: a Hadamard matrix" in result.stdout
    assert listing(tmp_path) == {} and listing(tiny) == before


def test_plan_shows_what_happens_when_the_model_runs(tiny: Path, tmp_path: Path) -> None:
    options = ("--activation-bits", "6", "--kv-bits", "4", "--value-bits", "3", "--skip", "*.o_proj")
    result = quantize("quarot", tiny, tmp_path / "out", "--plan", *options)
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert rows["model.layers.*.mlp.down_proj"].endswith("input bits=6 clip=0.95")
    assert "clip" not in rows["model.layers.*.self_attn.o_proj"] + rows["lm_head"]
    assert rows["KV"].startswith("KV cache: key_bits=4 value_bits=3 clip=0.95 sinks=0 hadamard=sylvester:3")
    assert listing(tmp_path) == {}


def test_inspect(packed: Path, tiny: Path) -> None:
    result = quantize("inspect", packed)
    assert result.exit_code == 0 and "quarot/integer v1" in result.stdout and "plain tensors" in result.stdout
    found = json.loads(quantize("inspect", packed, "--json").stdout)
    assert sum(len(group["linears"]) for group in found["groups"]) == 14
    tensors = load_file(packed / "model.safetensors")
    names = {name: tensor for name, tensor in tensors.items() if "_proj.weight" in name}
    stored = 8 * sum(tensor.nbytes for tensor in names.values())
    weights = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)
    assert found["bits_per_weight"] == pytest.approx(stored / weights)
    assert found["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert found["kv_cache"] is None
    assert json.loads(quantize("inspect", tiny, "--json").stdout)["groups"] == []
    assert "0.000" not in quantize("inspect", tiny).stdout


def test_inspect_shows_what_happens_when_the_model_runs(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    content = json.loads((packed / "config.json").read_text())["quantization_config"]
    content["schemes"]["scheme0"]["activation"] = {"bits": 8, "clip": 0.9}
    content["kv_cache"] = CacheQuantization(key_bits=4, value_bits=2).as_dict()
    edit_config(quantization_config=content)(copy)
    lines = quantize("inspect", copy).stdout.splitlines()
    assert "input bits=8 clip=0.9" in lines[1] and "clip" not in lines[2]
    assert "key_bits=4 value_bits=2" in lines[-1]
    assert json.loads(quantize("inspect", copy, "--json").stdout)["kv_cache"] == content["kv_cache"]


def test_inspect_refuses_what_it_does_not_know(packed: Path, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    edit_config(quantization_config={"quant_method": "gptq"})(model)
    check_refused(quantize("inspect", model), "was quantised by 'gptq', not by ptq")
    hostile = shutil.copytree(packed, tmp_path / "hostile")
    content = json.loads((packed / "config.json").read_text())["quantization_config"]
    content["linears"]["model.layers.7.mlp.up_proj"] = "scheme0"
    edit_config(quantization_config=content)(hostile)
    check_refused(quantize("inspect", hostile), "which the model does not have")
    content["linears"].popitem()
    edit_config(quantization_config={**content, "schemes": {**content["schemes"], "idle": {}}})(hostile)
    check_refused(quantize("inspect", hostile), "no linear uses scheme 'idle'")


def test_verify(packed: Path, tiny: Path) -> None:
    result = quantize("verify", packed)
    assert result.exit_code == 0 and "every one as it was written" in result.stdout
    found = json.loads(quantize("verify", packed, "--json").stdout)
    assert found["files"] == 5 and found["tensors"] == len(load_file(packed / "model.safetensors"))
    against = json.loads(quantize("verify", packed, "--against", tiny, "--json").stdout)
    assert against["tokens"] == 127 and 0.3 < against["kl"] < 1.3 and 0.3 < against["top1"] < 1
    check_refused(quantize("verify", tiny), "was not made by quantize")


def test_verify_against_the_original_on_a_text(packed: Path, tiny: Path, calibration_text: Path) -> None:
    ids = torch.tensor([ord(character) - 29 for character in calibration_text.read_text()])
    rows = ids[: len(ids) // 128 * 128].view(-1, 128)
    logits = []
    for folder in (tiny, packed):
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(rows).logits[:, :-1])
    p, q = (found.double().log_softmax(-1) for found in logits)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    found = json.loads(quantize("verify", packed, "--against", tiny, "--text", calibration_text, "--json").stdout)
    assert found["tokens"] == 127 * len(rows) and found["kl"] == pytest.approx(kl, rel=1e-3)
    assert found["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item(), abs=0.002)
    said = quantize("verify", packed, "--against", tiny, "--text", calibration_text).stdout.splitlines()[1]
    assert said.startswith(f"against {tiny}: KL {found['kl']:.5f} ") and f" {127 * len(rows)} tokens" in said


def test_verify_against_what_is_not_the_original(packed: Path, tiny: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", **{**TINY, "vocab_size": 97})
    message = f"{other}: is not the original: it knows 97 tokens, {packed} 96"
    check_refused(quantize("verify", packed, "--against", other), message)
    (tmp_path / "short.txt").write_text("too short")
    for name, message in {"none": "none: cannot be read as UTF-8 text", "short.txt": "too few for one window"}.items():
        result = quantize("verify", packed, "--against", tiny, "--text", tmp_path / name)
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


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
    "a second file of weights": (lambda f: shutil.copy(f / "model.safetensors", f / "more.safetensors"), "SHA-256"),
    "another tokenizer": (flip("tokenizer.json", 40), "tokenizer.json: is not the file"),
    "other settings of generation": (flip("generation_config.json", -2), "generation_config.json: is not the file"),
    "settings that are lost": (lambda folder: (folder / "generation_config.json").unlink(), "json: is missing"),
    "a record that is damaged": (lambda folder: (folder / "ptq.json").write_text("{"), "not a record"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_verify_detects_damage(damage: Callable[[Path], Any], message: str, packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    damage(copy)
    check_refused(quantize("verify", copy), message)


def test_verify_leaves_added_files_alone(packed: Path, tmp_path: Path) -> None:
    """What somebody put beside the weights was not written by the run, and damages nothing."""
    copy = shutil.copytree(packed, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert quantize("verify", copy).exit_code == 0


def test_output_that_nobody_reads_on(packed: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m ptq inspect {shlex.quote(str(packed))} --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "error" not in result.stderr, result.stderr


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
    assert result.exit_code == 2 and "its logits are NaN" in result.stderr.splitlines()[-1]
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    result = quantize("verify", saved)
    assert result.exit_code == 2 and "tensor 'model.norm.weight' holds 1 NaN" in result.stderr.splitlines()[-1]


# --- options that stay ----------------------------------------------------------------------------------------------

SHARED = ["--device", "--work", "--restart", "--plan", "--debug", "--seed"]
METHOD = [
    *SHARED, "--rounding", "--rotate", "--no-rotate", "--calibration", "--samples", "--sequence-length", "--damping",
    "--skip", "--report", "--no-report", "--activation-bits",
]  # fmt: skip
OPTIONS = {
    "quarot": [
        *METHOD, "--weight-bits", "--group-size", "--symmetric", "--asymmetric", "--online", "--offline",
        "--activation-clip", "--kv-bits", "--key-bits", "--value-bits", "--kv-clip", "--kv-sinks",
    ],
    "quip-sharp": [*METHOD, "--bits", "--finetune", "--finetune-epochs", "--sweeps"],
    "fp6": [*METHOD, "--element", "--group-size", "--scale", "--scale-search"],
    "prepack": ["--target", "--debug"],
    "rotate": SHARED,
    "inspect": ["--json", "--debug"],
    "verify": ["--against", "--text", "--json", "--debug"],
}  # fmt: skip


def test_the_options_are_these() -> None:
    """The command line is a contract: whoever changes it changes this list, and the documents."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: [flag for option in command.params if option.param_type_name == "option"
               for flag in (*option.opts, *option.secondary_opts) if flag != "--help"]
        for name, command in commands.items()
    }  # fmt: skip
    assert {name: sorted(options) for name, options in found.items()} == {
        name: sorted(options) for name, options in OPTIONS.items()
    }


# What must arrive in the recipe or the run's options; "fp6 --rounding" is only for that command. The first part of an
# entry is written in front, so that what the option says is not what was said before.
ARRIVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "--device": ("", "--device cpu", {"device": "cpu"}),
    "--work": ("", "--work here", {"work": Path("here")}),
    "--restart": ("", "--restart", {"restart": True}),
    "--plan": ("", "--plan", {"show_plan": True}),
    "--seed": ("", "--seed 7", {"seed": 7}),
    "--rounding": ("", "--rounding nearest", {"rounding": "nearest"}),
    "fp6 --rounding": ("", "--rounding gptq", {"rounding": "gptq"}),
    "--rotate": ("--no-rotate", "--rotate", {"rotate": True}),
    "--no-rotate": ("--rotate", "--no-rotate", {"rotate": False}),
    "--calibration": ("", "--calibration some.txt", {"calibration": "some.txt"}),
    "--samples": ("", "--samples 9", {"samples": 9}),
    "--sequence-length": ("", "--sequence-length 33", {"sequence_length": 33}),
    "--damping": ("", "--damping 0.05", {"damping": 0.05}),
    "fp6 --damping": ("--rounding gptq", "--damping 0.05", {"damping": 0.05}),
    "--skip": ("", "--skip *.down_proj --skip *.0.*", {"skip": ("*.down_proj", "*.0.*")}),
    "--report": ("--no-report", "--report", {"report": True}),
    "--no-report": ("", "--no-report", {"report": False}),
    "--activation-bits": ("", "--activation-bits 8", {"activation_bits": 8}),
    "quip-sharp --activation-bits": ("", "--activation-bits 16", {"activation_bits": 16}),
    "--weight-bits": ("", "--weight-bits 3", {"weight_bits": 3}),
    "--group-size": ("", "--group-size 64", {"group_size": 64}),
    "--symmetric": ("--asymmetric", "--symmetric", {"symmetric": True}),
    "--asymmetric": ("", "--asymmetric", {"symmetric": False}),
    "--online": ("--offline", "--online", {"online": True}),
    "--offline": ("", "--offline", {"online": False}),
    "--activation-clip": ("--activation-bits 4", "--activation-clip 0.8", {"activation_clip": 0.8}),
    "--kv-bits": ("", "--kv-bits 3", {"key_bits": 3, "value_bits": 3}),
    "--key-bits": ("--kv-bits 4", "--key-bits 8", {"key_bits": 8}),
    "--value-bits": ("--kv-bits 4", "--value-bits 2", {"value_bits": 2}),
    "--kv-clip": ("--kv-bits 4", "--kv-clip 0.8", {"cache_clip": 0.8}),
    "--kv-sinks": ("--kv-bits 4", "--kv-sinks 5", {"cache_sinks": 5}),
    "--bits": ("", "--bits 3", {"bits": 3}),
    "--finetune": ("", "--finetune blocks", {"finetune": "blocks"}),
    "--finetune-epochs": ("--finetune blocks", "--finetune-epochs 2", {"finetune_epochs": 2}),
    "--sweeps": ("", "--sweeps 1", {"sweeps": 1}),
    "--element": ("", "--element e3m2", {"element": "e3m2"}),
    "--scale": ("", "--scale e8m0", {"scale": "e8m0", "group_size": 32}),
    "--scale-search": ("", "--scale-search mse", {"scale_search": "mse"}),
}
QUANTIZING = ("quarot", "quip-sharp", "fp6", "rotate")


def asked(patch: pytest.MonkeyPatch, command: str, options: str) -> dict[str, Any]:
    """What a command line asks for: the fields of the recipe and of the run's options."""
    found: dict[str, Any] = {}

    def run(model: str, out: Path, recipe: Recipe, options: ptq.RunOptions, show_plan: bool) -> None:
        found.update(asdict(recipe), **asdict(options), method=recipe.method, show_plan=show_plan)
        assert (model, out) == ("MODEL", Path("OUT"))

    patch.setattr(cli, "run", run)
    result = quantize(command, "MODEL", "OUT", *options.split())
    assert result.exit_code == 0, result.output
    return found


@pytest.mark.parametrize(
    ("command", "flag"), [(name, flag) for name in QUANTIZING for flag in OPTIONS[name] if flag != "--debug"]
)
def test_an_option_arrives(command: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes what it says, and nothing else."""
    before, options, changes = ARRIVES.get(f"{command} {flag}") or ARRIVES[flag]
    assert flag in options.split()
    plain = asked(monkeypatch, command, before)
    found = asked(monkeypatch, command, f"{before} {options}")
    assert found == {**plain, **changes} != plain


@pytest.mark.parametrize(
    ("command", "recipe", "report"),
    [
        ("quarot", QuarotRecipe(), True),
        ("quip-sharp", QuipSharpRecipe(), True),
        ("fp6", Fp6Recipe(), True),
        ("rotate", QuarotRecipe(rounding="nearest", weight_bits=16, online=False), False),
    ],
)
def test_what_is_not_asked_for_is_the_default(
    command: str, recipe: Recipe, report: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {**recipe.as_dict(), **asdict(ptq.RunOptions(report=report)), "show_plan": False}
    assert asked(monkeypatch, command, "") == expected


@pytest.mark.parametrize(("options", "group_size"), [("", 32), ("--group-size 16", 16), ("--group-size 0", 0)])
def test_the_group_of_an_e8m0_scale(options: str, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "fp6", f"--scale e8m0 {options}")["group_size"] == group_size


@pytest.mark.parametrize("command", [[], *([name] for name in OPTIONS)])
def test_help(command: list[str]) -> None:
    result = quantize(*command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout


# --- the real process -----------------------------------------------------------------------------------------------


def test_the_process(tiny: Path, tmp_path: Path) -> None:
    """Exit code and streams as a shell sees them."""
    path = os.pathsep.join([str(Path(ptq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ptq", "quarot", str(tiny), str(tmp_path / "out"), "--weight-bits", "1"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "quantize: weight bits must be 2 to 8, or 16 to leave the weights alone; found 1\n"


def test_debug_shows_the_traceback(tiny: Path, tmp_path: Path) -> None:
    result = quantize("quarot", tiny, tmp_path / "out", "--weight-bits", "1", "--debug")
    assert isinstance(result.exception, ptq.InputError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quip-sharp", "demo", "{tmp}/out", "--finetune-epochs", "9"], "--finetune-epochs does nothing without"),
        (["quip-sharp", "demo", "{tmp}/out", "--rounding", "nearest", "--sweeps", "9"], "--sweeps does nothing with"),
        (["fp6", "demo", "{tmp}/out", "--damping", "0.5"], "--damping does nothing with --rounding nearest"),
        (["verify", "demo", "--text", "{tmp}/none.txt"], "--text does nothing without --against"),
        (["quip-sharp", "{tiny}", "{tmp}/out"], "LDLQ needs text"),
        (
            ["quip-sharp", "{tiny}", "{tmp}/out", "--rounding", "nearest", "--finetune", "full"],
            "or leave out --finetune",
        ),
    ],
)
def test_what_changes_nothing_or_misses_text_is_refused(
    arguments: list[str], message: str, tiny: Path, tmp_path: Path
) -> None:
    check_refused(quantize(*(part.format(tmp=tmp_path, tiny=tiny) for part in arguments)), message)
    assert listing(tmp_path) == {}


def test_paths_are_printed_as_they_are(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "b[int4]" / "d[x]"
    result = quantize("fp6", tiny, out)
    assert result.exit_code == 0 and str(out) in result.stderr
