"""What mixers that keep a state in the place of keys and values do on the CPU: an op for each step, or for a decoded
token one for all of them (`ptq.fast.delta_net`).

No family is named. A mixer is known by functions that its forward calls (`STEPS`), or is a gated norm; each is tried on
random numbers first, and where the reference of `ptq.ops.mixer_ops` gives other numbers (up to rounding), it is left
alone. The state is moved on in place, as the cache does it with what it is given.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ptq.fast import delta_net
from ptq.fast.trials import MISFIT, hollow, innermost, trial, tried_once, with_globals
from ptq.fast.watched import InPlace
from ptq.ops import mixer_ops
from ptq.ops.matmul import FEW_DTYPES, cpu_ops_serve

Step = Callable[..., Any]


def forward_of(module: nn.Module) -> Step | None:
    """The faster forward of a mixer or a gated norm; None for any other module."""
    eps = _gated_norm(module)
    if eps is not None:
        return InPlace(_norm_forward, module, eps)
    own = type(module).forward
    return None if _with_steps(own) is None else InPlace(_mixer_forward, module)


def _mixer_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = type(module).forward
    if torch.compiler.is_compiling():
        return own(module, *args, **kwargs)
    kind = None if args else delta_net.kind_of(module)
    found = None if kind is None else delta_net.decoded(module, kind, **kwargs)
    return (_with_steps(own) or own)(module, *args, **kwargs) if found is None else found


@functools.cache
def _with_steps(forward: Step) -> Step | None:
    """A forward function that differs in the steps alone that it calls; None where it calls none."""
    inner = innermost(forward)
    if inner is None:
        return None
    names = {name: inner.__globals__.get(name) for name in STEPS if name in inner.__code__.co_names}
    known = {name: step for name, own in names.items() if (step := step_for(name, own)) is not None}
    return with_globals(forward, known) if known else None


def step_for(name: str, own: Step | None) -> Step | None:
    """What takes the place of a function that transformers calls so; None where its numbers are others."""
    make, cases = STEPS[name]
    return make(own) if own is not None and _agrees(own, make, cases) else None


# --- a convolution of each channel ----------------------------------------------------------------------------------


def _convolution_step(own: Step) -> Step:
    def step(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        given = (hidden_states, conv_state, weight) if bias is None else (hidden_states, conv_state, weight, bias)
        one = hidden_states.dim() == 3 and hidden_states.shape[2] == 1 and hidden_states.numel() > 0
        known = activation in (None, "silu") and not others
        if not (one and known and cpu_ops_serve(*given) and conv_state.is_contiguous()):
            return own(hidden_states, conv_state, weight, bias, activation, **others)
        return torch.ops.ptq.conv_step.default(hidden_states, conv_state, weight, bias, activation is not None)

    return step


def _convolutions(draw: Callable[..., Tensor]) -> Iterable[tuple[list[Tensor], dict[str, Any]]]:
    for room, width in ((4, 4), (3, 4)):
        for bias in (None, draw(6)):
            for activation in (None, "silu"):
                yield [draw(2, 6, 1), draw(2, 6, room), draw(6, width)], {"bias": bias, "activation": activation}


# --- the gated delta rule -------------------------------------------------------------------------------------------


def _delta_step(own: Step) -> Step:
    def step(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        norm, numbers, state = use_qk_l2norm_in_kernel, (g.float(), beta.float()), initial_state
        if state is None and cpu_ops_serve(*numbers):
            state = numbers[0].new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
        if (
            state is None
            or not state.is_contiguous()
            or (initial_state is not None and not output_final_state)  # it would be moved on all the same
            or others.get("cu_seqlens") is not None
            or not (query.numel() and cpu_ops_serve(query, key, value) and cpu_ops_serve(*numbers, state))
        ):
            named = dict(initial_state=initial_state, output_final_state=output_final_state)
            return own(query, key, value, g=g, beta=beta, **named, use_qk_l2norm_in_kernel=norm, **others)
        y = torch.ops.ptq.gated_delta_rule.default(query, key, value, *numbers, state, norm)
        return y, state if output_final_state else None

    return step


def _deltas(draw: Callable[..., Tensor]) -> Iterable[tuple[list[Tensor], dict[str, Any]]]:
    for shared, norm, t in itertools.product((2, 4), (False, True), (1, 70)):
        given = [draw(2, t, shared, 8) / 3, draw(2, t, shared, 8) / 3, draw(2, t, 4, 6)]
        for state in (draw(2, 4, 8, 6), None):
            numbers = dict(g=-draw(2, t, 4).abs(), beta=draw(2, t, 4).sigmoid(), initial_state=state)
            yield given, {**numbers, "output_final_state": True, "use_qk_l2norm_in_kernel": norm}


Cases = Callable[[Callable[..., Tensor]], Iterable[tuple[list[Tensor], dict[str, Any]]]]
"""cases(draw): tensors and named arguments, of numbers that `draw` gives."""
STEPS: dict[str, tuple[Callable[[Step], Step], Cases]] = {
    "causal_conv1d_update": (_convolution_step, _convolutions),
    "torch_recurrent_gated_delta_rule": (_delta_step, _deltas),
    "torch_chunk_gated_delta_rule": (_delta_step, _deltas),
}
"""What transformers calls them; what takes their place, and what it is tried on."""


def _nobody(*args: Any, **kwargs: Any) -> Any:
    """In the place of the function that is tried: the step must not ask itself."""
    raise TypeError("nothing for the op")


@trial()
def _agrees(own: Step, make: Callable[[Step], Step], cases: Cases) -> bool:
    """Whether a function gives the numbers of a step, and leaves the same behind in what it was given."""
    plain, step = inspect.unwrap(own), make(_nobody)
    for tensors, named in cases(functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))):
        found = []
        for each in (plain, step):
            given = [x.clone() for x in tensors]
            others = {name: x.clone() if isinstance(x, Tensor) else x for name, x in named.items()}
            try:
                y = each(*given, **others)
            except MISFIT:
                return False
            found.append([*(y if isinstance(y, tuple) else (y,)), *given])
        if len(found[0]) != len(found[1]):
            return False
        if not all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(*found, strict=True)):
            return False
    return True


# --- a norm with a gate ---------------------------------------------------------------------------------------------


def _norm_forward(module: nn.Module, eps: float, *args: Any, **kwargs: Any) -> Tensor:
    gain = module._parameters.get("weight")
    if len(args) == 2 and not kwargs and gain is not None:
        x, gate = args
        if isinstance(gate, Tensor) and x.shape == gate.shape and x.numel() and cpu_ops_serve(x, gate, gain):
            return torch.ops.ptq.gated_rms_norm.default(x, gate, gain, eps)
    return type(module).forward(module, *args, **kwargs)


def _gated_norm(module: nn.Module) -> float | None:
    """eps of a module that is `ptq::gated_rms_norm`; None for any other."""
    gain, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", None)
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if not alone or gain is None or gain.dim() != 1 or not isinstance(eps, float) or not eps > 0:
        return None
    if [*inspect.signature(type(module).forward).parameters][2:] != ["gate"]:
        return None
    return eps if _norm_gives_its_numbers(module, len(gain), eps) else None


@tried_once
def _norm_gives_its_numbers(module: nn.Module, k: int, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype in FEW_DTYPES:
        alone = hollow(module)
        gain, x, gate = (torch.randn(shape, generator=generator).to(dtype) for shape in ((k,), (4, k), (4, k)))
        alone.weight = nn.Parameter(gain, requires_grad=False)
        x[0] *= eps**0.5
        try:
            found = type(module).forward(alone, x, gate)
        except MISFIT:
            return False
        wanted = mixer_ops.gated_rms_norm(x, gate, gain, eps)
        if not isinstance(found, Tensor) or found.dtype != dtype or not torch.equal(found, wanted):
            return False
    return True
