// Sixteen floats, as one AVX-512, two AVX or four SSE registers: the same arithmetic at every level.
// Included once per level, into an anonymous namespace.
#pragma once

#include <algorithm>
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
inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }
inline Lanes fill(float x) { return Lanes{} + x; }
inline Lanes min(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes max(Lanes a, Lanes b) { return a > b ? a : b; }

inline float sum(Lanes x) {
    float half[8];
    for (int i = 0; i < 8; i++) half[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; i++) half[i] += half[i + 4];
    return (half[0] + half[2]) + (half[1] + half[3]);
}

// To the nearest integer, halves to even, for 0 <= x < 2^22: adding 2^23 pushes the fraction out.
inline Lanes nearest(Lanes x) { return (x + 8388608.0f) - 8388608.0f; }

inline Lanes quantise(Lanes x, Lanes inverse, Lanes zero, Lanes top) {
    return nearest(min(max(x * inverse + zero, Lanes{}), top));
}

inline void store_codes(uint8_t* to, Lanes x, int64_t count) {
    typedef int32_t Ints __attribute__((vector_size(64)));
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x, Ints), Bytes);
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
