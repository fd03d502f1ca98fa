// Sixteen numbers of a tensor as floats, and back: included once per level.
#pragma once

#include "common/lanes.h"
#include "steps/kernels.h"

namespace ptq::steps {
namespace {

template <Number type>
constexpr int64_t bytes = type == Number::float32 ? 4 : 2;

// Sixteen numbers, or the first `count` and then zeros.
template <Number type>
inline Lanes read(const void* from, int64_t at, int64_t count = lanes) {
    if constexpr (type == Number::float32)
        return load(static_cast<const float*>(from) + at, count);
    else
        return load(static_cast<const uint16_t*>(from) + at, count);
}

// To the type, to the nearest, halves to even; still as floats.
template <Number type>
inline Lanes rounded(Lanes x) {
    return type == Number::float32 ? x : (Lanes)(bfloat16_bits(x) << 16);
}

template <Number type>
inline void write(void* to, int64_t at, Lanes x, int64_t count = lanes) {  // x is rounded
    if constexpr (type == Number::float32) {
        store(static_cast<float*>(to) + at, x, count);
    } else {
        store_words(static_cast<uint16_t*>(to) + at, (Dwords)x >> 16, count);
    }
}

}  // namespace
}  // namespace ptq::steps
