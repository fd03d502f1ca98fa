// The kernels on tiles as plain C++: no torch here. The layout is in tiles/layout.h.
#pragma once

#include <cstdint>

#include "gemm/panels_kernels.h"

namespace ptq::integer_tiled {

constexpr int most_multiplied = 4;         // bits of a code that may have integer scales,
constexpr int64_t most_columns = 1 << 16;  // and columns of its row

// W[n, k] in tiles. `group_blocks` super-blocks make a group; the last one may be filled up with columns of zeros.
struct Weight {
    const uint8_t* tiles;
    const uint16_t* scale;  // [row tile, groups, 16]: bits of bfloat16; null: integer scales
    const uint8_t* zero;    // [row tile, groups, 16], or null: 2^(bits - 1)
    int64_t n, k, groups, group_blocks;
    int bits;
    const uint8_t* multiples = nullptr;  // integer scales: [row tile, 1 + groups, 16], see quarot/integer_scales.py
};

// y[t, n] = q_scale[t] * sum over groups of scale * (integer), see quarot/tiled_ops.py: the same bits at every level.
struct Quantized {
    Weight w;
    const int8_t* q;       // [t, q_stride]: k columns, then zeros up to whole super-blocks
    int64_t q_stride;      // bytes
    const float* q_scale;  // [t]
    const int32_t* sums;   // [t, groups]: of q
    const float* bias;     // [n], or null
    void* out;             // [t, n]
    Number out_type;
    int64_t t;
};

// Sums of q over the groups of each token, for `Quantized`.
struct Sums {
    const int8_t* q;
    int64_t q_stride, size, groups;  // columns in a group, groups in a token
    int32_t* sums;                   // [t, groups]
};

// y[t, n] = x Wᵀ: sums in float32, in an order that depends on the level and the number of tokens; of integers within a
// group, exact, where the level has VNNI alone.
struct Floats {
    Weight w;
    const void* x;  // [t, k]
    Number x_type;
    uint8_t* arranged;        // [t, arranged_bytes(k)]: x as `floats` wants it, made by `arrange`
    int64_t arranged_stride;  // bytes
    float* sums;              // [t, groups]: of x, made by `arrange`
    const float* bias;
    void* out;  // [t, n]
    Number out_type;
    int64_t t;
};

// Each works on units [first, last): row tiles; `sums` and `arrange` on tokens.
struct Kernels {
    void (*sums)(const Sums&, int64_t first, int64_t last);
    void (*quantized)(const Quantized&, int64_t first, int64_t last);
    void (*arrange)(const Floats&, int64_t first, int64_t last);
    void (*floats)(const Floats&, int64_t first, int64_t last);
    gemm::Unpack unpack_floats, unpack_pairs, unpack_bytes;  // the modes of gemm/; those of numbers may be null
    gemm::Direct direct[7];                                  // of codes of 2 to 8 bits
    gemm::Direct multiplied[most_multiplied - 1];            // the same, with integer scales
};

extern const Kernels portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, dotprod;

// The stored rows of integer.py to tiles, and back.
struct Pack {
    uint8_t* rows;  // [n, row_bytes]
    uint8_t* tiles;
    int64_t n, k, row_bytes;
    int bits;
};
void pack_tiles(const Pack&, int64_t first, int64_t last);    // row tiles
void unpack_tiles(const Pack&, int64_t first, int64_t last);  // row tiles

}  // namespace ptq::integer_tiled
