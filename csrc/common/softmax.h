// What attention and gates need of sixteen lanes: powers, the largest number, and the sums of many vectors. Included
// once per level.
#pragma once

#include "common/lanes.h"

namespace ptq::vectors {
namespace {

// e^x for x <= 0, to about one unit in the last place; 0 for x below -87, NaN for NaN.
inline Lanes exponential(Lanes x) {
#if defined(__AVX512F__)
    const Lanes n = _mm512_maskz_roundscale_ps(0xffff, x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT), in = x;
#else
    const Lanes in = max(x, fill(-87.0f));
    const Lanes n = (in * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
#endif
    const Lanes r = fma(n, fill(1.42860677e-6f), fma(n, fill(-0.693148613f), in));
    Lanes y = fill(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, fill(c));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, fill(-87.0f), _CMP_NLT_UQ), y, n);  // y * 2^n
#else
    const SignedInts power = (converted<SignedInts>(n) + 127) << 23;
    return chosen(x < -87.0f, Lanes{}, chosen(x == x, y * (Lanes)power, x));
#endif
}

// 2^x for x <= 0, in fewer instructions than e^x: to 2e-7 of it; 0 for x below -126, NaN for NaN.
inline Lanes power_of_two(Lanes x) {
#if defined(__AVX512F__)
    const Lanes n = _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);
#else
    const Lanes in = max(x, fill(-127.0f)), nearest = (in + 12582912.0f) - 12582912.0f;
    const Lanes n = nearest - chosen(in < nearest, fill(1.0f), Lanes{});
#endif
    const Lanes r = x - n;  // to the nearest, which VREDUCEPS is not
    Lanes y = fill(0.00186713005f);
    for (const float c : {0.00901703071f, 0.0557999127f, 0.240164444f, 0.693151295f, 1.0f}) y = fma(y, r, fill(c));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, fill(-126.0f), _CMP_NLT_UQ), y, n);
#else
    const SignedInts power = (converted<SignedInts>(n) + 127) << 23;
    return chosen(x < -126.0f, Lanes{}, y * (Lanes)power);
#endif
}

// The largest of sixteen numbers; where one is NaN, any of them.
inline float largest_of(const Lanes& x) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_max_ps((__m256)first_eight((Dwords)x), (__m256)last_eight((Dwords)x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return std::max(four[0], four[1]);
#else
    float largest = x[0];
    for (int i = 1; i < lanes; i++) largest = std::max(largest, x[i]);
    return largest;
#endif
}

// x / (1 + e^-z), with the exponential of a number that is not positive.
inline Lanes times_sigmoid(Lanes x, Lanes z) {
    const Lanes e = exponential(chosen(z < 0.0f, z, -z));
    return x * chosen(z < 0.0f, e, fill(1.0f)) / (e + 1.0f);
}

// The sums of sixteen vectors, each added up in the order of `sum`.
#if defined(__AVX512F__)
template <class V, class T>
inline void sums(const V* v, T* out) {
    V x[8], y[4], z[2];
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        z[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(y[i], y[i + 2], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    const V total = __builtin_shufflevector(z[0], z[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                    __builtin_shufflevector(z[0], z[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    store_vector(out, __builtin_shufflevector(total, total, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
}
#elif defined(__AVX2__)
inline void sums(const Lanes* v, float* out) {
#pragma GCC unroll 2
    for (int first = 0; first < 16; first += 8) {
        __m256 four[4], two[2];  // pairs of vectors: the four sums of each, in its half; then those of two pairs
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Lanes &a = v[first + i], &b = v[first + i + 4];
            const __m256 x = a.low + a.high, y = b.low + b.high;
            four[i] = _mm256_permute2f128_ps(x, y, 0x20) + _mm256_permute2f128_ps(x, y, 0x31);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            two[i] = _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44) +
                     _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee);
        const __m256 all = _mm256_shuffle_ps(two[0], two[1], 0x88) + _mm256_shuffle_ps(two[0], two[1], 0xdd);
        std::memcpy(out + first, &all, sizeof all);
    }
}
#else
inline void sums(const Lanes* v, float* out) {
    for (int i = 0; i < lanes; i++) out[i] = sum(v[i]);
}
#endif

}  // namespace
}  // namespace ptq::vectors
