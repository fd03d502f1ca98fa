// Sylvester's part of the transform: included once per level.
#pragma once

#include "hadamard/simd.h"

namespace ptq::hadamard {
namespace {

// Lane i of a pair (i, i + stride) becomes x[i] + x[i + stride], the other x[i] - x[i + stride].
template <class T, int stride, std::size_t... i>
inline Vector<T> stage_in_vector(Vector<T> x, std::index_sequence<i...>) {
    constexpr Vector<T> sign = {((i & stride) ? T(-1) : T(1))...};
    return __builtin_shufflevector(x, x, static_cast<int>(i ^ stride)...) + x * sign;
}

template <class T, int stages>
inline Vector<T> stages_in_vector(Vector<T> x) {
    constexpr auto lanes = std::make_index_sequence<Simd<T>::lanes>();
    if constexpr (stages > 0) x = stage_in_vector<T, 1>(x, lanes);
    if constexpr (stages > 1) x = stage_in_vector<T, 2>(x, lanes);
    if constexpr (stages > 2) x = stage_in_vector<T, 4>(x, lanes);
    if constexpr (stages > 3) x = stage_in_vector<T, 8>(x, lanes);
    return x;
}

// `radix` vectors at distance `stride`, after `stages` steps inside each of them.
template <class T, int radix, int stages>
inline void butterfly(T* x, int64_t stride) {
    Vector<T> v[radix];
#pragma GCC unroll 16
    for (int r = 0; r < radix; r++) v[r] = stages_in_vector<T, stages>(load(x + r * stride));
#pragma GCC unroll 4
    for (int half = 1; half < radix; half *= 2)
#pragma GCC unroll 16
        for (int r = 0; r < radix; r++)
            if (!(r & half)) {
                const Vector<T> a = v[r], b = v[r + half];
                v[r] = a + b;
                v[r + half] = a - b;
            }
#pragma GCC unroll 16
    for (int r = 0; r < radix; r++) store(x + r * stride, v[r]);
}

template <class T, int radix, int stages = 0>
void pass(T* x, int64_t width, int64_t stride) {
    for (int64_t i = 0; i < width; i += radix * stride)
        for (int64_t j = i; j < i + stride; j += Simd<T>::lanes) butterfly<T, radix, stages>(x + j, stride);
}

// Stages first, 2 first, 4 first, ... below `end` on each `end` elements of x[width].
template <class T>
void sylvester(T* x, int64_t width, int64_t first, int64_t end) {
    constexpr int lanes = Simd<T>::lanes, all = lanes == 16 ? 4 : lanes == 8 ? 3 : lanes == 4 ? 2 : 1;
    if (first < lanes && end > first) {
        if (end < lanes) {  // first is 1 here: only the steps inside a vector, and not all of them
            if (end == 2) return pass<T, 1, 1>(x, width, lanes);
            if constexpr (lanes > 4)
                if (end == 4) return pass<T, 1, 2>(x, width, lanes);
            if constexpr (lanes > 8) return pass<T, 1, 3>(x, width, lanes);
        }
        if (end >= 8 * lanes)
            pass<T, 8, all>(x, width, lanes), first = 8 * lanes;
        else if (end == 4 * lanes)
            pass<T, 4, all>(x, width, lanes), first = 4 * lanes;
        else if (end == 2 * lanes)
            pass<T, 2, all>(x, width, lanes), first = 2 * lanes;
        else
            pass<T, 1, all>(x, width, lanes), first = lanes;
    }
    for (; first * 8 <= end; first *= 8) pass<T, 8>(x, width, first);
    if (first * 4 == end) pass<T, 4>(x, width, first);
    if (first * 2 == end) pass<T, 2>(x, width, first);
}

}  // namespace
}  // namespace ptq::hadamard
