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

from ptq.fast import fast_attention, fast_moe, fast_steps
from ptq.fast.fast_experts import HeldMoe
from ptq.kv.growing_cache import GrowingLayer
from ptq.kv.packed_layer import PackedLayer
from ptq.layers.linear import QuantLinear, stays_on_cpu, treat_input_alike
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, version
from ptq.ops import hadamard
from ptq.ops.layer_ops import HeldLayer
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
    moe: HeldMoe | None
    """What stands in the place of an MLP."""
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
        """Whether sign vectors have been written to, or experts have changed, since this was made."""
        if self.moe is not None and self.moe.is_over():
            return True
        return any(map(ne, map(version, self.signs), self.versions))


def layer_of(attention: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module | None]) -> Layer | None:
    """The parts of a decoder layer as an op takes them; None where none does. `norms`: before attention, before the
    MLP, behind attention, behind the MLP."""
    act = fast_steps.gate_of(mlp)
    if act is not None:
        found = _layer(attention, mlp, norms, gelu=act == fast_steps.GELU)
    else:
        moe = fast_moe.held(mlp)
        found = None if moe is None else _layer(attention, None, norms, moe)
    return found or _layer(attention, None, (norms[0], None, norms[2], None))


def _layer(
    attention: nn.Module,
    mlp: nn.Module | None,
    norms: Sequence[nn.Module | None],
    moe: HeldMoe | None = None,
    gelu: bool = False,
) -> Layer | None:
    kind = fast_attention.kind_of(attention)
    if kind is None:
        return None
    of_heads = [attention.get_submodule(name) if kind.normed else None for name in fast_attention.NORMS]
    normed, sites = _norms([*norms[:2], *of_heads, *norms[2:]]), _sites(attention, mlp)
    linears = [linear for site in sites for linear in site]
    if normed is None or not all(
        type(linear) is QuantLinear and stays_on_cpu(linear) and "forward" not in vars(linear) for linear in linears
    ):
        return None
    transforms, op, rows = _transforms(sites), _op_of(linears), _rows(attention, sites)
    if transforms is None or op is None:
        return None
    biases = [linear._parameters["bias"] for linear in linears]
    given = [bias for bias in biases if bias is not None]
    full = [NONE if bias is None else bias for bias in biases] if given else []
    make, weights = op
    handles, of_router = ([], []) if moe is None else ([moe.handle], [moe.weight])
    handle = make(*HeldLayer(**normed, biases=full, **transforms, gelu=gelu, rows=rows, moe=handles), *weights)
    floats = tuple(x for x in (*normed["gains"], *given, *of_router) if x is not NONE)
    signs = tuple(
        signs for x in linears for name in (INPUT_SIGNS, OUTPUT_SIGNS) if (signs := x._parameters.get(name)) is not None
    )
    d = cast(int, attention.head_dim)
    whole, heads = mlp is not None or moe is not None, (rows[1] // d, d)
    return Layer(handle, whole, moe, attention, kind, heads, floats, signs, tuple(map(version, signs)))


def _norms(norms: Sequence[nn.Module | None]) -> dict[str, list[Any]] | None:
    """The fields of norms, which are in the order of `ptq.ops.layer_ops`; None where one is of another kind."""
    kinds = [NO_NORM if norm is None else fast_steps.norm_kind(norm) for norm in norms]
    if None in kinds:
        return None
    gains = [NONE if norm is None else norm._parameters["weight"] for norm in norms]
    eps, offset, round_first = (list(numbers) for numbers in zip(*cast(Any, kinds), strict=True))
    return dict(gains=gains, eps=eps, offset=offset, round_first=round_first)


def _sites(attention: nn.Module, mlp: nn.Module | None) -> list[list[Any]]:
    """The linears of each input."""
    *first, output = fast_attention.linears_of(attention)
    if mlp is None:
        return [first, [output]]
    *gated, down = fast_steps.linears_of(mlp)
    return [first, [output], gated, [down]]


def run(
    layers: Sequence[Layer],
    x: Float[Tensor, "b t k"],
    others: dict[str, Any],
    multipliers: list[float],
) -> Float[Tensor, "b t k"] | None:
    """What layers, one behind another, give for decoded tokens of each row; None where they are called with something
    else. `multipliers`: m of each."""
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.get_autocast_dtype("cpu"):
        if any(layer.moe is not None for layer in layers):
            return None  # a router's product would have another dtype
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
    if mlp:
        _, (down,) = mlp
        rows.extend((down.in_features, down.in_features, down.out_features))
    return rows


def _op_of(linears: Sequence[QuantLinear]) -> LayerOp | None:
    format = linears[0].format
    if not isinstance(format, LaidOut) or any(linear.format != format for linear in linears):
        return None
    return format.layer_op([linear.parts() for linear in linears])


def _transforms(sites: Sequence[Sequence[QuantLinear]]) -> dict[str, list[Any]] | None:
    """The fields of what is done to inputs and products; None where linears treat one input in different ways."""
    if not all(treat_input_alike(first, other) for first, *others in sites for other in others):
        return None
    linears = [linear for site in sites for linear in site]
    outputs = [linear.online.output for linear in linears]
    signed = {linear.online.signs for linear in linears}
    if len({output is None for output in outputs}) > 1 or len(signed) > 1:
        return None
    into = [site[0].treatment() for site in sites]
    back = [hadamard.dense_factors(output, torch.device("cpu")) for output in outputs]
    has_signs = all(signed)
    return dict(
        input_bits=[one.bits for one in into],
        clips=[one.clip for one in into],
        su=[one.signs for one in into] if has_signs else [],
        factors=[factor for one in into for factor in one.factors],
        counts=[len(one.factors) for one in into],
        orders=[one.order for one in into],
        sv=[linear.signs(OUTPUT_SIGNS) for linear in linears] if has_signs else [],
        back_factors=[factor for factors, _ in back for factor in factors],
        back_counts=[len(factors) for factors, _ in back],
        back_orders=[order for _, order in back],
    )
