"""MODEL resolves to a folder, or to one sentence that says why not."""

import errno
import sys
from pathlib import Path

import huggingface_hub
import pytest

from ptq.demo import demo_path
from ptq.errors import InputError
from ptq.files.source import check_readable, headers_only, resolve


def refuse(*_, **__):
    raise AssertionError("the hub was asked")


def test_demo_and_local_folders_never_ask_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert resolve("demo") == demo_path()
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").resolve() == tmp_path / "org" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"
    for name in ("demo", "org/name"):
        with headers_only(name) as (folder, missing):
            assert folder == resolve(name) and missing == 0


@pytest.mark.parametrize(
    "name",
    [
        "missing",
        "./org/name",
        "/org/name",
        "../name",
        "a/b/c",
        "org/",
        "org/-x",
        "",
        "or g/x",
        "a/b@",
        "a/b@-x",
        "a/b@c@d",
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    if name == "":
        with pytest.raises(InputError, match="the name of the model is empty"):  # a variable of a shell was not set
            resolve(name)
        return
    with pytest.raises(InputError, match="no such folder, and not a hub name"):
        resolve(name)
    with pytest.raises(InputError, match="no such folder, and not a hub name"):
        headers_only(name)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="a file; pass the folder"):
        resolve(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="model.gguf: GGUF is not read"):
        resolve(str(tmp_path / "model.gguf"))


def test_importing_the_module_does_not_import_the_hub():
    for module in ("ptq.files.source", "ptq.files.hub"):
        assert not any(hasattr(sys.modules[module], name) for name in ("huggingface_hub", "snapshot_download"))


def test_a_text_that_cannot_be_read(tmp_path, monkeypatch):
    check_readable(None)
    (tmp_path / "text.txt").write_text("text")
    check_readable(tmp_path / "text.txt")
    for path in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(InputError, match="cannot be read"):
            check_readable(path)

    def denied(*_):  # what Python 3.11 gives for a file in a folder that may not be looked into
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(InputError, match=r"text\.txt: cannot be read \(Permission denied\)"):
        check_readable(tmp_path / "text.txt")


def test_a_result_that_is_not_finished_is_told(tmp_path):
    (tmp_path / "out.work").mkdir()
    with pytest.raises(InputError, match="out: its run is not finished; the command that makes it goes on"):
        resolve(str(tmp_path / "out"))
