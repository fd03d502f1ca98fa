"""The command line: exit codes, one sentence for every error, nothing half-written, what is printed."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_tensors, listing, quantize

import ptq
from ptq import cli
from ptq.pipeline import preflight, progress
from ptq.pipeline.result import Result
from ptq.planning.plan import weights_of
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")


def test_a_finished_result_is_left_as_it_is(packed: Path, tiny: Path) -> None:
    result = quantize("quarot", tiny, packed, "--rounding", "nearest")
    assert result.exit_code == 0 and "nothing was done" in result.stderr and "proven" not in result.stderr


def test_one_process_of_many_shows_the_plan(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    alone = quantize("quarot", tiny, tmp_path / "out", "--plan")  # some schedulers set RANK for every job
    assert alone.exit_code == 0 and "down_proj" in alone.stdout
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = quantize("quarot", tiny, tmp_path / "out", "--plan")
    assert (result.exit_code, result.output) == (0, "")


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
    monkeypatch.chdir(tmp_path)
    assert quantize("rotate", tiny, "./out/").exit_code == 0
    assert os.listdir(tmp_path) == ["out"]
    assert "config.json" in os.listdir(tmp_path / "out")


def test_a_changed_recipe_on_unfinished_work(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ptq.pipeline.pipeline._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        result = quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest")
    check_refused(result, "interrupted; give the same command again", code=130)
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


@pytest.mark.parametrize(
    "arguments", [["~no-such-user/x", "out"], ["demo", "~no-such-user/x"], ["demo", "out", "--work", "~no-such-user/x"]]
)
def test_a_home_of_nobody(arguments: list[str]) -> None:
    check_refused(quantize("fp6", *arguments), "~no-such-user/x: there is no such user")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    check_refused(quantize("fp6", "demo", tmp_path / ("x" * 300)), "File name too long")


def test_a_path_that_cannot_be_a_folder(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_refused(quantize("rotate", tiny, tmp_path / "file" / "out"), "file/out: lies below a file")


def test_what_cannot_fit_is_refused_before_it_starts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preflight.free_memory, "available", lambda: 10_000_000)
        check_refused(quantize("rotate", tiny, tmp_path / "out"), "of memory, 10 MB are free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000, "total": 2000}))
    check_refused(quantize("rotate", tiny, tmp_path / "out"), "of disk, 1 KB are free")
    assert listing(tmp_path) == {}


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    check_refused(quantize("rotate", "org/model", tmp_path / "out"), "no such folder here")
    check_refused(quantize("rotate", "no such thing", tmp_path / "out"), "no such folder")
    assert listing(tmp_path) == {}


# --- what a command prints ------------------------------------------------------------------------------------------


def test_a_run_reports_its_proofs(tiny: Path, tmp_path: Path) -> None:
    result = quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest", "--weight-bits", "8")
    assert result.exit_code == 0 and result.stdout == ""
    for text in ("bits per quantised weight", "before rounding, the model equals the original", "logits", "estimate:"):
        assert text in result.stderr
    assert "KL" not in result.stderr and "its quality was not measured" in result.stderr
    assert "the embedding's own weight" not in result.stderr
    cache = quantize("quarot", tiny, tmp_path / "cache", "--weight-bits", "16", "--kv-bits", "4")
    assert "its quality was not measured, for want of text: `quantize verify" in cache.stderr
    without = shutil.copytree(tiny, tmp_path / "without", ignore=shutil.ignore_patterns("tokenizer*"))
    mute = quantize("quarot", without, tmp_path / "mute", "--rounding", "nearest", "--weight-bits", "8")
    assert "has no tokenizer" in mute.stderr and "verify" not in mute.stderr
    rotated = quantize("rotate", tiny, tmp_path / "rotated")
    assert rotated.exit_code == 0 and "quality" not in rotated.stderr and "KL" not in rotated.stderr
    assert "no longer the embedding's own weight: 96 x 16 numbers" in rotated.stderr


def test_a_plan_of_the_library_prints_as_that_of_the_command(tiny: Path, tmp_path: Path) -> None:
    assert str(ptq.plan(str(tiny), QuarotRecipe())) in quantize("quarot", tiny, tmp_path / "out", "--plan").stdout


def test_plan_touches_nothing(tiny: Path, tmp_path: Path) -> None:
    before = listing(tiny)
    result = quantize("quarot", tiny, tmp_path / "out", "--plan", "--skip", "*.1.*.o_proj")
    assert result.exit_code == 0
    assert "needs --calibration" in result.stderr and "estimate: " in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    lines = dict(zip([" ".join(row[:2]) for row in rows], result.stdout.splitlines(), strict=True))
    assert "bits=4" in lines["model.layers.*.self_attn.q_proj 0-1"]
    assert "clip" not in result.stdout and "KV cache" not in result.stdout
    assert next(line for line in lines.values() if "model.embed_tokens" in line).endswith("as it is")  # tied
    assert "signs R1" in lines["model.layers.*.self_attn.q_proj 0-1"] and "R1 (sylvester:4):" in lines
    assert "signs R2.*" in lines["model.layers.*.self_attn.o_proj 0"]
    assert lines["model.layers.*.self_attn.o_proj 1"].endswith("as it is")
    assert lines["model.layers.*.mlp.down_proj 0-1"].count("H24") == 2  # in the weight, and online
    assert "H64: a Hadamard matrix" in result.stdout
    missing = quantize("quarot", tiny, tmp_path / "out", "--plan", "--calibration", tmp_path / "missing.txt")
    check_refused(missing, "missing.txt: cannot be read (No such file")
    assert listing(tmp_path) == {} and listing(tiny) == before


def test_what_a_late_refusal_leaves_is_named(tiny: Path, tmp_path: Path) -> None:
    model, out = Path(shutil.copytree(tiny, tmp_path / "model")), tmp_path / "out"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")

    edit_tensors(spoil)(model)
    check_refused(
        quantize("fp6", model, out), f"What was done stays in {out}.work and {out}.ptq-partial; to give up, remove both"
    )
    assert listing(out) == {} and (tmp_path / "out.ptq-partial").is_dir() and (tmp_path / "out.work").is_dir()
    again = quantize("quarot", model, out, "--calibration", "none.txt")  # refused before anything is touched
    check_refused(again, "none.txt")
    assert "What was done" not in again.stderr


def test_a_model_that_has_lost_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_vocabulary", lambda out: 512)
    recipe = QuarotRecipe(calibration="a.txt")

    def result(kl: float, error: float | None = None) -> Result:
        return Result(Path("OUT"), 4.0, 9, rotation_error=0.0, kl=kl, top1=1.0, kl_standard_error=error, text="a.txt")

    def quality(kl: float, error: float | None = None) -> str:
        return cli._quality("MODEL", recipe, result(kl, error))

    good, bad, lost = quality(0.01, 0.003), quality(0.5), quality(1000.0)
    measured = replace(result(0.01), perplexity=4.04, original_perplexity=4.0)
    assert "nats per token, perplexity 4.000 to 4.040 (+1.0%); `quantize ver" in cli._quality("MODEL", recipe, measured)
    growth = "about +1.0% of perplexity; `quantize ver"
    assert f"on a few rows of a.txt: KL from the original 0.0100 ± 0.0030 nats per token, {growth}" in good
    assert "0.5000 nats per token" in bad and "about +64.9% of perplexity; warning: that is much" in bad
    assert "more than twice the perplexity; warning" in lost
    far = replace(result(1.05), perplexity=6.0, original_perplexity=4.0)
    assert "perplexity 4.000 to 6.000 (+50.0%); warning" in cli._quality("MODEL", recipe, far)
    unread = replace(result(0.0), perplexity=612.0, original_perplexity=600.0)
    assert "(+2.0%); warning: the original predicts this text worse than chance" in cli._quality(
        "MODEL", recipe, unread
    )


def test_plan_says_what_the_run_would_refuse(tiny: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    places = {"full": "full: exists and is not empty", "full/file": "is a file, and the result is a folder"}
    for out, reason in places.items():
        result = quantize("fp6", tiny, tmp_path / out, "--plan")
        assert result.exit_code == 0 and "here and now the command would refuse: " in result.stderr
        assert reason in result.stderr
    done = quantize("fp6", tiny, packed, "--plan").stderr
    assert (
        "the command that made it has nothing left to do, any other is refused" in done and "would refuse" not in done
    )
    for work in (tmp_path, tiny):
        result = quantize("fp6", tiny, tmp_path / "out", "--plan", "--work", work)
        assert "is removed at the end, so" in result.stderr
    assert "refuse" not in quantize("fp6", tiny, tmp_path / "out", "--plan").stderr


def test_a_log_says_how_much_is_left(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now, plan = [0.0], ptq.plan(str(tiny), QuarotRecipe(calibration="a.txt")).plan
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress(plan, calibrated=True, visible=True) as shown:
        eighth = shown.bar.tasks[0].total / 8
        for description in ("one", "two", "three"):
            now[0] += 40
            with shown.step(description, eighth):
                pass
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "0 % done: one" and second == "12 % done, about 5 min left: two"
    assert third == "25 % done, about 4 min left: three"


@pytest.mark.parametrize("finetune", ["none", "blocks", "full"])
def test_blocks_that_were_done_before_count_as_done(finetune: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block advances the bar by what is skipped of it."""
    plan = ptq.plan(str(tiny), QuarotRecipe(calibration="a.txt", finetune=finetune)).plan
    shown, all_done = (progress.Progress(plan, calibrated=True, visible=False) for _ in range(2))
    shown.skip(1)
    all_done.skip(plan.blocks)
    one, every = (bar.bar.tasks[0].completed for bar in (shown, all_done))
    assert one * plan.blocks == pytest.approx(every) and every > 0
    whole = progress.PASSES_PER_EPOCH * plan.finetune_epochs * weights_of(plan.linears) * (finetune == "full")
    assert all_done.bar.tasks[0].total == pytest.approx(every + whole)


@pytest.mark.parametrize("options", [
    ("quarot", "--rounding", "nearest", "--group-size", "8", "--embedding-bits", "8"),
    ("quarot", "--rounding", "nearest", "--bits-for", "*.0.mlp.*=3", "--skip", "*.1.*.o_proj"),
    ("quip-sharp", "--rounding", "nearest", "--bits", "3"), ("fp6",), ("rotate",),
])  # fmt: skip
def test_the_plan_knows_the_bits_of_the_result(options: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    method, *options = options
    planned, done = (quantize(method, tiny, tmp_path / "out", *options, *more) for more in (("--plan",), ()))
    found = [re.findall(r"[\d.]+ bits per quantised weight", text) for text in (planned.stdout, done.stderr)]
    assert done.exit_code == 0 and found[0] == found[1] and len(found[0]) == (method != "rotate")


def test_plan_shows_what_happens_when_the_model_runs(tiny: Path, tmp_path: Path) -> None:
    options = ("--activation-bits", "6", "--kv-bits", "4", "--value-bits", "3", "--skip", "*.o_proj")
    result = quantize("quarot", tiny, tmp_path / "out", "--plan", *options)
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert rows["model.layers.*.mlp.down_proj"].endswith("input bits=6 clip=0.95")
    assert "clip" not in rows["model.layers.*.self_attn.o_proj"] + rows["model.embed_tokens"]
    assert rows["KV"].startswith(
        "KV cache: key_bits=4 value_bits=3 key_clip=1.0 value_clip=1.0 sinks=0 hadamard=sylvester:3"
    )
    assert listing(tmp_path) == {}


def test_output_that_nobody_reads_on(packed: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m ptq inspect {shlex.quote(str(packed))} --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "error" not in result.stderr, result.stderr


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
    assert result.stderr == "quantize: --weight-bits must be 2 to 8, or 16 to leave weights alone; found 1\n"


def test_debug_shows_the_traceback(tiny: Path, tmp_path: Path) -> None:
    result = quantize("quarot", tiny, tmp_path / "out", "--weight-bits", "1", "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "found 1\n" in result.stderr


def test_a_report_that_was_left_out_is_not_promised(tiny: Path, tmp_path: Path) -> None:
    assert quantize("fp6", tiny, tmp_path / "out", "--no-report").exit_code == 0
    again = quantize("fp6", tiny, tmp_path / "out", "--no-report").stderr
    assert "finished before" in again and "--no-report" not in again
    asked = quantize("fp6", tiny, tmp_path / "out").stderr
    assert "finished before" in asked and f"for a report, remove {tmp_path / 'out'} and repeat" in asked


def test_a_skip_of_everything_is_said(tiny: Path, tmp_path: Path) -> None:
    result = quantize("fp6", tiny, tmp_path / "out", "--skip", "*")
    assert result.exit_code == 0 and "nothing is quantised: --skip leaves every linear alone" in result.stderr


def test_paths_are_printed_as_they_are(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "b[int4]" / "d[x]"
    result = quantize("fp6", tiny, out)
    assert result.exit_code == 0 and str(out) in result.stderr


def test_the_version_is_that_of_the_project() -> None:
    said = quantize("--version")
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert version is not None and said.exit_code == 0
    assert said.stdout in (f"quantize {version[1]}\n", "quantize, ptq-toolkit from a folder: not installed\n")


def test_what_an_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="iso8859-2"))
    cli.write("café ± 2\n")
    assert written.getvalue() == b"caf\xe9 ? 2\n"
