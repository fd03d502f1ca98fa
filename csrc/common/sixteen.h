// Sixteen numbers of 32 bits, and how they come from memory and go there.
// Included once per level, into an anonymous namespace.
#pragma once

#include <cmath>

#include "common/halves.h"

namespace ptq {
namespace {

using Lanes = Numbers<float, 64>;
using SignedInts = Numbers<int32_t, 64>;
using Dwords = Numbers<uint32_t, 64>;

#if defined(__AVX2__)
// The first and the last eight, and both together.
PTQ_INLINE __m256i first_eight(const Dwords& x) {
#if defined(__AVX512F__)
    return _mm512_maskz_extracti64x4_epi64(0xff, (__m512i)x, 0);
#else
    return (__m256i)x.low;
#endif
}
PTQ_INLINE __m256i last_eight(const Dwords& x) {
#if defined(__AVX512F__)
    return _mm512_maskz_extracti64x4_epi64(0xff, (__m512i)x, 1);
#else
    return (__m256i)x.high;
#endif
}
PTQ_INLINE Dwords joined(__m256i first, __m256i last) {
#if defined(__AVX512F__)
    const __m512i wide = __builtin_shufflevector(first, first, 0, 1, 2, 3, -1, -1, -1, -1);
    return (Dwords)_mm512_maskz_inserti64x4(0xff, wide, last, 1);
#else
    return {(Dwords::Half)first, (Dwords::Half)last};
#endif
}
#endif

constexpr int64_t lanes = 16;

PTQ_INLINE Lanes fill(float x) {
    return x - Lanes{};
}
PTQ_INLINE Lanes min(const Lanes& a, const Lanes& b) {
    return chosen(a < b, a, b);
}
PTQ_INLINE Lanes max(const Lanes& a, const Lanes& b) {
    return chosen(a > b, a, b);
}

// a * b + c, rounded once.
PTQ_INLINE Lanes fma(const Lanes& a, const Lanes& b, Lanes c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
#else
    for (int i = 0; i < lanes; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// Sixteen floats in memory, or the first ones: zeros follow them.
PTQ_INLINE Lanes load(const float* from) {
    return load_vector<Lanes>(from);
}
PTQ_INLINE Lanes load(const float* from, int64_t count) {
    if (count >= lanes) return load(from);
    float x[lanes] = {};
    std::memcpy(x, from, count * sizeof(float));
    return load(x);
}
PTQ_INLINE void store(float* to, const Lanes& x) {
    store_vector(to, x);
}
PTQ_INLINE void store(float* to, const Lanes& x, int64_t count) {
    if (count >= lanes) return store(to, x);
    float all[lanes];
    store(all, x);
    std::memcpy(to, all, count * sizeof(float));
}

// Sixteen numbers of 16 or 8 bits in memory, and the first of them, followed by zeros.
template <class T>
PTQ_INLINE Dwords widened(const T* from) {
    if constexpr (sizeof(T) == 2) {
#if defined(__AVX512F__)
        return (Dwords)_mm512_maskz_cvtepu16_epi32(0xffff, load_vector<__m256i>(from));
#elif defined(__AVX2__)
        const auto eight = [](const T* at) { return _mm256_cvtepu16_epi32(load_vector<__m128i>(at)); };
        return joined(eight(from), eight(from + 8));
#endif
    } else {
#if defined(__AVX512F__)
        return (Dwords)_mm512_maskz_cvtepu8_epi32(0xffff, load_vector<__m128i>(from));
#elif defined(__AVX2__)
        const __m128i bytes = load_vector<__m128i>(from);
        return joined(_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
#endif
    }
#if !defined(__AVX2__)
    uint32_t x[16];
    for (int i = 0; i < 16; i++) x[i] = from[i];
    return load_vector<Dwords>(x);
#endif
}
template <class T>
PTQ_INLINE Dwords widened(const T* from, int64_t count) {
    if (count >= 16) return widened(from);
    T x[16] = {};
    std::memcpy(x, from, count * sizeof(T));
    return widened(x);
}

// The same of bfloat16 numbers.
PTQ_INLINE Lanes load(const uint16_t* from) {
    return (Lanes)(widened(from) << 16);
}
PTQ_INLINE Lanes load(const uint16_t* from, int64_t count) {
    return (Lanes)(widened(from, count) << 16);
}
// To the nearest, halves to even; NaN is the positive quiet one.
PTQ_INLINE Dwords bfloat16_bits(const Lanes& x) {
    const Dwords bits = (Dwords)x, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return chosen(x == x, nearest, Dwords{} + 0x7fc0u);
}

// The lowest 16 bits of each, to memory; or of the first ones.
PTQ_INLINE void store_words(uint16_t* to, Dwords x) {
#if defined(__AVX512F__)
    store_vector(to, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x));
#elif defined(__AVX2__)
    const Dwords words = x & 0xffffu;
    const __m256i packed = _mm256_packus_epi32(first_eight(words), last_eight(words));
    store_vector(to, _mm256_permute4x64_epi64(packed, 0xd8));
#else
    for (int i = 0; i < 16; i++) to[i] = static_cast<uint16_t>(x[i]);
#endif
}
PTQ_INLINE void store_words(uint16_t* to, Dwords x, int64_t count) {
    if (count >= 16) return store_words(to, x);
    uint16_t words[16];
    store_words(words, x);
    std::memcpy(to, words, count * sizeof *to);
}

// The lowest 8 bits of the first `count`, to memory.
PTQ_INLINE void store_bytes(uint8_t* to, Dwords x, int64_t count) {
    uint8_t bytes[16];
#if defined(__AVX512F__)
    store_vector(bytes, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x));
#elif defined(__AVX2__)
    const Dwords low = x & 0xffu;
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first_eight(low), last_eight(low)), 0xd8);
    store_vector(bytes, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(x[i]);
#endif
    if (count >= 16)
        std::memcpy(to, bytes, sizeof bytes);
    else
        std::memcpy(to, bytes, count);
}

}  // namespace
}  // namespace ptq
