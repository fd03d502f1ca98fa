// Sixteen floats, as one AVX-512, two AVX or four SSE registers, and how they become codes. Included once per level,
// into an anonymous namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "minifloat/kernels.h"

namespace ptq::minifloat {
namespace {

constexpr int64_t lanes = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Words __attribute__((vector_size(32)));
typedef uint32_t Dwords __attribute__((vector_size(64)));

inline Lanes fill(float x) {
    return Lanes{} + x;
}
inline Lanes load(const float* from, int64_t count) {  // the first `count`, then zeros
    Lanes x{};
    if (count >= lanes)
        std::memcpy(&x, from, sizeof x);
    else
        std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline Lanes load(const uint16_t* from, int64_t count) {  // bfloat16
    Words x{};
    if (count >= lanes)
        std::memcpy(&x, from, sizeof x);
    else
        std::memcpy(&x, from, count * sizeof(uint16_t));
    return reinterpret_cast<Lanes>(__builtin_convertvector(x, Dwords) << 16);
}
inline float number(const float* from) {
    return *from;
}
inline void store_codes(uint8_t* to, Ints codes, int64_t count) {
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    if (count >= lanes)
        std::memcpy(to, &bytes, sizeof bytes);
    else
        std::memcpy(to, &bytes, count);
}
inline Lanes min(Lanes a, Lanes b) {
    return a < b ? a : b;
}
inline Lanes max(Lanes a, Lanes b) {
    return a > b ? a : b;
}
inline Lanes magnitude(Lanes x) {
    return reinterpret_cast<Lanes>(reinterpret_cast<Ints>(x) & 0x7fffffff);
}
inline double sum(Lanes x) {
    double total = 0;
    for (int i = 0; i < lanes; i++) total += x[i];
    return total;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float number(const uint16_t* from) {  // bfloat16
    return from_bits(static_cast<uint32_t>(*from) << 16);
}
// The nearest bfloat16 number, ties to even, as a float.
inline float to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    return from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

inline float largest_of(Element e) {
    return std::ldexp(2.0f - std::ldexp(1.0f, -e.mantissa), e.top());
}

// Numbers on their way to codes. With 2^E the power of two below |x|, at least that of the subnormal numbers, the
// numbers around x are multiples of 2^(E - mantissa): `count` of them, and codes count them too.
struct Rounded {
    Lanes value;  // the nearest number, halves to the even mantissa
    Ints code;
};
struct Rounder {
    Lanes largest;
    int mantissa, first, sign_shift;

    explicit Rounder(Element e)
        : largest(fill(largest_of(e))), mantissa(e.mantissa), first(e.first()), sign_shift(32 - e.bits()) {}

    Rounded operator()(Lanes x) const {
        const Lanes u = min(magnitude(x), largest);  // NaN becomes the largest
        const Ints field = reinterpret_cast<Ints>(u) >> 23, at_least = Ints{} + first;
        const Ints power = field > at_least ? field : at_least;
        const Lanes inverse = reinterpret_cast<Lanes>((254 + mantissa - power) << 23);
        const Lanes step = reinterpret_cast<Lanes>((power - mantissa) << 23);
        const Lanes count = (u * inverse + 8388608.0f) - 8388608.0f;  // 2^23: the fraction is rounded off
        const Dwords sign = reinterpret_cast<Dwords>(x) & 0x80000000u;
        const Ints code = __builtin_convertvector(count, Ints) + ((power - first) << mantissa);
        return {reinterpret_cast<Lanes>(reinterpret_cast<Dwords>(count * step) | sign),
                code | reinterpret_cast<Ints>(sign >> sign_shift)};
    }
};

}  // namespace
}  // namespace ptq::minifloat
