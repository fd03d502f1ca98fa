// Attention of many query tokens over plain keys and values. No torch here; from AVX2 on.
#pragma once

#include <cstdint>

#include "common/number.h"
#include "common/units.h"

namespace ptq::prefill {

constexpr int64_t lanes = 16;   // keys, or columns of values, of a vector
constexpr int64_t panel = 64;   // keys, or columns of values, that are multiplied at once
constexpr int64_t chunk = 128;  // keys between two looks at the largest score: whole panels
constexpr int64_t block = 48;   // query rows of a unit

// What a product takes at once, in 32 bits: a float, or two bfloat16 (with AVX-512 BF16; and by tiles of AMX, which are
// sixteen steps deep).
enum class Mode { floats, pairs, tiles };
constexpr int64_t numbers_of(Mode mode) {
    return mode == Mode::floats ? 1 : 2;
}
constexpr int64_t depth_of(Mode mode) {
    return mode == Mode::tiles ? 16 : 1;
}

// A vector of neighbours in memory for each token of each head: strides in elements.
struct Heads {
    const void* data;
    int64_t batch, head, token;
};

// out = softmax(scaling * q Kᵀ) V. The `groups` query heads that share a head of keys are rows of one product: row
// token * groups + group. Scores, softmax and sums are float32; with `pairs` and `tiles`, weights are rounded to
// bfloat16 before they meet V. The same for any number of threads.
struct Attention {
    Mode mode;
    Number type;  // of q, keys, values and out
    Heads q, keys, values;
    const uint8_t* mask;  // [b, tokens, length], 0: not seen; or null
    int64_t mask_batch, mask_token;
    void* out;  // [b, tokens, heads * groups, value_d]
    int64_t batch, heads, groups, tokens, length, d, value_d;
    float scaling;
    bool causal;                    // token i sees keys 0 to i
    const float* sinks;             // [heads * groups]: scores of what has no value; null: none
    int64_t first;                  // of the heads of keys, over the batch, that are in the panels
    uint32_t *to_keys, *to_values;  // panels, made by `pack`

    int64_t rows() const { return tokens * groups; }
    int64_t blocks() const { return (rows() + block - 1) / block; }
    int64_t chunks() const { return (length + chunk - 1) / chunk; }

    // A chunk of keys is [panel, key_steps, 64] dwords; one of values [panel, value_steps, 64], 32 in the last panel
    // where the width is no multiple of 64.
    int64_t key_steps() const {
        const int64_t numbers = numbers_of(mode) * depth_of(mode);
        return (d + numbers - 1) / numbers * depth_of(mode);
    }
    int64_t value_steps() const { return chunk / numbers_of(mode); }
    int64_t value_width() const { return (value_d + 31) / 32 * 32; }
    uint32_t* keys_of(int64_t head, int64_t index) const {
        return to_keys + ((head - first) * chunks() + index) * chunk * key_steps();
    }
    uint32_t* values_of(int64_t head, int64_t index) const {
        return to_values + ((head - first) * chunks() + index) * value_steps() * value_width();
    }
};

// Units of `pack`: chunks of heads of keys. Units of `attend`: blocks of rows of heads of keys.
struct Kernels {
    void (*pack)(const Attention&, int64_t first, int64_t last);
    void (*attend)(const Attention&, Units&);
};

extern const Kernels avx2, avx512, avx512bf16, amx;

}  // namespace ptq::prefill
