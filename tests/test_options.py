"""The options of every command: which there are, and where they arrive."""

import inspect
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import quantize

import ptq
from fp6.plan import Fp6Recipe
from ptq import cli
from ptq.cli import app
from ptq.recipe import Recipe
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

pytestmark = pytest.mark.usefixtures("fast")


SHARED = ["--device", "--work", "--restart", "--plan", "--debug", "--seed"]
METHOD = [
    *SHARED, "--rounding", "--rotate", "--no-rotate", "--calibration", "--samples", "--sequence-length", "--damping",
    "--gptaq-alpha", "--sweeps", "--finetune", "--finetune-epochs", "--skip", "--report", "--no-report",
    "--activation-bits", "--embedding-bits",
]  # fmt: skip
OPTIONS = {
    "quarot": [
        *METHOD, "--weight-bits", "--bits", "--group-size", "--symmetric", "--asymmetric", "--online", "--offline",
        "--activation-clip", "--kv-bits", "--key-bits", "--value-bits", "--kv-clip", "--kv-sinks", "--key-centers",
        "--no-key-centers", "--bits-for", "--scale",
    ],
    "quip-sharp": [*METHOD, "--bits", "--bits-for"],
    "fp6": [*METHOD, "--element", "--element-for", "--group-size", "--scale", "--scale-search"],
    "prepack": ["--target", "--debug"],
    "export": ["--gguf", "--debug"],
    "dequantize": ["--debug"],
    "rotate": SHARED,
    "generate": [
        "--max-new-tokens", "--temperature", "--chat", "--no-chat", "--seed", "--device", "--dtype", "--debug",
    ],
    "perplexity": ["--text", "--dataset", "--context", "--against", "--device", "--dtype", "--json", "--debug"],
    "compare": ["--text", "--dataset", "--context", "--device", "--dtype", "--json", "--debug"],
    "inspect": ["--json", "--debug"],
    "verify": ["--against", "--text", "--max-kl", "--json", "--debug"],
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
    "--gptaq-alpha": ("", "--gptaq-alpha 0.25", {"gptaq_alpha": 0.25}),
    "fp6 --gptaq-alpha": ("--rounding gptq", "--gptaq-alpha 0.25", {"gptaq_alpha": 0.25}),
    "--skip": ("", "--skip *.down_proj --skip *.0.*", {"skip": ("*.down_proj", "*.0.*")}),
    "--bits-for": ("", "--bits-for *.down_proj=4 --bits-for *.0.*=3", {"widths": ("*.down_proj=4", "*.0.*=3")}),
    "--element-for": ("", "--element-for *.down_proj=e4m2", {"widths": ("*.down_proj=e4m2",)}),
    "--report": ("--no-report", "--report", {"report": True}),
    "--no-report": ("", "--no-report", {"report": False}),
    "--activation-bits": ("", "--activation-bits 8", {"activation_bits": 8}),
    "quip-sharp --activation-bits": ("", "--activation-bits 16", {"activation_bits": 16}),
    "--embedding-bits": ("", "--embedding-bits 6", {"embedding_bits": 6}),
    "--weight-bits": ("", "--weight-bits 3", {"weight_bits": 3}),
    "quarot --bits": ("", "--bits 3", {"weight_bits": 3}),
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
    "--key-centers": ("--kv-bits 4 --no-key-centers", "--key-centers", {"key_centers": True}),
    "--no-key-centers": ("--kv-bits 4", "--no-key-centers", {"key_centers": False}),
    "--bits": ("", "--bits 3", {"bits": 3}),
    "--finetune": ("", "--finetune blocks", {"finetune": "blocks"}),
    "--finetune-epochs": ("--finetune blocks", "--finetune-epochs 2", {"finetune_epochs": 2}),
    "--sweeps": ("", "--sweeps 1", {"sweeps": 1}),
    "fp6 --sweeps": ("--rounding gptq", "--sweeps 1", {"sweeps": 1}),
    "--element": ("", "--element e3m2", {"element": "e3m2"}),
    "--scale": ("", "--scale e8m0", {"scale": "e8m0", "group_size": 32}),
    "quarot --scale": ("--group-size 64", "--scale integer", {"scale": "integer"}),
    "--scale-search": ("", "--scale-search mse", {"scale_search": "mse"}),
}
QUANTIZING = ("quarot", "quip-sharp", "fp6", "rotate")


def asked(patch: pytest.MonkeyPatch, command: str, options: str) -> dict[str, Any]:
    """What a command line asks for: the fields of the recipe and of the run's options. The command that a recipe names
    gives that recipe again."""
    found: list[tuple[Recipe, dict[str, Any]]] = []

    def run(model: str, out: Path, recipe: Recipe, options: ptq.RunOptions, show_plan: bool) -> None:
        assert not asdict(recipe).keys() & asdict(options).keys()
        fields = {**asdict(recipe), **asdict(options), "method": recipe.method, "show_plan": show_plan}
        found.append((recipe, fields))
        assert (model, out) == ("org/model", Path("OUT"))

    patch.setattr(cli, "run_method", run)
    result = quantize(command, "org/model", "OUT", *options.split())
    assert result.exit_code == 0, result.output
    recipe, fields = found[0]
    assert quantize(recipe.command, "org/model", "OUT", *recipe.arguments()).exit_code == 0
    assert found[1][0] == recipe
    return fields


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
    expected = {**asdict(recipe), **asdict(ptq.RunOptions(report=report)), "method": recipe.method, "show_plan": False}
    assert asked(monkeypatch, command, "") == expected


@pytest.mark.parametrize(("options", "group_size"), [("", 32), ("--group-size 16", 16), ("--group-size 0", 0)])
def test_the_group_of_an_e8m0_scale(options: str, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "fp6", f"--scale e8m0 {options}")["group_size"] == group_size


def test_help_by_its_short_name() -> None:
    for command in ((), ("fp6",)):
        assert quantize(*command, "-h").stdout == quantize(*command, "--help").stdout != ""


@pytest.mark.parametrize("command", [[], *([name] for name in OPTIONS)])
def test_help(command: list[str]) -> None:
    result = quantize(*command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    options = result.stdout.partition("\nOptions:\n")[2].partition("\nCommands:")[0]
    of_help = [len(line) - len(line.lstrip()) for line in options.splitlines() if line.startswith(" " * 8)]
    assert max(of_help, default=0) <= 36  # more than half of a line is left for what an option does


def test_the_page_of_all_commands_says_in_full_what_each_does() -> None:
    page = " ".join(quantize("--help").stdout.split())
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f"{name} {' '.join(command.help.split())}" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(skip="*.q_proj"), "skip must be a list of patterns, such as ['*.down_proj'], found '*.q_proj'"),
        (dict(skip=[1]), "skip must be a list of patterns"),
        (dict(weight_bits="4"), "weight_bits must be an integer, found '4'"),
        (dict(damping="0.1"), "damping must be a number, found '0.1'"),
        (dict(online=1), "online must be true or false, found 1"),
        (dict(calibration=3), "calibration must be a string, found 3"),
        (dict(skip=5), "skip must be a list of patterns, such as ['*.down_proj'], found 5"),
        (dict(cache_clip="x"), "cache_clip must be a number, found 'x'"),
        (dict(cache_clip=True), "cache_clip must be a number, found True"),
        (dict(activation_clip=[]), "activation_clip must be a number or a word, found []"),
        (dict(activation_clip=0.8), "--activation-clip does nothing without --activation-bits 8, 6 or 4"),
        (dict(cache_clip=0.8), "--kv-clip does nothing without --kv-bits"),
        (dict(activation_bits=4, cache_sinks=3), "--kv-sinks does nothing without --kv-bits"),
        (dict(value_bits=4, key_centers=False), "--no-key-centers does nothing without --kv-bits or --key-bits"),
    ],
)
def test_what_python_gives_a_recipe(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ptq.InputError, match=re.escape(message)):
        given(**options)


def given(**options: Any) -> QuarotRecipe:
    """A recipe with options of any type: in tests, those of signatures are checked."""
    recipe = QuarotRecipe()
    for name, value in options.items():
        object.__setattr__(recipe, name, value)
    recipe.__post_init__()
    return recipe


def test_python_is_told_what_a_model_and_a_recipe_are(tiny: Path, tmp_path: Path) -> None:
    function: Any = inspect.unwrap(ptq.quantize)  # in tests, the types in signatures are checked
    with pytest.raises(ptq.InputError, match="model must be a folder, .*, found a Linear; .* save_pretrained"):
        function(torch.nn.Linear(2, 2), tmp_path / "out", Fp6Recipe())
    with pytest.raises(ptq.InputError, match="options must be RunOptions, .* found 'cpu'"):
        ptq.quantize("m", "out", QuarotRecipe(), "cpu")  # type: ignore[arg-type]
    planned: Any = inspect.unwrap(ptq.plan)
    for recipe, found in (({"method": "fp6"}, "a dict"), (Fp6Recipe, "the class Fp6Recipe"), (None, "a NoneType")):
        for call in (partial(function, tiny, tmp_path / "out", recipe), partial(planned, str(tiny), recipe)):
            with pytest.raises(ptq.InputError, match=f"recipe must be a QuarotRecipe, .*, found {found}"):
                call()
    with pytest.raises(ptq.InputError, match="out must be a folder, found None"):
        function(tiny, None, Fp6Recipe())
    for wrong in (dict(restart="no"), dict(report=1), dict(progress=None), dict(work=3)):
        with pytest.raises(ptq.InputError, match=f"{next(iter(wrong))} must be"):
            options: Any = ptq.RunOptions
            options(**wrong)
    with pytest.raises(ptq.InputError, match="--text does nothing without --against"):
        ptq.verify(tiny, text="a.txt")


def test_paths_of_every_kind(tiny: Path, calibration_text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """As strings and as `Path`, in the home folder, which only some shells put in the place of ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rows, name = dict(samples=4, sequence_length=32), calibration_text.name
    recipe = given(calibration=Path(f"~/{name}"), **rows)
    assert ptq.quantize(tiny, "~/out", recipe, ptq.RunOptions(work="~/work")).out == tmp_path / "out"
    again = ptq.quantize(str(tiny), tmp_path / "again", given(calibration=str(calibration_text), **rows)).out
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert quantize("prepack", "~/out", "~/tiles").exit_code == 0 and (tmp_path / "tiles" / "ptq.json").is_file()
    verified = quantize("verify", "~/out", "--against", tiny, "--text", f"~/{name}")
    assert verified.exit_code == 0, verified.stderr
