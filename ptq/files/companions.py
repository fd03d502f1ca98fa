"""The files of a checkpoint beside config.json and the weights: tokenizer, chat templates, generation settings."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ptq.errors import InputError
from ptq.files.hub import TERMS
from ptq.files.shards import write_bytes
from ptq.files.source import cannot_read

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files of which a model with a tokenizer has one at least."""
SETTINGS = "tokenizer_config.json"
OBJECTS = ("tokenizer.json", SETTINGS, "generation_config.json")
"""Files whose JSON is an object."""
TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates with names of their own, such as those for tools: in a folder, as transformers saves them."""
HUB_FILES = "blobs"
"""The folder of the hub's cache with all files, by their hashes."""
COPIED = (
    *TOKENIZERS,
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template*", TEMPLATES, *TERMS),
)
"""What a result takes over from its source."""


def found(folder: Path, patterns: Iterable[str]) -> Iterator[str]:
    """The files of a folder that match, once each and in order, as paths inside of it."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return (path.relative_to(folder).as_posix() for path in sorted(paths))


def check(folder: Path) -> None:
    """Raise InputError for a file to be copied that cannot be what its name says: JSON that is none, or a link to a
    file of another name. A strange model may hold links to files of this machine, which nobody means to pass on."""
    for name in found(folder, COPIED):
        target = (folder / name).resolve()
        if (folder / name).is_symlink() and target.name != Path(name).name and target.parent.name != HUB_FILES:
            raise InputError(
                f"{folder / name}: is a link to {target}, a file of another name; if it belongs to the model, put a "
                "copy in its place"
            )
        if name.endswith(".json"):
            try:
                content = json.loads((folder / name).read_bytes())
            except OSError as error:
                raise cannot_read(folder / name, error) from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{folder / name}: not valid JSON ({error}); fetch the file again") from None
            if name in OBJECTS and not isinstance(content, dict):
                raise InputError(f"{folder / name}: expected an object, found {str(content)[:80]!r}; fetch it again")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds a tokenizer."""
    return any(found(folder, TOKENIZERS))


def has_vocabulary(folder: Path) -> bool:
    """Whether the files of a tokenizer are more than its settings."""
    return any(name != SETTINGS for name in found(folder, TOKENIZERS))


def copy(source: Path, folder: Path, patterns: Iterable[str] = COPIED) -> None:
    """Copy the files of `source` that match to `folder`, and force them to disk."""
    for name in found(source, patterns):
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, (source / name).read_bytes())
