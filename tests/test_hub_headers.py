"""Models of the hub, planned from the headers of their weights alone. The hub is played by a server that knows as much
of its protocol as these need."""

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import datasets
import huggingface_hub
import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import constants
from tiny_models import TINY, tiny_config, tiny_model, tokenizer
from typer.testing import CliRunner

from ptq.cli import app
from ptq.files import hub as hub_module
from ptq.files import source
from ptq.files.checkpoint import Checkpoint
from ptq.pipeline import preflight
from ptq.statistics import text_sources

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A server of one repository, `org/name`: the files of a folder. `fetched` maps a file to its bytes that were
    sent."""

    def __init__(self, folder: Path):
        self.folder, self.fetched, self.asked = folder, dict[str, int](), list[str]()
        self.refusals = dict[str, list[int]]()
        """What is answered first to a GET, by the end of its path."""
        self.knows_ranges = True
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def weights_fetched(self) -> int:
        return sum(count for name, count in self.fetched.items() if name.endswith(".safetensors"))

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = urlsplit(to.path).path
        self.asked.append(path)
        for end, codes in self.refusals.items():
            if path.endswith(end) and codes and to.command == "GET":
                return self.send(to, codes.pop(0), b"", {})
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        head = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/org/name/tree/"):
            body = [{"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040d}"}
                    for name, data in files.items()]  # fmt: skip
            return self.send(to, 200, json.dumps(body).encode(), head)
        if path.startswith("/api/models/org/name"):
            return self.send(to, 200, json.dumps({"id": "org/name", "sha": COMMIT}).encode(), head)
        _, _, name = path.partition("/resolve/")
        name = name.partition("/")[2]
        if not path.startswith("/org/name/") or name not in files:
            code = "EntryNotFound" if path.startswith("/org/name/") else "RepoNotFound"
            return self.send(to, 404, b"", {"X-Error-Code": code})
        data, status = files[name], 200
        if (asked := to.headers.get("Range")) is not None and self.knows_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            data, status = data[int(first) : int(last) + 1 if last else None], 206
        if to.command == "GET":
            self.fetched[name] = self.fetched.get(name, 0) + len(data)
        self.send(to, status, data, head | {"ETag": f'"{len(files[name]):040d}"'})

    @staticmethod
    def send(to: BaseHTTPRequestHandler, status: int, body: bytes, head: dict[str, str]) -> None:
        to.send_response(status)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            to.send_header(name, value)
        to.end_headers()
        if to.command == "GET":
            to.wfile.write(body)


@pytest.fixture(params=["5GB", "100KB"], ids=["one file", "shards"])
def served(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model of 0.5 MB, and a cache in which nothing is."""
    folder = tmp_path / "published"
    model = tiny_model(tiny_config("llama", **TINY | dict(vocab_size=8192)), torch.float32)
    model.save_pretrained(folder, max_shard_size=request.param)
    tokenizer().save_pretrained(folder)
    hub = Hub(folder)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    yield hub
    huggingface_hub.close_session()
    hub.server.shutdown()
    hub.server.server_close()


def quantize(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sentence(result: Any) -> str:
    """The error, which follows the bars of the hub's library."""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("quantize: ")
    return last


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_plan_fetches_headers_alone(served: Hub, tmp_path: Path) -> None:
    here = quantize("fp6", served.folder, tmp_path / "out", "--plan")
    asked = quantize("fp6", "org/name", tmp_path / "out", "--plan")
    assert asked.exit_code == 0 and asked.stdout == here.stdout
    assert "its weights are not here yet: the command itself fetches 0.0 GB" in asked.stderr
    assert "not here yet" not in here.stderr
    assert 0 < served.weights_fetched() < weights(served.folder) / 3
    assert not (tmp_path / "out").exists()


def test_inspect_fetches_headers_alone(served: Hub) -> None:
    record = {"recipe": {"method": "fp6"}, "version": "ptq 1", "result": None}
    (served.folder / "ptq.json").write_text(json.dumps(record))
    found, here = (quantize("inspect", name, "--json") for name in ("org/name", served.folder))
    assert found.exit_code == 0 and json.loads(found.stdout) == json.loads(here.stdout)
    assert json.loads(found.stdout)["made"] == record
    assert served.weights_fetched() < weights(served.folder) / 3
    shown = quantize("inspect", "org/name").stdout.splitlines()
    assert shown[-2].startswith("made by fp6 with ptq 1") and shown[-1].startswith("org/name/ptq.json: no result")


@pytest.mark.parametrize(
    ("damage", "options", "words"),
    [
        ({"model_type": "unheard_of"}, (), "unheard_of"),
        ({"num_hidden_layers": 3}, (), "model.layers.2"),
        ({}, ("--element", "e9m9"), "e9m9"),
        ({}, ("--calibration", "missing.txt"), "missing.txt"),
        ({}, ("--calibration", "org/none"), "org/none: neither a local file nor a public hub dataset"),
        ({}, ("--device", "tpu"), "auto, cpu or cuda"),
        ({}, ("no memory",), "of memory, 10 MB are free"),
        ({}, ("no room",), "holds a model; nothing in it was touched"),
    ],
)
def test_a_run_is_refused_before_weights_are_fetched(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict, options: tuple, words: str
) -> None:
    path = served.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    out = tmp_path / "out"
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=DatasetNotFoundError("there is none")))
    monkeypatch.setattr(text_sources.hub, "is_known", lambda: True)
    if options == ("no memory",):
        monkeypatch.setattr(preflight.free_memory, "available", lambda: 10_000_000)
        options = ()
    if options == ("no room",):
        out, options = served.folder, ()
    result = quantize("fp6", "org/name", out, *options)
    assert result.exit_code == 2 and words in sentence(result)
    assert served.weights_fetched() < weights(served.folder) / 3
    assert not (tmp_path / "out").exists()


def test_a_run_fetches_the_weights_once(served: Hub, tmp_path: Path) -> None:
    assert quantize("fp6", served.folder, tmp_path / "here").exit_code == 0
    result = quantize("fp6", "org/name", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "here/model.safetensors").read_bytes()
    fetched = served.weights_fetched()
    again = quantize("fp6", "org/name", tmp_path / "out2", "--plan")
    assert again.exit_code == 0 and "not here yet" not in again.stderr
    with source.headers_only("org/name") as (folder, missing):
        assert missing == 0 and torch.isfinite(Checkpoint.open(folder).read("model.norm.weight")).all()
    assert served.weights_fetched() == fetched


def test_one_commit_is_asked_for(served: Hub, tmp_path: Path) -> None:
    """Whatever is pushed meanwhile; and what is in the cache stays the newest for who is offline."""
    with source.headers_only("org/name@v1.0") as (folder, missing):
        outlined, here = Checkpoint.open(folder), Checkpoint.open(served.folder)
        assert outlined.tensors == here.tensors and missing == weights(served.folder)
    assert not folder.exists() and not [*(tmp_path / "cache").rglob("refs/*")]
    assert [path for path in served.asked if "v1.0" in path] == ["/api/models/org/name/revision/v1.0"]
    assert any(f"/resolve/{COMMIT}/" in path for path in served.asked)


def test_a_hub_that_stumbles(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    served.refusals = {"model.safetensors": [503, 429], "-00001-of-00002.safetensors": [500]}
    assert quantize("fp6", "org/name", tmp_path / "out", "--plan").exit_code == 0
    assert not any(served.refusals["model.safetensors"]) or not any(served.refusals["-00001-of-00002.safetensors"])
    served.refusals = {"/api/models/org/name": [500] * 9}
    result = quantize("fp6", "org/name", tmp_path / "out", "--plan")
    assert result.exit_code == 1 and "check the network" in sentence(result)
    assert served.weights_fetched() < weights(served.folder) / 3


def test_a_server_that_knows_no_ranges(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served.knows_ranges = False
    assert quantize("fp6", "org/name", tmp_path / "out", "--plan").exit_code == 0


def test_long_headers(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "HEADER_BYTES", 100)
    with source.headers_only("org/name") as (folder, _):
        assert Checkpoint.open(folder).tensors == Checkpoint.open(served.folder).tensors


def test_what_is_here_serves_where_the_hub_cannot_be_asked(served: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    offline = ("fp6", "org/name", tmp_path / "out", "--plan")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = quantize(*offline)
    assert result.exit_code == 2 and "HF_HUB_OFFLINE is set" in sentence(result)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    source.resolve("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert quantize(*offline).exit_code == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    served.refusals = {"/api/models/org/name/revision/main": [500] * 9, "/api/models/org/name": [500] * 9}
    assert quantize(*offline).exit_code == 0


def test_a_finished_run_needs_nothing(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantize("fp6", "org/name", tmp_path / "out").exit_code == 0
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(preflight.free_memory, "available", lambda: 10_000_000)
    result = quantize("fp6", "org/name", tmp_path / "out")
    assert result.exit_code == 0 and "finished before" in result.stderr


def test_errors_name_the_model(served: Hub, tmp_path: Path, calibration_text: Path) -> None:
    for file in served.folder.glob("tokenizer*"):
        file.unlink()
    result = quantize("quarot", "org/name", tmp_path / "out", "--calibration", calibration_text)
    assert result.exit_code == 2 and sentence(result).startswith("quantize: org/name: holds no tokenizer")


def test_weights_of_another_name(served: Hub, tmp_path: Path) -> None:
    (served.folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (served.folder / "model.safetensors").unlink(missing_ok=True)
    (served.folder / "weights.safetensors").write_bytes(bytes(99))
    result = quantize("fp6", "org/name", tmp_path / "out")
    assert result.exit_code == 2 and sentence(result).startswith("quantize: org/name: found ")


@pytest.mark.parametrize("served", ["5GB"], indirect=True)
@pytest.mark.parametrize("change", [
    {"data_offsets": [0, 1 << 62]}, {"data_offsets": [0, 1 << 80]}, {"data_offsets": [-8, 0]}, {"data_offsets": [0]},
    {"data_offsets": None}, {"shape": None}, {"shape": [1] * 99}, {"dtype": "F7"},
])  # fmt: skip
def test_a_header_that_cannot_be(served: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change}).encode()
    (served.folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    result = quantize("fp6", "org/name", tmp_path / "out", "--plan")
    assert result.exit_code == 2 and "tensor 'a'" in sentence(result)
    assert sentence(result).startswith("quantize: org/name/model.safetensors: ")


@pytest.mark.parametrize("served", ["100KB"], indirect=True)
@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("../a.safetensors", "'../a.safetensors' is not a plain file name"),
        ("tokenizer.model", "'tokenizer.model' is not a safetensors file"),  # in the cache, which is not written to
    ],
)
def test_an_index_that_names_other_files(served: Hub, tmp_path: Path, shard: str, words: str) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (served.folder / "tokenizer.model").write_bytes(content := len(header).to_bytes(8, "little") + header + b" ")
    path = served.folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": shard}}))
    result = quantize("fp6", "org/name", tmp_path / "out", "--plan")
    assert result.exit_code == 2 and words in sentence(result)
    assert [file.read_bytes() for file in (tmp_path / "cache").rglob("tokenizer.model")] == [content]
