"""Multi-head latent attention of few decoded tokens (of each row of a batch) on the CPU: the products of the input,
`ptq::latent_attention` over the latent vectors themselves, and the output product.

Transformers' own code makes keys and values of all tokens of the context anew with every decoded token. Here the matrix
that makes them, `kv_b_proj`, meets queries and results instead (`ptq.ops.latent_ops`), for which it is kept as plain
numbers, too. Where its input is quantised in prompts, that of decoded tokens is not.

No family is named. `kind_of` tries a module on random numbers first: only where the steps give what its own forward
gives, up to rounding, does `decoded` take the place of that, and only for tokens behind others in a plain cache.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ptq.fast.attention import decoding, expansion
from ptq.fast.attention.expansion import EXPANSION
from ptq.fast.steps import rotary_embedding
from ptq.fast.trials import HIDDEN, TRIAL_ERRORS, bare_copy, is_close, mask_of, random_linear, random_norm, tried_once
from ptq.kv.attention import CACHE
from ptq.kv.growing_cache import GrowingLayer, growing_layer
from ptq.layers.replaceable import must_be_called
from ptq.layers.shared_input import products
from ptq.ops.latent_ops import RopeLayout
from ptq.ops.matmul import cpu_ops_serve
from ptq.ops.op_declarations import wants_gradient

QUERIES, LOW_RANK, LATENT = "q_proj", ("q_a_proj", "q_b_proj"), "kv_a_proj_with_mqa"
OUTPUT = "o_proj"
NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Of queries of low rank, and of latent vectors."""
FULL = {QUERIES, LATENT, NORMS[1], EXPANSION, OUTPUT}
OF_LOW_RANK = {*LOW_RANK, *NORMS, LATENT, EXPANSION, OUTPUT}
INTERLEAVED = "rope_interleave"
SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
"""dk, r, dv and rank of `ptq.ops.latent_ops`."""


class LatentKind(NamedTuple):
    """What a module does."""

    rope_layout: RopeLayout
    scaled: bool = False
    """As of `ptq.fast.attention.decoded_attention.AttentionKind`."""
    interleaved: bool | None = None
    """`rope_interleave` of the config that it was found for, which modules ask every time."""

    @property
    def tables(self) -> RopeLayout:
        """How cos and sin are given: layers that differ in it are not called with the same."""
        return self.rope_layout

    def cos_sin(self, module: Any, given: Any, x: Float[Tensor, "b t k"]) -> tuple[Tensor, Tensor] | None:
        """cos and sin, as the op takes them, of what decoded tokens x are `given`; None for something else."""
        if self.rope_layout is RopeLayout.NONE:
            return x, x
        if self.rope_layout is RopeLayout.COMPLEX:
            is_complex = isinstance(given, Tensor) and given.dtype == torch.complex64 and given.is_cpu
            return (given.real.contiguous(), given.imag.contiguous()) if is_complex else None
        return given if isinstance(given, tuple) else None

    def sites(self, module: nn.Module) -> list[list[Any]]:
        """The linears of each input."""
        first, inside, output = linears_of(module)
        return [first, *([inside] if inside else []), [output]]

    def inner_norms(self, module: nn.Module) -> list[nn.Module | None]:
        """The norms of queries of low rank, where there are any, and of latent vectors."""
        return [module._modules.get(name) for name in NORMS]

    def cached(self, module: Any) -> tuple[tuple[int, int], ...]:
        """Heads, and channels of each, of latent vectors and of what is rotated behind them."""
        return (1, module.kv_lora_rank), (1, module.qk_rope_head_dim)

    @staticmethod
    def cache_layers(
        attentions: Sequence[tuple[Any, "LatentKind"]],
        cos_sin: tuple[Tensor, Tensor] | None,
        x: Float[Tensor, "b t k"],
        attention_mask: Tensor | None = None,
        floats: Iterable[Tensor] = (),
        **others: Any,
    ) -> list[GrowingLayer] | None:
        """As `ptq.fast.attention.decoded_attention.AttentionKind.cache_layers`."""
        cache, tokens = others.get(CACHE), x.shape[1]
        if cos_sin is None or cache is None or not x.numel() or not decoding.are_decoded(tokens, attention_mask):
            return None
        if not cpu_ops_serve(x, *floats) or not all(
            y.dim() == 3 and y.is_cpu and not wants_gradient(y) for y in cos_sin
        ):
            return None
        found = []
        for module, kind in attentions:
            if getattr(module.config, INTERLEAVED, None) != kind.interleaved:
                return None
            layer = growing_layer(cache, module.layer_idx)
            if layer is None or not layer.get_seq_length() or module.training:
                return None
            ours = decoding.attention_name(module.config) == decoding.ATTENTION
            if not ours or not decoding.fits(attention_mask, x, layer):
                return None
            cached = cast(list[Tensor], [layer.keys, layer.values])
            learns = torch.is_grad_enabled() and wants_gradient(*module.parameters(), *cached)
            if learns or any(y.dtype != x.dtype for y in cached):
                return None
            found.append(layer)
        return found


def forward(module: nn.Module, kind: LatentKind, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module of this kind."""
    if torch.compiler.is_compiling():
        return rotary_embedding.forward(module, *args, **kwargs)
    found = None if args else decoded(module, kind, **kwargs)
    if found is not None:
        return found, None
    expansion.doubt(module, args[0] if args else kwargs["hidden_states"])
    return rotary_embedding.forward(module, *args, **kwargs)


def decoded(module: Any, kind: LatentKind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """The attention of decoded tokens, as a module of this kind computes it; None where it must do so itself."""
    x, cos_sin = hidden_states, kind.cos_sin(module, others.get("position_embeddings"), hidden_states)
    layers = kind.cache_layers([(module, kind)], cos_sin, x, **others)
    scaling = None if layers is None else decoding.scalings_of([(module, kind)], others)
    if layers is None or cos_sin is None or scaling is None or must_be_called(module._modules[EXPANSION]):
        return None
    matrix = expansion.kept_matrix(module, x.dtype)
    if matrix is None:
        return None
    parts = module._modules
    queries, latent = products(linears_of(module)[0], x)
    if queries.dtype != x.dtype or latent.dtype != x.dtype or wants_gradient(queries, latent):
        return None  # autocast, or somebody who listens
    if QUERIES not in parts:
        queries = parts[LOW_RANK[1]](parts[NORMS[0]](queries))
    if queries.dtype != x.dtype or wants_gradient(queries):
        return None
    latent, rotary = latent.split((module.kv_lora_rank, module.qk_rope_head_dim), -1)
    latent, layer = parts[NORMS[1]](latent), layers[0]
    *room, before = layer.reserve(*decoding.shapes_of(kind.cached(module), x), x)
    numbers = *matrix.numbers, kind.rope_layout, scaling[0], others.get("attention_mask")
    y = torch.ops.ptq.latent_attention.default(queries, latent, rotary, *cos_sin, *room, before, *numbers)
    layer.advance(x.shape[1])
    return parts[OUTPUT](y)


def linears_of(module: nn.Module) -> tuple[list[Any], list[Any], Any]:
    """The linears of the input, of queries of low rank behind their norm (or none), and that of the output."""
    parts = module._modules
    is_full = QUERIES in parts
    first = [parts[QUERIES if is_full else LOW_RANK[0]], parts[LATENT]]
    return first, [] if is_full else [parts[LOW_RANK[1]]], parts[OUTPUT]


# --- the trial ------------------------------------------------------------------------------------------------------


def kind_of(module: nn.Module) -> LatentKind | None:
    """What an attention module does; None for any other module."""
    if module._modules.keys() not in (FULL, OF_LOW_RANK) or module._parameters:
        return None
    known = {*SIZES, "config", "scaling", "layer_idx"} <= vars(module).keys()
    return _tried(module) if known and module._modules[EXPANSION] is not None else None


@tried_once
def _tried(module: Any) -> LatentKind | None:
    more = decoding.scaled_by(module.config) is not None, getattr(module.config, INTERLEAVED, None)
    kinds = (LatentKind(rope_layout, *more) for rope_layout in RopeLayout)
    return next((kind for kind in kinds if _matches(module, kind)), None)


def _matches(module: Any, kind: LatentKind) -> bool:
    generator = torch.Generator().manual_seed(0)
    alone = _small_copy(module, generator)
    return all(_gives_those_of(module, alone, kind, tokens, generator) for tokens in (1, 3))


def _gives_those_of(module: Any, alone: Any, kind: LatentKind, tokens: int, generator: torch.Generator) -> bool:
    """Whether the steps give what the forward of a module gives for so many tokens. `alone`: a small copy."""
    before = [torch.randn(2, h, 5, d, generator=generator) for h, d in kind.cached(module)]
    x, angles = (torch.randn(2, tokens, n, generator=generator) for n in (HIDDEN, module.qk_rope_head_dim // 2))
    cos_sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    given = torch.polar(torch.ones_like(angles), angles) if kind.rope_layout is RopeLayout.COMPLEX else cos_sin
    given = None if kind.rope_layout is RopeLayout.NONE else given
    mask = mask_of(tokens, 5)
    results = []
    for own in (True, False):
        cache = DynamicCache()
        cache.update(before[0].clone(), before[1].clone(), 0)
        inputs = {
            "position_embeddings": given,
            "attention_mask": mask,
            CACHE: cache,
            **decoding.distant_positions(alone, tokens),
        }
        alone.config._attn_implementation = "sdpa" if own else decoding.ATTENTION
        try:
            y = type(module).forward(alone, hidden_states=x, **inputs)[0] if own else decoded(alone, kind, x, **inputs)
        except TRIAL_ERRORS:
            return False
        layer = cast(DynamicLayer, cache.layers[0])
        results.append((y, layer.keys, layer.values))
    pairs = zip(*results, strict=True)
    return all(is_close(found, wanted) for wanted, found in pairs)


def _small_copy(module: Any, generator: torch.Generator) -> Any:
    """The module with all its numbers, but with small linears of random weights."""
    alone = bare_copy(module)
    alone.config, alone.layer_idx = copy.copy(module.config), 0
    for name, part in module._modules.items():
        if name in NORMS:
            made = random_norm(part, generator)
        else:
            n = HIDDEN if name == OUTPUT else part.out_features
            k = HIDDEN if name in (QUERIES, LOW_RANK[0], LATENT) else part.in_features
            made = random_linear(n, k, generator)
        setattr(alone, name, made)
    return alone.eval()
