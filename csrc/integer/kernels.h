// The integer kernels as plain C++: no torch here. Codes are 0 .. 2^bits - 1 and stand for scale * (code - zero).
// Every level gives the same bits: 16 lanes whatever the register width, no fused multiply-add, a fixed order of sums.
#pragma once

#include <cstdint>

namespace ptq::integer {

struct Fit {
    const float* w;   // [n, k]
    float* scale;     // [n, k / size]: bfloat16 numbers; NaN where the group is not finite
    uint8_t* zero;    // [n, k / size]
    int64_t k, size;  // columns; columns in a group
    int bits;
    bool symmetric;
    const float* shrink;  // [steps]: scales to try, as a share of the full range
    int64_t steps;
};

struct Round {
    const float* w;       // [n, k]
    const float* scale;   // [n, k / size]
    const uint8_t* zero;  // [n, k / size]
    uint8_t* codes;       // [n, k]
    int64_t k, size;
    int bits;
};

struct Ldlq {
    const float* target;   // [c, n]
    const float* w;        // [c, n]
    const float* factor;   // [c, c]: factor[j, i] is what column j takes of the error of column i > j
    const float* scale;    // [g, n]
    const float* zero;     // [g, n]
    const int64_t* group;  // [c]
    uint8_t* codes;        // [c, n]
    float* error;          // [c, n]
    int64_t c, n;
    int bits;
};

struct Pack {
    const uint8_t* codes;  // [n, k]
    uint8_t* packed;       // [n, ceil(k bits / 8)]
    int64_t k;
    int bits;
};

struct Linear {
    const float* x;          // [t, k]
    const uint8_t* codes;    // [n, ceil(k bits / 8)]
    const uint16_t* scale;   // [n, k / size]: bits of bfloat16
    const uint8_t* zero;     // [n, k / size], or null: 2^(bits - 1)
    const float* bias;       // [n], or null
    float* out;              // [t, n]
    int64_t t, k, n, size;
    int bits;
};

constexpr int64_t ldlq_strip = 64;  // rows of W that one unit of `ldlq` takes
constexpr int64_t linear_rows = 4;  // rows of W that one unit of `linear` takes

// Each works on units [first, last): rows of W, or strips of them.
struct Kernels {
    void (*fit)(const Fit&, int64_t first, int64_t last);
    void (*round)(const Round&, int64_t first, int64_t last);
    void (*ldlq)(const Ldlq&, int64_t first, int64_t last);
    void (*pack)(const Pack&, int64_t first, int64_t last);
    void (*linear)(const Linear&, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::integer
