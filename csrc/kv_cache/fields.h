// Codes of sixteen tokens as floats, and the vector helpers of attention. Included once per level.
#pragma once

#include "integer/lanes.h"
#include "kv_cache/kernels.h"

namespace ptq::kv_cache {
namespace {

using integer::bfloat16, integer::fma, integer::Ints, integer::Lanes, integer::lanes, integer::load, integer::nearest,
    integer::SignedInts, integer::store, integer::sum;

inline Lanes splat(float x) {
    return x - Lanes{};
}
inline Ints load_words(const uint32_t* from) {
    Ints x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Lanes load_bfloat16(const uint16_t* from) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return reinterpret_cast<Lanes>(__builtin_convertvector(half, Ints) << 16);
}

// Where the words of a block of tokens lie: word w of the widest plane at low + w * stride, of the second plane (three
// and six bits have one) at high + w * stride.
struct Words {
    const uint32_t *low, *high;
    int64_t stride;
};

template <int BITS>
inline Words words_of(const Side& side, int64_t index, int64_t head, int64_t block) {
    const uint32_t* at = side.codes_of(index, head);
    const int64_t stride = side.channel_major ? chunk : block_tokens;
    at += block * block_tokens * (side.channel_major ? 1 : words(side.d, BITS));
    return {at, at + (side.d * widest_plane(BITS) + 31) / 32 * stride, stride};
}

// Channels first, first + 1, ... of a word of the widest plane. `first` is a multiple of 4.
template <int BITS>
struct Fields {
    static constexpr int plane = widest_plane(BITS), above = BITS - plane, count = 32 / plane;
    Ints low, high;

    // `whole`: the first channel is the first of its word.
    Fields(const Words& at, int64_t first, bool whole = false) {
        low = load_words(at.low + first / count * at.stride);
        if (!whole) low >>= static_cast<uint32_t>(first % count * plane);
        if constexpr (above > 0) {
            constexpr int wide = 32 / above;
            const Ints word = load_words(at.high + first / wide * at.stride);
            high = word >> static_cast<uint32_t>(first % wide * above) << plane;
        }
    }

    inline __attribute__((always_inline)) Lanes get(int i) const {
        constexpr uint32_t mask = (1u << plane) - 1;
        const Ints x = low >> static_cast<uint32_t>(i * plane);
        if constexpr (above > 0) return lowest((x & mask) | (high >> static_cast<uint32_t>(i * above) & ~mask));
        return lowest(x);
    }

  private:
    static inline Lanes as_floats(Ints x) { return __builtin_convertvector(reinterpret_cast<SignedInts>(x), Lanes); }
    static inline Lanes lowest(Ints x) {  // the lowest BITS bits
#if defined(__AVX512F__)
        if constexpr (BITS <= 4) {
            Lanes table;  // one instruction looks sixteen numbers up by the lowest four bits
            for (int i = 0; i < lanes; i++) table[i] = static_cast<float>(i & ((1 << BITS) - 1));
            return __builtin_shuffle(table, reinterpret_cast<SignedInts>(x));
        }
#endif
        return as_floats(x & ((1u << BITS) - 1));
    }
};

// e^x for x <= 0, to about one unit in the last place; 0 for x below -87, NaN for NaN.
inline Lanes exponential(Lanes x) {
    const Lanes in = integer::max(x, splat(-87.0f));
    const Lanes n = (in * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    const Lanes r = fma(n, splat(1.42860677e-6f), fma(n, splat(-0.693148613f), in));
    Lanes y = splat(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, splat(c));
    const SignedInts power = (__builtin_convertvector(n, SignedInts) + 127) << 23;
    const Lanes scaled = y * reinterpret_cast<Lanes>(power);
    return x < splat(-87.0f) ? Lanes{} : x == x ? scaled : x;
}

// The sums of sixteen vectors, each added up in the order of `sum`.
inline void sums(const Lanes* v, float* out) {
    Lanes x[8], y[4], z[2];
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        z[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(y[i], y[i + 2], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    const Lanes total = __builtin_shufflevector(z[0], z[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                        __builtin_shufflevector(z[0], z[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    store(out, __builtin_shufflevector(total, total, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
}

}  // namespace
}  // namespace ptq::kv_cache
