"""What an op that holds a decoder layer takes, and a token that goes through it (`ptq.ops.layer_ops`)."""

from collections.abc import Callable
from typing import NamedTuple, get_type_hints

from jaxtyping import Float
from torch import Tensor

DECODE_SCHEMA = (
    "(Tensor[] layers, Tensor x, Tensor cos, Tensor sin, Tensor(a!)[] cache, int[] before, int[] cache_bits, "
    "float[] cache_clips, Tensor[] cache_factors, int cache_order, float[] scaling, float[] residual_multiplier, "
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
    """What the op of a format takes of a layer, but its weights: the arguments of `SCHEMA`, in their order.

    The seven weights are those of q, k, v, o, gate, up and down; of a state space there is one before o, of a delta net
    there are two, and of latent attention, too, or three with low rank: the third makes queries of what the norm of
    queries gives. q, k and v may be one weight, whose rows are theirs in turn, and so may gate and up; lists of weights
    are then shorter.

    Inputs are four: that of q, k and v; of o; of gate and up; of down; with low rank, its own is the second of five.
    Each goes through a Hadamard transform behind the signs `su`, and is quantised. The product of each weight is
    transformed back, with the signs `sv` behind.
    """

    gains: list[Tensor]
    """Of the norms before attention, before the MLP, of queries, of keys, behind attention, behind the MLP; of latent
    attention those of queries are of low rank. A gain of no elements is no norm."""
    eps: list[float]
    offset: list[float]
    round_first: list[int]
    """Of these norms, as of `ptq::rms_norm`."""
    biases: list[Tensor]
    """None, or one for each weight; of no elements: none."""
    input_bits: list[int]
    """Of each input; 0: it is not quantised."""
    clips: list[float]
    su: list[Tensor]
    """None, or one for each input."""
    factors: list[Tensor]
    """The dense factors of the transforms of all inputs."""
    counts: list[int]
    """How many of them each has."""
    orders: list[int]
    """0: no transform."""
    sv: list[Tensor]
    """None, or one for each weight."""
    back_factors: list[Tensor]
    back_counts: list[int]
    back_orders: list[int]
    """Of the products, likewise."""
    gelu: bool
    """Whether the MLP has it in the place of silu."""
    rows: list[int]
    """Of the seven weights, in any case. Where they end with that of o, and inputs are two, `moe` comes behind."""
    moe: list[Tensor]
    """None: the op ends in front of the MLP, should `rows` do; or what stands for a router and experts in the place of
    that (`ptq.ops.moe_ops`)."""
    gated: int
    """0, or the size of a head of queries, whose rows those of a gate follow: what is attended is multiplied with the
    gate's sigmoid."""
    recurrent: list[Tensor]
    """None, or what a delta net has besides: conv, conv_bias (of no elements: none), a, b, a_log, dt_bias, gain; or
    what a state space has: conv, conv_bias, a_log, D, dt_bias, gain."""
    recurrent_eps: float
    norm_groups: int
    """Of a state space; of a delta net 0."""
    latent: list[Tensor]
    """None, or the two matrices of latent attention."""
    rope_layout: int
    """Of `RopeLayout` in `ptq.ops.latent_ops`."""
    sinks: list[Tensor]
    """None, or those of the heads of attention over a plain cache, as one tensor."""

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
    """Keys and values [b, h, room, d], or codes and scales of keys and values (`ptq.ops.kv_ops`), or these, and
    `starts`, sink keys and sink values, and, or, the centres of keys, all of which are only read; of latent attention
    latents and rope_keys; of a recurrent mixer its states."""
    before: int
    """Tokens in front."""
    cache_bits: list[int]
    cache_clips: list[float]
    cache_factors: list[Tensor]
    cache_order: int
    scaling: float
    residual_multiplier: float
    mask: Tensor | None = None
    """What each token sees; it hides padding, say (`ptq.ops.steps`). With a packed cache, several tokens need one."""


KINDS = {list[Tensor]: "Tensor[]", list[float]: "float[]", list[int]: "int[]", bool: "bool", int: "int", float: "float"}
"""What torch's schemas call types."""
SCHEMA = ", ".join(f"{KINDS[kind]} {name}" for name, kind in get_type_hints(HeldLayer).items())

Products = Callable[..., list[Tensor]]
"""products(input, biases, first, last, dtype, weights ...): those of weights [first, last) with an input of numbers
(one tensor), or integers and scales; only of these in `dtype`. `biases` are empty, or one for each."""
LayerFunction = Callable[..., Tensor]
"""layer(x, cos, sin, ...): the fields of `Token`."""
