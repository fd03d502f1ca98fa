// The small steps between the products of a decoded token, as plain C++: no torch here. ptq/steps.py defines them.
#pragma once

#include <cstdint>

namespace ptq::steps {

enum class Number { float32, bfloat16 };

// y = x / sqrt(mean(x²) + eps) * (offset + gain), per token.
struct Norm {
    Number type;  // of x, gain and y
    const void *x, *gain;
    void* y;
    int64_t k;
    float eps, offset;
    bool round_first;  // to the type, before the gain is multiplied
};

// One head of one token, d even: y = x * cos + (-second half of x, first half) * sin, each product and the sum rounded.
struct Rotary {
    Number type;  // of all four
    int64_t d;
};

struct Kernels {
    void (*norm)(const Norm&, int64_t first, int64_t last);  // tokens
    void (*rotary)(const Rotary&, const void* x, const void* cos, const void* sin, void* y);
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::steps
