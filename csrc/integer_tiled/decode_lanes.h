// What the kernels for few tokens have in common, whatever the codes stand for: sixteen rows lie in the sixteen lanes
// of a vector. Included once per level, into an anonymous namespace.
#pragma once

#include "integer/lanes.h"
#include "integer_tiled/kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

using integer::fill;
using integer::fma;
using integer::Lanes;
using integer::SignedInts;

constexpr int64_t ahead = 8192;           // bytes that are fetched before they are needed: measured on Zen 5
constexpr int64_t segment_blocks = 2048;  // 65536 columns: 255 * 128 * 65536 is below 2^31

// Past the second-level cache: weights are read once, and what runs between products keeps its place there.
inline void fetch(const uint8_t* block, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(block + ahead + i, 0, 0);
}

inline int32_t load_int(const int8_t* from) {
    int32_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// acc + the products of four codes of each row with four activations. `wide`: codes may have eight bits.
template <bool wide>
inline SignedInts dot(SignedInts acc, Dwords codes, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (SignedInts)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(activations));
#elif defined(__AVX512BW__)
    const __m512i q = _mm512_set1_epi32(activations), c = (__m512i)codes, ones = _mm512_set1_epi16(1);
    if constexpr (!wide) {  // 2 * 127 * 128 fits into the int16 sums
        return acc + (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(c, q), ones);
    } else {
        const __m512i mask = _mm512_set1_epi8(15), high = _mm512_and_si512(_mm512_srli_epi16(c, 4), mask);
        const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(c, mask), q);
        return acc + (SignedInts)_mm512_madd_epi16(low, ones) +
               (SignedInts)_mm512_madd_epi16(_mm512_maddubs_epi16(high, q), _mm512_set1_epi16(16));
    }
#elif defined(__AVX2__)
    const __m256i q = _mm256_set1_epi32(activations), ones = _mm256_set1_epi16(1);
    __m256i c[2], sum[2];
    std::memcpy(c, &codes, sizeof c);
    for (int h = 0; h < 2; h++) {
        if constexpr (!wide) {
            sum[h] = _mm256_madd_epi16(_mm256_maddubs_epi16(c[h], q), ones);
        } else {
            const __m256i mask = _mm256_set1_epi8(15), high = _mm256_and_si256(_mm256_srli_epi16(c[h], 4), mask);
            const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(c[h], mask), q);
            sum[h] = _mm256_add_epi32(_mm256_madd_epi16(low, ones),
                                      _mm256_madd_epi16(_mm256_maddubs_epi16(high, q), _mm256_set1_epi16(16)));
        }
    }
    SignedInts total;
    std::memcpy(&total, sum, sizeof total);
    return acc + total;
#else
    for (int j = 0; j < 4; j++) {
        const int32_t q = static_cast<int8_t>(static_cast<uint32_t>(activations) >> 8 * j);
        acc += (SignedInts)(codes >> 8 * j & 255u) * q;
    }
    return acc;
#endif
}

// --- results ---------------------------------------------------------------------------------------------------------

typedef uint16_t Words __attribute__((vector_size(32)));

// Scales (bfloat16) and zeros of the rows of a tile. (gcc 12 takes `__builtin_convertvector` of bytes from memory apart
// into scalars.)
inline Lanes load_scale(const uint16_t* from) {
#if defined(__AVX512F__)
    __m256i words;
    std::memcpy(&words, from, sizeof words);
    return (Lanes)((SignedInts)_mm512_maskz_cvtepu16_epi32(0xffff, words) << 16);
#elif defined(__AVX2__)
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * i));
        half[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
    }
    Lanes x;
    std::memcpy(&x, half, sizeof x);
    return x;
#else
    Dwords x;
    for (int r = 0; r < tile_rows; r++) x[r] = static_cast<uint32_t>(from[r]) << 16;
    return (Lanes)x;
#endif
}
inline SignedInts load_zero(const uint8_t* from) {
#if defined(__AVX512F__)
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (SignedInts)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
#else
    SignedInts x;
    for (int r = 0; r < tile_rows; r++) x[r] = from[r];
    return x;
#endif
}

// The first `count` of sixteen results, from element `at` on.
inline void store_result(void* out, Number type, int64_t at, Lanes y, int64_t count) {
    if (type == Number::float32) {
        if (count == tile_rows) return integer::store(static_cast<float*>(out) + at, y);
        std::memcpy(static_cast<float*>(out) + at, &y, count * sizeof(float));
        return;
    }
    const Dwords bits = (Dwords)y, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Dwords found = y == y ? nearest : Dwords{} + 0x7fc0u;
#if defined(__AVX512F__)
    const Words words = (Words)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)found);
#else
    const Words words = __builtin_convertvector(found, Words);
#endif
    auto* to = static_cast<uint16_t*>(out) + at;
    if (count == tile_rows) return static_cast<void>(std::memcpy(to, &words, sizeof words));
    std::memcpy(to, &words, count * sizeof(uint16_t));
}

inline Lanes load_bias(const float* bias, int64_t row, int64_t count) {
    return bias ? integer::load(bias + row, count) : Lanes{};
}

// Calls kernel.operator()<tokens>(tile, token) for tiles [first, last) and all tokens, four at a time.
template <class Kernel>
inline void over_tokens(int64_t tokens, int64_t first, int64_t last, const Kernel& kernel) {
    for (int64_t tile = first; tile < last; tile++) {
        int64_t t = 0;
        for (; t + 4 <= tokens; t += 4) kernel.template operator()<4>(tile, t);
        if (t + 2 <= tokens) kernel.template operator()<2>(tile, t), t += 2;
        if (t < tokens) kernel.template operator()<1>(tile, t);
    }
}

// --- x ---------------------------------------------------------------------------------------------------------------

// The first `count` of sixteen numbers, from element `at` of x on, then zeros.
inline Lanes read(const void* x, Number type, int64_t at, int64_t count) {
    if (type == Number::float32) return integer::load(static_cast<const float*>(x) + at, count);
    const auto* from = static_cast<const uint16_t*>(x) + at;
    Words words{};
    if (count == tile_rows)
        std::memcpy(&words, from, sizeof words);
    else
        std::memcpy(&words, from, count * sizeof(uint16_t));
    return (Lanes)(__builtin_convertvector(words, Dwords) << 16);
}

// The 32 columns of a super-block as bfloat16: bytes of one part. The parts of a super-block follow each other.
constexpr int64_t part_bytes = block_columns * 2;

// Sixteen columns as bfloat16: quad c of four becomes the pairs (c, c + 2), (c + 1, c + 3), as codes lie in a dword.
inline void store_pairs(uint8_t* to, Lanes x, int parts) {
    for (int i = 0; i < parts; i++) {
        const Dwords high = (Dwords)x & 0xffff0000u;
        const Words words = __builtin_convertvector(high >> 16, Words);
        const Words pairs = __builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        std::memcpy(to + i * part_bytes, &pairs, sizeof pairs);
        x -= (Lanes)high;  // exact
    }
}

}  // namespace
}  // namespace ptq::integer_tiled
