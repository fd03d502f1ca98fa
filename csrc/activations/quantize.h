// Integers and one scale per token (ptq/ops/activations.py defines them), without torch.
#pragma once

#include <cstdint>

namespace ptq::activations {

struct Quantizer {
    float low, high;  // of the integers
    float share;      // scale of a token whose largest magnitude is 1
};

// One token of k numbers; bfloat16 numbers are given as their bits.
struct Kernels {
    void (*float32)(const Quantizer& quantizer, const float* x, int64_t k, int8_t* q, float* scale);
    void (*bfloat16)(const Quantizer& quantizer, const uint16_t* x, int64_t k, int8_t* q, float* scale);
};

// Tokens that become integers one by one.
struct Numbers {
    Quantizer quantizer;
    const void* x;  // [t, k]: float32, or bits of bfloat16
    bool wide;      // float32
    int64_t t, k;
};
void quantize(const Numbers& numbers, int64_t token, int8_t* q, float* scale);

// The kernels of the level in use.
const Kernels& kernels();

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::activations
