// The steps of mixers that keep a state in the place of keys and values, as plain C++: no torch here.
// ptq/ops/mixer_ops.py defines them.
#pragma once

#include <cstdint>

#include "common/number.h"

namespace ptq::mixers {

// One token of a causal convolution of each channel: `state` is moved by one and takes x as its last. The sum is
// rounded, and so is its silu.
struct Conv {
    Number type;                    // of all of them
    const void *x, *weight, *bias;  // [b, channels], [channels, width], [channels] or null
    void *state, *y;                // [b, channels, room], [b, channels]
    int64_t channels, room, width;  // width <= room + 1
    bool silu;
};

// The gated delta rule, token after token, for heads of values, of which `groups` share a head of queries and keys.
struct Delta {
    Number type;            // of q, k, v and out
    const void *q, *k, *v;  // [b, tokens, heads / groups, dk], the same, [b, tokens, heads, dv]
    const float *g, *beta;  // [b, tokens, heads]; g: the logarithm of the decay
    float* state;           // [b, heads, dk, dv]
    void* out;              // [b, tokens, heads, dv]
    int64_t tokens, heads, groups, dk, dv;
    bool norm;  // whether q and k are brought to length 1 first
};

// y = x / sqrt(mean(x²) + eps) * gain * silu(gate): rounded before the gain, behind it and at last.
struct GatedNorm {
    Number type;  // of all of them
    const void *x, *gate, *gain;
    void* y;
    int64_t k;
    float eps;
};

// Each works on units [first, last).
struct Kernels {
    void (*conv)(const Conv&, int64_t first, int64_t last);       // sixteen channels, over the batch
    void (*delta)(const Delta&, int64_t first, int64_t last);     // heads of values, over the batch
    void (*norm)(const GatedNorm&, int64_t first, int64_t last);  // rows
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::mixers
