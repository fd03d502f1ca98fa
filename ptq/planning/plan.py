"""The plan: pure data that says, for every tensor of a model, what happens to it.

A method (`quarot.plan`, ...) makes a `Plan` from a model's shape, its `Family` row and a recipe. The rewriter, the
calibrator, the writer and the tests read that one plan; nothing else in the package knows where a rotation goes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.files.header import TensorInfo
from ptq.kv.kv_cache import CacheQuantization
from ptq.models.model_shape import ModelShape
from ptq.ops.activations import Activation
from ptq.recipe import Finetune
from ptq.weights import formats
from ptq.weights.formats import Format

OF_ANOTHER = "the config belongs to another model, or the checkpoint is damaged"
"""The end of a sentence about a tensor."""


@dataclass(frozen=True)
class Rotation:
    """The orthogonal map R x = H (s * x) of feature vectors: signs first, then a block-diagonal Hadamard transform.

    On the input side of a weight it is fused as W Rᵀ, on the output side as R W (and R b). QuaRot, section 4.
    """

    size: int
    """Length of the feature vectors."""
    order: int
    """Order of the Hadamard matrix, a divisor of `size`; 1 means that only the signs act."""
    signs: str | None = None
    """Name of the +-1 vector s, a key of `Plan.signs`; None for all ones. A vector shorter than `size` is
    repeated."""

    def __post_init__(self) -> None:
        assert self.size % self.order == 0, self


@dataclass(frozen=True)
class Balance:
    """Two tensors of the source that share a scale s per channel (see ptq.pipeline.balance)."""

    producer: str
    """Its rows are multiplied with s, and so is its bias."""
    reader: str
    """Its columns are divided by s."""
    first: int = 0
    """The first row of the producer that is meant, of as many as the reader has columns: not 0 in a fused linear."""


@dataclass(frozen=True)
class KeyBalance:
    """Queries and keys that share a scale s per channel of every key-value head, the same for two channels that RoPE
    turns together (see ptq.pipeline.balance).

    Rows of the query are multiplied with s, rows of the key are divided by it, and so are their biases.
    """

    query: str
    """Module name; so is `key`."""
    key: str
    norm: str
    """Tensor of the gain of the norm in front of both."""
    shape: ModelShape
    interleaved: bool = False
    """Which channels are a pair: see `Family.rope_interleaved`."""
    first: int = 0
    """The first row of `key` that is one of the keys: not 0 in a fused linear."""


@dataclass(frozen=True)
class LinearPlan:
    """What happens to one weight matrix W[n, k] (a linear layer, the embedding or the head)."""

    name: str
    """Module name in the Hugging Face model; of experts, as the files of a checkpoint have it (`ptq.hf.experts`)."""
    n: int
    k: int
    source: str
    """Tensor that W is read from; another module's where the head is tied to the embedding."""
    norm: str | None = None
    """Tensor of the RMSNorm gain g that is folded into the columns: W diag(g). It holds g - `Plan.norm_offset`."""
    input: Rotation | None = None
    output: Rotation | None = None
    online: Rotation | None = None
    """The part of `input` that the layer applies to its activations at run time; the rest is done by its producers."""
    online_output: Rotation | None = None
    """`output`, where the layer undoes it on its own product; None where its readers expect a rotated product."""
    balance: Balance | KeyBalance | None = None
    """Applied to W before anything else, to its rows but for the `reader`."""
    statistics: str | None = None
    """Name of the linear whose input's Hessian is used: one for all that read the same input; None where the weight
    is not rounded."""
    format: Format | None = None
    """None: the weight stays in the checkpoint's own dtype, as a plain tensor."""
    even_rows: bool = False
    """Rows are divided by their own size before `output` mixes them; the layer's output signs carry it
    (`ptq.pipeline.balance`). Only with `online_output`."""
    activation: Activation | None = None
    """How the input is quantised when the model runs; None: not at all."""
    clip_search: str | None = None
    """Name under which the clip of its input is searched, one for all that read the same input, and for all experts
    of a block (`ptq.statistics.clip_search`): that of `activation` is only where the search begins. None: it is what
    `activation` says."""
    role: str = ""
    """What it is in the model: see `ptq.planning.outline`."""
    block: int | None = None
    """Number of the decoder block that it is in; None for embeddings and head."""
    parts: tuple["LinearPlan", ...] = ()
    """Of a fused linear whose rows are not all treated alike: what happens to them, range after range. Each part has an
    `output`, `balance` and `role` of its own, and the whole has no output and balance."""
    expert: int | None = None
    """Number of the expert that it belongs to; None where it is part of none."""

    def __post_init__(self) -> None:
        assert self.online_output in (None, self.output), self
        assert not self.parts or (self.output is self.balance is None and self.n == sum(x.n for x in self.parts)), self

    @property
    def weights(self) -> int:
        """How many it has."""
        return self.n * self.k

    @property
    def rewritten(self) -> bool:
        """Whether its weight is another one than the source's before it is rounded."""
        return any((self.norm, self.input, self.output, self.balance, self.parts))

    @property
    def undone(self) -> bool:
        """Whether the layer itself undoes, when the model runs, all that is done to its weight: it can then stand among
        linears of the source."""
        alone = self.input == self.online and self.output == self.online_output
        return alone and not any((self.norm, self.balance, self.parts))

    @property
    def balanced_columns(self) -> bool:
        """Whether it is the columns of W that its balance scales."""
        return isinstance(self.balance, Balance) and self.source == self.balance.reader

    @property
    def acts_online(self) -> bool:
        """Whether something happens to its input or its product when the model runs."""
        return any((self.online, self.online_output, self.activation))

    @property
    def dense_weight(self) -> str:
        """Name of its weight in the model between rewriting and rounding."""
        return f"{self.name}.weight_dense" if self.acts_online else f"{self.name}.weight"


@dataclass(frozen=True)
class Plan:
    """Every tensor of the result, and which tensor of the source it comes from."""

    method: str
    layers: str
    """Prefix of the decoder blocks, `model.layers`."""
    blocks: int
    linears: tuple[LinearPlan, ...]
    unit_norms: tuple[str, ...]
    """Norm gains that were folded into their readers and are written such that norms multiply by 1."""
    kept: tuple[str, ...]
    """Tensors that pass through unchanged."""
    unused: tuple[str, ...] = ()
    """Tensors of the source that the model never reads (a second copy of a tied head, stored rotary tables)."""
    norm_offset: float = 0.0
    """What norms add to their stored gain."""
    untied: bool = False
    """True where the source ties head and embedding and the result must not."""
    online_residual: Rotation | None = None
    """R1, where it is not fused into embedding and head but acts behind the one and in front of the last norm when the
    model runs (`ptq.hf.residual`)."""
    signs: dict[str, int] = field(default_factory=dict)
    """Name and length of every sign vector."""
    cache: CacheQuantization | None = None
    """How the KV cache is quantised when the model runs; None: not at all."""
    finetune: Finetune = "none"
    """What is trained around the codes: see `ptq.pipeline.finetune`."""
    finetune_epochs: int = 5
    """Most passes over the calibration rows: in a turn of a block, and with the whole model."""
    notes: tuple[str, ...] = ()
    """What a user should know before the run, such as a width that has no full-size Hadamard matrix."""

    @property
    def centered(self) -> bool:
        """Whether keys are cached without their centre."""
        return self.cache is not None and self.cache.centered

    def block(self, index: int) -> Iterator[LinearPlan]:
        """The linears of one decoder block."""
        return (linear for linear in self.linears if linear.block == index)

    def ends(self) -> Iterator[LinearPlan]:
        """The linears outside of blocks: embeddings, and the head where it has a weight of its own."""
        return (linear for linear in self.linears if linear.block is None)

    def packed_linears(self) -> Iterator[LinearPlan]:
        """The linears that are stored in a format: each has an entry in config.json."""
        return (linear for linear in self.linears if linear.format is not None)

    def with_choices(self, options: Mapping[str, Mapping[str, Any]], clips: Mapping[str, float]) -> "Plan":
        """The plan in which the named linears have their formats with these options, and their inputs these clips."""

        def decided(linear: LinearPlan) -> LinearPlan:
            if linear.format is not None and linear.name in options:
                linear = replace(linear, format=formats.get(linear.format.name, **options[linear.name]))
            if linear.activation is not None and linear.name in clips:
                activation = replace(linear.activation, clip=clips[linear.name])
                linear = replace(linear, activation=activation, clip_search=None)
            return linear

        return replace(self, linears=tuple(map(decided, self.linears)))

    def linear(self, name: str) -> LinearPlan | None:
        """The plan of one linear, or None where the model has no such weight of its own (a tied head)."""
        return next((linear for linear in self.linears if linear.name == name), None)


def check_tensors(plan: Plan, tensors: Mapping[str, TensorInfo], promised: Mapping[str, tuple[int, ...]]) -> None:
    """Check dtype and shape of every tensor that the plan uses; `promised` are the shapes of the config's model.

    Raises InputError for a weight that is no 16- or 32-bit float, and for a shape that contradicts the config.
    """
    for name, info in tensors.items():
        if name in plan.unused:
            continue
        if info.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InputError(
                f"tensor {name!r} is {dtype_name(info.dtype)}: weights must be float32, float16 or "
                "bfloat16, or FP8 (float8_e4m3fn) or MXFP4 that config.json describes; convert the model first"
            )
        if tuple(info.shape) != promised.get(name, tuple(info.shape)):
            raise InputError(
                f"tensor {name!r} has shape {list(info.shape)}, but config.json says {list(promised[name])}: "
                f"{OF_ANOTHER}"
            )


def check_claims(plan: Plan, tensors: dict[str, tuple[int, ...]]) -> None:
    """Check that the plan reads every tensor of the source, each one in the shape that the config promises.

    `tensors` maps each tensor of the source to its shape. Raises InputError for a tensor that is missing, that no
    row of the family claims, or whose shape contradicts the config.
    """
    expected: dict[str, tuple[int, ...] | None] = {}
    for linear in plan.linears:
        expected[linear.source] = (linear.n, linear.k)
        if f"{linear.name}.bias" in tensors:
            expected[f"{linear.name}.bias"] = (linear.n,)
    expected |= {name: None for name in (*plan.unit_norms, *plan.kept, *plan.unused)}
    for name, shape in expected.items():
        if name not in tensors:
            raise InputError(f"the checkpoint has no tensor {name!r}, which its config.json promises")
        if shape is not None and tuple(tensors[name]) != shape:
            raise InputError(
                f"tensor {name!r} has shape {list(tensors[name])}, but config.json says {list(shape)}: {OF_ANOTHER}"
            )
    unclaimed = sorted(set(tensors) - set(expected))
    if unclaimed:
        more = f" and {len(unclaimed) - 1} more" if len(unclaimed) > 1 else ""
        block, _, rest = unclaimed[0].removeprefix(f"{plan.layers}.").partition(".")
        if rest and block.isdecimal() and int(block) >= plan.blocks:
            raise InputError(
                f"tensor {unclaimed[0]!r}{more}: config.json promises {plan.blocks} blocks, 0 to {plan.blocks - 1}: "
                f"{OF_ANOTHER}, or the model has parts that ptq does not know"
            )
        raise InputError(
            f"tensor {unclaimed[0]!r}{more} is nothing that a model of this family has: this one was changed, or has "
            "parts that ptq does not know; see docs/add-a-family.md"
        )


def check_groups(linear: LinearPlan, plan: Plan, group_size: int) -> None:
    """Raise InputError where groups of this size (0: whole rows) do not divide the input channels of a linear."""
    if group_size and linear.k % group_size:
        common = math.gcd(*(other.k for other in plan.linears if other.statistics))
        divisors = [group for group in (128, 64, 32, 16, 8) if common % group == 0]
        remedy = f"--group-size {divisors[0]}" if divisors else "--group-size 0"
        raise InputError(
            f"{linear.name}: its {linear.k} input channels cannot be cut into groups of {group_size}; "
            f"try {remedy}, or leave the layer out with --skip"
        )


def weights_of(linears: Iterable[LinearPlan]) -> int:
    """How many weights linears have together."""
    return sum(linear.weights for linear in linears)
