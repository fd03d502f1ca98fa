"""What a user asks for: `Recipe` changes the bits of the result (hashed and stored), `RunOptions` does not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

from ptq.errors import InputError

Rounding = Literal["nearest", "gptq", "ldlq"]
Finetune = Literal["none", "blocks", "full"]
"""`blocks`: each block after its own original; `full`: after that the whole model after the original's logits."""
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    int | None: ((int, type(None)), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    float | None: ((int, float, type(None)), "a number"),
    float | str | None: ((int, float, str, type(None)), "a number or a word"),
    str | None: ((str, type(None)), "a string"),
}
"""What the options of a type may be, and how that is said."""


@dataclass(frozen=True)
class Recipe:
    """The part of a recipe that all methods share; a method adds its own fields in a subclass."""

    method: ClassVar[str]
    title: ClassVar[str]
    """What the method is called."""
    paper: ClassVar[str]
    """The address of its paper."""
    typed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options that are not called as their fields are; of a switch, what is typed to leave its default."""
    solver: ClassVar[Rounding] = "gptq"
    """What the paper of the method calls LDLQ."""
    width_option: ClassVar[str] = "--bits-for"
    width_word: ClassVar[str] = "BITS"
    """What is typed for `widths`."""
    known_widths: ClassVar[tuple[str, ...]]
    """What may stand behind the = there."""
    younger: ClassVar[tuple[str, ...]] = ("widths", "gptaq_alpha", "finetune", "finetune_epochs")
    """Options that older recipes lack: where they are left at their defaults, `as_dict` is without them."""

    rounding: Rounding = "gptq"
    """`nearest`, or LDLQ with Hessians from calibration data: `gptq` and `ldlq` are two names of it, and a recipe keeps
    that of its method's paper."""
    calibration: str | None = None
    """A .txt or .jsonl file, `wikitext2`, `c4` or a hub dataset, as of `ptq.statistics.text_sources.load`; None only
    where nothing needs data."""
    samples: int = 128
    sequence_length: int | None = None
    """Tokens per calibration row; None: 2048, or the model's limit where that is less."""
    damping: float = 0.01
    """Added to the Hessian's diagonal, as a share of its mean."""
    sweeps: int = 0
    """At most so many sweeps of coordinate descent after LDLQ (`ptq.weights.sweeps`); above 0, bfloat16
    scales of rows are chosen by its loss, too (`ptq.weights.loss_scales`)."""
    gptaq_alpha: float = 0.0
    """Share of what earlier rounding did to the input of a linear that its weight makes up for before it is rounded
    (GPTAQ's alpha, `ptq.statistics.inputs`); 0: none. Not for linears of experts."""
    seed: int = 0
    embedding_bits: int = 16
    """Bits of the embedding and the head, which are rounded to the nearest integers; 16 leaves them alone."""
    skip: tuple[str, ...] = ()
    """Shell-style patterns of linears that stay in the checkpoint's own dtype."""
    widths: tuple[str, ...] = ()
    """`PATTERN=WIDTH`: the linears that match have this width, one of `known_widths` (bits, or an element of FP6), and
    not that of the others. Of several that match a linear the first counts, and before all of them `skip`."""
    finetune: Finetune = "none"
    """What is trained around the codes: see `ptq.pipeline.finetune`."""
    finetune_epochs: int = 5
    """Most passes over the calibration rows: in a turn of a block, and with the whole model."""

    def __post_init__(self) -> None:
        if type(self) is Recipe:
            raise InputError("a recipe of no method: use QuarotRecipe, QuipSharpRecipe or Fp6Recipe")
        if self.rounding not in ("nearest", "gptq", "ldlq"):
            raise InputError(f"--rounding must be nearest, gptq or ldlq, found {self.rounding!r}")
        if self.rounding != "nearest":
            object.__setattr__(self, "rounding", self.solver)
        if isinstance(self.calibration, Path):
            object.__setattr__(self, "calibration", str(self.calibration))
        for option in fields(self):
            value = getattr(self, option.name)
            kinds, wanted = KINDS.get(cast(Any, option.type), ((), ""))
            if kinds and type(value) not in kinds:
                raise InputError(f"{option.name} must be {wanted}, found {value!r}")
            if float in kinds and type(value) is int:  # as the command line has it: both are the same run
                object.__setattr__(self, option.name, float(value))
        for name in ("skip", "widths"):
            patterns = getattr(self, name)
            if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
                example = "*.down_proj" if name == "skip" else f"*.down_proj={max(self.known_widths)}"
                raise InputError(f"{name} must be a list of patterns, such as ['{example}'], found {patterns!r}")
        self._check_widths()
        if self.embedding_bits not in (4, 6, 8, 16):
            raise InputError(
                "--embedding-bits must be 4, 6 or 8, or 16 to leave embedding and head alone; "
                f"found {self.embedding_bits}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed must be at least 0 and below 2^63, found {self.seed}")
        for name in ("samples", "sequence_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
        if self.sweeps < 0:
            raise InputError(f"--sweeps must be 0 or more, found {self.sweeps}")
        if not 0 < self.damping < 1:
            raise InputError(f"--damping must be above 0 and below 1, found {self.damping}")
        if not 0 <= self.gptaq_alpha <= 1:
            raise InputError(f"--gptaq-alpha must be 0 to 1, found {self.gptaq_alpha}")
        if self.gptaq_alpha and self.rounding == "nearest":
            raise InputError("--gptaq-alpha does nothing with --rounding nearest")
        self._check_finetuning()

    def _check_finetuning(self) -> None:
        if self.finetune not in ("none", "blocks", "full"):
            raise InputError(f"--finetune must be none, blocks or full, found {self.finetune!r}")
        if self.finetune_epochs < 1:
            raise InputError(f"--finetune-epochs must be at least 1, found {self.finetune_epochs}")
        if self.finetune != "none" and self.gptaq_alpha:
            raise InputError(
                "--gptaq-alpha: fine-tuning makes up for what earlier rounding did, better; leave one of them out"
            )

    def _check_widths(self) -> None:
        for entry in self.widths:
            pattern, _, width = entry.partition("=")
            if not pattern or not width:
                example = f"'*.down_proj={max(self.known_widths)}'"
                shape = f"PATTERN={self.width_word}, such as {example}"
                raise InputError(f"{self.width_option} must be {shape}; found {entry!r}")
            if width not in self.known_widths:
                raise InputError(
                    f"{self.width_option} {entry!r}: unknown width {width!r}; known are {', '.join(self.known_widths)} "
                    "(--skip leaves linears alone)"
                )

    def width_of(self, linear: str) -> str | None:
        """What `widths` say of a linear, by its name; None: nothing."""
        parts = (entry.partition("=") for entry in self.widths)
        return next((width for pattern, _, width in parts if fnmatch(linear, pattern)), None)

    @property
    def command(self) -> str:
        """What is typed behind `quantize`."""
        return self.method.replace("_", "-")

    @classmethod
    def option(cls, field: str) -> str:
        """What is typed for a field: `--group-size` for `group_size`."""
        named = {"widths": cls.width_option, **cls.typed}
        return named.get(field, f"--{field.replace('_', '-')}")

    def default(self, field: str) -> Any:
        """The default of a field beside the others."""
        return next(each.default for each in fields(self) if each.name == field)

    def refuse_idle(self, why: str, *names: str) -> None:
        """Raise InputError for a field that changes nothing, because of `why`, and is not at its default."""
        for name in names:
            if getattr(self, name) != self.default(name):
                raise InputError(f"{self.option(name)} does nothing {why}; leave it out")

    def arguments(self) -> list[str]:
        """What is typed for the fields that are not at their defaults, in the order of fields."""
        found: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == self.default(field.name):
                continue
            option = self.option(field.name)
            if isinstance(value, bool):
                found.append(option)
            else:
                values = value if isinstance(value, list | tuple) else [value]
                found += [word for each in values for word in (option, str(each))]
        return found

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded: weights, activations or the KV cache."""
        return True

    def as_dict(self) -> dict[str, Any]:
        """JSON form, the same for the same recipe; without the `younger` options that change nothing."""
        defaults = {option.name: option.default for option in fields(self) if option.name in self.younger}
        given = {"method": self.method, **asdict(self)}
        return {key: value for key, value in given.items() if key not in defaults or value not in (defaults[key], [])}


def check_recipe(found: object) -> None:
    """Raise InputError for what is no recipe."""
    if not isinstance(found, Recipe):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise InputError(f"recipe must be a QuarotRecipe, QuipSharpRecipe or Fp6Recipe with its options, found {kind}")


def check_device(name: str) -> None:
    """Raise InputError for what is no name of an option `--device`."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda (CUDA_VISIBLE_DEVICES says which GPU), found {name!r}")


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; on one kind of device, nothing here changes a byte of the result."""

    work: str | Path | None = None
    """Folder of unfinished work; `<out>.work` by default. It is removed when the run has succeeded."""
    restart: bool = False
    """Throw unfinished work away instead of continuing it."""
    device: str = "auto"
    progress: bool = True
    report: bool = True
    """Also write report.html and report.json beside the checkpoint."""

    def __post_init__(self) -> None:
        for name in ("restart", "progress", "report"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if not isinstance(self.work, str | Path | None):
            raise InputError(f"work must be a folder, found {self.work!r}")
