// Sixteen numbers of a tensor as floats, and back: included once per level.
#pragma once

#include "integer/lanes.h"
#include "steps/kernels.h"

namespace ptq::steps {
namespace {

using integer::Lanes;
using integer::lanes;

// Sixteen numbers, or the first `count` and then zeros.
template <Number type>
inline Lanes read(const void* from, int64_t at, int64_t count = lanes) {
    if constexpr (type == Number::float32) {
        return integer::load(static_cast<const float*>(from) + at, count);
    } else {
        return (Lanes)(widened(static_cast<const uint16_t*>(from) + at, count) << 16);
    }
}

// To the type, to the nearest, halves to even; still as floats.
template <Number type>
inline Lanes rounded(Lanes x) {
    if constexpr (type == Number::float32) return x;
    const Dwords bits = (Dwords)x, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return (Lanes)chosen(x == x, nearest, Dwords{} + 0x7fc00000u);
}

template <Number type>
inline void write(void* to, int64_t at, Lanes x, int64_t count = lanes) {  // x is rounded
    if constexpr (type == Number::float32) {
        integer::store(static_cast<float*>(to) + at, x, count);
    } else {
        store_words(static_cast<uint16_t*>(to) + at, (Dwords)x >> 16, count);
    }
}

}  // namespace
}  // namespace ptq::steps
