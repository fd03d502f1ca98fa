"""Several processes make the bytes that one makes, also when one of them dies on the way."""

import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY, save_model

from ptq.engine import ALONE, Workers
from ptq.errors import InputError, RunError
from ptq.pipeline import needs, pipeline
from ptq.pipeline.writer import LOG
from ptq.recipe import Recipe, RunOptions
from ptq.statistics import chunks
from quarot.plan import QuarotRecipe

QUIET = RunOptions(progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


def recipe(model: Path, **changes: Any) -> QuarotRecipe:
    text = model.parent / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghij klmnop", k=1500)))
    return QuarotRecipe(**{**dict(calibration=str(text), samples=20, sequence_length=32, group_size=8), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOG}


def worker(environment: dict[str, str], model: Path, out: Path, asked: Recipe) -> None:
    """One process of a run, as torchrun would start it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    needs._matmul_rate = lambda bfloat16=False: 1e9
    chunks.CHUNK_TOKENS = 32  # one row a chunk: 20 chunks, 5 parts
    try:
        pipeline.quantize(model, out, asked, QUIET)
    except InputError as error:
        (out.parent / f"error{environment.get('RANK', '')}").write_text(str(error))
        sys.exit(2)
    except RunError as error:
        assert "another process of this run has stopped" in str(error)
        sys.exit(1)


def start(count: int, model: Path, out: Path, *asked: Recipe) -> list[Any]:
    """`count` processes; the last ones get the last recipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ptq", "quarot.plan", "transformers.models.llama.modeling_llama"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = []
    for rank in range(count):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        arguments = (environment, model, out, asked[min(rank, len(asked) - 1)])
        made.append(context.Process(target=worker, args=arguments))
        made[-1].start()
    return made


def finish(processes: list[Any]) -> list[int]:
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(
    "changes",
    [
        dict(rounding="gptq"),
        dict(gptaq_alpha=0.25, activation_bits=4),
        dict(rounding="nearest"),
        dict(activation_bits=4, activation_clip="search"),
    ],
    ids=["gptq", "gptaq", "nearest", "clip search"],
)
def test_any_number_of_processes_gives_the_same_bytes(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    asked = recipe(model, **changes)
    for count in (1, 2, 3):
        assert finish(start(count, model, tmp_path / str(count), asked)) == [0] * count
        assert contents(tmp_path / str(count)) == contents(tmp_path / "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_also_in_bfloat16(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    model = save_model(tmp_path_factory.mktemp("source") / "model", dtype=torch.bfloat16, **TINY)
    for count in (1, 3):
        assert finish(start(count, model, tmp_path / str(count), recipe(model))) == [0] * count
    assert contents(tmp_path / "3") == contents(tmp_path / "1")


def test_a_dead_process_costs_its_unfinished_task(model: Path, tmp_path: Path) -> None:
    """The others wait for it, until they are stopped, as torchrun does; the next start goes on."""
    asked, chance = recipe(model), random.Random(0)
    assert finish(start(1, model, tmp_path / "expected", asked)) == [0]
    out, kills = tmp_path / "run" / "out", 0
    out.parent.mkdir()
    while not out.exists():
        processes = start(2 + kills % 2, model, out, asked)
        before, wanted = len(list(out.parent.rglob("*"))), chance.randint(4, 12)
        while all(process.is_alive() for process in processes) and kills < 6:
            if abs(len(list(out.parent.rglob("*"))) - before) >= wanted:
                chance.choice(processes).kill()
                time.sleep(0.05)
                kills += 1
                break
            time.sleep(0.001)
        else:
            finish(processes)
        for process in processes:
            process.kill()
            process.join()
    assert kills >= 3
    assert contents(out) == contents(tmp_path / "expected")
    assert os.listdir(out.parent) == ["out"]


def test_a_process_with_another_recipe_is_refused_by_all(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run" / "out"
    out.parent.mkdir()
    assert finish(start(2, model, out, recipe(model), recipe(model, seed=1))) == [2, 2]
    for rank in (0, 1):
        said = (out.parent / f"error{rank}").read_text()
        assert "process 1 is about to do another run than process 0 (seed: 0 -> 1): start all" in said
    assert sorted(os.listdir(out.parent)) == ["error0", "error1"]


def test_too_many_processes_are_refused() -> None:
    with pytest.raises(InputError, match="started 8 processes, but a block has 7 layers to share; start at most 7"):
        Workers(0, 8).check_same("", lambda *_: [], limit=7)


def test_restart_throws_work_away_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own restarts repeat the command line; they are there to go on."""
    seen: list[bool] = []
    monkeypatch.setattr(pipeline, "open_work", lambda *given: seen.append(given[2]) or sys.exit())
    options = RunOptions(progress=False, restart=True)
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with pytest.raises(SystemExit):
            pipeline.quantize(model, tmp_path / "out", recipe(model, rounding="nearest"), options)
    assert seen == [True, False]


def test_what_the_first_process_finds_is_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    first, second = Workers(0, 2), Workers(1, 2)

    def agree(self: Workers, value: Any) -> Any:
        said.extend([value] if self.first else [])
        return said[-1]

    monkeypatch.setattr(Workers, "agree", agree)
    assert first.first_finds(lambda: "here") == second.first_finds(lambda: pytest.fail("looked, too")) == "here"

    def refuse() -> None:
        raise InputError("damaged")

    for each in (first, second):
        with pytest.raises(InputError, match="damaged"):
            each.first_finds(refuse if each.first else (lambda: pytest.fail("looked, too")))


def test_every_item_is_shared_once_and_evenly() -> None:
    costs = {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0, "e": 1.0}
    for count in (1, 2, 3, 7):
        shares = [Workers(rank, count).share(costs, costs.__getitem__) for rank in range(count)]
        assert sorted(item for share in shares for item in share) == sorted(costs)
    assert [Workers(rank, 2).share(costs, costs.__getitem__) for rank in (0, 1)] == [{"a", "d"}, {"b", "c", "e"}]
    assert ALONE.share(costs) == set(costs)


def test_torchrun_itself(model: Path, tmp_path: Path) -> None:
    """The command of the documentation."""
    asked = recipe(model)
    options = ["--calibration", str(asked.calibration), "--samples=20", "--sequence-length=32", "--group-size=8"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ptq"]
    done = subprocess.run(
        [*command, "quarot", str(model), str(tmp_path / "out"), *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("proven: ") == 1, "one process speaks"
    assert finish(start(1, model, tmp_path / "expected", asked)) == [0]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "expected" / "model.safetensors"
    ).read_bytes()
