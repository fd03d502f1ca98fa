// Rounding to small floats ExMy as plain C++: no torch here. Every level gives the same bits: 16 lanes whatever the
// register width, a fixed order of sums, no fused multiply-add.
#pragma once

#include <cstdint>

namespace ptq::minifloat {

struct Element {
    int exponent, mantissa;

    constexpr int bits() const { return 1 + exponent + mantissa; }
    constexpr int bias() const { return (1 << (exponent - 1)) - 1; }
    constexpr int top() const { return (1 << exponent) - 1 - bias(); }  // exponent of the largest power of two
    constexpr int first() const { return 128 - bias(); }  // of the subnormal numbers, as float32 writes it
};

struct Fit {
    const float* w;   // [n, k]
    float* scale;     // [n, k / size]; NaN where the group is not finite
    int64_t k, size;  // columns; columns in a group
    Element element;
    bool power, search;
};

struct Nearest {
    const void* w;           // [n, k], float32 or bfloat16
    uint8_t* codes;          // [n, k]
    float* scale;            // [n, k / size]
    double *error, *energy;  // [n]: sums of (w - what)^2 and w^2
    int64_t k, size;
    Element element;
    bool power, search, bfloat16;
};

struct Encode {
    const float* w;      // [n, k]
    const float* scale;  // [n, k / size]
    uint8_t* codes;      // [n, k]
    int64_t k, size;
    Element element;
};

struct Decode {
    const uint8_t* codes;  // [n, k]
    const float* scale;    // [n, k / size]
    float* w;              // [n, k]
    int64_t k, size;
    Element element;
};

struct Ldlq {
    const float* target;   // [c, n]
    const float* w;        // [c, n]
    const float* factor;   // [c, c]: factor[j, i] is what column j takes of the error of column i > j
    const float* scale;    // [g, n]
    const int64_t* group;  // [c]
    uint8_t* codes;        // [c, n]
    float* error;          // [c, n]
    int64_t c, n;
    Element element;
};

// Each works on units [first, last): rows of W, or strips of them.
struct Kernels {
    void (*fit)(const Fit&, int64_t first, int64_t last);
    void (*nearest)(const Nearest&, int64_t first, int64_t last);
    void (*encode)(const Encode&, int64_t first, int64_t last);
    void (*decode)(const Decode&, int64_t first, int64_t last);
    void (*ldlq)(const Ldlq&, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512;

}  // namespace ptq::minifloat
