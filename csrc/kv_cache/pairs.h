// Attention over codes multiplies integers: what they are multiplied with is rounded to 16 bits, and sums are exact.
// A product takes two numbers of each of sixteen tokens at once. Included once per level.
#pragma once

#include "kv_cache/fields.h"

namespace ptq::kv_cache {
namespace {

// sum + a0 * b0 + a1 * b1, of the lower and the upper 16 bits of each, with their signs.
PTQ_INLINE SignedInts dot(const SignedInts& sum, const Dwords& a, const Dwords& b) {
#if defined(__AVX512VNNI__)
    return (SignedInts)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (SignedInts)by_register(
                     [](auto x, auto y) {
#if defined(__AVX512F__)
                         return (decltype(x))_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
                         return (decltype(x))_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
                         return (decltype(x))_mm_madd_epi16((__m128i)x, (__m128i)y);
#elif defined(__aarch64__)
                         const auto s = (int16x8_t)x, t = (int16x8_t)y;
                         return (decltype(x))vpaddq_s32(vmull_s16(vget_low_s16(s), vget_low_s16(t)),
                                                        vmull_high_s16(s, t));
#else
                         const auto lower = [](auto v) { return (Numbers<int32_t, sizeof v>)(v << 16) >> 16; };
                         const auto upper = [](auto v) { return (Numbers<int32_t, sizeof v>)v >> 16; };
                         return (decltype(x))(lower(x) * lower(y) + upper(x) * upper(y));
#endif
                     },
                     a, b);
#endif
}

// Numbers as integers times a factor. The largest integer is that of 16 bits, or, where that would be too much, as
// large as lets `terms` of them times codes of so many bits fit into 32 bits.
struct Integers {
    float factor, inverse;
    Integers(float largest, int bits, int64_t terms) {
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        const auto top = static_cast<float>(std::min(int64_t{32767}, most / (((1 << bits) - 1) * terms)));
        const bool is_zero = largest < 1e-30f;
        factor = is_zero ? 0.0f : largest / top, inverse = is_zero ? 0.0f : top / largest;
    }
    // To the nearest, halves to even, in the lowest 16 bits: all 32 are `zero` plus the integer.
    Dwords of(const Lanes& x) const { return (Dwords)(x * inverse + 12582912.0f); }
    static constexpr uint32_t zero = 0x4b400000;  // the bits of 12582912.0f
};

// The first number in the lower 16 bits, the second above.
PTQ_INLINE Dwords paired(const Dwords& first, const Dwords& second) {
    return (first & 0xffffu) | second << 16;
}

// Pairs of codes, as many as 16 bits of the widest plane have.
template <int BITS>
struct Pairs : Planes<BITS> {
    using Planes<BITS>::plane, Planes<BITS>::above, Planes<BITS>::count, Planes<BITS>::half, Planes<BITS>::wide;
    Dwords low, high;

    // get(i): channels i and i + half of a word, of the tokens of one block.
    PTQ_INLINE static Pairs of_channels(const Words& at, int64_t word) {
        Pairs to;
        to.low = load_words(at.low + word * at.stride);
        if constexpr (above > 0) {
            const int64_t first = word * count;
            const Dwords x =
                load_words(at.high + first / wide * at.stride) >> static_cast<uint32_t>(first % wide * above);
            to.high = ((x & 0xffu) | (x & 0xff00u) << 8) << plane;
        }
        return to;
    }

    // get(i): channel first + i, of the tokens of one block and of the next. All of them are in one half of a word.
    PTQ_INLINE static Pairs of_tokens(const Words& at, int64_t first) {
        const auto shifted = [](const uint32_t* from, int64_t bits) {
            return load_words(from) >> static_cast<uint32_t>(bits);
        };
        Pairs to;
        const uint32_t* from = at.low + first / count * at.stride;
        const int64_t bits = first % count * plane;
        to.low = paired(shifted(from, bits), shifted(from + block_tokens, bits));
        if constexpr (above > 0) {
            const uint32_t* over = at.high + first / wide * at.stride;
            const int64_t more = first % wide * above;
            to.high = paired(shifted(over, more) & 0xffu, shifted(over + block_tokens, more) & 0xffu) << plane;
        }
        return to;
    }

    PTQ_INLINE Dwords get(int i) const {
        constexpr uint32_t both = 0x10001;
        const Dwords x = low >> static_cast<uint32_t>(i * plane) & both * ((1u << plane) - 1);
        if constexpr (above == 0)
            return x;
        else
            return x | (high >> static_cast<uint32_t>(i * above) & both * (((1u << above) - 1) << plane));
    }
};

}  // namespace
}  // namespace ptq::kv_cache
