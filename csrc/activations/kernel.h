// Included once per level, after PTQ_LEVEL (the name of its table) is defined. Loops are plain: compilers make vectors
// of them, and every operation is rounded the same way at every level.
#include <bit>
#include <cstring>
#include <limits>
#if defined(__AVX512BW__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns about its own header
#include <immintrin.h>
#endif

#include "activations/quantize.h"
#include "common/bfloat16.h"

#if defined(__AVX512F__)
#define PTQ_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PTQ_VECTOR_BYTES 32
#else
#define PTQ_VECTOR_BYTES 16
#endif

namespace ptq::activations {
namespace {

constexpr float tiny = 1e-30f;
constexpr int32_t infinity = 0x7f800000;
// Added to a number below 2^22, this rounds it to an integer, halves to even, and leaves it in the low bits.
constexpr float rounder = 12582912.0f;

inline float widen(float x) {
    return x;
}
inline float widen(uint16_t bits) {
    return from_bfloat16(bits);
}

template <class Vector, class T>
inline Vector magnitudes(const T* x) {
    typedef T Loaded __attribute__((vector_size(sizeof(Vector) * sizeof(T) / 4), aligned(alignof(T)), may_alias));
    const Loaded loaded = *reinterpret_cast<const Loaded*>(x);
    if constexpr (sizeof(T) == 2)
        return __builtin_convertvector(loaded, Vector) << 16 & 0x7fffffff;
    else
        return reinterpret_cast<Vector>(loaded) & 0x7fffffff;
}

// As bits, magnitudes are in the order of the numbers, and NaNs are above infinity: a maximum that loses none.
template <class T>
inline float largest(const T* x, int64_t k, bool* finite) {
    constexpr int lanes = PTQ_VECTOR_BYTES / 4, vectors = 4;  // independent maxima: none waits for the one before
    typedef int32_t Vector __attribute__((vector_size(PTQ_VECTOR_BYTES)));
    Vector tops[vectors] = {};
    int64_t i = 0;
    for (; i + vectors * lanes <= k; i += vectors * lanes)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            __builtin_prefetch(x + i + v * lanes + k, 0, 2);  // the next token
            const Vector m = magnitudes<Vector>(x + i + v * lanes);
            tops[v] = m > tops[v] ? m : tops[v];
        }
    for (int v = 1; v < vectors; v++) tops[0] = tops[v] > tops[0] ? tops[v] : tops[0];
    int32_t each[lanes];
    std::memcpy(each, &tops[0], sizeof(each));
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) each[j] = each[j + half] > each[j] ? each[j + half] : each[j];
    int32_t top = each[0];
    for (; i < k; i++) {
        const int32_t m = std::bit_cast<int32_t>(widen(x[i])) & 0x7fffffff;
        top = m > top ? m : top;
    }
    *finite = top < infinity;
    return std::bit_cast<float>(top);
}

#if defined(__AVX512BW__)
inline __m512 load(const float* x) {
    return _mm512_loadu_ps(x);
}
inline __m512 load(const uint16_t* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// 64 numbers
template <class T>
inline void store_rounded(const Quantizer& z, const T* x, float inverse, int8_t* q) {
    const __m512 scale = _mm512_set1_ps(inverse);
    __m512i y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) y[j] = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16 * j), scale));
    // Packing takes the four 128-bit parts of its operands in turns.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(y[0], y[1]), _mm512_packs_epi32(y[2], y[3]));
    packed = _mm512_max_epi8(packed, _mm512_set1_epi8(static_cast<char>(z.low)));
    packed = _mm512_min_epi8(packed, _mm512_set1_epi8(static_cast<char>(z.high)));
    _mm512_storeu_si512(q, _mm512_permutexvar_epi32(order, packed));
}
#endif

template <class T>
void quantize(const Quantizer& z, const T* __restrict x, int64_t k, int8_t* __restrict q, float* scale) {
    bool finite;
    const float top = largest(x, k, &finite);
    *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : top < tiny ? 1.0f : top * z.share;
    const float inverse = finite ? 1.0f / *scale : 0.0f, low = z.low, high = z.high;
    if (!finite) {
        for (int64_t i = 0; i < k; i++) q[i] = 0;
        return;
    }
    int64_t i = 0;
#if defined(__AVX512BW__)
    // The packing clamps; a tiny clip could still overflow the integers before it.
    if (z.share > 1e-6f)
        for (; i + 64 <= k; i += 64) store_rounded(z, x + i, inverse, q + i);
#endif
    for (; i < k; i++) {
        float y = widen(x[i]) * inverse;
        y = y < low ? low : y;
        y = y > high ? high : y;
        q[i] = static_cast<int8_t>(std::bit_cast<int32_t>(y + rounder));
    }
}

}  // namespace

const Kernels PTQ_LEVEL = {quantize<float>, quantize<uint16_t>};

}  // namespace ptq::activations
