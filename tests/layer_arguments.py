"""What the ops on a decoder layer take: random weights of every format, and a token."""

from typing import Any

import torch
from torch import Tensor

from fp6 import layer_ops as minifloat_ops
from fp6.minifloat import MinifloatFormat
from ptq.ops import hadamard, kv_ops
from ptq.ops.latent_ops import RopeLayout
from ptq.ops.moe_ops import Choosing, RouterWeights
from ptq.weights import formats
from ptq.weights.rounding import Rounded
from quarot import layer_ops as integer_ops
from quarot.integer import IntegerFormat
from quip_sharp import layer_ops as e8p_ops
from quip_sharp.e8p_format import E8PFormat

HIDDEN, FEATURES, HEADS, KV_HEADS, D = 64, 96, 6, 2, 16
WIDTH, KV_WIDTH = HEADS * D, KV_HEADS * D
KEY_HEADS, DK, KERNEL = 3, 8, 4
"""Of a delta net, whose heads of values are those of queries."""
GROUPS, N = 3, 7
"""Of a state space."""
CHANNELS = WIDTH + 2 * GROUPS * N
LOW, RANK, R = 64, 32, 8
"""Of queries of low rank, of latent vectors, and of what is rotated behind them."""
ROWS = dict(q=WIDTH, k=KV_WIDTH, v=KV_WIDTH, o=HIDDEN, g=FEATURES, u=FEATURES, d=HIDDEN, c=2 * KEY_HEADS * DK + WIDTH,
            z=WIDTH, Q=2 * WIDTH, n=HEADS * (DK + R), l=RANK + R, r=LOW, s=WIDTH + CHANNELS + HEADS)  # fmt: skip
"""By role; c: what goes through the convolution of a delta net, z: its gate, Q: queries that have gates behind them; n:
queries of latent attention, l: latent vectors, r: what makes queries of low rank, s: all of a state space."""
INSIDE = {"rln": LOW}
"""The width of the input of the last role of a mixer, where that is another one."""
SITES = [HIDDEN, WIDTH, HIDDEN, FEATURES]
FORMATS: dict[str, Any] = {
    "integer": (IntegerFormat(4, 0), integer_ops.layer),
    "integer scales": (IntegerFormat(4, 32, scale="integer"), integer_ops.layer),
    "asymmetric": (IntegerFormat(3, 32, symmetric=False), integer_ops.layer),
    "e2m3": (MinifloatFormat("e2m3", 32), minifloat_ops.layer),
    "e3m2": (MinifloatFormat("e3m2"), minifloat_ops.layer),
    "e8p": (E8PFormat(2), e8p_ops.layer),
    "e8p, 3 bits": (E8PFormat(3), e8p_ops.layer),
}
DECODE = torch.ops.ptq.decode_layers.default
TOKEN = [argument.name for argument in DECODE._schema.arguments][1:]
"""What comes with each token."""
OF_EACH = ("before", "scaling", "residual_multiplier")
"""Of these there is one for each layer; the reference of a layer takes that alone."""


def packed(format: formats.Format, w: Tensor) -> formats.Parts:
    codebook = format.codebook
    assert codebook is not None
    scales = codebook.fit(w)
    return format.prepack(format.pack(Rounded(codebook.round(w, scales), scales)), "cpu")


def transforms(sizes: list[int], orders: list[int], signed: bool) -> list[Any]:
    """Signs, factors, counts and orders."""
    signs = [torch.randn(size) for size in sizes] if signed else []
    factors = [hadamard.dense_factors(order, torch.device("cpu"))[0] if order else [] for order in orders]
    return [signs, [each for some in factors for each in some], [len(some) for some in factors], orders]


def arguments(
    dtype: torch.dtype,
    format: str = "integer",
    bits: int = 8,
    norms: str = "am",
    cache: str = "plain",
    orders: tuple[int, ...] = (0, 0, 0, 32),
    back: bool = False,
    signed: bool = False,
    biases: str = "o",
    gelu: bool = False,
    batch: int = 2,
    multiplier: float = 1.0,
    mlp: bool = True,
    fused: str = "",
    rotary_dim: int = D,
    hidden: int = 0,
    tokens: int = 1,
    moe: bool = False,
    mixer: str = "qkv",
    rope_layout: int = 0,
    sinks: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The op, and by name its arguments and those of a token, with seven tokens before.

    `norms`: before attention and MLP, of queries and keys (by heads or whole), behind both; `biases`: the first letters
    of the linears that have one; `mlp`: whether there is one; `fused`: the first letters of linears that are one with
    those of the same input; `rotary_dim`: of each head; `hidden`: tokens that a mask hides, fewer in later rows;
    `tokens`: of each row; `moe`: whether there are experts in the place of an MLP; `mixer`: the roles of its first
    input, and of one inside; `rope_layout`: of latent attention; `sinks`: whether heads have them;
    `cache`: plain, or packed, with `sinks`, with `centred` keys, or with both.
    """
    torch.manual_seed(0)
    draw, before, sites, roles = torch.randn, 7, *((SITES, f"{mixer}ogud") if mlp else (SITES[:2], f"{mixer}o"))
    is_latent, groups = "l" in mixer, (mixer, "o", "gu", "d")
    if mixer in INSIDE:
        groups, sites = (mixer[:-1], mixer[-1], *groups[1:]), [HIDDEN, INSIDE[mixer], *sites[1:]]
        orders = orders[:1] + orders
    linears = [linear for site, k in zip(groups, sites, strict=False)
               for linear in [(site, k)] * (site[0] in fused) or [(role, k) for role in site]]  # fmt: skip
    shapes = [(sum(ROWS[role] for role in name), k) for name, k in linears]
    parts = [packed(FORMATS[format][0], draw(n, k) / k**0.5) for n, k in shapes]
    found = FORMATS[format][0].layer_op(parts)
    assert found is not None
    of_heads = (LOW, RANK) if is_latent else (D, KV_WIDTH)
    sizes = {"a": HIDDEN, "m": HIDDEN, "q": of_heads[0], "k": of_heads[1], "A": HIDDEN, "M": HIDDEN}
    gains = [torch.rand(size, dtype=dtype) + 0.5 if name in norms else torch.empty(0) for name, size in sizes.items()]
    offset = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    given = [draw(n, dtype=dtype) if name[0] in biases else torch.empty(0)
             for (name, _), (n, _) in zip(linears, shapes, strict=True)] if biases else []  # fmt: skip
    held: list[Tensor] = []
    states = draw(2, batch, KV_HEADS, before, D)
    if mixer == "cz":
        held.extend((draw(batch, ROWS["c"], KERNEL, dtype=dtype), draw(batch, HEADS, DK, D)))
    elif mixer == "s":
        held.extend((draw(batch, CHANNELS, KERNEL, dtype=dtype), draw(batch, HEADS, D, N)))
    elif is_latent:
        held.extend(draw(batch, 1, 12, size, dtype=dtype) for size in (RANK, R))
        rotary_dim = R
    elif cache == "plain":
        room = torch.zeros(2, batch, KV_HEADS, 12, D, dtype=dtype)
        room[:, :, :, :before] = states
        held.extend(room)
    else:
        for state, channel_major in zip(states, (False, True), strict=True):
            codes, scales = kv_ops.empty_chunks(1, batch, KV_HEADS, D, 4, state.device)
            kv_ops.append(codes, scales, state, 0, 4, 0.95, channel_major)
            held.extend((codes, scales))
    if cache in ("sinks", "both"):
        held.extend((torch.tensor([0, 2, 0][:batch]), draw(batch, KV_HEADS, 3, D), draw(batch, KV_HEADS, 3, D)))
    if cache in ("centred", "both"):
        held.append(draw(KV_HEADS, D, dtype=dtype))
    sides, count = [n for n, _ in shapes], len(sites)
    inputs = [[bits] * count, [0.9, 0.8, 0.7, 0.9, 0.8][:count], *transforms(sites, list(orders[:count]), signed)]
    outputs = transforms(sides, [n if back else 0 for n in sides], signed and back)
    table = (
        dict(size=(1, tokens, R // 2))
        if rope_layout == RopeLayout.COMPLEX
        else dict(size=(1, tokens, rotary_dim), dtype=dtype)
    )
    cos_sin = [draw(**table) for _ in range(2)]
    r3 = hadamard.dense_factors(D, torch.device("cpu"))
    x = draw(batch, tokens, HIDDEN, dtype=dtype)
    seen = torch.arange(before + tokens) >= hidden - torch.arange(batch)[:, None]
    causal = torch.ones(tokens, before + tokens, dtype=torch.bool).tril(before)
    mask = seen[:, None, None] & causal if hidden else None
    norm = [gains, [1e-5] * 6, offset, [1, 0, 1, 0, 1, 0]]
    held_moe = [experts(dtype)] if moe else []
    net = [draw(ROWS["c"], 1, KERNEL), draw(ROWS["c"]), *draw(2, HEADS, HIDDEN), *draw(2, HEADS), draw(D)]
    space = [draw(CHANNELS, 1, KERNEL), draw(CHANNELS), *draw(3, HEADS), draw(WIDTH)]
    net = [x.to(dtype) for x in {"cz": net, "s": space}.get(mixer, [])]
    recurrent = net, 1e-5, GROUPS if mixer == "s" else 0
    latent = [draw(HEADS, RANK, DK, dtype=dtype), draw(HEADS, D, RANK, dtype=dtype) / RANK**0.5] if is_latent else []
    special = D if mixer[0] == "Q" else 0, *recurrent, latent, rope_layout, [draw(HEADS, dtype=dtype)] * sinks
    fixed = [*norm, given, *inputs, *outputs, gelu, [ROWS[role] for role in roles], held_moe, *special, *found[1]]
    token = dict(
        zip(TOKEN, [x, *cos_sin, held, before, [4, 4], [0.95, 0.9], *r3, D**-0.5, multiplier, mask], strict=True)
    )
    names = (argument.name for argument in found[0]._schema.arguments)
    return found[0], token | dict(zip(names, fixed, strict=True))


def experts(dtype: torch.dtype) -> Tensor:
    """A router, two experts of which a token chooses one, and one that all choose."""
    parts = [packed(IntegerFormat(4, 0), torch.randn(n, k) / k**0.5)
             for n, k in [(32, HIDDEN)] * 6 + [(HIDDEN, 32)] * 3]  # fmt: skip
    weights = [[part[name] for part in parts] for name in ("tiles", "scale")]
    steps = 32, 4, 0, 8, 1.0, [], 0, 8, 1.0, [], []
    held, router = torch.ops.ptq.integer_all_experts(*weights, [], *steps), torch.randn(2, HIDDEN, dtype=dtype)
    return torch.ops.ptq.moe([held], *RouterWeights(router, shared_gate=router[:1]), *Choosing(1, normed=0.0))


def of_layer(given: dict[str, Any]) -> list[Any]:
    return [value for name, value in given.items() if name not in TOKEN]


def of_token(given: dict[str, Any]) -> list[Any]:
    return [given[name] for name in TOKEN]


def of_one(held: Tensor, given: dict[str, Any]) -> list[Any]:
    """The arguments of `DECODE` for one layer."""
    return [[held], *([given[name]] if name in OF_EACH else given[name] for name in TOKEN)]


def decoded(op: Any, given: dict[str, Any]) -> Tensor:
    return DECODE(*of_one(op(*of_layer(given)), given))
