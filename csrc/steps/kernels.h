// The small steps between the products of decoded tokens, as plain C++: no torch here. ptq/ops/steps.py defines them.
#pragma once

#include <cstdint>

#include "common/number.h"

namespace ptq::steps {

// y = x / sqrt(mean(x²) + eps) * (offset + gain), per token.
struct Norm {
    Number type;  // of x, gain and y
    const void *x, *gain;
    void* y;
    int64_t k;
    float eps, offset;
    bool round_first;  // to the type, before the gain is multiplied
};

// The first d channels of one head of one token, d even: y = x * cos + (-second half of x, first half) * sin, each
// product and the sum rounded. Or with neighbours, of which the second and the first take turns, in the place of
// halves.
struct Rotary {
    Number type;  // of x and y, and of both tables
    int64_t d;
    bool wide = false;  // of neighbours: tables are float32, and only y is rounded
};

// y = act(gate) * up, both rounded: act is silu, the approximation of GELU by a tanh, or a sigmoid. Or, with g at most
// `limit` and u within +-limit, (u + 1) * (g * sigmoid(alpha * g)), every step rounded.
enum class Gate { silu, gelu, sigmoid, clamped };
struct Gated {
    Number type;  // of all three
    const void *gate, *up;
    void* y;
    int64_t size;
    Gate kind;
    float alpha, limit;
};

// y = a + b, rounded.
struct Sum {
    Number type;  // of all three
    const void *a, *b;
    void* y;
    int64_t size;
};

// Elements of a row of floats whose last vector is whole.
inline int64_t padded(int64_t d) {
    return (d + 15) / 16 * 16;
}

// Attention of the last `tokens` of before + tokens: each sees itself and all before it, or what `mask` says. `heads`
// are those of keys and values; `groups` query heads share one.
constexpr int64_t part_tokens = 512;  // keys and values of so many, in bfloat16, stay in a second-level cache of 1 MB
struct Attend {
    Number type;                // of q, keys, values and out
    const void* q;              // [b, heads, groups, tokens, d + more]
    const void *keys, *values;  // [b, heads, room, d]; maybe not from the first token on
    void* out;                  // [b, tokens, heads, groups, d]
    int64_t heads, groups, tokens, d, before, room;
    const void* more_keys;  // [b, heads, more_room, more]: what keys have behind these d numbers; null: nothing
    int64_t more, more_room;
    float scaling;        // times log2(e): weights are powers of two
    float* partial;       // [b, heads, parts, groups, tokens, padded(d) + 2], where there is more than one part
    const uint8_t* mask;  // [b or 1, tokens, before + tokens], or null: 0 where a token is hidden
    int64_t mask_batch;   // elements between rows of the batch: 0 where all share one mask
    int64_t units;        // parts of heads, over the batch
    int64_t part = part_tokens;
    const float* sinks = nullptr;  // [heads * groups], times log2(e): scores of what has no value; null: none

    int64_t rows() const { return groups * tokens; }
    // What a row of a head sees from token `at` on.
    const uint8_t* mask_of(int64_t unit, int64_t row, int64_t at) const {
        return mask + unit / heads * mask_batch + row % tokens * (before + tokens) + at;
    }
    int64_t parts() const { return (before + tokens + part - 1) / part; }
    // Of a row: sums that its weights make of the values, the largest score, the sum of the weights.
    float* partial_row(int64_t unit, int64_t part, int64_t row) const {
        return partial + ((unit * parts() + part) * rows() + row) * (padded(d) + 2);
    }
};

// Each works on units [first, last).
struct Kernels {
    void (*norm)(const Norm&, int64_t first, int64_t last);  // tokens
    void (*rotary)(const Rotary&, const void* x, const void* cos, const void* sin, void* y);
    void (*rotary_pairs)(const Rotary&, const void* x, const void* cos, const void* sin, void* y);
    void (*gated)(const Gated&, int64_t first, int64_t last);    // sixteen elements
    void (*sum)(const Sum&, int64_t first, int64_t last);        // sixteen elements
    void (*attend)(const Attend&, int64_t first, int64_t last);  // parts of heads of keys, over the batch
    void (*merge)(const Attend&, int64_t first, int64_t last);   // rows of these heads
};

extern const Kernels portable, avx2, avx512, avx512bf16;

}  // namespace ptq::steps
