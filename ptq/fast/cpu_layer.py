"""Decoder layers of few decoded tokens on the CPU, in one call of an op of `ptq.ops.layer_ops`; or of one layer what
stands before its MLP, where that is of another kind.

The call needs a format that has such an op, linears that treat their input alike, and attention and MLP of the kinds of
`ptq.fast.fast_attention` and `ptq.fast.fast_steps`. The numbers are those of the single ops to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import ne
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ptq.fast import fast_attention, fast_steps
from ptq.kv.growing_cache import GrowingLayer
from ptq.kv.packed_layer import PackedLayer
from ptq.layers.linear import QuantLinear, stays_on_cpu, treat_input_alike
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, version
from ptq.ops import hadamard
from ptq.ops import layer_ops as _layer_ops  # noqa: F401 (registers the op)
from ptq.weights.formats import LayerOp
from ptq.weights.layouts import LaidOut

NONE = torch.empty(0, device="cpu")
"""No gain, or no bias."""
NO_NORM = (1.0, 0.0, False)
DECODE = torch.ops.ptq.decode_layers.default


@dataclass(frozen=True)
class Layer:
    """A layer that its op holds, and what a call is checked against."""

    handle: Tensor
    """Stands for it in `ptq::decode_layers` (`ptq.ops.layer_ops`)."""
    has_mlp: bool
    """Whether the op does all, or what stands before the MLP."""
    attention: nn.Module
    kind: fast_attention.Kind
    heads: tuple[int, int]
    """Number and size of the heads of keys and values."""
    floats: tuple[Tensor, ...]
    """Gains and biases."""
    signs: tuple[Tensor, ...]
    """The stored sign vectors; it has them as numbers."""
    versions: tuple[int, ...]
    """The versions of the sign vectors when it was made."""

    def is_over(self) -> bool:
        """Whether sign vectors have been written to since this was made."""
        return any(map(ne, map(version, self.signs), self.versions))


def layer_of(attention: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module | None]) -> Layer | None:
    """The parts of a decoder layer as an op takes them; None where none does. `norms`: before attention, before the
    MLP, behind attention, behind the MLP."""
    act = fast_steps.gate_of(mlp)
    found = None if act is None else _layer(attention, mlp, norms, act == fast_steps.GELU)
    return found or _layer(attention, None, (norms[0], None, norms[2], None), False)


def _layer(attention: nn.Module, mlp: nn.Module | None, norms: Sequence[nn.Module | None], gelu: bool) -> Layer | None:
    kind = fast_attention.kind_of(attention)
    if kind is None:
        return None
    of_heads = [attention.get_submodule(name) if kind.normed else None for name in fast_attention.NORMS]
    normed = [*norms[:2], *of_heads, *norms[2:]]
    kinds = [NO_NORM if norm is None else fast_steps.norm_kind(norm) for norm in normed]
    *first, output = fast_attention.linears_of(attention)
    sites = [first, [output]]
    if mlp is not None:
        *gated, last = fast_steps.linears_of(mlp)
        sites.extend((gated, [last]))
    linears = [linear for site in sites for linear in site]
    if None in kinds or not all(
        type(linear) is QuantLinear and stays_on_cpu(linear) and "forward" not in vars(linear) for linear in linears
    ):
        return None
    treatments, op, rows = _treatments(sites), _op_of(linears), _rows(attention, sites)
    if treatments is None or op is None:
        return None
    gains = [NONE if norm is None else cast(Tensor, norm._parameters["weight"]) for norm in normed]
    eps, offset, round_first = (list(numbers) for numbers in zip(*cast(Any, kinds), strict=True))
    biases = [linear._parameters["bias"] for linear in linears]
    given = [bias for bias in biases if bias is not None]
    full = [NONE if bias is None else bias for bias in biases] if given else []
    d = cast(int, attention.head_dim)
    stored = tuple(
        signs for x in linears for name in (INPUT_SIGNS, OUTPUT_SIGNS) if (signs := x._parameters.get(name)) is not None
    )
    floats = tuple(x for x in (*gains, *given) if x is not NONE)
    handle = op[0](gains, eps, offset, round_first, full, *treatments, gelu, rows, *op[1])
    heads, versions = (rows[1] // d, d), tuple(map(version, stored))
    return Layer(handle, mlp is not None, attention, kind, heads, floats, stored, versions)


def run(
    layers: Sequence[Layer],
    x: Float[Tensor, "b t k"],
    others: dict[str, Any],
    multipliers: list[float],
) -> Float[Tensor, "b t k"] | None:
    """What layers, one behind another, give for decoded tokens of each row; None where they are called with something
    else. `multipliers`: m of each."""
    attentions = [(layer.attention, layer.kind) for layer in layers]
    floats = chain.from_iterable(layer.floats for layer in layers)
    states = fast_attention.cache_layers(attentions, x, floats=floats, **others)
    if states is None or len(set(map(id, states))) < len(states):  # layers that are one see their own tokens
        return None
    cache = _cache(layers, states, x)
    if cache is None:
        return None
    turns, mask = others["position_embeddings"], others.get("attention_mask")
    scaling = [layer.attention.scaling for layer in layers]
    y = DECODE([layer.handle for layer in layers], x, *turns, *cache, scaling, multipliers, mask)
    for state in cast(list[GrowingLayer | PackedLayer], states):
        state.advance(x.shape[1])
    return y


def _cache(
    layers: Sequence[Layer], states: Sequence[fast_attention.CacheLayer], x: Float[Tensor, "b t k"]
) -> tuple[Any, ...] | None:
    """The arguments of `ptq::decode_layers` from `cache` to `cache_order`, with room for the tokens of x. All states
    are of one cache."""
    batch, tokens = x.shape[:2]
    room, before, numbers = [], [], ([0, 0], 1.0, [], 0)
    for layer, state in zip(layers, states, strict=True):
        if isinstance(state, GrowingLayer):
            shape = batch, layer.heads[0], tokens, layer.heads[1]
            *held, length = state.reserve(shape, shape, x)
        elif isinstance(state, PackedLayer) and state.decodes and state.key.batch == batch:
            held, length, numbers = state.room(tokens), state.length, state.numbers()
        else:
            return None
        room.extend(held)
        before.append(length)
    return room, before, *numbers


def _rows(attention: nn.Module, sites: Sequence[Sequence[QuantLinear]]) -> list[int]:
    """How many rows q, k, v, o, gate, up and down have, or the first four."""
    first, (output,), *mlp = sites
    rows = fast_attention.rows_of(attention) if len(first) == 1 else [linear.out_features for linear in first]
    rows.append(output.out_features)
    for down in mlp[1:]:
        rows.extend((down[0].in_features, down[0].in_features, down[0].out_features))
    return rows


def _op_of(linears: Sequence[QuantLinear]) -> LayerOp | None:
    format = linears[0].format
    if not isinstance(format, LaidOut) or any(linear.format != format for linear in linears):
        return None
    return format.layer_op([linear.parts() for linear in linears])


def _treatments(sites: Sequence[Sequence[QuantLinear]]) -> tuple[Any, ...] | None:
    """What is done to the inputs and the products; None where linears treat one input in different ways. A site is the
    linears of one input."""
    if not all(treat_input_alike(first, other) for first, *others in sites for other in others):
        return None
    firsts, linears = [site[0] for site in sites], [linear for site in sites for linear in site]
    outputs = [linear.online.output for linear in linears]
    signed = {linear.online.signs for linear in linears}
    if len({output is None for output in outputs}) > 1 or len(signed) > 1:
        return None
    su, factors, orders, bits, clips = zip(*(linear.treatment() for linear in firsts), strict=True)
    cpu = torch.device("cpu")
    back, back_orders = zip(*(hadamard.dense_factors(output, cpu) for output in outputs), strict=True)
    both = all(signed)
    sv = [linear.signs(OUTPUT_SIGNS) for linear in linears] if both else []
    return (
        list(bits), list(clips), list(su) if both else [], *_flat(factors), list(orders), sv, *_flat(back),
        list(back_orders),
    )  # fmt: skip


def _flat(factors: Sequence[list[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """The dense factors of several transforms in one list, and how many each has."""
    return [factor for each in factors for factor in each], [len(each) for each in factors]
