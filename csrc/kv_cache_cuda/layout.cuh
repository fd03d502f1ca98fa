// The packed KV cache in memory (ptq/ops/kv_ops.py), and its codes as bfloat16 operands of the tensor cores. No torch
// here.
//
// A code's bits are in a wide plane (the lowest ones) and, with 3 and 6 bits, a narrow one above it. A word of the wide
// plane has 32 / width channels of one token; its channels in the narrow plane are one half of a word there.
#pragma once

#include "cuda/numbers.cuh"

namespace ptq::kv_cache_cuda {

using namespace ptq::cuda;

constexpr int chunk = 256, block_tokens = 16, chunk_blocks = chunk / block_tokens;

PTQ_BOTH constexpr int wide_plane(int bits) {
    return bits == 3 ? 2 : bits == 6 ? 4 : bits;
}
PTQ_BOTH constexpr int plane_words(int d, int width) {
    return (d * width + 31) / 32;
}
PTQ_BOTH constexpr int words_of(int d, int bits) {
    return plane_words(d, wide_plane(bits)) + plane_words(d, bits - wide_plane(bits));
}

// One side, keys or values. `heads` counts over the batch.
struct Side {
    uint32_t* codes;   // [chunks, heads, block, word, lane], or [chunks, heads, word, block, lane]
    uint16_t* scales;  // [chunks, heads, 2, chunk]: bits of bfloat16
    int heads, d, bits;
    bool channel_major;

    // There are fewer than 2^31 chunks of heads: each takes a KiB and more.
    PTQ_DEVICE uint32_t* codes_of(int index, int head) const {
        return codes + static_cast<int64_t>(index * heads + head) * (chunk * words_of(d, bits));
    }
    PTQ_DEVICE uint16_t* scales_of(int index, int head) const {
        return scales + static_cast<int64_t>(index * heads + head) * (2 * chunk);
    }
    // Word `word` of token `token` of the chunk, in words behind codes_of.
    PTQ_DEVICE int at(int word, int token) const {
        const int block = token / block_tokens;
        return (channel_major ? word * chunk_blocks + block : block * words_of(d, bits) + word) * block_tokens +
               token % block_tokens;
    }
};

// Pairs of codes, one in each half of a register, as bfloat16 numbers. `wide` has its field at bit 0 of either half,
// `narrow` likewise.
PTQ_DEVICE uint32_t code_numbers(uint32_t wide, uint32_t narrow, int bits) {
    constexpr uint32_t one = 0x3f803f80u, minus_128 = 0xc300c300u, base = 0x43004300u;  // 128 and its fraction
    if (bits == 8) {  // the eighth bit does not fit behind 128: it is a number of its own
        const uint32_t low = fma2<Bfloat16>(and_or(wide, 0x007f007fu, base), one, minus_128);
        return fma2<Bfloat16>((wide & 0x00800080u) * 0x86u, one, low);  // 0x80 * 0x86 is 0x4300
    }
    const int width = wide_plane(bits);
    const uint32_t mask = ((1u << width) - 1) * 0x00010001u;
    uint32_t codes = and_or(wide, mask, base);
    if (width < bits) codes |= (narrow & ((1u << (bits - width)) - 1) * 0x00010001u) << width;
    return fma2<Bfloat16>(codes, one, minus_128);
}

// The same and raised_by(bits) more, which takes an instruction less: a code's first bit is the number's last but one.
PTQ_BOTH constexpr float raised_by(int bits) {
    return bits == 8 ? 0.0f : static_cast<float>(1 << bits);
}
// Fields are at bits `shift` and `narrow_shift` of either half.
PTQ_DEVICE uint32_t raised_numbers(uint32_t wide, int shift, uint32_t narrow, int narrow_shift, int bits) {
    if (bits == 8) return code_numbers(wide >> shift, narrow, bits);
    const int width = wide_plane(bits), left = 7 - bits;  // of a fraction of seven bits
    const uint32_t base = (0x4300u - 0x80u * left) * 0x00010001u, mask = (((1u << width) - 1) << left) * 0x00010001u;
    const auto move = [](uint32_t x, int by) { return by < 0 ? x << -by : x >> by; };
    const uint32_t numbers = and_or(move(wide, shift - left), mask, base);
    if (width == bits) return numbers;
    const uint32_t narrow_mask = (((1u << (bits - width)) - 1) << (left + width)) * 0x00010001u;
    return and_or(move(narrow, narrow_shift - left - width), narrow_mask, numbers);
}

// x as a sum of bfloat16 numbers: one if it is bfloat16, two for float16, three for float32.
PTQ_DEVICE uint16_t take_part(float& x) {
    const Bfloat16 part = narrow<Bfloat16>(x);
    x -= widen(part);
    return part.bits;
}

}  // namespace ptq::kv_cache_cuda
