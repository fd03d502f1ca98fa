"""`PackedWeight`: a module whose weight is stored in a format; what linears and embeddings have in common."""

from typing import Any, cast

import torch
from jaxtyping import Float32, Int16, Num
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.ops.op_declarations import lasting
from ptq.weights import formats
from ptq.weights.formats import Format
from ptq.weights.layouts import LaidOut
from ptq.weights.prepacked import PrepackedFormat

GUARD = "weight"
"""Name of the one-element tensor that every packed layer stores where a plain layer has its weight.

Without this package, transformers would find no `weight`, warn, and go on with random numbers. It finds one of the
wrong size instead, and refuses to load.
"""

INPUT_SIGNS, OUTPUT_SIGNS = "weight_su", "weight_sv"
"""Names of the sign vectors of a linear with transforms of its own on both sides: SU [k] and SV [n] in the code of
QuIP#. They hold the bits of float16 numbers in int16 tensors, since loaders cast floating-point tensors to the model's
dtype: +-1 as drawn, any number after fine-tuning."""

NOT_OF_THE_FORMAT = ("format", "version", "hadamard", "output_hadamard", "signs", "activation")
"""Keys of an entry of config.json that are no options of its format."""


class PackedWeight(nn.Module):
    """A weight W[n, k] in a format, as parameters: `weight_<part>` for every part of the format, a one-element `weight`
    (see GUARD) and, where a subclass has one, `bias` behind them."""

    def __init__(self, n: int, k: int, format: Format) -> None:
        super().__init__()
        self.in_features, self.out_features = k, n
        self.file_format = format
        """How its bytes lie in files; `format` is what multiplies with them, and differs where they are prepacked."""
        self.format = format.inner if isinstance(format, PrepackedFormat) else format
        self.part_names: dict[str, str] = {}
        """What the parameters are called, by part."""
        self.register_parameter(GUARD, frozen(guard()))
        self.register_parameter("bias", None)

    def make_room(self) -> None:
        """Empty parts, to be loaded; the last thing that a subclass does when it is made."""
        buffers = self.file_format.buffers(self.out_features, self.in_features).items()
        self._hold({part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in buffers})

    def parts(self) -> dict[str, Tensor]:
        """The tensors of the weight, by part: the stored ones, or what `prepack` made of them."""
        held = self._parameters  # directly: `getattr` of a module is slow
        return cast(dict[str, Tensor], {part: held[name] for part, name in self.part_names.items()})

    def prepack(self) -> None:
        """Put the weight into the layout of the kernels of its device, in the place of the stored one. `state_dict` and
        `load_state_dict` still speak of the stored parts. A weight that is not here (meta, offloaded) is left alone.
        """
        parts = self.parts()
        if not any(tensor.is_meta for tensor in parts.values()):
            with lasting():  # also where a model is loaded in inference mode
                own = {part: tensor.clone() if tensor.is_inference() else tensor for part, tensor in parts.items()}
                if isinstance(self.format, LaidOut):
                    self.format.check_values(own)
                packed = self.file_format.prepack(own, next(iter(own.values())).device)
            if packed.keys() != parts.keys() or any(tensor.is_inference() for tensor in parts.values()):
                self._hold(packed)
                synchronize(packed)

    def _hold(self, parts: dict[str, Tensor]) -> None:
        bias = self._parameters.pop("bias")
        for name in self.part_names.values():
            del self._parameters[name]
        self.part_names = {part: f"weight_{part}" for part in parts}
        for part, tensor in parts.items():
            self.register_parameter(self.part_names[part], frozen(tensor))
        self.register_parameter("bias", bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        parts = self.parts()
        stored = self.file_format.unprepack(parts)
        if stored.keys() != parts.keys():
            for name in (*self.part_names.values(), "bias"):
                destination.pop(prefix + name, None)
            destination.update({f"{prefix}weight_{part}": tensor for part, tensor in stored.items()})
            bias = self._parameters["bias"]
            if bias is not None:
                destination[f"{prefix}bias"] = bias if keep_vars else bias.detach()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        parts = self.parts()
        stored = self.file_format.unprepack(parts)
        if stored.keys() == parts.keys():
            return super()._load_from_state_dict(*args, **kwargs)
        self._hold(stored)
        super()._load_from_state_dict(*args, **kwargs)
        self.prepack()


def guard() -> Tensor:
    """The tensor stored in a packed layer's `weight`."""
    return torch.zeros(1, dtype=torch.uint8)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient. Parameters rather than buffers, so that accelerate can spill them to disk."""
    return nn.Parameter(tensor, requires_grad=False)


def stored_signs(vector: Num[Tensor, " size"]) -> Int16[Tensor, " size"]:
    """A sign vector as it is stored."""
    return vector.to(torch.float16).view(torch.int16)


def loaded_signs(stored: Int16[Tensor, " size"]) -> Float32[Tensor, " size"]:
    """Inverse of `stored_signs`."""
    return stored.view(torch.float16).float()


def synchronize(parts: dict[str, Tensor]) -> None:
    """Wait until what was written to packed weights is there: on a GPU, kernels read them while the kernel ahead of
    them still ends (csrc/cuda/device.h). Not while a graph is captured, which cannot wait."""
    for device in {tensor.device for tensor in parts.values() if tensor.is_cuda}:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)


def version(x: Tensor) -> int:
    """Counts what is written to a tensor; 0 for those that do not count."""
    return 0 if x.is_inference() else x._version


class KeptSigns(dict[str, tuple[Tensor, int, Tensor]]):
    """Sign vectors by name: as stored, the version of that, and as numbers. Copies and pickles are empty: there the
    versions begin anew."""

    def __reduce__(self) -> tuple[type["KeptSigns"], tuple[()]]:
        return KeptSigns, ()


def kept_signs(kept: KeptSigns, name: str, stored: Int16[Tensor, " size"]) -> Float32[Tensor, " size"]:
    """`loaded_signs`, kept for the next call."""
    if torch.compiler.is_compiling():  # a graph cannot ask for the version
        return loaded_signs(stored)
    known = kept.get(name)
    now = version(stored)  # `load_state_dict` writes into the same tensor, `module.to` moves it
    if known is None or known[0] is not stored or known[1] != now or known[2].device != stored.device:
        with lasting():
            known = kept[name] = stored, now, loaded_signs(stored)
    return known[2]


def format_of(entry: Any, name: str, n: int, k: int) -> Format:
    """The format of an entry of config.json, for a weight [n, k].

    Raises InputError, naming the module, for a format, version or option that does not exist or fit.
    """
    if not isinstance(entry, dict):
        raise InputError(f"config.json: quantization_config of {name}: expected an object, found {entry!r}")
    options = {key: value for key, value in entry.items() if key not in NOT_OF_THE_FORMAT}
    try:
        format = formats.get(str(entry.get("format")), **options)
        format.buffers(n, k)
    except InputError as error:
        raise InputError(f"config.json: quantization_config of {name}: {error}") from error
    if entry.get("version") != format.version:
        raise InputError(
            f"config.json: quantization_config of {name}: {format.name} has layout version {entry.get('version')!r}, "
            f"this package reads version {format.version}; install the version of ptq that wrote the checkpoint"
        )
    return format
