// What attention and gates need of sixteen lanes: e^x, and the sums of many vectors. Included once per level.
#pragma once

#include "integer/lanes.h"

namespace ptq::integer {
namespace {

// e^x for x <= 0, to about one unit in the last place; 0 for x below -87, NaN for NaN.
inline Lanes exponential(Lanes x) {
    const Lanes in = max(x, fill(-87.0f));
    const Lanes n = (in * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    const Lanes r = fma(n, fill(1.42860677e-6f), fma(n, fill(-0.693148613f), in));
    Lanes y = fill(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, fill(c));
    const SignedInts power = (__builtin_convertvector(n, SignedInts) + 127) << 23;
    const Lanes scaled = y * reinterpret_cast<Lanes>(power);
    return x < fill(-87.0f) ? Lanes{} : x == x ? scaled : x;
}

// x / (1 + e^-z), with the exponential of a number that is not positive.
inline Lanes times_sigmoid(Lanes x, Lanes z) {
    const Lanes e = exponential(z < 0.0f ? z : -z);
    return x * (z < 0.0f ? e : Lanes{} + 1.0f) / (e + 1.0f);
}

// The sums of sixteen vectors, each added up in the order of `sum`.
inline void sums(const Lanes* v, float* out) {
    Lanes x[8], y[4], z[2];
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        z[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(y[i], y[i + 2], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    const Lanes total = __builtin_shufflevector(z[0], z[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                        __builtin_shufflevector(z[0], z[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    store(out, __builtin_shufflevector(total, total, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
}

}  // namespace
}  // namespace ptq::integer
