// Sixteen floats, as one AVX-512, two AVX or four SSE registers: the same arithmetic at every level.
// Included once per level, into an anonymous namespace.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "integer/kernels.h"

namespace ptq::integer {
namespace {

constexpr int64_t lanes = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint32_t Ints __attribute__((vector_size(64)));
typedef int32_t SignedInts __attribute__((vector_size(64)));

// Whether one instruction looks up sixteen numbers in a table of sixteen (`__builtin_shuffle`).
#if defined(__AVX512F__)
constexpr bool gathers = true;
constexpr int unrolled = 8;
#else
constexpr bool gathers = false;
constexpr int unrolled = 1;  // sixteen lanes are many instructions already
#endif

inline Lanes load(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Lanes load(const float* from, int64_t count) {  // the first `count`, then zeros
    if (count == lanes) return load(from);
    Lanes x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline void store(float* to, Lanes x) {
    std::memcpy(to, &x, sizeof x);
}
inline Lanes fill(float x) {
    return Lanes{} + x;
}
inline Lanes min(Lanes a, Lanes b) {
    return a < b ? a : b;
}
inline Lanes max(Lanes a, Lanes b) {
    return a > b ? a : b;
}

// a * b + c, rounded once.
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, sizeof c);
    return c;
#else
    for (int i = 0; i < lanes; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

inline float sum(Lanes x) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    const Eight eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four four =
        __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// To the nearest integer, halves to even, for 0 <= x < 2^22: adding 2^23 pushes the fraction out.
inline Lanes nearest(Lanes x) {
    return (x + 8388608.0f) - 8388608.0f;
}

inline Lanes quantise(Lanes x, Lanes inverse, Lanes zero, Lanes top) {
    return nearest(min(max(x * inverse + zero, Lanes{}), top));
}

inline void store_codes(uint8_t* to, Lanes x, int64_t count) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x, SignedInts), Bytes);
    std::memcpy(to, &bytes, count);
}

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
// The nearest bfloat16 number, ties to even, as a float.
inline float bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

}  // namespace
}  // namespace ptq::integer
