"""Options that are refused: values that no command takes, and those that would change nothing."""

from pathlib import Path

import pytest
import torch
from conftest import check_refused, listing, quantize

pytestmark = pytest.mark.usefixtures("fast")


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no calibration": ([], "--calibration"),
    "no such text": (["--calibration", "{tmp}/none.txt"], "none.txt"),
    "too short a text": (["--calibration", "{tmp}/short.txt"], "lower --samples"),
    "text that is no UTF-8": (["--calibration", "{tmp}/latin1.txt"], "not UTF-8"),
    "a sequence above the limit": (["--calibration", "{tmp}/short.txt", "--sequence-length", "129"], "limit is 128"),
    "a sequence of nothing": (["--sequence-length", "0"], "--sequence-length must be at least 1"),
    "no samples": (["--samples", "0"], "--samples must be at least 1"),
    "groups that do not divide": (["--rounding", "nearest", "--group-size", "7"], "try --group-size"),
    "a negative group": (["--rounding", "nearest", "--group-size", "-1"], "--group-size must be 0"),
    "one bit": (["--weight-bits", "1"], "--weight-bits must be 2 to 8"),
    "no damping": (["--damping", "0"], "--damping must be above 0"),
    "fewer sweeps than none": (["--sweeps", "-1"], "--sweeps must be 0 or more, found -1"),
    "sweeps over nothing": (["--weight-bits", "16", "--sweeps", "4"], "--sweeps does nothing with --weight-bits 16"),
    "more than all of the drift": (["--gptaq-alpha", "1.5"], "--gptaq-alpha must be 0 to 1, found 1.5"),
    "an alpha of nothing": (["--rounding", "nearest", "--gptaq-alpha", "0.5"], "--gptaq-alpha does nothing with"),
    "an alpha of weights that stay": (["--weight-bits", "16", "--gptaq-alpha", "0.5"], "--gptaq-alpha does nothing"),
    "odd activation bits": (["--activation-bits", "5"], "--activation-bits must be 4, 6 or 8, or 16"),
    "odd embedding bits": (["--embedding-bits", "5"], "--embedding-bits must be 4, 6 or 8, or 16"),
    "an activation clip above one": (
        ["--activation-bits", "8", "--activation-clip", "1.01"],
        "--activation-clip must be 1e-05 to 1",
    ),
    "no activation clip": (
        ["--activation-bits", "8", "--activation-clip", "0"],
        "--activation-clip must be 1e-05 to 1",
    ),
    "an activation clip that is no number": (
        ["--activation-bits", "8", "--activation-clip", "nan"],
        "--activation-clip must be 1e-05 to 1",
    ),
    "damping of nothing": (["--rounding", "nearest", "--damping", "0.5"], "--damping does nothing with"),
    "groups of nothing": (["--weight-bits", "16", "--group-size", "32"], "--group-size does nothing with"),
    "integer scales of whole rows": (["--rounding", "nearest", "--scale", "integer"], "in groups, without zero-points"),
    "integer scales of nothing": (["--weight-bits", "16", "--scale", "integer"], "--scale does nothing with"),
    "offline without rotations": (["--no-rotate", "--offline"], "--offline does nothing with"),
    "a seed beyond 64 bits": (["--seed", "99999999999999999999"], "--seed must be at least 0 and below 2^63"),
    "a clip of activations that are left alone": (["--activation-clip", "0.9"], "does nothing without"),
    "sinks of a cache that is left alone": (["--kv-sinks", "4"], "does nothing without"),
    "bits of a cache beside those of its keys and values": (
        ["--kv-bits", "4", "--key-bits", "16", "--value-bits", "8"],
        "--kv-bits does nothing beside",
    ),
    "one bit of a key": (["--kv-bits", "4", "--key-bits", "1"], "--key-bits must be one of"),
    "too many bits of a value": (["--kv-bits", "9"], "--kv-bits must be one of"),
    "a KV clip above one": (["--kv-bits", "4", "--kv-clip", "1.5"], "--kv-clip must be above 0"),
    "less than no sinks": (["--kv-sinks", "-1"], "--kv-sinks must be a whole number"),
    "an unknown device": (["--rounding", "nearest", "--device", "tpu"], "--device must be auto, cpu or cuda"),
    "a part of a name": (["--rounding", "nearest", "--skip", "down_proj"], "is '*down_proj' meant?"),
    "a part in the midst": (["--rounding", "nearest", "--skip", "*.layers.0"], "is '*.layers.0*' meant?"),
    "a part with bits": (["--rounding", "nearest", "--bits-for", "mlp=3"], "is '*mlp*=3' meant?"),
    "a pipe": (["--calibration", "/dev/null"], "must be a file, not a pipe"),
    "a folder of texts": (["--calibration", "{tmp}"], "(name such a file in it)"),
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
    planned = quantize("fp6", tiny, tmp_path / "out", "--device", "cuda", "--plan")
    assert planned.exit_code == 0 and "would refuse: --device cuda" in planned.stderr
    assert listing(tmp_path) == {}


@pytest.mark.parametrize(("arguments", "message"), [
    (["quarot"], "missing argument 'MODEL' (see `quantize quarot --help`)"),
    (["quaro"], "no such command 'quaro'. Did you mean 'quarot'? (see `quantize --help`)"),
    (["fp6", "demo", "demo"], "OUT cannot be demo: that names the model that ships with ptq"),
    (["generate", "demo", "import", "os"], "got unexpected extra argument(s) (os); a text of several words needs"),
    (["generate", "demo", "-5 + 3"], "no such option: -5; put -- in front of a text that begins with a dash (see `"),
    (["fp6", "demo", "out", "--no-such-option"], "no such option: --no-such-option (see `quantize fp6 --help`)"),
    (["fp6", "demo", "out", "--element"], "option '--element' requires an argument (see `quantize fp6 --help`)"),
    (["fp6", "demo", "out", "--report=3"], "option '--report' does not take a value (see `quantize fp6 --help`)"),
    (["fp6", "demo", "out", "--bits", "6"], "no such option: --bits; --element says how many: 7 in e4m2 and e3m3, 6"),
    (["quip-sharp", "demo", "out", "--group-size", "64"], "no such option: --group-size; `quarot`, `fp6` have --grou"),
    (["fp6", "demo", "out", "--kv-bits", "4"], "; `quarot` has --kv-bits (see `quantize fp6 --help`)"),
    (["fp6", "demo", "out", "--bits-for", "*=3"], "(Possible options: "),
    (["fp6", "demo", "out", "--weight-bits", "4"], "--element says how many"),
    (["inspect", "demo", "--device", "cpu"], "no such option: --device (see `quantize inspect --help`)"),
    (["--element"], "no such option: --element (see `quantize --help`)"),
    (["quarot", "demo", "out", "--rounding", "up"], "invalid value for '--rounding': 'up' is not one of 'nearest', "),
])  # fmt: skip
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    result = quantize(*arguments)
    check_refused(result, message)
    assert result.output.count("\n") == 1


def test_no_command_shows_the_help_and_is_wrong_usage() -> None:
    result = quantize()
    assert result.exit_code == 2 and "Usage: quantize [OPTIONS] COMMAND" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quip-sharp", "demo", "{tmp}/out", "--finetune-epochs", "9"], "--finetune-epochs does nothing without"),
        (["quip-sharp", "demo", "{tmp}/out", "--rounding", "nearest", "--sweeps", "9"], "--sweeps does nothing with"),
        (["fp6", "demo", "{tmp}/out", "--damping", "0.5"], "--damping does nothing with --rounding nearest"),
        (["fp6", "{tiny}", "{tmp}/out", "--samples", "9"], "--samples does nothing without --calibration"),
        (["fp6", "demo", "{tmp}/out", "--samples", "9"], "--samples does nothing where nothing is fitted to the text"),
        (["fp6", "{tiny}", "{tmp}/out", "--samples", "9", "--plan"], "--samples does nothing without --calibration"),
        (
            ["quarot", "{tiny}", "{tmp}/out", "--rounding", "nearest", "--sequence-length", "9"],
            "--sequence-length does",
        ),
        (["quarot", "{tiny}", "{tmp}/out", "--weight-bits", "16", "--samples", "9"], "--samples does nothing with"),
        (
            ["quarot", "demo", "{tmp}/out", "--weight-bits", "16", "--activation-bits", "8", "--samples", "9"],
            "--samples does nothing with --weight-bits 16; leave it out",
        ),
        (["verify", "demo", "--text", "{tmp}/none.txt"], "--text does nothing without --against"),
        (["verify", "demo", "--against", "demo", "--text", "{tmp}/none.txt"], "none.txt: cannot be read"),
        (
            ["verify", "demo", "--against", "demo", "--text", "{tmp}/short.txt", "--max-kl", "inf"],
            "--max-kl must be a finite number of nats per to",
        ),
        (["perplexity", "demo", "--text", "{tmp}/none.txt"], "none.txt: cannot be read (No such file or dir"),
        (["quip-sharp", "{tiny}", "{tmp}/out"], "LDLQ needs text"),
        (["quip-sharp", "demo", "{tmp}/out", "--finetune", "full", "--gptaq-alpha", "0.25"], "leave one of them out"),
        (["fp6", "demo", "{tmp}/out", "--finetune-epochs", "9"], "--finetune-epochs does nothing without"),
        (["quarot", "demo", "{tmp}/out", "--finetune", "full", "--bits", "16"], "16 bits leave none"),
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


def test_the_current_folder_is_not_replaced(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stood in it would stand in a folder that is gone."""
    (inside := tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(inside)
    for out in (".", "", inside, inside.parent):
        check_refused(quantize("fp6", tiny, out), "is the current folder, or around it")
    check_refused(quantize("fp6", "", inside / "out"), "the name of the model is empty")
    assert listing(tmp_path).keys() == {"a", "a/b"}
