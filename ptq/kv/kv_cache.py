"""How a model's KV cache is quantised: the settings, and their entry in config.json. Light to import.

`ptq.kv.attention.attach` turns it on; the cache itself is in `ptq.kv.packed_cache`, its ops are in `ptq.ops.kv_ops`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ptq.errors import InputError
from ptq.ops import hadamard

VERSION = 2
BITS = (2, 3, 4, 6, 8, 16)
MAX_SINKS = 256
FIELDS_1 = ("key_bits", "value_bits", "clip", "sinks", "hadamard")
"""What version 1 had: one clip for both sides, and keys as they are."""
_KINDS = {
    "key_bits": (int,),
    "value_bits": (int,),
    "key_clip": (int, float),
    "value_clip": (int, float),
    "sinks": (int,),
    "hadamard": (str, type(None)),
    "centered": (bool,),
}
_WORDS = {
    "key_clip": "a number",
    "value_clip": "a number",
    "hadamard": "a text, or null",
    "centered": "true or false",
}


@dataclass(frozen=True)
class CacheQuantization:
    """Keys and values are quantised per token and head: unsigned codes, a scale and a minimum (asymmetric).

    `key_bits`, `value_bits`: 2, 3, 4, 6 or 8; 16 leaves that side as it is. `key_clip` and `value_clip` shrink minimum
    and maximum (QuaRot, arXiv 2404.00456, section 5: 0.95). The first `sinks` tokens of every row are kept as they are.
    `hadamard` is the construction (ptq.ops.hadamard) of R3, which acts on every query and key after RoPE, block by
    block where its order is smaller than the head; None for none. `centered`: before R3 every key loses the centre of
    its head, which the attention module holds (`ptq.kv.key_centers`). Raises InputError for a value out of range.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_clip: float = 0.95
    value_clip: float = 0.95
    sinks: int = 0
    hadamard: str | None = None
    centered: bool = False

    def __post_init__(self) -> None:
        check_bits(self.key_bits, "KV cache: key_bits")
        check_bits(self.value_bits, "KV cache: value_bits")
        check_clip(self.key_clip, "KV cache: key_clip")
        check_clip(self.value_clip, "KV cache: value_clip")
        check_sinks(self.sinks, "KV cache: sinks")
        if self.hadamard is not None:
            hadamard.parse(self.hadamard)
        if self.centered and self.key_bits == 16:
            raise InputError("KV cache: centered: keys of 16 bits are cached as they are")

    def as_dict(self) -> dict[str, Any]:
        """The entry of config.json: `parse` reads it."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def parse(cls, entry: Any) -> "CacheQuantization":
        """What an entry of config.json says. Raises InputError for anything that `as_dict` cannot have written."""
        where = "config.json: quantization_config: kv_cache"
        if not isinstance(entry, dict):
            raise InputError(f"{where}: expected an object, found {entry!r}")
        version = entry.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise InputError(
                f"{where} has version {version!r}, this package reads versions 1 to {VERSION}; "
                "install the version of ptq that wrote the checkpoint"
            )
        fields = {key: value for key, value in entry.items() if key != "version"}
        names = FIELDS_1 if version == 1 else tuple(cls.__dataclass_fields__)
        if set(fields) != set(names):
            raise InputError(f"{where}: expected {', '.join(names)}; found {', '.join(fields)}")
        if version == 1:
            clip = fields.pop("clip")
            fields |= {"key_clip": clip, "value_clip": clip, "centered": False}
        for name, value in fields.items():
            if type(value) not in _KINDS[name]:
                raise InputError(f"{where}: {name} must be {_WORDS.get(name, 'a whole number')}, found {value!r}")
        try:
            return cls(**{**fields, **{name: float(fields[name]) for name in ("key_clip", "value_clip")}})
        except (InputError, OverflowError) as error:  # the latter for an integer that no float can hold
            raise InputError(f"{where}: {error}") from error


def check_bits(bits: int, called: str) -> None:
    """Raise InputError for bits that keys or values cannot have."""
    if bits not in BITS:
        raise InputError(f"{called} must be one of {', '.join(map(str, BITS))}, found {bits!r}")


def check_clip(clip: float, called: str) -> None:
    """Raise InputError for what is no share of a range."""
    if not 0 < clip <= 1:  # a NaN neither
        raise InputError(f"{called} must be above 0 and at most 1, found {clip!r}")


def check_sinks(sinks: int, called: str) -> None:
    """Raise InputError for a number of tokens that cannot be kept as they are."""
    if not 0 <= sinks <= MAX_SINKS:
        raise InputError(f"{called} must be a whole number from 0 to {MAX_SINKS}, found {sinks!r}")


def key_rotation(head_dim: int) -> str:
    """The construction of R3 for heads of this size: Hadamard of the largest block that divides it."""
    return hadamard.construction(hadamard.largest_block(head_dim))
