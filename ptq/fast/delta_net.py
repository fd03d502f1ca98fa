"""A gated delta net of one decoded token of each row, on the CPU: the products of its input, `ptq::delta_net_step` for
all that follows, and the output product.

No family is named. `kind_of` tries a module on random numbers first: only where the steps give what its own forward
gives, up to rounding, does `decoded` take the place of that, and only for a token behind others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from ptq.fast.trials import MISFIT, hollow, tried_once
from ptq.fast.watched import is_ours
from ptq.kv.attention import CACHE
from ptq.kv.kv_side import is_frozen
from ptq.layers.linear import is_heard
from ptq.layers.shared_input import products
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve
from ptq.ops.op_declarations import wants_gradient

INPUTS, OUTPUT = ("in_proj_qkv", "in_proj_z"), "out_proj"
PLAIN, NORM, CONV = ("in_proj_a", "in_proj_b"), "norm", "conv1d"
VECTORS = ("A_log", "dt_bias")
GIVEN = ("position_embeddings", "position_ids", "use_cache")
"""What a decoder layer is called with besides, for attention."""
NONE = torch.empty(0, device="cpu")
"""No bias."""


class Kind(NamedTuple):
    """What a module does."""

    eps: float
    """Of the gated RMSNorm."""


class Net(NamedTuple):
    """What a module has besides its packed linears, as `ptq::delta_net_step` takes it."""

    conv: Float[Tensor, "channels 1 kernel"]
    conv_bias: Float[Tensor, " channels"]
    """Of no elements: none."""
    a: Float[Tensor, "heads k"]
    b: Float[Tensor, "heads k"]
    a_log: Float[Tensor, " heads"]
    dt_bias: Float[Tensor, " heads"]
    gain: Float[Tensor, " dv"]

    def floats(self) -> tuple[Tensor, ...]:
        """Those that must have the dtype of the input."""
        return tuple(x for x in (self.conv, self.conv_bias, self.a, self.b, self.gain) if x is not NONE)


def decoded(module: Any, kind: Kind, hidden_states: Float[Tensor, "b t k"], **others: Any) -> Tensor | None:
    """What a module of this kind makes of decoded tokens; None where it must do so itself."""
    inside = [module._modules[name] for name in (*PLAIN, NORM, CONV)]
    if any(map(is_heard, inside)) or not all(is_ours(vars(part).get("forward")) for part in inside):
        return None
    net, x = net_of(module), hidden_states
    states = None if net is None else states_of([module], x, net.floats(), **others)
    if net is None or states is None:
        return None
    *inputs, output = linears_of(module)
    qkv, z = products(inputs, x)
    if qkv.dtype != x.dtype or z.dtype != x.dtype or wants_gradient(qkv, z):  # autocast, or somebody who listens
        return None
    bias = None if net.conv_bias is NONE else net.conv_bias
    y = torch.ops.ptq.delta_net_step.default(x, qkv, z, *states[0], *net._replace(conv_bias=bias), kind.eps)
    return output(y)


def states_of(
    modules: Sequence[Any],
    x: Float[Tensor, "b t k"],
    floats: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    **others: Any,
) -> list[tuple[Tensor, Tensor]] | None:
    """The states of the convolution and of the delta rule of each module, which a token of each row moves on; None
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


def linears_of(module: nn.Module) -> list[Any]:
    """The packed linears: those of the input, and that of the output."""
    return [module._modules[name] for name in (*INPUTS, OUTPUT)]


def net_of(module: nn.Module) -> Net | None:
    """The parts of a module; None where one is of another kind now."""
    linears, conv, norm = [module._modules.get(name) for name in PLAIN], module._modules[CONV], module._modules[NORM]
    if conv is None or norm is None or not all(map(_is_plain, linears)):
        return None
    if any(hasattr(part, "_hf_hook") for part in (conv, norm, *linears)):
        return None  # which brings weights here for a call
    weights = [None if x is None else x._parameters.get("weight") for x in (conv, *linears, norm)]
    vectors = [module._parameters.get(name) for name in VECTORS]
    if any(x is None for x in (*weights, *vectors)) or any(x.dtype not in FEW_DTYPES for x in vectors if x is not None):
        return None
    kernel, a, b, gain = weights
    bias = conv._parameters.get("bias")
    return Net(kernel, NONE if bias is None else bias, a, b, *vectors, gain)  # pyright: ignore


def _is_plain(linear: Any) -> bool:
    is_own = type(linear) is nn.Linear or type(linear).__module__.startswith("ptq.")
    return isinstance(linear, nn.Linear) and is_own and linear.bias is None


def kind_of(module: nn.Module) -> Kind | None:
    """What a module does; None for one that is no such net."""
    names = {*INPUTS, OUTPUT, *PLAIN, NORM, CONV}
    if module._modules.keys() != names or module._parameters.keys() != {*VECTORS}:
        return None
    eps = getattr(module._modules[NORM], "variance_epsilon", None)
    if not isinstance(eps, float) or net_of(module) is None:
        return None
    return Kind(eps) if _gives_its_numbers(module, eps) else None


# --- the trial ------------------------------------------------------------------------------------------------------

HIDDEN = 24
"""Width of what the trial gives a module."""


@tried_once
def _gives_its_numbers(module: Any, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        alone, heads = _small_copy(module, generator), len(module.A_log)
        channels, width = module.conv1d.weight.shape[0], len(module.norm.weight)
        dk = (channels - heads * width) // 2 // module.num_k_heads
        x = torch.randn(2, 1, HIDDEN, generator=generator)
        before = torch.randn(2, channels, 7, generator=generator), torch.randn(2, heads, dk, width, generator=generator)
        results = []
        for own in (True, False):
            cache = DynamicCache()
            cache.layers.append(LinearAttentionLayer())
            cache.update_conv_state(before[0].clone(), 0, conv_kernel_size=module.conv1d.weight.shape[2])
            cache.update_recurrent_state(before[1].clone(), 0)
            given = {CACHE: cache, "attention_mask": None}
            y = type(module).forward(alone, hidden_states=x, **given) if own else decoded(alone, Kind(eps), x, **given)
            layer = cache.layers[0]
            results.append((y, layer.conv_states[0], layer.recurrent_states[0]))  # pyright: ignore
    except MISFIT:
        return False
    pairs = zip(*results, strict=True)
    return all(isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)


def _small_copy(module: Any, generator: torch.Generator) -> Any:
    """The module with all its numbers, but with small linears of random weights."""
    alone = hollow(module)
    alone.layer_idx = 0
    for name, part in module._modules.items():
        if name in (NORM, CONV):
            made = hollow(part)
            tensors = {
                key: torch.rand(x.shape, generator=generator) for key, x in part._parameters.items() if x is not None
            }
            for key, x in part._parameters.items():
                made.register_parameter(key, None if x is None else nn.Parameter(tensors[key], requires_grad=False))
        else:
            n, k = (HIDDEN, part.in_features) if name == OUTPUT else (part.out_features, HIDDEN)
            made = nn.utils.skip_init(nn.Linear, k, n, bias=False)
            made.get_parameter("weight").copy_(torch.randn(n, k, generator=generator) / k**0.5)
        setattr(alone, name, made)
    for name in VECTORS:
        size = module._parameters[name].shape
        alone.register_parameter(name, nn.Parameter(torch.rand(size, generator=generator), requires_grad=False))
    return alone.eval()
