// Sixteen floats, and how they become codes. Included once per level, into an anonymous namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/bfloat16.h"
#include "common/sixteen.h"
#include "minifloat/kernels.h"

namespace ptq::minifloat {
namespace {

inline float number(const float* from) {
    return *from;
}
inline void store_codes(uint8_t* to, SignedInts codes, int64_t count) {
    store_bytes(to, (Dwords)codes, count);
}
inline Lanes magnitude(Lanes x) {
    return (Lanes)((SignedInts)x & 0x7fffffff);
}
inline double sum(Lanes x) {
    double total = 0;
    for (int i = 0; i < lanes; i++) total += x[i];
    return total;
}
inline float number(const uint16_t* from) {
    return from_bfloat16(*from);
}

inline float largest_of(Element e) {
    return std::ldexp(2.0f - std::ldexp(1.0f, -e.mantissa), e.top());
}

// Numbers on their way to codes. With 2^E the power of two below |x|, at least that of the subnormal numbers, the
// numbers around x are multiples of 2^(E - mantissa): `count` of them, and codes count them too.
struct Rounded {
    Lanes value;  // the nearest number, halves to the even mantissa
    SignedInts code;
};
struct Rounder {
    Lanes largest;
    int mantissa, first, sign_shift;

    explicit Rounder(Element e)
        : largest(fill(largest_of(e))), mantissa(e.mantissa), first(e.first()), sign_shift(32 - e.bits()) {}

    Rounded operator()(Lanes x) const {
        const Lanes u = min(magnitude(x), largest);  // NaN becomes the largest
        const SignedInts field = (SignedInts)u >> 23, at_least = SignedInts{} + first;
        const SignedInts power = chosen(field > at_least, field, at_least);
        const Lanes inverse = (Lanes)((254 + mantissa - power) << 23);
        const Lanes step = (Lanes)((power - mantissa) << 23);
        const Lanes count = (u * inverse + 8388608.0f) - 8388608.0f;  // 2^23: the fraction is rounded off
        const Dwords sign = (Dwords)x & 0x80000000u;
        const SignedInts code = converted<SignedInts>(count) + ((power - first) << mantissa);
        return {(Lanes)((Dwords)(count * step) | sign), code | (SignedInts)(sign >> sign_shift)};
    }
};

}  // namespace
}  // namespace ptq::minifloat
