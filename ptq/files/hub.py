"""Models of the Hugging Face hub: fetched into its cache, or looked at through the headers of their weights alone."""

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ptq.errors import InputError, RunError

# Weights, configuration and tokenizer of the top folder; no pickles, and not the second copy of the weights that some
# repositories keep as consolidated.safetensors or in a sub-folder.
WEIGHTS = "*.safetensors"
TOP = [WEIGHTS, "*.json", "*.txt", "*.model", "*.tiktoken", "tokenizer*", "LICENSE*"]
WANTED = [*TOP, "chat_template*", "additional_chat_templates/*.jinja"]
UNWANTED = [*(f"*/{pattern}" for pattern in TOP), *(f"{name}*/*" for name in ("tokenizer", "LICENSE", "chat_template")),
            "consolidated*", "*.bin", "*.pt", "*.pth", "*.pkl"]  # fmt: skip


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


def download(name: str) -> Path:
    """The folder of a hub model in huggingface_hub's cache, fetched where it is not there yet.

    Raises InputError for what is no repository of safetensors, RunError for a download that did not finish.
    """
    folder = Path(_snapshot(name))
    if not any(folder.glob(WEIGHTS)):
        from ptq.files.header import TO_SAFETENSORS  # brings in torch, and this module is for `ptq.cli` too

        raise InputError(f"{name}: the repository holds no safetensors, and pickles are never opened; {TO_SAFETENSORS}")
    return folder


def is_to_be_fetched(name: str) -> bool:
    """Whether `download` would fetch weights. False, too, where the hub cannot say."""
    from huggingface_hub.errors import DryRunError
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    try:
        files = _snapshot(name, dry_run=True, tqdm_class=Silent)
    except RunError as error:
        if isinstance(error.__cause__, DryRunError):  # `download` takes what is here, or says why not
            return False
        raise
    return any(file.will_download and file.filename.endswith(WEIGHTS[1:]) for file in files)


@contextmanager
def outline(name: str) -> Iterator[Path]:
    """A folder of all files of a hub model, in which a hole stands for the weights behind every header, for as long as
    the context lasts. Raises as `download` does."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

    repository, revision = _parts(name)
    files = Path(_snapshot(name, ignore_patterns=[*UNWANTED, WEIGHTS]))
    shards = {}
    with _explained(name), suppress(NotASafetensorsRepoError, EntryNotFoundError):  # Checkpoint.open names it
        shards = huggingface_hub.HfApi().get_safetensors_metadata(repository, revision=revision).files_metadata
    with tempfile.TemporaryDirectory(prefix=f"{repository.replace('/', '--')}-") as made:
        for path in files.iterdir():
            if not path.match(WEIGHTS):  # of an older download, perhaps
                (Path(made) / path.name).symlink_to(path.resolve())
        for shard, found in shards.items():
            if shard == Path(shard).name and Path(shard).match(WEIGHTS):  # or Checkpoint.open will refuse the index
                _write_header(Path(made) / shard, found)
        yield Path(made)


def _write_header(path: Path, found: Any) -> None:
    """A safetensors file of a header as huggingface_hub has parsed it, and no weights."""
    tensors = {
        name: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        for name, info in found.tensors.items()
    }
    header = json.dumps(tensors).encode()
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        with suppress(OSError, OverflowError, ValueError):  # no such size: Checkpoint.open will say so
            file.truncate(8 + len(header) + max((info.data_offsets[1] for info in found.tensors.values()), default=0))


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
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
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
    except Exception as error:  # the hub's HTTP, Xet and cache layers share no base class; the cause stays chained
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            reason = "the disk of the hub cache (HF_HOME) is full; free some space and"
        else:
            reason = f"the download from the hub did not finish ({type(error).__name__}); check the network and"
        raise RunError(
            f"{name}: no such folder here, and as a hub name: {reason} run again, which continues it, or pass a local "
            "folder"
        ) from error
