"""Other widths for some linears (`--bits-for`, `--element-for`): in plan, record and checkpoint, and when the model
runs."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, listing, quantize
from safetensors.torch import load_file
from tiny_models import TINY, decode, save_model
from transformers import AutoModelForCausalLM

import ptq
from fp6.plan import Fp6Recipe
from ptq.hf.experts import Experts
from ptq.layers.linear import QuantLinear
from ptq.models.families import FAMILIES
from ptq.models.model_shape import ModelShape
from ptq.pipeline import pipeline
from ptq.pipeline.work import Record, differences
from ptq.planning.plan import Plan
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe, plan
from quip_sharp.plan import QuipSharpRecipe

QUIET = ptq.RunOptions(progress=False, report=False)
SHAPE = ModelShape(
    hidden=24, intermediate=40, vocab=9, blocks=3, heads=2, kv_heads=1, head_dim=12, rotary=12, tied=False
)
NEAREST = QuarotRecipe(rounding="nearest")
pytestmark = pytest.mark.usefixtures("fast")


def make(*widths: str, **changes: Any) -> Plan:
    recipe = dataclasses.replace(NEAREST, widths=widths, **changes)
    return plan(SHAPE, FAMILIES["llama"], recipe, {})


def options(made: Plan, name: str) -> dict[str, Any]:
    linear = made.linear(f"model.layers.{name}")
    assert linear is not None and linear.format is not None
    return linear.format.options()


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_first_pattern_counts_and_nothing_else_changes() -> None:
    made = make("*.0.mlp.down_proj=8", "*.down_proj=6", "*.v_proj=2", group_size=4, symmetric=False)
    plain = make(group_size=4, symmetric=False)
    bits = {linear.name: options(made, linear.name[13:])["bits"] for linear in made.linears if linear.statistics}
    others = {"model.layers.0.mlp.down_proj": 8, "model.layers.1.mlp.down_proj": 6, "model.layers.2.mlp.down_proj": 6}
    others |= {f"model.layers.{block}.self_attn.v_proj": 2 for block in range(3)}
    assert bits == dict.fromkeys(bits, 4) | others and len(bits) == 21
    assert options(made, "1.mlp.down_proj") == {"bits": 6, "group_size": 4, "symmetric": False}
    without = [dataclasses.replace(plan, linears=tuple(dataclasses.replace(linear, format=None) for linear in
               plan.linears)) for plan in (made, plain)]  # fmt: skip
    assert without[0] == without[1]


def test_skip_comes_before() -> None:
    made = make("*.q_proj=8", "*.down_proj=8", skip=("*.1.*",))
    left, found = made.linear("model.layers.1.self_attn.q_proj"), made.linear("model.layers.0.self_attn.q_proj")
    assert left is not None and left.format is None and found is not None and found.format is not None
    with pytest.raises(ptq.InputError, match="'\\*.1.*=8' does nothing: --skip, or another --bits-for before it"):
        make("*.1.*=8", skip=("*.1.*",))
    with pytest.raises(ptq.InputError, match="'\\*.0.mlp.down_proj=8' does nothing"):
        make("*.down_proj=6", "*.0.mlp.down_proj=8")


def test_linears_of_one_input_keep_one_name_for_what_they_share(tmp_path: Path) -> None:
    """Their Hessian, QuIP#'s signs, and the clip of their input."""
    source = str(save_model(tmp_path / "model"))
    for mixed in (
        QuarotRecipe(activation_bits=4, activation_clip="search", widths=("*.q_proj=8", "*.up_proj=3")),
        QuipSharpRecipe(widths=("*.q_proj=4", "*.up_proj=3")),
    ):
        plain = dataclasses.replace(mixed, widths=())
        plans = [ptq.plan(source, recipe).plan for recipe in (mixed, plain)]
        shared = [[(x.statistics, x.input, x.activation, x.clip_search) for x in made.linears] for made in plans]
        assert shared[0] == shared[1] and plans[0].signs == plans[1].signs and plans[0] != plans[1]


REFUSED: dict[str, tuple[Recipe, tuple[Any, ...], str]] = {
    "no width": (NEAREST, ("*.down_proj",), "--bits-for must be PATTERN=BITS, such as '*.down_proj=8'; found '*.down"),
    "nothing behind =": (NEAREST, ("*.down_proj=",), "must be PATTERN=BITS"),
    "no pattern": (NEAREST, ("=8",), "must be PATTERN=BITS"),
    "nine bits": (NEAREST, ("*.down_proj=9",), "unknown width '9'; known are 2, 3, 4, 5, 6, 7, 8 (--skip leaves"),
    "what --skip does": (NEAREST, ("*.down_proj=16",), "unknown width '16'"),
    "two widths": (NEAREST, ("*.down_proj=4=8",), "unknown width '4=8'"),
    "five bits on the lattice": (QuipSharpRecipe(), ("*=5",), "unknown width '5'; known are 2, 3, 4 ("),
    "bits in place of an element": (Fp6Recipe(), ("*=6",), "--element-for '*=6': unknown width '6'; known are e3m2, "),
    "an element without pattern": (Fp6Recipe(), ("e4m2",), "such as '*.down_proj=e4m2'; found 'e4m2'"),
    "no strings": (NEAREST, (8,), "widths must be a list of patterns, such as ['*.down_proj=8'], found (8,)"),
    "weights that are left alone": (QuarotRecipe(weight_bits=16), ("*=8",), "--weight-bits 16 leaves all alone"),
}


@pytest.mark.parametrize(("recipe", "widths", "message"), REFUSED.values(), ids=REFUSED)
def test_what_python_gives_is_checked(recipe: Recipe, widths: tuple[Any, ...], message: str) -> None:
    given = copy.copy(recipe)
    object.__setattr__(given, "widths", widths)
    with pytest.raises(ptq.InputError, match=re.escape(message)):
        given.__post_init__()


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("quarot", ("--bits-for", "*.dwn_proj=8"), "--bits-for '*.dwn_proj=8' matches no linear that would be"),
        ("quarot", ("--bits-for", "*.down_proj=1"), "unknown width '1'"),
        ("quarot", ("--bits-for", "lm_head=8"), "matches no linear"),
        ("quip-sharp", ("--bits-for", "*.down_proj"), "must be PATTERN=BITS"),
        ("fp6", ("--element-for", "*.down_proj=e9m9"), "--element-for '*.down_proj=e9m9': unknown width 'e9m9'"),
        ("fp6", ("--element-for", "*.dwn_proj=e4m2"), "--element-for '*.dwn_proj=e4m2' matches no linear"),
    ],
)
def test_the_command_refuses(command: str, options: tuple[str, ...], message: str, tiny: Path, tmp_path: Path) -> None:
    check_refused(quantize(command, tiny, tmp_path / "out", "--rounding", "nearest", *options), message)
    assert listing(tmp_path) == {}


# --- the record -----------------------------------------------------------------------------------------------------


def test_records_from_before_are_those_of_the_same_recipe() -> None:
    assert "widths" not in NEAREST.as_dict()
    made = plan(SHAPE, FAMILIES["llama"], NEAREST, {})
    record = Record.of(NEAREST, made, "source", None)
    stored = json.loads(json.dumps(record.as_dict()))
    assert "widths" not in stored["recipe"] and differences(record.as_dict(), stored) == []
    orders = [dataclasses.replace(NEAREST, widths=widths) for widths in (("a=8", "*=3"), ("*=3", "a=8"))]
    records = [Record.of(recipe, made, "source", None) for recipe in orders]
    assert differences(records[0].as_dict(), stored) == ["widths: None -> ['a=8', '*=3']"]
    assert differences(record.as_dict(), records[0].as_dict()) == ["widths: ['a=8', '*=3'] -> None"]
    assert differences(records[1].as_dict(), records[0].as_dict()) == ["widths: ['a=8', '*=3'] -> ['*=3', 'a=8']"]


def test_a_changed_width_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, given = tmp_path / "out", ("--rounding", "nearest", "--bits-for", "*.down_proj=8")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_finish", lambda *args: 1 / 0)
        assert quantize("quarot", tiny, out, *given).exit_code == 1
    check_refused(quantize("quarot", tiny, out, *given[:3], "*.down_proj=6"), "widths: ['*.down_proj=8'] -> ['*.down_")
    check_refused(quantize("quarot", tiny, out, *given[:2]), "widths: ['*.down_proj=8'] -> None")
    result = quantize("quarot", tiny, out, *given)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "ptq.json").read_text())["recipe"]["widths"] == ["*.down_proj=8"]


# --- the checkpoint -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a mixed checkpoint of it that can be exported but for that. Do not write to them."""
    folder = tmp_path_factory.mktemp("mixed")
    source = save_model(folder / "model", **{**TINY, "hidden_size": 32, "intermediate_size": 64})
    given = ("--rounding", "nearest", "--offline", "--bits-for", "*.down_proj=8", "--bits-for", "*.1.*.v_proj=6")
    result = quantize("quarot", source, folder / "out", *given)
    assert result.exit_code == 0, result.output
    return source, folder / "out"


def test_every_figure_is_that_of_the_mixed_plan(folders: tuple[Path, Path]) -> None:
    source, out = folders
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight_codes"].shape == (32, 64)
    assert tensors["model.layers.0.self_attn.v_proj.weight_codes"].shape == (8, 16)
    assert tensors["model.layers.1.self_attn.v_proj.weight_codes"].shape == (8, 24)
    packed = [tensor.nbytes for name, tensor in tensors.items() if name.rpartition(".")[2] in
              ("weight_codes", "weight_scale") or tensor.numel() == 1]  # fmt: skip
    weights = 2 * (2 * 32 * 16 + 2 * 32 * 8 + 3 * 32 * 64)
    record = json.loads((out / "ptq.json").read_text())
    assert record["result"]["bits_per_weight"] == pytest.approx(8 * sum(packed) / weights)
    inspected = json.loads(quantize("inspect", out, "--json").stdout)
    assert inspected["bits_per_weight"] == record["result"]["bits_per_weight"]
    assert {g["scheme"]["bits"]: len(g["linears"]) for g in inspected["groups"]} == {4: 11, 6: 1, 8: 2}
    table = quantize("inspect", out).stdout
    assert all(f"bits={bits} " in table for bits in (4, 6, 8))
    report = json.loads((out / "report.json").read_text())
    assert report["recipe"]["widths"] == ["*.down_proj=8", "*.1.*.v_proj=6"]
    stored = {layer["name"]: layer["storage"] for layer in report["layers"]}
    assert "bits=8" in stored["model.layers.1.mlp.down_proj"] and "bits=4" in stored["model.layers.1.mlp.up_proj"]
    assert "widths *.down_proj=8, *.1.*.v_proj=6" in (out / "report.html").read_text()
    plain = QuarotRecipe(rounding="nearest", online=False)
    mixed = dataclasses.replace(plain, widths=("*.down_proj=8", "*.1.*.v_proj=6"))
    estimates = [pipeline.estimate(ptq.plan(str(source), made), str(source), made) for made in (plain, mixed)]
    assert estimates[1].out - estimates[0].out == (2 * 32 * 64 * 4 + 8 * 32 * 2) // 8


def test_the_plan_has_a_row_for_every_width(folders: tuple[Path, Path], tmp_path: Path) -> None:
    given = ("--bits-for", "*.0.mlp.down_proj=8", "--bits-for", "*.v_proj=6", "--rounding", "nearest", "--plan")
    rows = [line.split() for line in quantize("quarot", folders[0], tmp_path / "out", *given).stdout.splitlines()]
    found = [(row[0].rpartition(".")[2], row[1], next(cell for cell in row if cell.startswith("bits=")))
             for row in rows if row[0].endswith(("v_proj", "down_proj"))]  # fmt: skip
    assert found == [("v_proj", "0-1", "bits=6"), ("down_proj", "0", "bits=8"), ("down_proj", "1", "bits=4")]


def test_what_can_be_done_with_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = folders
    assert quantize("verify", out, "--against", source).exit_code == 0
    assert quantize("prepack", out, tmp_path / "tiles").exit_code == 0
    ids, models = torch.arange(3, 30)[None], []
    for folder in (out, tmp_path / "tiles"):
        models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    models[0].save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    check_refused(quantize("export", out, tmp_path / "exported"), "stored in several ways, which is not exported: quan")
    assert not (tmp_path / "exported").exists()


# --- the running model ----------------------------------------------------------------------------------------------

ATTENTION, MLP = ("*.q_proj={}", "*.k_proj={}", "*.v_proj={}"), ("*.gate_proj={}", "*.experts.2.*={}", "*.down_proj={}")


def widths(model_type: str, *given: Any) -> tuple[str, ...]:
    """Different ones within every group of linears that run together, as far as the model has them apart."""
    patterns = ATTENTION + MLP if model_type == "qwen3_moe" else ATTENTION + MLP[::2]
    if model_type == "phi3":
        patterns = "*.qkv_proj={}", "*.down_proj={}"
    return tuple(pattern.format(width) for pattern, width in zip(patterns, given, strict=False))


MIXED: dict[str, tuple[Recipe, tuple[Any, ...]]] = {
    "W4A16": (NEAREST, (8, 3, 6, 2, 5, 8)),
    "W4A4KV4": (QuarotRecipe(rounding="nearest", activation_bits=4, key_bits=4, value_bits=4), (8, 3, 6, 2, 5, 8)),
    "FP6": (Fp6Recipe(), ("e4m2", "e2m1", "auto", "e2m2", "e3m3", "e4m2")),
    "FP6 with integers": (Fp6Recipe(activation_bits=8), ("e3m2", "e2m1", "e2m2", "e2m2", "e3m1", "e3m2")),
    "E8P": (QuipSharpRecipe(rounding="nearest"), (4, 3, 2, 3, 4, 4)),
    "E8P with numbers": (QuipSharpRecipe(rounding="nearest", activation_bits=16), (4, 3, 2, 3, 4, 4)),
}


def one_by_one(model: Any) -> Any:
    """The same model, whose linears are all called alone."""
    alone = copy.deepcopy(model)
    for module in alone.modules():
        if isinstance(module, QuantLinear):
            module.shared = None
        elif isinstance(module, Experts):
            module.few_tokens = lambda *given: None
        elif type(module).__name__.endswith("DecoderLayer"):
            vars(module).pop("forward", None)
    return alone


@pytest.mark.parametrize("model_type", ["llama", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("name", MIXED)
@torch.no_grad()
def test_a_mixed_model_gives_the_bits_of_its_linears_one_by_one(name: str, model_type: str, tmp_path: Path) -> None:
    recipe, given = MIXED[name]
    recipe = dataclasses.replace(recipe, widths=widths(model_type, *given))
    ptq.quantize(save_model(tmp_path / "model", model_type), tmp_path / "out", recipe, QUIET)
    ids = torch.arange(3, 12)[None]
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
        formats = {module.format for module in model.modules() if isinstance(module, QuantLinear)}
        assert len(formats) >= (2 if model_type == "phi3" else 3)
        alone = one_by_one(model)
        for batch in (1, 3, 1):  # who belongs together is learnt first
            for a, b in zip(decode(model, batch), decode(alone, batch), strict=True):
                assert torch.equal(a, b)
        generated = (each.generate(ids, max_new_tokens=4, do_sample=False) for each in (model, alone))
        assert torch.equal(*generated)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(again(ids).logits, alone(ids).logits)


def test_fine_tuning_of_two_widths(calibration_text: Path, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", **TINY)
    recipe = QuipSharpRecipe(
        calibration=str(calibration_text), samples=8, sequence_length=32, finetune="blocks", finetune_epochs=1,
        widths=("*.v_proj=4", "*.down_proj=3"),
    )  # fmt: skip
    ptq.quantize(source, tmp_path / "out", recipe, QUIET)
    assert quantize("verify", tmp_path / "out", "--against", source).exit_code == 0
