"""`quantization_config` of config.json: what is packed, and how."""

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ptq.errors import InputError, in_folder
from ptq.files.checkpoint import Checkpoint
from ptq.hf import residual
from ptq.kv.kv_cache import CacheQuantization
from ptq.layers.linear import config_entry
from ptq.models.families import family_or_default
from ptq.planning.plan import Plan

QUANT_METHOD = "ptq"
LAYOUT_VERSION = 1
OPTIONAL = ("kv_cache", "residual_rotation")
"""Keys of `quantization_config` that may be absent."""


class PtqConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json: every quantised linear, explicitly, and the embedding, where it is.

    `schemes` maps a name to {"format", "version", options..., "hadamard"?, "activation"?}; `linears` maps a module to a
    scheme; `kv_cache` says how keys and values are cached, and is absent where they are not quantised;
    `residual_rotation` is there where R1 runs at the ends of the model (`ptq.hf.residual`).
    """

    def __init__(
        self,
        schemes: Any = None,
        linears: Any = None,
        version: Any = LAYOUT_VERSION,
        quant_method: str = QUANT_METHOD,
        kv_cache: Any = None,
        residual_rotation: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InputError(f"config.json: quantization_config has unknown entries: {', '.join(sorted(unknown))}")
        if type(version) is not int or version != LAYOUT_VERSION:
            raise InputError(
                f"config.json: quantization_config has version {version!r}, this package reads {LAYOUT_VERSION}; "
                "install the version of ptq that wrote the checkpoint"
            )
        if not isinstance(schemes, dict) or not isinstance(linears, dict):
            raise InputError("config.json: quantization_config must hold the objects `schemes` and `linears`")
        for name, entry in schemes.items():
            if not isinstance(entry, dict):
                raise InputError(f"config.json: quantization_config of {name}: expected an object, found {entry!r}")
        for name, scheme in linears.items():
            if not isinstance(scheme, str) or scheme not in schemes:
                raise InputError(f"config.json: quantization_config of {name}: no scheme is called {scheme!r}")
        self.quant_method = quant_method  # pyright: ignore[reportAttributeAccessIssue]  (the enum is of built-in methods)
        self.version = version
        self.schemes: dict[str, Any] = schemes
        self.linears: dict[str, str] = linears
        self.kv_cache: dict[str, Any] | None = kv_cache
        self.residual_rotation: dict[str, Any] | None = residual_rotation
        self.cache()
        self.residual()

    @classmethod
    def parse(cls, config: dict[str, Any]) -> "PtqConfig | None":
        """What a config.json says; None where the model is not quantised. Raises InputError for another method."""
        found = config.get("quantization_config")
        if found is None:
            return None
        if not isinstance(found, dict):
            raise InputError(f"config.json: quantization_config must be an object, found {str(found)[:80]!r}")
        method = found.get("quant_method")
        if method != QUANT_METHOD:
            export = "; of what `quantize export` wrote, name the checkpoint that it was made from"
            hint = export if method == "compressed-tensors" else ""
            raise InputError(f"config.json: the model was quantised by {str(method)[:80]!r}, not by ptq{hint}")
        # Before the call: an entry called `self` would be an argument given twice.
        known = {"schemes", "linears", "version", "quant_method", *OPTIONAL}
        unknown = sorted(found.keys() - known)
        if unknown:
            raise InputError(f"config.json: quantization_config has unknown entries: {', '.join(unknown)}")
        return cls(**found)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> "PtqConfig | None":
        """`parse` of a checkpoint's config.json, with errors that name its folder."""
        with in_folder(checkpoint.folder):
            return cls.parse(checkpoint.config)

    @classmethod
    def of(cls, plan: Plan) -> "PtqConfig":
        """The config that describes a plan's result."""
        entries = {linear.name: config_entry(linear) for linear in plan.packed_linears()}
        turned = plan.online_residual
        return cls.listing(
            entries, plan.cache.as_dict() if plan.cache else None, residual.config_entry(turned) if turned else None
        )

    @classmethod
    def listing(
        cls,
        entries: dict[str, dict[str, Any]],
        kv_cache: dict[str, Any] | None,
        residual_rotation: dict[str, Any] | None,
    ) -> "PtqConfig":
        """The config with an entry for every linear; equal ones become one scheme."""
        schemes: dict[str, dict[str, Any]] = {}
        linears: dict[str, str] = {}
        for linear, entry in entries.items():
            name = next((name for name, known in schemes.items() if known == entry), f"scheme{len(schemes)}")
            schemes[name] = entry
            linears[linear] = name
        return cls(schemes, linears, kv_cache=kv_cache, residual_rotation=residual_rotation)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {key: value for key, value in super().to_dict().items() if key not in OPTIONAL or value is not None}

    def cache(self) -> CacheQuantization | None:
        """How the KV cache is quantised; None: not at all. Raises InputError for what it cannot mean."""
        return None if self.kv_cache is None else CacheQuantization.parse(self.kv_cache)

    def residual(self) -> str | None:
        """The Hadamard construction of an R1 that runs at the ends of the model; None: there is none. Raises InputError
        for what it cannot mean."""
        return None if self.residual_rotation is None else residual.parse(self.residual_rotation)

    def rounded(self) -> tuple[str, ...]:
        """What is rounded when the model runs, in words."""
        bits = {entry["activation"]["bits"] for entry in self.schemes.values() if "activation" in entry}
        inputs = f"inputs of linears, in {', '.join(map(str, sorted(bits)))} bits"
        cached = "keys and values, in the cache of few bits"
        return (*((inputs,) if bits else ()), *((cached,) if self.kv_cache is not None else ()))

    def entries(self) -> dict[str, Any]:
        """The scheme of every quantised linear, by module name. What a scheme says is checked by `linear.build`."""
        return {name: self.schemes[scheme] for name, scheme in self.linears.items()}

    def entries_in(self, config: Any) -> dict[str, Any]:
        """The entries of linears that the model of a transformers config has: who gives it fewer blocks has no use
        for those of the others, as transformers has none for their tensors. Raises InputError for one without blocks.
        """
        family, blocks = family_or_default(config), config.num_hidden_layers
        if not isinstance(blocks, int) or blocks < 1:
            raise InputError(f"config.json: num_hidden_layers must be a positive whole number, found {blocks!r}")
        numbers = {name: family.block_of(name) for name in self.linears}
        return {name: entry for name, entry in self.entries().items() if (numbers[name] or 0) < blocks}


register_quantization_config(QUANT_METHOD)(PtqConfig)
