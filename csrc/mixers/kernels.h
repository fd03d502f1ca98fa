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

// A causal convolution of each channel over all tokens, with nothing in front of them; rounded as `Conv` is.
struct Window {
    Number type;                 // of x and y
    const void* x;               // [b, tokens, channels], tokens `apart`
    const float *weight, *bias;  // [width, channels], [channels] or null
    void* y;                     // [b, tokens, channels]
    int64_t apart, tokens, channels, width;
    bool silu;
};

// A state space whose heads decay by one number each (Mamba-2), token after token: S = exp(dt a) S + dt x Bᵀ and
// y = S C + skip x, where dt is log(1 + exp(dt + bias)) between `low` and `high`. Tokens of x, B, C and dt are `apart`.
struct Scan {
    Number type;                 // of x, b, c and dt
    const void *x, *b, *c, *dt;  // [b, tokens, heads, d], [b, tokens, heads / groups, n], the same, [b, tokens, heads]
    const float *a, *skip, *bias;  // [heads]; of the last two, null: none
    float *state, *y;              // [b, heads, d, n], [b, tokens, heads, d]
    int64_t x_apart, b_apart, c_apart, dt_apart, tokens, heads, groups, d, n;
    float low, high;
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

// y = x / sqrt(mean(x²) + eps) * gain * silu(gate): rounded before the gain, behind it and at last. Where the gate
// comes `before`, x * silu(gate) is what is brought to a mean of 1, and nothing follows the gain.
struct GatedNorm {
    Number type, other;  // of x and y, and of gate and gain: the same, or x is in float32
    const void *x, *gate, *gain;
    void* y;
    int64_t apart, k, groups;  // rows of the gate are apart; each of the groups of a row has a mean of its own
    float eps;
    bool before;
};

// Each works on units [first, last).
struct Kernels {
    void (*conv)(const Conv&, int64_t first, int64_t last);       // sixteen channels, over the batch
    void (*window)(const Window&, int64_t first, int64_t last);   // tokens, over the batch
    void (*delta)(const Delta&, int64_t first, int64_t last);     // heads of values, over the batch
    void (*scan)(const Scan&, int64_t first, int64_t last);       // heads, over the batch
    void (*norm)(const GatedNorm&, int64_t first, int64_t last);  // rows
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::mixers
