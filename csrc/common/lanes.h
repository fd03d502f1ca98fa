// Sixteen floats: the same arithmetic at every level. Included once per level, into an anonymous namespace.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/bfloat16.h"
#include "common/sixteen.h"

namespace ptq::vectors {
namespace {

// Whether one instruction looks up sixteen numbers in a table of sixteen (`picked`).
#if defined(__AVX512F__)
constexpr bool gathers = true;
constexpr int unrolled = 8;
#else
constexpr bool gathers = false;
constexpr int unrolled = 1;  // sixteen lanes are many instructions already
#endif

// The numbers of x at places; where `gathers`, bits above the fourth change nothing.
inline Lanes picked(Lanes x, Dwords place) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)place, (__m512)x);
#else
    Lanes y;
    for (int l = 0; l < 16; l++) y[l] = x[place[l]];
    return y;
#endif
}

inline float sum(Lanes x) {
    typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    const Four four = (__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 8, 9, 10, 11)) +
                      (__builtin_shufflevector(x, x, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 12, 13, 14, 15));
#else
    Four part[4];
    store_vector(part, x);
    const Four four = (part[0] + part[2]) + (part[1] + part[3]);
#endif
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
    store_bytes(to, (Dwords)converted<SignedInts>(x), count);
}

}  // namespace
}  // namespace ptq::vectors
