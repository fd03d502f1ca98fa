// The integer kernels as plain C++: no torch here. Codes are 0 .. 2^bits - 1 and stand for scale * (code - zero).
// Every level gives the same bits: 16 lanes whatever the register width, a fixed order of sums, and multiply-adds that
// are fused either at every level (`linear`) or at none (all others).
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
    const float* x;                 // [t, k]
    float* arranged;                // [t, arranged_stride(k)]: x in the order of `linear`
    const uint8_t* codes;           // [n, ceil(k bits / 8)]
    const uint16_t* scale;          // [n, k / size]: bits of bfloat16
    const uint8_t* zero;            // [n, k / size], or null: 2^(bits - 1)
    const float* bias;              // [n], or null
    float* out;                     // [t, n]
    int64_t t, k, n, size, groups;  // groups in a row: k / size
    int bits;
};

constexpr int64_t block = 128;      // codes that `linear` decodes at once: eight for each of sixteen lanes
constexpr int64_t panel_rows = 24;  // rows of W that one unit of `linear` takes

inline int64_t packed_size(int64_t k, int bits) {
    return (k * bits + 7) / 8;
}
inline int64_t arranged_width(int64_t k) {
    return (k + block - 1) / block * block;
}
// An odd number of KiB: rows of x whose distance is a large power of two would fall into the same few sets of a cache.
inline int64_t arranged_stride(int64_t k) {
    return ((k + 255) / 256 | 1) * 256;
}
// Whether the codes of a block have one scale.
inline bool one_group(const Linear& p) {
    return p.size % block == 0 || p.size == p.k;
}
// Whether the eight codes of each lane have one scale.
inline bool lanes_have_one_group(const Linear& p) {
    return one_group(p) || p.size % 8 == 0;
}

// Each works on units [first, last): rows of W, or strips of them; `arrange` on rows of x.
struct Kernels {
    void (*fit)(const Fit&, int64_t first, int64_t last);
    void (*round)(const Round&, int64_t first, int64_t last);
    void (*ldlq)(const Ldlq&, int64_t first, int64_t last);
    void (*pack)(const Pack&, int64_t first, int64_t last);
    void (*arrange)(const Linear&, int64_t first, int64_t last);
    void (*linear)(const Linear&, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512, avx512vnni;

}  // namespace ptq::integer
