"""A decoder layer as an op of `ptq.ops.layer_ops` holds it, for few decoded tokens on the CPU; or of one what stands
before its MLP, where that is of another kind.

It needs a format that has such an op, linears that treat their input alike, a mixer of the kinds of
`ptq.fast.attention.decoded_attention`, `latent_attention`, `delta_net` and `state_space` beside it, and an MLP of those
of `ptq.fast.steps.gated_mlp` and `ptq.fast.experts.moe_block`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn

from ptq.fast.attention import decoded_attention, latent_attention
from ptq.fast.attention import expansion as expansions
from ptq.fast.attention.decoded_attention import AttentionKind
from ptq.fast.attention.expansion import HeldExpansion
from ptq.fast.attention.latent_attention import LatentKind
from ptq.fast.experts import moe_block
from ptq.fast.experts.moe_block import HeldMoe
from ptq.fast.mixers import delta_net, state_space
from ptq.fast.mixers.delta_net import DeltaNetKind
from ptq.fast.mixers.state_space import StateSpaceKind
from ptq.fast.steps import gated_mlp, rms_norm
from ptq.layers.linear import QuantLinear
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, version
from ptq.layers.replaceable import stays_on_cpu, treat_input_alike
from ptq.ops import hadamard
from ptq.ops import layer_ops as _layer_ops  # noqa: F401 (registers the op)
from ptq.ops.held_layer import HeldLayer
from ptq.ops.matmul import FEW_DTYPES
from ptq.weights.formats import LayerOp
from ptq.weights.layouts import LaidOut

NONE = torch.empty(0, device="cpu")
"""No gain, or no bias."""
NO_NORM = rms_norm.RmsNormKind(1.0, 0.0, False)
Recurrent = DeltaNetKind | StateSpaceKind
Parts = delta_net.Net | state_space.Space
Kind = AttentionKind | LatentKind | Recurrent
"""What a mixer does. A kind has `sites`, `cache_layers`, and of attention `cos_sin`, `inner_norms` and `cached`, of the
others `parts`."""
FIND_KIND = decoded_attention.kind_of, latent_attention.kind_of, delta_net.kind_of, state_space.kind_of


@dataclass(frozen=True)
class FoundLayer:
    """A layer that its op holds, and what a call is checked against."""

    handle: Tensor
    """Stands for it in `ptq::decode_layers` (`ptq.ops.layer_ops`)."""
    has_mlp: bool
    """Whether the op does all, or what stands before the MLP."""
    moe: HeldMoe | None
    """What stands in the place of an MLP."""
    mixer: Any
    """Attention, or what stands in its place."""
    kind: Kind
    expansion: HeldExpansion | None
    """The matrix of latent attention."""
    cached: tuple[tuple[int, int], ...]
    """Heads, and channels of each, of what attention adds to a cache."""
    floats: tuple[Tensor, ...]
    """Gains and biases."""
    vectors: tuple[Tensor, ...]
    """What else a recurrent mixer has, in either of `FEW_DTYPES`."""
    signs: tuple[Tensor, ...]
    """The stored sign vectors; it has them as numbers."""
    versions: tuple[int, ...] = field(init=False)
    """The versions of the sign vectors when it was made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", tuple(map(version, self.signs)))

    def is_over(self) -> bool:
        """Whether sign vectors have been written to, or experts, the matrix of latent attention or dtypes have changed,
        since this was made."""
        if any(part is not None and part.is_over() for part in (self.moe, self.expansion)):
            return True
        if self.expansion is not None and self.expansion.numbers.keys.dtype != self.floats[0].dtype:
            return True
        if any(x.dtype not in FEW_DTYPES for x in self.vectors):
            return True
        return any(map(ne, map(version, self.signs), self.versions))


def layer_of(mixer: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module | None]) -> FoundLayer | None:
    """The parts of a decoder layer as an op takes them; None where none does. `norms`: before attention, or what stands
    in its place, before the MLP, behind attention, behind the MLP."""
    act = gated_mlp.gate_of(mlp)
    if act is not None:
        found = _layer(mixer, mlp, norms, gelu=act == gated_mlp.GELU)
    else:
        moe = moe_block.moe_of(mlp)
        gains = [norm._parameters.get("weight") for norm in norms if norm is not None]
        alike = moe is not None and len({x.dtype for x in (*moe.floats(), *gains) if x is not None}) == 1
        found = _layer(mixer, None, norms, moe) if alike else None
    return found or _layer(mixer, None, (norms[0], None, norms[2], None))


def _layer(
    mixer: Any,
    mlp: nn.Module | None,
    norms: Sequence[nn.Module | None],
    moe: HeldMoe | None = None,
    gelu: bool = False,
) -> FoundLayer | None:
    kind = next((kind for find in FIND_KIND if (kind := find(mixer)) is not None), None)
    if kind is None:
        return None
    inner = (None, None) if isinstance(kind, Recurrent) else kind.inner_norms(mixer)
    mixing = kind.sites(mixer)
    normed, sites = _norms([*norms[:2], *inner, *norms[2:]]), mixing + _mlp_sites(mlp)
    linears = [linear for site in sites for linear in site]
    if normed is None or not all(
        type(linear) is QuantLinear and stays_on_cpu(linear) and "forward" not in vars(linear) for linear in linears
    ):
        return None
    transforms, op, rows = _transforms(sites), _op_of(linears), _rows(mixer, kind, mixing, mlp)
    dtype = next((gain.dtype for gain in normed["gains"] if gain is not NONE), torch.float32)
    expansion = expansions.kept_matrix(mixer, dtype) if isinstance(kind, LatentKind) else None
    recurrent = kind.parts(mixer) if isinstance(kind, Recurrent) else None
    special = _special(mixer, kind, expansion, recurrent)
    if transforms is None or op is None or special is None:
        return None
    biases = [linear._parameters["bias"] for linear in linears]
    given = [bias for bias in biases if bias is not None]
    full = [NONE if bias is None else bias for bias in biases] if given else []
    make, weights = op
    handles, of_router = ([], []) if moe is None else ([moe.handle], moe.floats())
    held = HeldLayer(**normed, biases=full, **transforms, gelu=gelu, rows=rows, moe=handles, **special)
    handle = make(*held, *weights)
    net, vectors = ((), ()) if recurrent is None else (recurrent.floats(), recurrent.vectors())
    floats = tuple(x for x in (*normed["gains"], *given, *of_router, *net, *special["latent"]) if x is not NONE)
    signs = tuple(
        signs for x in linears for name in (INPUT_SIGNS, OUTPUT_SIGNS) if (signs := x._parameters.get(name)) is not None
    )
    return FoundLayer(
        handle=handle, has_mlp=mlp is not None or moe is not None, moe=moe, mixer=mixer, kind=kind,
        expansion=expansion, cached=() if isinstance(kind, Recurrent) else kind.cached(mixer), floats=floats,
        vectors=vectors, signs=signs,
    )  # fmt: skip


def _special(mixer: Any, kind: Kind, expansion: HeldExpansion | None, recurrent: Parts | None) -> dict[str, Any] | None:
    """The fields of mixers of one kind alone; None where a part of that is of another kind now."""
    fields: dict[str, Any] = dict(
        gated=0, recurrent=[], recurrent_eps=0.0, norm_groups=0, latent=[], rope_layout=0, sinks=[]
    )
    if isinstance(kind, AttentionKind):
        sinks = [mixer._parameters[decoded_attention.SINKS]] if kind.sinks else []
        return fields | dict(gated=mixer.head_dim if kind.gated else 0, sinks=sinks)
    if isinstance(kind, LatentKind):
        return None if expansion is None else fields | dict(latent=[*expansion.numbers], rope_layout=kind.rope_layout)
    if recurrent is None:
        return None
    groups = kind.groups if isinstance(kind, StateSpaceKind) else 0
    held = [NONE if x is None else x for x in recurrent]
    return fields | dict(recurrent=held, recurrent_eps=kind.eps, norm_groups=groups)


def _norms(norms: Sequence[nn.Module | None]) -> dict[str, list[Any]] | None:
    """The fields of norms, which are in the order of `ptq.ops.held_layer`; None where one is of another kind."""
    found = (NO_NORM if norm is None else rms_norm.kind_of(norm) for norm in norms)
    kinds = [kind for kind in found if kind is not None]
    if len(kinds) < len(norms):
        return None
    gains = [NONE if norm is None else norm._parameters["weight"] for norm in norms]
    eps, offset, round_first = (list(numbers) for numbers in zip(*kinds, strict=True))
    return dict(gains=gains, eps=eps, offset=offset, round_first=round_first)


def _mlp_sites(mlp: nn.Module | None) -> list[list[Any]]:
    """The linears of each input of an MLP, should it be there."""
    if mlp is None:
        return []
    *gated, down = gated_mlp.linears_of(mlp)
    return [gated, [down]]


def _rows(mixer: nn.Module, kind: Kind, mixing: Sequence[Sequence[QuantLinear]], mlp: nn.Module | None) -> list[int]:
    """How many rows the linears have before and with o (`ptq.ops.held_layer`), and gate, up and down, should they be
    there."""
    rows = [linear.out_features for site in mixing for linear in site]
    if isinstance(kind, AttentionKind) and len(mixing[0]) == 1:
        rows[:1] = decoded_attention.rows_of(mixer)
    for [down] in _mlp_sites(mlp)[1:]:
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
