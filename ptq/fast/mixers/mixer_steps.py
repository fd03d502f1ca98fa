"""Functions that transformers' mixers call, as ops of `ptq.ops.mixer_ops` on the CPU: `STEPS`.

Each is tried on random numbers first: where transformers' own function gives other numbers (up to rounding), it is left
alone; likewise where what it is called with is nothing for the op.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ptq.fast.trials import TRIAL_ERRORS, is_close, trial
from ptq.ops.matmul import cpu_ops_serve

Step = Callable[..., Any]
Draw = Callable[..., Tensor]
"""draw(*shape): random numbers."""
Cases = Iterable[tuple[list[Tensor], dict[str, Any]]]
"""Tensors and named arguments, as a function is called with them."""


def step_for(name: str, own: Step | None) -> Step | None:
    """What takes the place of a function that transformers calls so; None where its numbers are others."""
    make, cases = STEPS[name]
    return make(own) if own is not None and _agrees(own, make, cases) else None


def _nobody(*args: Any, **kwargs: Any) -> Any:
    """In the place of the function that is tried: the step must not ask itself."""
    raise TypeError("nothing for the op")


@trial()
def _agrees(own: Step, make: Callable[[Step], Step], cases: Callable[[Draw], Cases]) -> bool:
    """Whether a function gives the numbers of a step, and leaves the same behind in what it was given."""
    plain, step = inspect.unwrap(own), make(_nobody)
    for tensors, named in cases(functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))):
        found = []
        for each in (plain, step):
            given = [_copy(x) for x in tensors]
            others = {name: _copy(x) if isinstance(x, Tensor) else x for name, x in named.items()}
            try:
                y = each(*given, **others)
            except TRIAL_ERRORS:
                return False
            found.append([*(y if isinstance(y, tuple) else (y,)), *given])
        if len(found[0]) != len(found[1]):
            return False
        if not all(map(is_close, *found)):
            return False
    return True


def _copy(x: Tensor) -> Tensor:
    """What is expanded stays so: nobody writes to it."""
    return x if 0 in x.stride() else x.clone()


def _apart(others: dict[str, Any]) -> bool:
    """Whether a row of tokens is several sequences."""
    return any(others.get(name) is not None for name in ("seq_idx", "cu_seqlens"))


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


def _convolutions(draw: Draw) -> Cases:
    for room, width in ((4, 4), (3, 4)):
        for bias in (None, draw(6)):
            for activation in (None, "silu"):
                yield [draw(2, 6, 1), draw(2, 6, room), draw(6, width)], {"bias": bias, "activation": activation}


def _convolution(own: Step) -> Step:
    def step(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        given = (hidden_states, weight) if bias is None else (hidden_states, weight, bias)
        known = activation in (None, "silu") and not _apart(others)
        if not (known and hidden_states.numel() and cpu_ops_serve(*given)):
            return own(hidden_states, weight, bias, activation, **others)
        return torch.ops.ptq.causal_conv.default(hidden_states, weight, bias, activation is not None)

    return step


def _windows(draw: Draw) -> Cases:
    for tokens, bias, activation in itertools.product((2, 7), (None, draw(6)), (None, "silu")):
        yield [draw(2, 6, tokens), draw(6, 4)], {"bias": bias, "activation": activation}


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
            or _apart(others)
            or not (query.numel() and cpu_ops_serve(query, key, value) and cpu_ops_serve(*numbers, state))
        ):
            named = dict(initial_state=initial_state, output_final_state=output_final_state)
            return own(query, key, value, g=g, beta=beta, **named, use_qk_l2norm_in_kernel=norm, **others)
        y = torch.ops.ptq.gated_delta_rule.default(query, key, value, *numbers, state, norm)
        return y, state if output_final_state else None

    return step


def _deltas(draw: Draw) -> Cases:
    for shared, norm, t in itertools.product((2, 4), (False, True), (1, 70)):
        given = [draw(2, t, shared, 8) / 3, draw(2, t, shared, 8) / 3, draw(2, t, 4, 6)]
        for state in (draw(2, 4, 8, 6), None):
            numbers = dict(g=-draw(2, t, 4).abs(), beta=draw(2, t, 4).sigmoid(), initial_state=state)
            yield given, {**numbers, "output_final_state": True, "use_qk_l2norm_in_kernel": norm}


# --- the state space of Mamba-2 --------------------------------------------------------------------------------------


def _state_update(own: Step) -> Step:
    def step(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        each = [(dt, 2), (A, 1), (A, 2), *((x, 1) for x in (D, dt_bias) if x is not None)]
        of_heads = all(x.stride(i) == 0 or x.shape[i] == 1 for x, i in each)
        known = of_heads and dt_softplus and state.is_contiguous() and hidden_states.numel() > 0
        if not (known and _serve_scan((A, state), (hidden_states, dt, B, C), (D, dt_bias))):
            return own(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **others)
        skip, bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
        token = hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]
        y = torch.ops.ptq.mamba2_scan.default(*token, skip, bias, state, 0.0, float("inf"))[:, 0]
        y = y.to(hidden_states.dtype)
        return y if z is None else (y * torch.nn.functional.silu(z)).to(y.dtype)

    return step


def _chunk_scan(own: Step) -> Step:
    def step(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        known = dt_softplus and hidden_states.numel() > 0 and others.get("z") is None and not _apart(others)
        singles = (A,) if initial_states is None else (A, initial_states)
        if not (known and _serve_scan(singles, (hidden_states, dt, B, C), (D, dt_bias))):
            named = dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus)
            named |= dict(dt_limit=dt_limit, return_final_states=return_final_states)
            return own(hidden_states, dt, A, B, C, chunk_size, **named, **others)
        if initial_states is None:
            rows, _, heads, d = hidden_states.shape
            state = A.new_zeros(rows, heads, d, B.shape[-1])
        else:
            state = initial_states.clone(memory_format=torch.contiguous_format)
        y = torch.ops.ptq.mamba2_scan.default(hidden_states, dt, A, B, C, D, dt_bias, state, *dt_limit)
        return (y, state) if return_final_states else y

    return step


def _serve_scan(
    singles: tuple[Tensor, ...], of_tokens: tuple[Tensor, ...], of_heads: tuple[Tensor | None, ...]
) -> bool:
    """Whether the op takes these: `singles` must be in float32, those of tokens of one dtype."""
    served = cpu_ops_serve(*singles) and singles[0].dtype == torch.float32 and cpu_ops_serve(*of_tokens)
    return served and all(x is None or cpu_ops_serve(x) for x in of_heads)


def _updates(draw: Draw) -> Cases:
    for groups, skip, z in ((1, draw(4), None), (2, None, draw(2, 4, 6))):
        heads = (draw(4) if skip is None else None, skip)
        bias, skip = (None if x is None else x[:, None].expand(4, 6) for x in heads)
        dt, decay = draw(2, 4)[..., None].expand(2, 4, 6), draw(4).abs().neg()[:, None, None].expand(4, 6, 5)
        given = [draw(2, 4, 6, 5), draw(2, 4, 6), dt, decay, draw(2, groups, 5), draw(2, groups, 5)]
        yield given, dict(D=skip, dt_bias=bias, dt_softplus=True, z=z)


def _chunks(draw: Draw) -> Cases:
    for tokens, groups, skip, limit in ((3, 1, draw(4), (0.0, float("inf"))), (19, 2, None, (0.5, 1.0))):
        for state in (None, draw(2, 4, 6, 5)):
            given = [draw(2, tokens, 4, 6), draw(2, tokens, 4), -draw(4).abs()]
            given += [draw(2, tokens, groups, 5), draw(2, tokens, groups, 5)]
            named = dict(chunk_size=8, D=skip, dt_bias=draw(4), initial_states=state, dt_softplus=True)
            yield given, {**named, "dt_limit": limit, "return_final_states": True}


STEPS: dict[str, tuple[Callable[[Step], Step], Callable[[Draw], Cases]]] = {
    "causal_conv1d_update": (_convolution_step, _convolutions),
    "causal_conv1d_fn": (_convolution, _windows),
    "torch_recurrent_gated_delta_rule": (_delta_step, _deltas),
    "torch_chunk_gated_delta_rule": (_delta_step, _deltas),
    "mamba2_selective_state_update": (_state_update, _updates),
    "mamba2_chunk_scan": (_chunk_scan, _chunks),
}
"""What transformers calls them; what takes their place, and what it is tried on."""
