"""Models of the hub, fetched. The download is played by a function."""

import errno
import socket
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import pytest
from huggingface_hub import errors

from ptq.errors import InputError, RunError
from ptq.files.hub import UNWANTED, WANTED, is_known
from ptq.files.source import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub(monkeypatch, folder=None, error=None):
    """Replace the download by one that yields `folder` or raises `error`; returns the list of its calls."""
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        if error is not None:
            raise error
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


class ReadTimeout(Exception):
    """As the hub's HTTP library raises it: which library that is, and its base class, changes with the version."""


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize("revision", ["", "v1.0", "refs/pr/3"])
@pytest.mark.parametrize("known", [True, False])
def test_download(tmp_path, monkeypatch, known, revision):
    """Where the hub cannot be found, what was downloaded before is taken, without a word to the network."""
    monkeypatch.setattr("ptq.files.hub.is_known", lambda: known)
    (tmp_path / "model.safetensors").write_bytes(b"")
    calls = hub(monkeypatch, folder=tmp_path)
    assert resolve(f"org/name@{revision}" if revision else "org/name") == tmp_path
    asked = {
        "revision": revision or None,
        "allow_patterns": WANTED,
        "ignore_patterns": UNWANTED,
        "local_files_only": not known,
    }
    assert calls == [("org/name", asked)]


def test_the_hub_is_known_or_a_proxy_is(monkeypatch):
    looked_up = []

    def getaddrinfo(host, port):
        looked_up.append(host)
        if len(looked_up) > 1:
            raise socket.gaierror("Name or service not known")
        return ["an address"]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert is_known() and not is_known()
    assert looked_up == [urlsplit(huggingface_hub.constants.ENDPOINT).hostname] * 2
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    assert is_known() and len(looked_up) == 2


def test_patterns_choose_the_files():
    names = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    names += ["merges.txt", "chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "LICENSE"]
    names += ["additional_chat_templates/tools.jinja", "qwen.tiktoken", "tekken.json"]
    pickles = ["pytorch_model.bin", "training_args.bin", "tokenizer.pkl", "optimizer.pt", "modeling_x.py"]
    copies = ["consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx", "sub/config.json"]
    copies += ["tokenizer/weights.onnx", "LICENSES/a.txt", "onnx/chat_template.jinja", "tokenizer_big/model.msgpack"]
    copies += ["original/tokenizer.model", "sub/tokenizer.json", "sub/merges.txt"]
    chosen = huggingface_hub.utils.filter_repo_objects(
        names + pickles + copies, allow_patterns=WANTED, ignore_patterns=UNWANTED
    )
    assert list(chosen) == names


def test_a_repository_without_safetensors(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    hub(monkeypatch, folder=tmp_path)
    with pytest.raises(InputError, match="org/name: the repository holds no safetensors.*save_pretrained"):
        resolve("org/name")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (errors.GatedRepoError("x", response=RESPONSE), InputError, "gated; accept its terms"),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), InputError, "neither a local folder nor"),
        (errors.RevisionNotFoundError("x", response=RESPONSE), InputError, "no such revision; name a branch"),
        (errors.HFValidationError("x"), InputError, "neither a local folder nor"),
        (errors.LocalEntryNotFoundError("x"), RunError, "run again, which continues it, or pass a local folder"),
        (errors.OfflineModeIsEnabled("x"), InputError, "no such folder here, .*check the path"),
        (ReadTimeout("x"), RunError, "ReadTimeout.*run again, which continues it"),
        (errors.HfHubHTTPError("x", response=RESPONSE), RunError, "check the network"),
        (ConnectionResetError("x"), RunError, "check the network"),
        (OSError(errno.ENOSPC, "x"), RunError, "cache .HF_HOME. is full"),
    ],
)
def test_download_errors(monkeypatch, error, kind, words):
    monkeypatch.setattr("ptq.files.hub.is_known", lambda: True)
    hub(monkeypatch, error=error)
    with pytest.raises(kind, match=f"^org/name: .*{words}") as caught:
        resolve("org/name")
    assert "\n" not in str(caught.value) and caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("known", "offline", "words"), [(False, False, "there is no network"), (True, True, "HF_HUB_OF")]
)
def test_what_is_not_here_cannot_be_fetched(monkeypatch, known, offline, words):
    hub(monkeypatch, error=errors.LocalEntryNotFoundError("x"))
    monkeypatch.setattr("ptq.files.hub.is_known", lambda: known)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(InputError, match=f"nor can be now .{words}"):
        resolve("org/name")


def test_an_interrupt_passes_through(monkeypatch):
    hub(monkeypatch, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")
