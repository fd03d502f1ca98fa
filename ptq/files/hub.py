"""Models of the Hugging Face hub: fetched into its cache, or looked at through the headers of their weights alone."""

import errno
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptq.errors import InputError, RunError

NOT_GGUF = "GGUF is not read: pass the model that it was made from, as a Hugging Face folder of safetensors"

# Weights, configuration and tokenizer of the top folder; no pickles, and not the second copy of the weights that some
# repositories keep as consolidated.safetensors or in a sub-folder.
WEIGHTS = "*.safetensors"
TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""What must be passed on with a model, and says nothing of how it runs."""
TOP = [WEIGHTS, "*.json", "*.txt", "*.model", "*.tiktoken", "tokenizer*", *TERMS]
CARD = "README.md"
"""The card of a model, which the hub shows."""
WANTED = [*TOP, "chat_template*", "additional_chat_templates/*.jinja", CARD]
FOLDERS = ("tokenizer*", "chat_template*", *TERMS)
"""Patterns of `WANTED` that fit what lies in folders, too."""
UNWANTED = [*(f"*/{pattern}" for pattern in TOP), *(f"{pattern}/*" for pattern in FOLDERS),
            "consolidated*", "*.bin", "*.pt", "*.pth", "*.pkl"]  # fmt: skip

HEADER_BYTES = 1 << 17
"""What is asked for first of a file of weights: most headers are smaller."""


def is_known() -> bool:
    """Whether this machine can look up the hub's address, or leaves that to a proxy. Where it cannot, the libraries of
    the hub would try for half a minute."""
    import socket  # this module is for `quantize --help` too
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub.constants import ENDPOINT

    try:
        return bool(getproxies() or socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None))
    except OSError:
        return False


def name_of(folder: Path) -> str | None:
    """The name on the hub of a folder of its cache, .../models--ORG--NAME/snapshots/COMMIT; None for any other."""
    repository = folder.parent.parent.name
    is_snapshot = folder.parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_snapshot else None


@contextmanager
def asked_if_known() -> Iterator[None]:
    """Within it, where the hub is not known, its libraries ask nobody: they take what was fetched before, or fail."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_known()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def download(name: str) -> Path:
    """The folder of a hub model in huggingface_hub's cache, fetched where it is not there yet.

    Raises InputError for what is no repository of safetensors, RunError for a download that did not finish.
    """
    folder = Path(_snapshot(name))
    if not any(folder.glob(WEIGHTS)):
        from ptq.files.header import TO_SAFETENSORS  # brings in torch, and this module is for `ptq.cli` too

        raise InputError(
            f"{name}: the repository holds no safetensors; pickles are never opened, GGUF is not read; {TO_SAFETENSORS}"
        )
    return folder


@contextmanager
def headers_only(name: str) -> Iterator[tuple[Path, int]]:
    """A folder that a hub model can be planned from, for as long as the context lasts, and how many bytes of weights
    `download` would fetch. Where it would fetch some, the folder holds the small files, and of the weights the headers
    with a hole behind each. Raises as `download` does."""
    folder = None
    try:
        files, commit = _listing(name)
    except (InputError, RunError):  # of a hub that cannot be asked, or refuses: what is here will do, if it is whole
        if (folder := _cached(name)) is None:
            raise
        files, commit = [], None
    weights = [file for file in files if file.filename.endswith(WEIGHTS[1:])]
    missing = sum(file.file_size or 0 for file in weights if file.will_download)
    if not missing:
        yield folder or Path(_snapshot(name, revision=commit)), 0
        return
    small = Path(_snapshot(name, revision=commit, ignore_patterns=[*UNWANTED, WEIGHTS]))
    with tempfile.TemporaryDirectory() as made:
        for path in small.iterdir():
            if not path.match(WEIGHTS):  # of an older download, perhaps
                (Path(made) / path.name).symlink_to(path.resolve())
        with _explained(name), ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda file: _header_alone(name, file, Path(made)), weights))
        try:
            yield Path(made), missing
        except (InputError, RunError) as error:
            raise type(error)(str(error).replace(made, name)) from error


def _cached(name: str) -> Path | None:
    """The folder of a model that was downloaded before; None where it was not, or not whole."""
    try:
        return Path(_snapshot(name, local_files_only=True))
    except (InputError, RunError):
        return None


def _listing(name: str) -> tuple[list[Any], str | None]:
    """The files of a model as huggingface_hub describes them (`DryRunFileInfo`), and the commit that they are of: asked
    for by its number from here on, so that nothing that is pushed meanwhile is mixed in, and what is here stays the
    model's newest for who is offline."""
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    repository, revision = _parts(name)
    with _explained(name):
        if not is_known():
            raise OfflineModeIsEnabled("no address of the hub")
        commit = huggingface_hub.HfApi().model_info(repository, revision=revision).sha
    return _snapshot(name, revision=commit, dry_run=True, tqdm_class=Silent), commit


def _header_alone(name: str, file: Any, folder: Path) -> None:
    """Write a safetensors file of the hub's header, as long as the hub's."""
    import huggingface_hub

    from ptq.files.header import MAX_HEADER_BYTES

    path = folder / Path(file.filename).name
    url = huggingface_hub.hf_hub_url(_parts(name)[0], file.filename, revision=file.commit_hash)
    start = _first_bytes(url, HEADER_BYTES)
    size, length = file.file_size or len(start), 8 + int.from_bytes(start[:8], "little")
    if len(start) < length <= min(MAX_HEADER_BYTES, size):
        start = _first_bytes(url, length)
    with path.open("xb") as to:
        to.write(start[:length])
        to.truncate(size)


def _first_bytes(url: str, count: int) -> bytes:
    """The first bytes of a file of the hub: all of them, where it has fewer."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    found = bytearray()
    headers = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            found += piece
            if len(found) >= count:  # from a server that sends more than it was asked for
                break
    return bytes(found[:count])


def _parts(name: str) -> tuple[str, str | None]:
    """Repository and revision."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def _snapshot(name: str, **options: Any) -> Any:
    """What `huggingface_hub.snapshot_download` returns for the files of a model."""
    import huggingface_hub

    repository, revision = _parts(name)
    with _explained(name):
        chosen: dict[str, Any] = {"revision": revision, "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
        chosen["local_files_only"] = not is_known()  # then what was downloaded before, or an error at once
        return huggingface_hub.snapshot_download(repository, **chosen | options)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of the hub into one sentence."""
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        repository, _ = _parts(name)
        raise InputError(
            f"{name}: the repository is gated; accept its terms at https://huggingface.co/{repository}, "
            "run `hf auth login` and try again"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{name}: the repository has no such revision; name a branch, a tag or a commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"{name}: neither a local folder nor a public hub repository; "
            "check the name, or run `hf auth login` if it is private"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        if isinstance(error, LocalEntryNotFoundError) and not offline and is_known():
            raise _unfinished(name, error) from error
        why = "HF_HUB_OFFLINE is set" if offline else "there is no network"
        raise InputError(
            f"{name}: no such folder here, and a hub model of that name was not downloaded before, nor can be now "
            f"({why}); check the path"
        ) from error
    except Exception as error:  # the hub's HTTP, Xet and cache layers share no base class; the cause stays chained
        raise _unfinished(name, error) from error


def _unfinished(name: str, error: Exception) -> RunError:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = "the disk of the hub cache (HF_HOME) is full; free some space and"
    else:
        reason = f"the download from the hub did not finish ({type(error).__name__}); check the network and"
    return RunError(
        f"{name}: no such folder here, and as a hub name: {reason} run again, which continues it, or pass a local "
        "folder"
    )
