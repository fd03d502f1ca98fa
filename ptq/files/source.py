"""From what the user typed as MODEL to a local folder: a folder, a hub name, or `demo`."""

import errno
import re
from pathlib import Path

from ptq.errors import InputError, RunError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w./-]*)?", re.ASCII)
"""With `@` and a branch, a tag or a commit, or without."""
# Weights, configuration and tokenizer of the top folder; no pickles, and not the second copy of the weights that some
# repositories keep as consolidated.safetensors or in a sub-folder.
TOP = ["*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "tokenizer*", "LICENSE*"]
WANTED = [*TOP, "chat_template*", "additional_chat_templates/*.jinja"]
UNWANTED = [*(f"*/{pattern}" for pattern in TOP), *(f"{name}*/*" for name in ("tokenizer", "LICENSE", "chat_template")),
            "consolidated*", "*.bin", "*.pt", "*.pth", "*.pkl"]  # fmt: skip


def resolve(model: str) -> Path:
    """The local folder of MODEL; downloads it if it is a hub name, through huggingface_hub and its cache.

    Raises InputError for what is neither, RunError for a download that did not finish.
    """
    return local_folder(model) or _download(model)


def local_folder(model: str) -> Path | None:
    """The folder that MODEL names; None where it can only be a hub name. Raises InputError for what is neither.

    `demo` is the model that ships with the project (write `./demo` for a folder of that name). A local folder wins
    over a hub name.
    """
    if model == "demo":
        from ptq.demo import demo_path

        return Path(demo_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{model}: a file; pass the folder that holds config.json and the safetensors")
    if not HUB_NAME.fullmatch(model):
        raise InputError(f"{model!r}: no such folder, and not a hub name like `org/name`; check the path")
    return None


def hub_is_known() -> bool:
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


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    try:
        cached = not hub_is_known()  # then what was downloaded before, or an error at once
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            local_files_only=cached,
        )
    except GatedRepoError as error:
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
    folder = Path(folder)
    if not any(folder.glob("*.safetensors")):
        from ptq.files.header import TO_SAFETENSORS  # brings in torch, and this module is for `ptq.cli` too

        raise InputError(f"{name}: the repository holds no safetensors, and pickles are never opened; {TO_SAFETENSORS}")
    return folder
