"""What a run says that it will need, and what is refused because the machine does not have it."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import check_refused, listing, quantize
from tiny_models import save_model, tiny_config

import ptq
from fp6.plan import Fp6Recipe
from ptq.engine import Workers
from ptq.models.families import FAMILIES
from ptq.models.model_shape import shape_of
from ptq.pipeline import needs, pipeline, preflight
from ptq.pipeline.needs import Estimate
from ptq.pipeline.probe import Probe
from ptq.reporting.sizes import size_text
from ptq.statistics import chunks, clip_search
from quarot.plan import QuarotRecipe, plan
from quip_sharp.plan import QuipSharpRecipe

pytestmark = pytest.mark.usefixtures("fast")

# --- the estimate ---------------------------------------------------------------------------------------------------

BLOCKS, HIDDEN, INTERMEDIATE = 2, 4096, 11008


def needed(length: int = 1, **changes: Any) -> Estimate:
    """Of a Llama of that size, on a single row of calibration text."""
    config = tiny_config(
        "llama", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=32, num_key_value_heads=32,
        head_dim=128, num_hidden_layers=BLOCKS,
    )  # fmt: skip
    shape = shape_of(config)
    recipe = QuarotRecipe(samples=1, sequence_length=length, **changes)
    made = plan(shape, FAMILIES["llama"], recipe, dict.fromkeys(["model.embed_tokens.weight"], torch.empty(())))
    return needs.estimate(made, shape, recipe, {"model.embed_tokens.weight": 4 * shape.vocab * HIDDEN})


def test_what_fine_tuning_alone_needs(tmp_path: Path) -> None:
    """Text, but no Hessians."""
    model = str(save_model(tmp_path / "model"))
    for rounding, finetune, hessians in (
        ("nearest", "blocks", False),
        ("nearest", "none", False),
        ("ldlq", "none", True),
    ):
        recipe = QuipSharpRecipe(rounding=rounding, finetune=finetune)
        found = pipeline.plan(model, recipe).plan
        assert needs.needs_hessians(found, recipe) == hessians
        assert needs.needs_text(found, recipe) == (hessians or finetune == "blocks")


def test_a_probe_of_rows_that_weights_are_fitted_to_is_told(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model"))
    recipe = QuarotRecipe(calibration="text.txt")
    target, rows = pipeline.plan(model, recipe), torch.arange(64 * 32).view(64, 32)
    for probe, told in ((rows[:4, :16], True), (rows[4:8, :16], False), (rows[:4, :16] + 1, False)):
        said = list(preflight.warnings(target.plan, shape_of(target.config), recipe, rows, probe))
        assert any("the KL at the end is measured on them and too low" in text for text in said) == told


def test_memory_of_the_solver() -> None:
    """H of the widest input, and beside it down_proj twice, in float32."""
    solver = 4 * INTERMEDIATE**2 + 8 * HIDDEN * INTERMEDIATE
    assert solver < needed().memory - needed(rounding="nearest").memory < 1.5 * solver


def test_memory_of_long_rows() -> None:
    """A row goes through a block as a whole."""
    more = needed(1 << 16).memory - needed(1 << 15).memory
    assert more == 4 * (1 << 15) * (3 * HIDDEN + 4 * INTERMEDIATE)
    assert needed(chunks.CHUNK_TOKENS).memory == needed().memory


def test_time_of_the_solver() -> None:
    """n k² multiplications and additions for a linear, k³ for the factor of an H, a billion of either in a second."""
    linears = 4 * HIDDEN**3 + 2 * INTERMEDIATE * HIDDEN**2 + HIDDEN * INTERMEDIATE**2
    factors = 3 * HIDDEN**3 + INTERMEDIATE**3
    added = needed().seconds - needed(rounding="nearest").seconds
    assert added == pytest.approx(BLOCKS * 2 * (linears + factors) / 1e9, rel=0.01)


def test_time_of_the_search_for_clips() -> None:
    """The one token goes through a block, and through its weights for each clip and to be compared with."""
    weights = 4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE
    for rounding in ("gptq", "nearest"):
        common = dict(rounding=rounding, activation_bits=4)
        added = needed(**common, activation_clip="search").seconds - needed(**common).seconds
        passes = 1 + 1 + len(clip_search.GRID) + (rounding == "nearest")  # and with it through the packed block
        assert added == pytest.approx(BLOCKS * 2 * passes * weights / 1e9, rel=0.01)


# --- what cannot fit ------------------------------------------------------------------------------------------------


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=free + 1))


def test_the_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds and does not use is free, too."""
    memory(monkeypatch, 7)
    for name, value in {"mem_get_info": (100, 1000), "memory_reserved": 60, "memory_allocated": 50}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    available = preflight.free_memory.available
    assert available(torch.device("cuda")) == 110 and available(torch.device("cpu")) <= 7


def test_where_there_is_no_disk_the_system_says_why_no_folder_is_made(tiny: Path) -> None:
    check_refused(quantize("fp6", tiny, "/proc/none/out"), "/proc/none", code=1)


def memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(preflight.free_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_memory_of_the_scores_of_latent_attention(tmp_path: Path) -> None:
    """torch has no kernel for keys that are wider than values: the scores of all heads are there, in float32."""
    length = 2048
    recipe, found = QuarotRecipe(sequence_length=length, samples=1), []
    for heads in (4, 32):
        sizes = dict(num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length)
        folder = str(save_model(tmp_path / f"{heads}", "youtu", **sizes))
        found.append(pipeline.estimate(pipeline.plan(folder, recipe), folder, recipe).memory)
    scores = 4 * (32 - 4) * length**2
    assert 2.5 * scores < found[1] - found[0] < 4 * scores


def test_sizes_have_three_digits() -> None:
    found = [size_text(nbytes) for nbytes in (0, 999, 1000, 1500, 999_499, 999_700_000, 12_345_678, 5e12)]
    assert found == ["0 B", "999 B", "1 KB", "1.5 KB", "999 KB", "1 GB", "12.3 MB", "5 TB"]


def test_result_and_work_share_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tmp_path / "work", tmp_path / "out"
    disk(monkeypatch, 1000)
    preflight.check(Estimate(1.0, 1, work=400, out=600), *places)
    with pytest.raises(ptq.InputError, match="needs about 1 KB of disk, 1 KB are free"):
        preflight.check(Estimate(1.0, 1, work=401, out=600), *places)


@pytest.mark.parametrize("full, remedy", [("work", "or name a folder on another disk with --work"), ("out", "OUT")])
def test_what_to_do_is_said_of_the_disk_that_is_full(
    full: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "out" if full == "work" else "work"
    Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev or pytest.skip("/dev/shm is no disk of its own")
    places = {full: tmp_path / full, other: Path("/dev/shm") / "ptq" / other}
    usage = {tmp_path: 1000, Path("/dev/shm"): 10**9}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=usage[folder], total=1))
    with pytest.raises(ptq.InputError, match=f"{tmp_path}: this run needs about 1.5 KB of disk, .*{remedy}$"):
        preflight.check(Estimate(1.0, 1, work=1500, out=1500), places["work"], places["out"])


def test_another_work_folder_is_no_help_where_the_result_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 1000)
    for out, remedy in ((900, "--work$"), (1100, "another OUT$")):
        with pytest.raises(ptq.InputError, match=remedy):
            preflight.check(Estimate(1.0, 1, work=900, out=out), tmp_path / "work", tmp_path / "out")


def test_a_run_without_statistics_needs_a_work_folder_too(tiny: Path) -> None:
    recipe = Fp6Recipe()
    needed = pipeline.estimate(pipeline.plan(str(tiny), recipe), str(tiny), recipe)
    assert 0 < needed.work - needs.MARK_BYTES * 15 < 1 << 12  # the probe: four tokens


def test_what_a_run_before_has_left_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Estimate(1.0, 1, work=9000, out=9000)
    disk(monkeypatch, 2000)
    for folder in ("work", "out.ptq-partial"):
        with pytest.raises(ptq.InputError, match="of disk"):
            preflight.check(asked, tmp_path / "work", tmp_path / "out")
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left").write_bytes(os.urandom(8192))
    preflight.check(asked, tmp_path / "work", tmp_path / "out")


def test_every_process_needs_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tmp_path / "work", tmp_path / "out"
    memory(monkeypatch, 1000)
    preflight.check(Estimate(1.0, 500, 1, 1), *places, processes=2)
    with pytest.raises(ptq.InputError, match="needs about 1.5 KB of memory, 1 KB are free"):
        preflight.check(Estimate(1.0, 500, 1, 1), *places, processes=3)


def test_processes_of_this_machine_are_counted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 2 * needs.BASE_MEMORY)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.engine, "workers", lambda: nullcontext(Workers(local_count=2)))
        check_refused(quantize("rotate", tiny, tmp_path / "out"), "this run needs about 1.05 GB of memory")
    assert listing(tmp_path) == {}
    assert quantize("rotate", tiny, tmp_path / "out").exit_code == 0


# --- what is said of the text ---------------------------------------------------------------------------------------

FEW = "235 calibration tokens for layers of up to 24 input channels are few"
IDLE = "nothing is fitted to the text of --calibration"


@pytest.mark.parametrize(
    ("options", "few", "idle"),
    [
        (("--samples", 5, "--sequence-length", 47), True, False),
        (("--samples", 5, "--sequence-length", 48), False, False),
        (("--rounding", "nearest"), False, True),
    ],
)
def test_what_is_said_of_the_text(
    options: tuple[Any, ...], few: bool, idle: bool, tiny: Path, calibration_text: Path, tmp_path: Path
) -> None:
    result = quantize("quarot", tiny, tmp_path / "out", "--calibration", calibration_text, *options)
    assert result.exit_code == 0
    assert (FEW in result.stderr) == ("are few" in result.stderr) == few
    assert (IDLE in result.stderr) == idle and "repeats itself" not in result.stderr


@pytest.mark.parametrize(
    ("letters", "found"),
    [("a", "1 different rows of 8"), ("abcdefghi", "9 different tokens"), ("abcdefghij", None)],
)
def test_a_text_that_repeats_itself(letters: str, found: str | None, tiny: Path, tmp_path: Path) -> None:
    drawn = torch.randint(len(letters), (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text("".join(letters[number] for number in drawn))
    rows = ("--calibration", tmp_path / "text.txt", "--samples", 8, "--sequence-length", 64)
    said = quantize("quarot", tiny, tmp_path / "out", *rows).stderr.replace("\n", " ")
    assert ("repeats itself" in said) == (f"repeats itself ({found})" in said) == (found is not None)


def test_nothing_is_said_of_a_text_that_nobody_named(tiny: Path, tmp_path: Path) -> None:
    assert IDLE not in quantize("quarot", tiny, tmp_path / "out", "--rounding", "nearest").stderr


GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"memory.max": "max", "memory.current": 7 * GIB}, 64),
        ("0::/\n", {"memory.max": 8 * GIB, "memory.current": 7 * GIB}, 1),
        ("0::/\n", {"memory.max": 8 * GIB, "memory.current": 9 * GIB}, 0),
        ("0::/pod/box\n", {"pod/memory.max": 9 * GIB, "pod/memory.current": GIB, "pod/box/memory.max": "max"}, 8),
        ("\nno colons\n0::/\n", {"memory.max": 8 * GIB, "memory.current": 7 * GIB}, 1),
        ("0::/docker/abc\n", {"memory.max": 4 * GIB, "memory.current": GIB}, 3),  # which it does not see
        (
            "3:cpu:/\n2:memory:/box\n0::/\n",
            {"memory/box/memory.limit_in_bytes": 6 * GIB, "memory/box/memory.usage_in_bytes": GIB},
            5,
        ),
    ],
)
def test_the_limit_of_a_container_counts(
    own: str, files: dict[str, Any], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 64 * GIB)
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
        (path.parent / "memory.stat").write_text(f"anon {GIB}\ninactive_file 0\n")
    monkeypatch.setattr(preflight.free_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(preflight.free_memory, "OWN_GROUPS", tmp_path / "own")
    assert preflight.free_memory.available() == free * GIB
    for stat in tmp_path.rglob("memory.stat"):  # files that were read, and are dropped when somebody wants the room
        stat.write_text(f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 2}\ntotal_inactive_file {GIB}\n")
    more = GIB if 0 < free < 64 else 0
    assert preflight.free_memory.available() == free * GIB + more


def test_the_memory_of_logits_grows_with_the_tokens_of_a_probe_row(tmp_path: Path) -> None:
    """Without text there are only four."""
    found = {}
    for text in (None, "a.txt"):
        folder = str(save_model(tmp_path / str(text), vocab_size=64000, max_position_embeddings=256))
        recipe = Fp6Recipe(calibration=text, sequence_length=256)
        found[text] = pipeline.estimate(pipeline.plan(folder, recipe), folder, recipe).memory
    assert 50 < (found["a.txt"] - found[None]) / (64000 * 131) < 150  # as many tokens as probe rows have there


@pytest.mark.parametrize("text", [False, True])
def test_the_states_of_the_probe_are_on_disk(text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is what the files take together, up to their headers."""
    model, words = save_model(tmp_path / "model"), tmp_path / "words.txt"
    words.write_text("some words of a text and others " * 2000)
    recipe = Fp6Recipe(calibration=str(words) if text else None)
    largest, write = [0], Probe.write

    def written(probe: Probe, *given: Any) -> None:
        kept = sum(file.stat().st_size for file in (probe.work / "probe").iterdir())
        write(probe, *given)
        largest.append(kept + probe._file(given[0] + 1).stat().st_size)

    monkeypatch.setattr(Probe, "write", written)
    needed = pipeline.estimate(pipeline.plan(str(model), recipe), str(model), recipe)
    ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    states = needed.work - needs.MARK_BYTES * 15
    assert 0 < states <= max(largest) <= 1.3 * states + 4096
