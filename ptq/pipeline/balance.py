"""Balance: a scale per channel that two linears share, so that no channel between them is far larger than the others.

- Where a linear reads another one's output channel by channel, rows of the first times s and columns of the second over
  s compute the same (`Balance`). A rotation between them then mixes channels of like size; it would spread one of 64
  times the size over all the others.
- A product of queries and keys is a sum over channels, and RoPE turns pairs of them, or of some of them: rows of the
  query times s and of the key over s, s the same for the two of a pair, compute the same (`KeyBalance`). Keys are then
  easier to cache.

SmoothQuant (Xiao et al. 2022, equation 4) with strength 1/2, on weights alone, and in powers of two: these are exact in
every dtype, and channels of usual size are left as they are, to the bit.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ptq.models.model_shape import ModelShape
from ptq.pipeline.rewrite import PIECE
from ptq.planning.plan import Balance, KeyBalance, LinearPlan


def scale_of(
    balance: Balance | KeyBalance,
    read: Callable[[str], Tensor | None],
    norm_offset: float = 0.0,
    bias_left: Float64[Tensor, " head_dim"] | None = None,
) -> Float64[Tensor, "*c"]:
    """The scale of a balance; `read` gives a tensor of the source by name, None for one that it lacks. Norms add
    `norm_offset` to their stored gain. `bias_left`: the share of a squared bias of keys that their centre leaves; None:
    there is no centre."""

    def tensor(name: str) -> Tensor:
        found = read(name)
        assert found is not None, name
        return found

    if isinstance(balance, Balance):
        reader = tensor(balance.reader)
        return scale(tensor(balance.producer)[balance.first : balance.first + reader.shape[1]], reader)
    gain, shape = tensor(balance.norm).double() + norm_offset, balance.shape
    found = []
    for name, heads, first, left in (
        (balance.query, shape.heads, 0, None),
        (balance.key, shape.kv_heads, balance.first, bias_left),
    ):
        rows, bias = slice(first, first + heads * shape.head_dim), read(f"{name}.bias")
        bias = None if bias is None else bias[rows].double()
        if bias is not None and left is not None:
            bias = bias * left.sqrt().to(bias.device).repeat(heads)
        found.append(mean_squares(tensor(f"{name}.weight")[rows], gain, bias))
    return key_scale(found[0], found[1], partners(shape, balance.interleaved))


def factor(linear: LinearPlan, scale: Float64[Tensor, "*c"]) -> Float64[Tensor, " n"]:
    """What the rows of a linear, or its columns, are multiplied with."""
    if isinstance(linear.balance, KeyBalance):
        if linear.role == "key":
            return 1 / scale.flatten()
        return scale.repeat_interleave(linear.n // scale.numel(), 0).flatten()  # heads that read one key-value head
    return 1 / scale if linear.balanced_columns else scale


def mean_squares(
    w: Float[Tensor, "n k"], gain: Float[Tensor, " k"], bias: Float[Tensor, " n"] | None
) -> Float64[Tensor, " n"]:
    """The mean square of every output W (g x) + b for inputs x of variance 1: |W diag(g)|^2 + b^2 by rows.

    The bias of a LayerNorm, a part of the input that is the same for every token, is left out.
    """
    squares = torch.cat([(piece.float() * gain.float()).square().sum(1) for piece in w.split(PIECE)]).double()
    return squares if bias is None else squares + bias.double().square()


def partners(shape: ModelShape, interleaved: bool) -> Int64[Tensor, " head_dim"]:
    """For every channel of a head the one that RoPE turns it with: itself, where it turns neither."""
    channels = torch.arange(shape.head_dim)
    turned = channels[: shape.rotary]
    channels[: shape.rotary] = turned ^ 1 if interleaved else turned.roll(shape.rotary // 2)
    return channels


def key_scale(
    query: Float64[Tensor, " q"], key: Float64[Tensor, " n"], partner: Int64[Tensor, " head_dim"]
) -> Float64[Tensor, "kv_heads head_dim"]:
    """The scale s of every channel of every key-value head, from the mean squares of queries and keys: the power of two
    nearest to sqrt(|key| / |query|), both of the pair with its partner, relative to the median channel of the head. 1
    for a pair that is zero on one side.

    Rounding keys to one grid per head adds the same error e to each channel of k / s, hence (s |q|)^2 e to the square
    of the product; e grows with the sum of (|k| / s)^2. The product of both sums is least for this s (Cauchy-Schwarz).
    """
    size = key.view(-1, len(partner))
    reader = query.view(len(size), -1, len(partner)).sum(1)
    size, reader = (x + x[:, partner] for x in (size, reader))  # twice itself on both sides where it has none
    alive = (size > 0) & (reader > 0)
    ratio = torch.where(alive, size / reader.where(alive, 1.0), 1.0).log2() / 4
    ratio = torch.where(alive, ratio, float("nan"))
    relative = (ratio - ratio.nanmedian(1, keepdim=True).values).round()
    return torch.where(alive, relative, 0.0).exp2()


def scale(producer: Float[Tensor, "c k"], reader: Float[Tensor, "n c"]) -> Float64[Tensor, " c"]:
    """The scale s of every channel c: the power of two nearest to sqrt(|reader[:, c]| / |producer[c]|), relative to
    the median channel's. 1 for a channel that is zero on one side."""
    into = torch.cat([piece.float().square().sum(1) for piece in producer.split(PIECE)]).double().sqrt()
    out = torch.stack([piece.float().square().sum(0) for piece in reader.split(PIECE)]).double().sum(0).sqrt()
    alive = (into > 0) & (out > 0)
    result = torch.ones_like(into)
    if bool(alive.any()):
        ratio = (out[alive] / into[alive]).log2() / 2
        result[alive] = (ratio - ratio.median()).round().exp2()
    return result
