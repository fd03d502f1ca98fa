// Products of codes and activations, of one level, included by gemm.h.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "integer_tiled/gemm_kernels.h"
#include "integer_tiled/layout.h"

namespace ptq::integer_tiled {
namespace {

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

// sum + the products of four codes of each row with four activations. `wide`: codes may have eight bits.
#if defined(__AVX512F__)
constexpr int64_t strip = gemm_tiles;
constexpr bool hold = true;  // float sums, too, have registers
#else
constexpr int64_t strip = 1;
constexpr bool hold = false;
#endif

#if defined(__AVX512VNNI__)
template <bool wide>
inline Integers dot(Integers sum, Dwords codes, int32_t x) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
}
#elif defined(__AVX512BW__)
template <bool wide>
inline Integers dot(Integers sum, Dwords codes, int32_t x) {
    const __m512i q = _mm512_set1_epi32(x), c = (__m512i)codes;
    if constexpr (!wide)  // 2 * 127 * 128 fits into 16 bits
        return sum + (Integers)_mm512_madd_epi16(_mm512_maddubs_epi16(c, q), _mm512_set1_epi16(1));
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8), odd = _mm512_srai_epi16(q, 8);
    return sum + (Integers)_mm512_madd_epi16((__m512i)(codes & 0x00ff00ffu), even) +
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
inline Integers dot(Integers sum, Dwords codes, int32_t x) {
    const __m256i q = _mm256_set1_epi32(x);
    __m256i c[2];
    std::memcpy(c, &codes, sizeof c);
    c[0] = products<wide>(c[0], q), c[1] = products<wide>(c[1], q);
    return sum + load<Integers>(c);
}
#else
template <bool wide>
inline Integers dot(Integers sum, Dwords codes, int32_t x) {
    for (int j = 0; j < 4; j++)
        sum += (Integers)(codes >> 8 * j & 255u) * static_cast<int8_t>(static_cast<uint32_t>(x) >> 8 * j);
    return sum;
}
#endif

}  // namespace
}  // namespace ptq::integer_tiled
