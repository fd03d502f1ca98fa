"""What an op that holds a decoder layer takes, and a token that goes through it: `ptq.ops.layer_ops` says what all that
is."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

SCHEMA = (
    "Tensor[] gains, float[] eps, float[] offset, int[] round_first, Tensor[] biases, int[] input_bits, float[] clips, "
    "Tensor[] su, Tensor[] factors, int[] counts, int[] orders, Tensor[] sv, Tensor[] back_factors, int[] back_counts, "
    "int[] back_orders, bool gelu, int[] rows, Tensor[] moe, int gated, Tensor[] recurrent, float "
    "recurrent_eps, int norm_groups, Tensor[] latent, int rope_layout, Tensor[] sinks"
)
DECODE_SCHEMA = (
    "(Tensor[] layers, Tensor x, Tensor cos, Tensor sin, Tensor(a!)[] cache, int[] before, int[] cache_bits, "
    "float cache_clip, Tensor[] cache_factors, int cache_order, float[] scaling, float[] residual_multiplier, "
    "Tensor? mask=None) -> Tensor"
)

FIRST_ROLES = {
    "attention": (0, 3, 4, 6, 7),
    "delta net": (0, 2, 3, 5, 6),
    "state space": (0, 1, 2, 4, 5),
    "latent": (0, 2, 3, 5, 6),
    "low rank": (0, 2, 3, 4, 6, 7),
}
"""Of q, k, v, o, gate, up and down, or what a mixer has in the place of the first three, that with which each input
starts."""
INPUTS = MIXER_INPUT, INSIDE_INPUT, O_INPUT, GATE_UP_INPUT, DOWN_INPUT = range(5)
"""The inputs, in the order of `input_bits` and the lists beside it; the second one is there with low rank alone."""
ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, ATTENDED_NORM, MLP_OUTPUT_NORM = range(6)
"""The norms, in the order of `gains`: before attention, before the MLP, of queries, of keys, behind attention, behind
the MLP."""


class HeldLayer(NamedTuple):
    """What the op of a format takes of a layer, but its weights: the arguments of `SCHEMA`, in their order."""

    gains: list[Tensor]
    eps: list[float]
    offset: list[float]
    round_first: list[int]
    biases: list[Tensor]
    input_bits: list[int]
    clips: list[float]
    su: list[Tensor]
    factors: list[Tensor]
    counts: list[int]
    orders: list[int]
    sv: list[Tensor]
    back_factors: list[Tensor]
    back_counts: list[int]
    back_orders: list[int]
    gelu: bool
    rows: list[int]
    moe: list[Tensor]
    gated: int
    recurrent: list[Tensor]
    recurrent_eps: float
    norm_groups: int
    latent: list[Tensor]
    rope_layout: int
    sinks: list[Tensor]

    def mixer(self) -> str:
        """Which of `FIRST_ROLES` it has."""
        if self.latent:
            return "low rank" if self.gains[Q_NORM].numel() else "latent"
        if self.recurrent:
            return "state space" if self.norm_groups else "delta net"
        return "attention"


class Token(NamedTuple):
    """What `ptq::decode_layers` takes of one layer behind its handle: the arguments of `DECODE_SCHEMA`, in their
    order."""

    x: Float[Tensor, "b t k"]
    cos: Tensor
    sin: Tensor
    cache: list[Tensor]
    before: int
    cache_bits: list[int]
    cache_clip: float
    cache_factors: list[Tensor]
    cache_order: int
    scaling: float
    residual_multiplier: float
    mask: Tensor | None = None


Products = Callable[..., list[Tensor]]
"""products(input, biases, first, last, dtype, weights ...): those of weights [first, last) with an input of numbers
(one tensor), or integers and scales; only of these in `dtype`. `biases` are empty, or one for each."""
LayerFunction = Callable[..., Tensor]
"""layer(x, cos, sin, ...): the fields of `Token`."""
