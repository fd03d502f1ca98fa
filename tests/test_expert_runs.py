"""Whole runs of models with experts: resume, processes, files, experts without tokens, the proof, refusals."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, quantize
from safetensors.torch import load_file
from test_engine import finish, start
from test_experts import IDS, QUIET, SPARSE, close, load, of_text
from tiny_models import CACHED, SPARSE_FAMILIES, TINY, WRITTEN_PLAIN, experts_of, save_model
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import ptq
from ptq.hf.experts import Experts
from ptq.layers.linear import QuantLinear
from ptq.pipeline import pipeline, rewrite, solve
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job
from ptq.pipeline.writer import LOG
from ptq.reporting import console_tables
from ptq.statistics import hessian
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

SMALL = {**TINY, "moe_intermediate_size": 24}
pytestmark = pytest.mark.usefixtures("fast")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOG}


METHODS = {
    "quarot": ("quarot", "--group-size", 8, "--activation-bits", 8),
    "quip-sharp": ("quip-sharp", "--bits", 4),
    "fp6": ("fp6", "--rounding", "gptq"),
}
TURNS = ("quarot", "fp6", "quarot", "fp6", "quip-sharp", "fp6")  # QuIP# takes twice the time of the others


@pytest.mark.parametrize(
    "model_type, method",
    [("mixtral", method) for method in METHODS]
    + [(name, TURNS[i % len(TURNS)]) for i, name in enumerate(SPARSE) if name != "mixtral"],
)
@torch.no_grad()
def test_through_the_command(model_type: str, method: str, calibration_text: Path, tmp_path: Path) -> None:
    """Also of a model that was saved as it was trained, with a loss over its routers."""
    model, out = save_model(tmp_path / "model", model_type), tmp_path / "out"
    edit_config(output_router_logits=True)(model)
    command, *options = METHODS[method]
    if method == "quarot" and model_type in CACHED:
        options += ["--kv-bits", 4]
    text = ("--calibration", calibration_text, "--samples", 8, "--sequence-length", 64)
    result = quantize(command, model, out, *options, *text)
    assert result.exit_code == 0, result.output
    packed, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    family = SPARSE[model_type].experts
    assert family is not None
    apart = experts_of(packed)
    assert isinstance(apart, Experts) and apart.names == family.linears
    linears = [module for name, module in apart.named_modules() if name.rpartition(".")[2] in family.linears]
    assert len(linears) == 12 and all(isinstance(linear, QuantLinear) for linear in linears)
    assert close(packed(IDS).logits, load(model)(IDS).logits, 0.6)
    generated = packed.generate(IDS[:, :7], max_new_tokens=5, do_sample=False)
    for length in range(7, 12):  # greedy over full forwards
        assert torch.equal(packed(generated[:, :length]).logits[:, -1].argmax(-1), generated[:, length])
    assert quantize("verify", out, "--against", model).exit_code == 0
    assert quantize("inspect", out).exit_code == 0
    page = (out / "report.html").read_text()
    assert f".experts.*.{family.down} (4)" in page and ".experts.2." not in page
    packed.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert quantize("verify", tmp_path / "again").exit_code == 0
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(out / "model.safetensors"))
    source = {name.removesuffix(".weight") for name in pipeline.plan(str(model), QuarotRecipe()).checkpoint.tensors}
    packed = json.loads((out / "config.json").read_text())["quantization_config"]
    assert set(packed["linears"]) < source


@pytest.mark.parametrize("model_type", SPARSE_FAMILIES)
def test_saved_again_in_16_bits(model_type: str, tmp_path: Path) -> None:
    """transformers computes some routers in float32."""
    model = save_model(tmp_path / "model", model_type, torch.bfloat16)
    edit_tensors(routers_in_16_bits)(model)
    ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest", group_size=8), QUIET)
    for source, copy in (("out", "again"), ("again", "once more")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / source)
        loaded.save_pretrained(tmp_path / copy)
        loaded.save_pretrained(tmp_path / copy)  # another time, too
        written = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", copy)]
        assert written[0] == written[1]


LOAD = """
import sys, torch, ptq
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found[folder] = model(torch.arange(3, 60).reshape(3, 19)).logits
torch.save(found, sys.argv[1])
"""


@torch.no_grad()
def test_a_fresh_process_loads_them(tmp_path: Path) -> None:
    """Which has tried no experts yet; also files with the names of the model, where the source has other ones."""
    wanted = {}
    for model_type in SPARSE:
        model, out, again = (tmp_path / f"{model_type}{kind}" for kind in ("", "-out", "-again"))
        ptq.quantize(save_model(model, model_type), out, QuarotRecipe(rounding="nearest", group_size=8), QUIET)
        packed = load(out)
        packed.save_pretrained(again, save_original_format=False)
        names = [{name for file in folder.glob("*.safetensors") for name in load_file(file)} for folder in (out, again)]
        logits = packed(IDS).logits
        wanted |= {str(folder): logits for folder in ((out, again) if names[0] != names[1] else (out,))}
    assert len(wanted) > len(SPARSE)
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "logits"), *wanted], check=True)
    found = torch.load(tmp_path / "logits")
    assert all(torch.equal(found[folder], logits) for folder, logits in wanted.items())


@pytest.mark.parametrize("model_type", SPARSE)
def test_loaded_logits_are_those_of_the_run(model_type: str, tmp_path: Path) -> None:
    """And of a model without head, and of one that is loaded in shards."""
    model, out = save_model(tmp_path / "model", model_type), tmp_path / "out"
    recipe = QuarotRecipe(rounding="nearest")
    ptq.quantize(model, out, recipe, QUIET)
    target = pipeline.plan(str(model), recipe)
    signs = {name: rewrite.draw_signs(name, length, recipe.seed) for name, length in target.plan.signs.items()}
    job = Job(recipe=recipe, signs=signs, device=torch.device("cpu"), **vars(target))
    tensors = load_file(out / "model.safetensors")
    hidden = job.embed([plain_matrix(tensors["model.embed_tokens.weight"])], IDS)
    for index in range(2):
        inside = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{index}.")}
        hidden = job.packed_block(index, inside).run(hidden)
    with torch.no_grad():
        packed = load(out)
        logits = job.logits(
            plain_matrix(tensors[f"{job.head.name}.weight"]),
            {name: tensors[name] for name in job.final_tensors},
            hidden,
        )
        assert torch.equal(torch.cat(logits), torch.cat([packed(row).logits for row in IDS.split(3)]))
        headless = AutoModel.from_pretrained(out, dtype=torch.float32)
        assert torch.equal(headless(IDS).last_hidden_state, packed.model(IDS).last_hidden_state)
        packed.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
        assert torch.equal(load(tmp_path / "shards")(IDS).logits, packed(IDS).logits)


@pytest.mark.parametrize("pattern", ["*experts*", "model.layers.1.*experts.2.*", "*layers.1*"])
def test_experts_that_are_left_out(pattern: str, tmp_path: Path) -> None:
    """All of them: transformers holds them together, as ever. One: reports keep it apart from the others."""
    model, out = save_model(tmp_path / "model", "mixtral"), tmp_path / "out"
    recipe = QuarotRecipe(rounding="nearest", weight_bits=8, online=False, skip=(pattern,))
    ptq.quantize(model, out, recipe, QUIET)
    page, table = (out / "report.html").read_text(), console_tables.plan_table(pipeline.plan(str(model), recipe).plan)
    assert ("layers.1.block_sparse_moe.experts.*.w1 (3)" in page) == ("experts.2" in pattern)
    assert ("experts.*.w1 (2)" in table) == ("experts.2" in pattern)
    packed = load(out)
    with torch.no_grad():
        assert close(packed(IDS).logits, load(model)(IDS).logits, 0.15)
    assert isinstance(packed.model.layers[1].mlp.experts, Experts) == (pattern != "*experts*")
    packed.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_stopped_and_continued(
    model_type: str, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = save_model(tmp_path / "model", model_type, **SMALL), of_text(calibration_text)
    ptq.quantize(model, tmp_path / "out", recipe, QUIET)
    real, left = solve.ldlq, 0

    def stopping(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(solve, "ldlq", stopping)
    stops = 0
    while not (tmp_path / "again").exists():
        left, stops = 7, stops + 1
        try:
            ptq.quantize(model, tmp_path / "again", recipe, QUIET)
        except KeyboardInterrupt:
            continue
    assert stops == 5 and contents(tmp_path / "again") == contents(tmp_path / "out")


def test_two_processes_make_the_same_bytes(tmp_path: Path, calibration_text: Path) -> None:
    model, recipe = save_model(tmp_path / "model", "qwen3_moe", **SMALL), of_text(calibration_text, samples=20)
    for count in (1, 2):
        assert finish(start(count, model, tmp_path / str(count), recipe)) == [0] * count
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_prepacked(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral", hidden_size=64, intermediate_size=128, head_dim=16)
    ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)
    assert quantize("prepack", tmp_path / "out", tmp_path / "tiled", "--target", "cpu").exit_code == 0
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "tiled")(IDS).logits, load(tmp_path / "out")(IDS).logits)


def routers_in_16_bits(tensors: dict[str, Tensor]) -> None:
    """transformers 5.24 writes some of them in float32."""
    tensors.update((name, x.to(torch.bfloat16)) for name, x in tensors.items() if name.endswith("gate.weight"))


@pytest.mark.parametrize("model_type", SPARSE)
def test_files_with_fused_tensors(model_type: str, tmp_path: Path) -> None:
    """The same weights in other files give the same result."""
    folder = save_model(tmp_path / "model", model_type, torch.bfloat16)
    load(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "fused", save_original_format=False)
    edit_tensors(routers_in_16_bits)(tmp_path / "fused")
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert any(name.startswith("model.layers.1.") and name.endswith(".experts.gate_up_proj") for name in names)
    assert not any("experts.0" in name for name in names)
    for source in ("model", "fused"):
        ptq.quantize(tmp_path / source, tmp_path / f"{source}.out", QuarotRecipe(rounding="nearest"), QUIET)
    written = [(tmp_path / f"{source}.out" / "model.safetensors").read_bytes() for source in ("model", "fused")]
    assert written[0] == written[1]


# --- few tokens, and none -------------------------------------------------------------------------------------------


def never_chosen(tensors: dict[str, Tensor]) -> None:
    """Of expert 1 and its opposite one always has the larger share: expert 3, of share zero, gets no token."""
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name][1], tensors[name][3] = -tensors[name][0], 0


@pytest.mark.parametrize("kind", [of_text, QuipSharpRecipe], ids=["gptq", "ldlq"])
def test_an_expert_without_tokens(kind: Any, calibration_text: Path, tmp_path: Path, capsys: Any) -> None:
    model = save_model(tmp_path / "model", "olmoe", num_experts_per_tok=1)
    edit_tensors(never_chosen)(model)
    text = dict(calibration=str(calibration_text), samples=8, sequence_length=64)
    recipe = of_text(calibration_text) if kind is of_text else QuipSharpRecipe(bits=2, **text)
    ptq.quantize(model, tmp_path / "out", recipe)
    assert "block 1: 1 of 4 experts were given no calibration token" in capsys.readouterr().err
    lines = json.loads((tmp_path / "out" / "ptq.json").read_text())["linears"]
    for index in range(2):
        lines_of = {n: lines[f"model.layers.{index}.mlp.experts.{n}.down_proj"] for n in range(4)}
        assert [line["tokens"] == 0 for line in lines_of.values()] == [False, False, False, True]
        assert lines_of[3]["solver"] == "nearest" and lines_of[3]["note"] == hessian.NO_TOKEN
        assert all("note" not in lines_of[n] and lines_of[n]["shrinkage"] < 1 for n in (0, 1))
        up = lines[f"model.layers.{index}.mlp.experts.3.up_proj"]
        assert up["tokens"] == 0 and up["shrinkage"] == 1 and up["solver"] == "ldlq" and up["loss"] > 0
        assert sum(lines[f"model.layers.{index}.mlp.experts.{n}.gate_proj"]["tokens"] for n in range(4)) == 512
    with torch.no_grad():
        assert load(tmp_path / "out")(IDS).logits.isfinite().all()
    assert quantize("verify", tmp_path / "out").exit_code == 0


# --- the proof ------------------------------------------------------------------------------------------------------


def almost_equal(tensors: dict[str, Tensor]) -> None:
    """Two experts whose routers differ in the last bits: which of the two is chosen is chance."""
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        noise = torch.randn(tensors[name][1].shape, generator=torch.Generator().manual_seed(0))
        tensors[name][1] = tensors[name][0] * (1 + 2e-7 * noise)


def test_experts_that_change_places_are_no_error(tmp_path: Path, calibration_text: Path) -> None:
    model = save_model(tmp_path / "model", "olmoe", num_experts_per_tok=1)
    edit_tensors(almost_equal)(model)
    recipe = of_text(calibration_text, rounding="nearest")  # the text makes the probe longer
    assert ptq.quantize(model, tmp_path / "out", recipe, QUIET).rotation_error < 1e-5


def test_a_wrong_router_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers, that is: what it chooses is the original's."""
    real = rewrite.weight

    def broken(linear: Any, *rest: Any) -> Tensor:
        return real(linear, *rest) * (1.01 if linear.role == "router" else 1)

    model = save_model(tmp_path / "model", "mixtral", **SMALL)
    monkeypatch.setattr(rewrite, "weight", broken)
    with pytest.raises(ptq.RunError, match="block 0: the rotated block differs from the original by 1"):
        ptq.quantize(model, tmp_path / "out", QuarotRecipe(rounding="nearest"), QUIET)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_options_and_configs(tmp_path: Path, calibration_text: Path) -> None:
    model, out = save_model(tmp_path / "model", "olmoe", **SMALL), tmp_path / "out"
    text = ("--calibration", calibration_text)
    tuned = quantize("quip-sharp", model, out, "--finetune", "blocks", *text)
    check_refused(tuned, "--finetune is not made for models with experts")
    for change, message in (
        (dict(clip_qkv=8.0), "clip_qkv 8.0: models that clip their values are not supported"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok must be a positive whole number, found 0"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9, but there are only 4 experts"),
        (dict(num_experts=10**6), "num_experts 1000000, but the checkpoint has"),
        (dict(hidden_act="nosuch"), "config.json: transformers makes no model of it: it knows no 'nosuch'"),
        (dict(num_experts=5), "'model.layers.0.mlp.gate.weight' has shape [4, 16], but config.json says [5, 16]"),
    ):
        changed = shutil.copytree(model, tmp_path / "changed")
        edit_config(**change)(changed)
        check_refused(quantize("fp6", changed, out), message)
        shutil.rmtree(changed)


def test_an_expert_that_the_model_does_not_have(tmp_path: Path) -> None:
    inside = "model.layers.0.mlp.experts"
    for model_type, name in (
        ("olmoe", f"{inside}.9.up_proj"), ("olmoe", f"{inside}.1.w2"), ("llama", f"{inside}.1.up_proj")
    ):  # fmt: skip
        model, out = save_model(tmp_path / "model", model_type, **SMALL), tmp_path / "out"
        ptq.quantize(model, out, QuarotRecipe(rounding="nearest"), QUIET)
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["linears"][name] = "scheme0"
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(ptq.InputError, match=f"names {name}, which the model does not have"):
            load(out)
        for folder in (model, out):
            shutil.rmtree(folder)


@pytest.mark.parametrize("skip", [(), ("*self_attn*",)], ids=["all", "experts alone"])
def test_without_this_package_nothing_loads(skip: tuple[str, ...], tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model", "mixtral", **SMALL), tmp_path / "out"
    ptq.quantize(model, out, QuarotRecipe(rounding="nearest", skip=skip), QUIET)
    code = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode != 0 and "Error" in result.stderr


def test_a_rotated_checkpoint_needs_no_package(tmp_path: Path) -> None:
    """Its tensors have the names of the source, so that transformers, and others, find them."""
    folders: list[Path] = []
    for model_type in (name for name in SPARSE if name in WRITTEN_PLAIN):
        model, out = save_model(tmp_path / model_type, model_type), tmp_path / f"{model_type}.out"
        assert quantize("rotate", model, out).exit_code == 0
        names = [load_file(folder / "model.safetensors").keys() for folder in (model, out)]
        assert names[1] - {"lm_head.weight"} == names[0]
        folders += model, out
    code = "import sys, torch; from transformers import AutoModelForCausalLM as M\nfor f in sys.argv[1:]: " \
           "print(M.from_pretrained(f)(torch.arange(3, 60)[None]).logits.norm(dim=-1).tolist())"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, cwd=tmp_path)
    found = [torch.tensor(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(folders) > 10, done.stderr
    for out, rotated, original in zip(folders[1::2], found[1::2], found[::2], strict=True):
        assert close(rotated, original, 1e-5), out


def test_saved_under_the_names_of_the_model(tmp_path: Path) -> None:
    """`block_sparse_moe.experts.0.w1` in files is `mlp.experts.0.w1` in the model: both load, and are checked alike."""
    model = save_model(tmp_path / "model", "mixtral")
    assert quantize("fp6", model, tmp_path / "out").exit_code == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(
        tmp_path / "saved", save_original_format=False
    )
    assert any(".mlp.experts.0.w1." in name for name in load_file(tmp_path / "saved" / "model.safetensors"))
    assert quantize("verify", tmp_path / "saved").exit_code == 0
    shown = [quantize("inspect", tmp_path / name).stdout for name in ("out", "saved")]
    assert shown[0].splitlines()[:4] == shown[1].splitlines()[:4]
