"""The ops of the packed KV cache: schema, fake and reference in PyTorch. Native kernels are in `csrc/kv_cache`.

**Definition.** A token's key (or value) of one head is x[d]. In float32, lo = min(x, 0) * clip and
hi = max(x, 0) * clip; scale = bfloat16(hi / top - lo / top), top = 2^bits - 1, and 1 where all of x is (almost) zero;
minimum = bfloat16(lo); code = round((x - minimum) * (1 / scale)), halves to even, clamped to 0 .. 2^bits - 1. It
stands for minimum + scale * code. A token that is not finite gets scale and minimum NaN, so that it shows.

**Layout**, for the kernels: tokens are lanes. A chunk is 256 tokens of one head, a block 16 of them. Codes are split
into bit planes, the widest first and with the lowest bits: 8 = {8}, 6 = {4, 2}, 4 = {4}, 3 = {2, 1}, 2 = {2}. A plane
of width p has ceil(d p / 32) words of 32 bits for each token; field i of word g, lowest bits first, is channel
g * 32 / p + i.
`codes` is uint8 [chunks, batch, heads, bytes], where the bytes are little-endian words [block, word, lane], or,
`channel_major`, [word, block, lane]: keys are read token by token, values channel by channel. `scales` is bfloat16
[chunks, batch, heads, 2, 256]: every token's scale, then every token's minimum.

At 4 bits and head_dim 64 a token and head takes 36 bytes, 28 % of bfloat16; at head_dim 128 68 bytes, 27 %.
"""

import torch
from jaxtyping import BFloat16, Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from ptq.ops.op_declarations import reference_of

CHUNK, LANES = 256, 16
BLOCKS = CHUNK // LANES
PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,)}
TINY = 1e-30
"""A token whose range is below this has scale 1: its scale could underflow."""


def words(d: int, bits: int) -> int:
    """32-bit words for the codes of one token and head."""
    return sum(-(-d * plane // 32) for plane in PLANES[bits])


def empty_chunks(chunks: int, batch: int, heads: int, d: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of so many chunks, all zero."""
    codes = torch.zeros(chunks, batch, heads, CHUNK * 4 * words(d, bits), dtype=torch.uint8, device=device)
    return codes, torch.zeros(chunks, batch, heads, 2, CHUNK, dtype=torch.bfloat16, device=device)


def quantize(
    x: Float[Tensor, "*n d"], bits: int, clip: float
) -> tuple[UInt8[Tensor, "*n d"], BFloat16[Tensor, "*n"], BFloat16[Tensor, "*n"]]:
    """Codes, scale and minimum of every vector."""
    x = x.float()
    top = 2**bits - 1
    low, high = x.amin(-1).clamp(max=0) * clip, x.amax(-1).clamp(min=0) * clip
    scale = torch.where(high - low < TINY, 1.0, high / top - low / top).bfloat16()
    minimum = low.bfloat16()
    finite = ((x * 0).sum(-1) == 0) & scale.isfinite() & minimum.isfinite()
    code = ((x - minimum.float()[..., None]) * (1 / scale.float())[..., None]).clamp(0, top).round()
    code = torch.where(finite[..., None], code, 0.0).to(torch.uint8)
    nan = torch.full_like(scale, torch.nan)
    return code, torch.where(finite, scale, nan), torch.where(finite, minimum, nan)


def pack(codes: UInt8[Tensor, "chunks b h 256 d"], bits: int, channel_major: bool) -> UInt8[Tensor, "chunks b h bytes"]:
    """The bytes of whole chunks of codes."""
    lead, d = codes.shape[:3], codes.shape[-1]
    planes, below = [], 0
    for plane in PLANES[bits]:
        fields = 32 // plane
        x = (codes.long() >> below) & (2**plane - 1)
        x = torch.nn.functional.pad(x, (0, -d % fields)).view(*lead, BLOCKS, LANES, -1, fields)
        planes.append((x << torch.arange(0, 32, plane, device=x.device)).sum(-1))
        below += plane
    word = torch.cat(planes, -1)  # [chunks, b, h, block, lane, word]
    word = word.permute(0, 1, 2, 5, 3, 4) if channel_major else word.transpose(-1, -2)
    return ((word[..., None] >> torch.arange(0, 32, 8, device=word.device)) & 255).to(torch.uint8).flatten(3)


def unpack(
    packed: UInt8[Tensor, "chunks b h bytes"], d: int, bits: int, channel_major: bool
) -> UInt8[Tensor, "chunks b h 256 d"]:
    """Inverse of `pack`."""
    lead, count = packed.shape[:3], words(d, bits)
    word = packed.reshape(*lead, CHUNK * count, 4).long() << torch.arange(0, 32, 8, device=packed.device)
    word = word.sum(-1)
    if channel_major:
        word = word.view(*lead, count, BLOCKS, LANES).permute(0, 1, 2, 4, 5, 3)
    else:
        word = word.view(*lead, BLOCKS, count, LANES).transpose(-1, -2)
    codes, below, at = torch.zeros(*lead, CHUNK, d, dtype=torch.long, device=packed.device), 0, 0
    for plane in PLANES[bits]:
        size = -(-d * plane // 32)
        x = word[..., at : at + size, None] >> torch.arange(0, 32, plane, device=word.device) & (2**plane - 1)
        codes |= x.reshape(*lead, CHUNK, size * x.shape[-1])[..., :d] << below
        below, at = below + plane, at + size
    return codes.to(torch.uint8)


@reference_of(
    "kv_append",
    "(Tensor(a!) codes, Tensor(b!) scales, Tensor x, int start, int bits, float clip, bool channel_major) -> ()",
    lambda *given: None,
)
def append(
    codes: UInt8[Tensor, "chunks b h bytes"],
    scales: BFloat16[Tensor, "chunks b h 2 256"],
    x: Float[Tensor, "b h t d"],
    start: int,
    bits: int,
    clip: float,
    channel_major: bool,
) -> None:
    """Quantise t tokens and store them as tokens start .. start + t - 1 of their heads, in place."""
    t, d = x.shape[2:]
    if t == 0:
        return
    first, last = start // CHUNK, -(-(start + t) // CHUNK)
    code, scale, minimum = quantize(x, bits, clip)
    whole = unpack(codes[first:last], d, bits, channel_major).permute(1, 2, 0, 3, 4).flatten(2, 3)
    at = slice(start - first * CHUNK, start - first * CHUNK + t)
    whole[:, :, at] = code
    lead = whole.shape[:2]
    codes[first:last] = pack(whole.view(*lead, -1, CHUNK, d).permute(2, 0, 1, 3, 4), bits, channel_major)
    for part, new in enumerate((scale, minimum)):
        stored = scales[first:last, :, :, part].permute(1, 2, 0, 3).reshape(*lead, -1).clone()  # never a view
        stored[:, :, at] = new
        scales[first:last, :, :, part] = stored.view(*lead, -1, CHUNK).permute(2, 0, 1, 3)


@reference_of(
    "kv_append_at",
    "(Tensor(a!) codes, Tensor(b!) scales, Tensor x, Tensor start, int bits, float clip, bool channel_major) -> ()",
    lambda *given: None,
)
def append_at(
    codes: UInt8[Tensor, "chunks b h bytes"],
    scales: BFloat16[Tensor, "chunks b h 2 256"],
    x: Float[Tensor, "b h t d"],
    start: Int64[Tensor, ""],
    bits: int,
    clip: float,
    channel_major: bool,
) -> None:
    """`append` with `start` in a tensor, so that one graph serves every step. The CUDA kernel drops tokens that find no
    room, as it cannot say so."""
    torch.ops.ptq.kv_append(codes, scales, x, int(start), bits, clip, channel_major)


@reference_of(
    "kv_dequantize",
    "(Tensor codes, Tensor scales, int length, int d, int bits, bool channel_major) -> Tensor",
    lambda codes, scales, length, d, *rest: codes.new_empty(*codes.shape[1:3], length, d, dtype=torch.float32),
)
def dequantize(
    codes: UInt8[Tensor, "chunks b h bytes"],
    scales: BFloat16[Tensor, "chunks b h 2 256"],
    length: int,
    d: int,
    bits: int,
    channel_major: bool,
) -> Float32[Tensor, "b h length d"]:
    """What the first `length` stored tokens stand for."""
    code = unpack(codes, d, bits, channel_major).float()
    x = code * scales[..., 0, :, None].float() + scales[..., 1, :, None].float()
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].contiguous()


def place_sinks(
    x: Float[Tensor, "b h length d"], starts: Int64[Tensor, " b"], sinks: Float32[Tensor, "b h s d"]
) -> Float[Tensor, "b h length d"]:
    """x with the sinks in their places: sink j of row i is token starts[i] + j, if there is such a token."""
    x = x.clone()
    for row, start in enumerate(starts.tolist()):
        first, end = max(start, 0), min(start + sinks.shape[2], x.shape[2])
        if first < end:
            x[row, :, first:end] = sinks[row, :, first - start : end - start].to(x.dtype)
    return x


@reference_of(
    "kv_attend",
    "(Tensor q, Tensor k_codes, Tensor k_scales, Tensor v_codes, Tensor v_scales, int length, int k_bits, "
    "int v_bits, float scaling, Tensor? mask, Tensor? starts, Tensor? sink_keys, Tensor? sink_values) -> Tensor",
    lambda q, *rest: q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]),
)
def attend(
    q: Float[Tensor, "b q_heads t d"],
    k_codes: UInt8[Tensor, "chunks b h k_bytes"],
    k_scales: BFloat16[Tensor, "chunks b h 2 256"],
    v_codes: UInt8[Tensor, "chunks b h v_bytes"],
    v_scales: BFloat16[Tensor, "chunks b h 2 256"],
    length: int,
    k_bits: int,
    v_bits: int,
    scaling: float,
    mask: Bool[Tensor, "b_or_1 1 t length"] | None,
    starts: Int64[Tensor, " b"] | None,
    sink_keys: Float32[Tensor, "b h s d"] | None,
    sink_values: Float32[Tensor, "b h s d"] | None,
) -> Float[Tensor, "b t q_heads d"]:
    """Attention of a few query tokens over the packed cache, float32 inside, the result in q's dtype.

    Every query sees all `length` tokens but those where `mask` is False; one that sees none gets zeros. Kernels of the
    CPU multiply integers: they round every query, and its weights times the scales of 256 values, to 16 bits of the
    largest (math.md, section 9).
    """
    if length == 0:
        return torch.zeros_like(q).transpose(1, 2).contiguous()
    d, groups = q.shape[-1], q.shape[1] // k_codes.shape[2]
    k = dequantize(k_codes, k_scales, length, d, k_bits, False)
    v = dequantize(v_codes, v_scales, length, d, v_bits, True)
    if starts is not None and sink_keys is not None and sink_values is not None:
        k, v = place_sinks(k, starts, sink_keys), place_sinks(v, starts, sink_values)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    score = q.float() @ k.transpose(-1, -2) * scaling
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    weight = (score - score.amax(-1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)).exp()
    total = weight.sum(-1, keepdim=True)
    out = (weight @ torch.where(weight.sum((1, 2), keepdim=True).mT == 0, 0.0, v)) / torch.where(total == 0, 1.0, total)
    return out.to(q.dtype).transpose(1, 2).contiguous()
