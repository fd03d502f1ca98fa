"""From what the user typed as MODEL to a local folder: a folder, a hub name, or `demo`."""

import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ptq.errors import InputError
from ptq.files import hub

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w./-]*)?", re.ASCII)
"""With `@` and a branch, a tag or a commit, or without."""


def spelled(model: object, what: str = "model") -> str:
    """MODEL as a Python user gave it, as text. Raises InputError, which calls it `what`, for anything but a name."""
    if isinstance(model, str | Path):
        return str(model)
    raise InputError(
        f"{what} must be a folder, a hub name or `demo`, found a {type(model).__name__}; a model in memory is saved by "
        "its save_pretrained, and that folder passed"
    )


def resolve(model: str) -> Path:
    """The local folder of MODEL; downloads it if it is a hub name, through huggingface_hub and its cache.

    Raises InputError for what is neither (or cannot be asked for), RunError for a download that did not finish.
    """
    return local_folder(model) or hub.download(model)


def headers_only(model: str) -> AbstractContextManager[tuple[Path, int]]:
    """A folder of MODEL that can be planned from, for as long as the context lasts, and how many bytes of weights
    `resolve` would fetch. Raises as `resolve` does."""
    folder = local_folder(model)
    return hub.headers_only(model) if folder is None else nullcontext((folder, 0))


def path_of(text: str | Path) -> Path:
    """The path that a user means: `~` is a home. Raises InputError for that of nobody."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{text}: there is no such user; check the path") from error


def name_of(model: str) -> str:
    """What to call MODEL where others read it: where a folder lies is nobody's business."""
    if model == "demo" or (folder := local_folder(model)) is None:
        return model
    folder = Path(os.path.abspath(folder))  # `.` has a name, and a link keeps its own
    return hub.name_of(folder) or ("./demo" if folder.name == "demo" else folder.name)


def check_readable(text: str | Path | None) -> None:
    """Raise InputError for a text, where there is one, that is no file which can be read. Pipes are left alone."""
    if text is None:
        return
    path = path_of(text)
    try:
        if path.is_file() or path.is_dir() or not path.exists():
            path.open("rb").close()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> InputError:
    """What to say of a file that the system does not open."""
    return InputError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions")


def local_folder(model: str) -> Path | None:
    """The folder that MODEL names; None where it can only be a hub name. Raises InputError for what is neither.

    `demo` is the model that ships with the project (write `./demo` for a folder of that name). A local folder wins
    over a hub name.
    """
    if model == "demo":
        from ptq.demo import demo_path

        return Path(demo_path())
    if not model:
        raise InputError("the name of the model is empty; pass a folder, or a name on the hub")
    path = path_of(model)
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        raise InputError(f"{model}: {hub.NOT_GGUF}")
    if path.exists():
        raise InputError(f"{model}: a file; pass the folder that holds config.json and the safetensors")
    if not HUB_NAME.fullmatch(model):
        if path.with_name(f"{path.name}.work").is_dir():
            raise InputError(f"{model}: its run is not finished; the command that makes it goes on where it was")
        raise InputError(f"{model!r}: no such folder, and not a hub name like `org/name`; check the path")
    return None
