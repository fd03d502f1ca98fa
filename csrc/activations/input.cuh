// What a product of a decoder layer is given: the RMSNorm of x, or silu(x) * up, number by number as ptq/ops/steps.py
// rounds them (the sum of squares alone is added in an order of its own). The kernels here (input_kernel.cuh) and the
// Hadamard transform (hadamard/transform.cuh) begin with it. No torch here.
#pragma once

#include "cuda/lines.cuh"

namespace ptq::inputs {

using namespace ptq::cuda;

// Tensors of one type T, all tokens of k numbers. Neither `gain` nor `up`: x as it is.
struct Input {
    const void* gain;   // [k], of the norm; or null
    const void* added;  // [tokens, k]: the norm is that of x + added, which is written to `sum`; or null
    void* sum;
    const void* up;  // [tokens, k], or null
    float eps, offset;
    bool round_first;
};

constexpr int unit = 8;  // neighbours that a thread takes at once

PTQ_DEVICE float sum_in_warp(float x) {
    PTQ_UNROLL
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

PTQ_DEVICE float with_squares(float total, const float (&v)[unit]) {
    PTQ_UNROLL
    for (int j = 0; j < unit; j++) total += v[j] * v[j];
    return total;
}

// This lane's part of stretch `stretch` of the sum of squares of the token that begins at `start`; the token is in `x`,
// or after this in `sum`. Whoever adds up, the order is the same: 16 stretches, each by 32 lanes.
constexpr int stretches = 16;
template <class T>
PTQ_DEVICE float squares(const Input& in, const T* x, int64_t start, int k, bool aligned, int stretch) {
    constexpr int together = 8 / sizeof(T), step = unit * 32 * stretches;
    float total = 0;
    for (int first = unit * (32 * stretch + lane()); first < k; first += together * step) {
        Line<T> lines[together], others[together];
        load_lines(x + start, first, step, k, aligned, lines);
        if (in.added) load_lines(static_cast<const T*>(in.added) + start, first, step, k, aligned, others);
        PTQ_UNROLL
        for (int n = 0; n < together; n++) {
            const int i = first + n * step;
            if (i >= k) break;
            float v[unit], other[unit];
            lines[n].get(v);
            if (in.added) {
                others[n].get(other);
                PTQ_UNROLL
                for (int j = 0; j < unit; j++) v[j] = rounded<T>(add(v[j], other[j]));
                store_numbers(static_cast<T*>(in.sum) + start + i, k - i, aligned, v);
            }
            total = with_squares(total, v);
        }
    }
    return total;
}
template <class T>
PTQ_DEVICE float squares_by_warp(const Input& in, const T* x, int64_t start, int k, bool aligned) {
    float mine = 0;
    for (int s = 0; s < stretches && 32 * unit * s < k; s++) {
        const float total = sum_in_warp(squares(in, x, start, k, aligned, s));
        if (lane() == s) mine = total;
    }
    return sum_in_warp(mine);
}
PTQ_DEVICE float sum_of_stretches(const float* reduce) {
    block_barrier();
    const float total = sum_in_warp(lane() < stretches ? reduce[lane()] : 0.0f);
    block_barrier();
    return total;
}
template <class T>
PTQ_DEVICE float squares_by_block(const Input& in, const T* x, int64_t start, int k, bool aligned, float* reduce,
                                  int threads) {
    for (int s = warp(); s < stretches; s += threads / 32) {
        const float total = sum_in_warp(squares(in, x, start, k, aligned, s));
        if (lane() == 0) reduce[s] = total;
    }
    return sum_of_stretches(reduce);
}
PTQ_DEVICE float inverse_norm(const Input& in, float total, int k) {
    return divide(1.0f, root(add(divide(total, static_cast<float>(k)), in.eps)));
}

template <class T>
PTQ_DEVICE float normed(const Input& in, float x, float gain, float inverse) {
    x = multiply(x, inverse);
    if (in.round_first) x = rounded<T>(x);
    return rounded<T>(multiply(x, add(gain, in.offset)));
}
template <class T>
PTQ_DEVICE float gated(float gate, float up) {
    float silu;
    if constexpr (sizeof(T) == 4)
        silu = divide(gate, add(1.0f, accurate_exponential(-gate)));
    else  // far closer than the type that it is rounded to
        silu = divide_nearly(gate, add(1.0f, exponential(-gate)));
    return rounded<T>(multiply(rounded<T>(silu), up));
}

}  // namespace ptq::inputs
