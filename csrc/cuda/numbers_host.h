// float16 and bfloat16 numbers in plain C++, rounded to the nearest, halves to even. For device_host.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ptq::cuda {

inline float float_of(uint32_t bits) {
    return std::bit_cast<float>(bits);
}
inline uint32_t bits_of(float x) {
    return std::bit_cast<uint32_t>(x);
}

inline float widen(Bfloat16 x) {
    return float_of(static_cast<uint32_t>(x.bits) << 16);
}
inline float widen(Half x) {
    const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    float magnitude;
    if (exponent == 31)
        magnitude = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    else
        magnitude =
            std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
    return x.bits >> 15 ? -magnitude : magnitude;
}

template <class T>
T narrow(double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    constexpr bool half = std::is_same_v<T, Half>;
    constexpr int fraction = half ? 10 : 7, least = half ? -14 : -126, bias = half ? 15 : 127;
    constexpr uint16_t infinity = half ? 0x7c00 : 0x7f80;
    if (std::isnan(x)) return {static_cast<uint16_t>(0x7fff)};
    if (std::isinf(x)) return {static_cast<uint16_t>(sign | infinity)};
    if (x == 0) return {sign};
    int exponent = std::ilogb(x);
    if (exponent < least) exponent = least;
    // The integer is 2^fraction or more for a normal number; adding it to the exponent field carries as it should.
    const int64_t scaled = std::llrint(std::ldexp(std::fabs(x), fraction - exponent));
    const int64_t bits = (static_cast<int64_t>(exponent + bias - 1) << fraction) + scaled;
    return {static_cast<uint16_t>(sign | (bits > infinity ? infinity : bits))};
}

template <class T>
uint32_t pack(float low, float high) {
    return static_cast<uint32_t>(narrow<T>(double{high}).bits) << 16 | narrow<T>(double{low}).bits;
}

template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out = 0;
    for (int i = 0; i < 32; i += 16) {
        const auto number = [i](uint32_t word) { return double{widen(T{static_cast<uint16_t>(word >> i)})}; };
        out |= static_cast<uint32_t>(narrow<T>(number(a) * number(b) + number(c)).bits) << i;
    }
    return out;
}

inline float lesser(float a, float b) {
    return std::fmin(a, b);
}
inline float greater(float a, float b) {
    return std::fmax(a, b);
}
// The compiler is told not to contract.
inline float multiply(float a, float b) {
    return a * b;
}
inline float add(float a, float b) {
    return a + b;
}
inline float divide(float a, float b) {
    return a / b;
}
inline float divide_nearly(float a, float b) {
    return a / b;
}
inline float root(float x) {
    return std::sqrt(x);
}
inline float exponential(float x) {
    return std::exp(x);
}
inline float maximum(float a, float b) {
    return a >= b || a != a ? a : b;
}
inline float accurate_exponential(float x) {
    return std::exp(x);
}
inline int round_to_int(float x) {
    return static_cast<int>(std::nearbyint(x));
}

}  // namespace ptq::cuda
