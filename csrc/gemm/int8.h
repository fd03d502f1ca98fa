// Products of weights that are bytes with int8 activations, for many tokens, whatever the weights stand for: included
// once per level, into an anonymous namespace.
//
// Sixteen rows of W (a row tile) lie in the sixteen lanes of a vector; a strip of three row tiles is multiplied with
// blocks of four tokens, twelve vectors of sums: the loads of four activations and three vectors of weights are then
// well below the two that a cycle can do beside twelve products. A panel of a strip, 512 columns, is unpacked to bytes
// in the first-level cache and serves all tokens. Columns go in quads: a dword for each row.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm/sizes.h"

namespace ptq::gemm {
namespace {

typedef uint32_t Dwords __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));

template <class V, class T>
inline V load(const T* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
template <class T, class V>
inline void store(T* to, V x) {
    std::memcpy(to, &x, sizeof x);
}

// Row tiles of a strip at this level; and whether there are registers for float sums beside the integers.
#if defined(__AVX512F__)
constexpr int64_t strip = row_tiles_of_a_strip;
constexpr bool hold = true;
#else
constexpr int64_t strip = 1;
constexpr bool hold = false;
#endif

// sum + the products of four weights of each row with four activations. `wide`: weights may have eight bits, not seven.
#if defined(__AVX512VNNI__)
template <bool wide>
inline Integers dot(Integers sum, Dwords weights, int32_t x) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}
#elif defined(__AVX512BW__)
template <bool wide>
inline Integers dot(Integers sum, Dwords weights, int32_t x) {
    const __m512i q = _mm512_set1_epi32(x), c = (__m512i)weights;
    if constexpr (!wide)  // 2 * 127 * 128 fits into 16 bits
        return sum + (Integers)_mm512_madd_epi16(_mm512_maddubs_epi16(c, q), _mm512_set1_epi16(1));
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8), odd = _mm512_srai_epi16(q, 8);
    return sum + (Integers)_mm512_madd_epi16((__m512i)(weights & 0x00ff00ffu), even) +
           (Integers)_mm512_madd_epi16(_mm512_srli_epi16(c, 8), odd);
}
#elif defined(__AVX2__)
template <bool wide>
inline __m256i products(__m256i c, __m256i q) {
    if constexpr (!wide) return _mm256_madd_epi16(_mm256_maddubs_epi16(c, q), _mm256_set1_epi16(1));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd = _mm256_srai_epi16(q, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)), even),
                            _mm256_madd_epi16(_mm256_srli_epi16(c, 8), odd));
}
template <bool wide>
inline Integers dot(Integers sum, Dwords weights, int32_t x) {
    const __m256i q = _mm256_set1_epi32(x);
    __m256i c[2];
    std::memcpy(c, &weights, sizeof c);
    c[0] = products<wide>(c[0], q), c[1] = products<wide>(c[1], q);
    return sum + load<Integers>(c);
}
#else
template <bool wide>
inline Integers dot(Integers sum, Dwords weights, int32_t x) {
    for (int j = 0; j < 4; j++)
        sum += (Integers)(weights >> 8 * j & 255u) * static_cast<int8_t>(static_cast<uint32_t>(x) >> 8 * j);
    return sum;
}
#endif

// 32 columns of some row tiles and tokens: quad.operator()<i>(r) gives quad i of row tile r, x[i, token] four
// activations.
template <bool wide, int tiles, int tokens, class Quad>
inline void multiply_quads(const Quad& quad, const int32_t* x, Integers sum[tokens][tiles]) {
    const auto step = [&]<int i>() {
        Dwords weights[tiles];
#pragma GCC unroll 4
        for (int r = 0; r < tiles; r++) weights[r] = quad.template operator()<i>(r);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
            for (int r = 0; r < tiles; r++)
                sum[t][r] = dot<wide>(sum[t][r], weights[r], x[i * tokens_of_a_block + t]);
    };
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (step.template operator()<i>(), ...);
    }(std::make_integer_sequence<int, 8>{});
}

// --- activations: [panel, block of tokens, column / 4, token] --------------------------------------------------------

// Where block b of tokens begins in the panel that begins at this column; `width`: all columns.
inline int64_t place(int64_t width, int64_t token_blocks, int64_t column, int64_t b) {
    return (column * token_blocks + b * std::min(panel_columns, width - column)) / 4 * tokens_of_a_block;
}

// Sixteen columns of four tokens: four numbers of four columns each, token after token.
inline void transpose(const int8_t* const q[tokens_of_a_block], int64_t column, int32_t* to) {
    typedef int32_t Four __attribute__((vector_size(16)));
    Four row[4];
    for (int j = 0; j < 4; j++) row[j] = load<Four>(q[j] + column);
    for (int half = 0; half < 2; half++) {
        const Four from = Four{0, 4, 1, 5} + 2 * half;
        const Four a = __builtin_shuffle(row[0], row[1], from), b = __builtin_shuffle(row[2], row[3], from);
        store(to + half * 8, __builtin_shuffle(a, b, Four{0, 1, 4, 5}));
        store(to + half * 8 + 4, __builtin_shuffle(a, b, Four{2, 3, 6, 7}));
    }
}

// A block of tokens.
inline void pack_block(const int8_t* const q[tokens_of_a_block], int64_t width, int64_t token_blocks, int64_t b,
                       int32_t* x) {
    for (int64_t column = 0; column < width; column += panel_columns) {
        int32_t* to = x + place(width, token_blocks, column, b);
        for (int64_t i = 0; i < std::min(panel_columns, width - column); i += 16) transpose(q, column + i, to + i);
    }
}

}  // namespace
}  // namespace ptq::gemm
