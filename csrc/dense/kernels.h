// Few tokens times a plain weight, as plain C++: no torch here.
#pragma once

#include <cstdint>

#include "common/number.h"

namespace ptq::dense {

constexpr int64_t step = 64;  // columns that are multiplied at a time; a row of `arranged` is filled up to whole steps

inline int64_t arranged_size(int64_t k) {
    return (k + step - 1) / step * step;
}

// y[t, n] = x Wᵀ + bias: sums in float32, the same for any number of tokens and of threads, and at every level but
// avx512bf16.
struct Linear {
    Number type;         // of x, the bias and the result
    Number weight_type;  // the same, or bfloat16
    const void* x;       // [t, k]
    float* arranged;     // [t, arranged_size(k)]: x as `rows` wants it, made by `arrange`
    const void* weight;  // [n, k]
    const void* bias;    // [n], or null
    void* out;           // [t, n]
    int64_t t, n, k;
};

struct Kernels {
    void (*arrange)(const Linear&);
    void (*rows)(const Linear&, int64_t first, int64_t last);  // rows of the weight
};

extern const Kernels portable, avx2, avx512, avx512bf16;

}  // namespace ptq::dense
