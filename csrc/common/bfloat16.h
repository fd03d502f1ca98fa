// bfloat16, the upper half of a float, one number at a time. In an anonymous namespace, for it is compiled per level.
#pragma once

#include <bit>
#include <cstdint>

namespace ptq {
namespace {

inline float from_bfloat16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The bits of the nearest bfloat16, halves to even; NaN becomes the positive quiet one.
inline uint16_t to_bfloat16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
}

inline float rounded_to_bfloat16(float x) {
    return from_bfloat16(to_bfloat16(x));
}

}  // namespace
}  // namespace ptq
