"""The states of a mixer in a cache of transformers, and the trial of an op that moves them on in one call."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from ptq.fast.trials import HIDDEN, TRIAL_ERRORS, bare_copy, innermost, is_close, random_linear, with_globals
from ptq.kv.attention import CACHE
from ptq.kv.kv_side import is_frozen
from ptq.ops.matmul import cpu_ops_serve
from ptq.ops.op_declarations import wants_gradient

GIVEN = ("position_embeddings", "position_ids", "use_cache")
"""What a decoder layer is called with besides, for attention."""
CONV = "conv1d"


def cache_layers(
    mixers: Sequence[tuple[Any, Any]], cos_sin: object, x: Float[Tensor, "b t k"], **others: Any
) -> list[tuple[Tensor, Tensor]] | None:
    """`states_of` the modules of mixers with their kinds, as `ptq.fast.layers.cpu_layer` asks for it."""
    return states_of([module for module, _ in mixers], x, **others)


def states_of(
    modules: Sequence[Any],
    x: Float[Tensor, "b t k"],
    floats: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    **others: Any,
) -> list[tuple[Tensor, Tensor]] | None:
    """The states of the convolution and of the recurrence of each module, which a token of each row moves on; None
    where this is something else than decoding, or nothing for the ops (`floats`: what else they would take)."""
    cache = others.pop(CACHE, None)
    if attention_mask is not None or type(cache) is not DynamicCache or cache.offloading:
        return None
    if any(value is not None and value is not False for name, value in others.items() if name not in GIVEN):
        return None  # such as where packed sequences end
    if x.shape[1] != 1 or not x.numel() or any(module.training for module in modules) or not cpu_ops_serve(x, *floats):
        return None
    learns = torch.is_grad_enabled() and any(wants_gradient(*module.parameters()) for module in modules)
    if learns or torch.is_autocast_enabled("cpu"):
        return None
    found = []
    for module in modules:
        layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
        if type(layer) is not LinearAttentionLayer or layer.record_past or layer.number_of_states != 1:
            return None
        conv, state = layer.conv_states[0], layer.recurrent_states[0]
        if conv is None or state is None or not layer.has_previous_state[0]:
            return None
        if conv.dtype != x.dtype or state.dtype != torch.float32 or len(conv) != len(x) or len(state) != len(x):
            return None
        if not (conv.is_contiguous() and state.is_contiguous() and conv.is_cpu and state.is_cpu):
            return None
        if is_frozen(conv) or is_frozen(state) or wants_gradient(conv, state):
            return None
        found.append((conv, state))
    return found


def matches(
    module: Any, output: str, state: tuple[int, ...], decoded: Callable[..., Tensor | None], *kind: Any
) -> bool:
    """Whether `decoded(module, *kind, x, ...)` gives what the forward of a module's class gives, and leaves the same
    states behind, of these sizes for each row. `output`: the name of its last linear."""
    generator = torch.Generator().manual_seed(0)
    try:
        alone = _small_copy(module, output, generator)
        channels, _, width = alone.conv1d.weight.shape
        x = torch.randn(2, 1, HIDDEN, generator=generator)
        before = torch.randn(2, channels, 7, generator=generator), torch.randn(2, *state, generator=generator)
        results, forward = [], _without_hints(type(module).forward)
        for own in (True, False):
            cache = DynamicCache()
            cache.layers.append(LinearAttentionLayer())
            cache.update_conv_state(before[0].clone(), 0, conv_kernel_size=width)
            cache.update_recurrent_state(before[1].clone(), 0)
            given = {CACHE: cache, "attention_mask": None}
            y = forward(alone, hidden_states=x, **given) if own else decoded(alone, *kind, x, **given)
            layer = cache.layers[0]
            results.append((y, layer.conv_states[0], layer.recurrent_states[0]))  # pyright: ignore
    except TRIAL_ERRORS:
        return False
    return all(map(is_close, *results))


def _without_hints(forward: Any) -> Any:
    """A forward whose steps do not say that another package has faster ones: those of decoded tokens are ours."""
    inner = innermost(forward)
    if inner is None:
        return forward
    steps = {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
    return with_globals(forward, {name: inspect.unwrap(step) for name, step in steps.items() if callable(step)})


def _small_copy(module: Any, output: str, generator: torch.Generator) -> Any:
    """A module of the same kind with small linears, all of whose numbers are random."""
    alone = bare_copy(module)
    alone.layer_idx = 0
    for name, part in module._modules.items():
        if hasattr(part, "in_features"):
            n, k = (HIDDEN, part.in_features) if name == output else (part.out_features, HIDDEN)
            made = random_linear(n, k, generator)
        else:
            made = bare_copy(part)
            _with_random_numbers(made, part, generator)
        setattr(alone, name, made)
    _with_random_numbers(alone, module, generator)
    return alone.eval()


def _with_random_numbers(made: nn.Module, part: nn.Module, generator: torch.Generator) -> None:
    for name, x in part._parameters.items():
        numbers = None if x is None else nn.Parameter(torch.rand(x.shape, generator=generator), requires_grad=False)
        made.register_parameter(name, numbers)
