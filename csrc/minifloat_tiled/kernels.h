// The kernels on tiles of small floats as plain C++: no torch here. Tiles are those of tiles/layout.h.
#pragma once

#include "gemm/panels_kernels.h"

namespace ptq::minifloat_tiled {

constexpr int most_codes = 128;
constexpr int byte_offset = 64;  // of `ElementTable::byte`

// The numbers that codes of 4 to 7 bits stand for. Tables are repeated up to 128 codes: bits above a code change
// nothing.
struct ElementTable {
    int exponent, mantissa, bits;
    float value[most_codes];   // exact in bfloat16
    uint8_t byte[most_codes];  // value * 2^shift + 64, below 128; only if `whole`
    int shift;
    bool whole;  // whether every value * 2^shift is an integer from -63 to 63
};

// W[n, k] in tiles. `group_blocks` super-blocks make a group; the last group may have fewer.
struct Weight {
    const uint8_t* tiles;
    const uint16_t* scale;  // [row tile, groups, 16], bits of bfloat16
    int64_t n, k, blocks, groups, group_blocks;
    const ElementTable* element;
};

// y[t, n] = q_scale[t] * sum over groups of scale * (integer), see fp6/tiled_ops.py: the same bits at every level.
struct Quantized {
    Weight w;
    const int8_t* q;       // [t, q_stride]: k columns, then zeros up to whole super-blocks
    int64_t q_stride;      // bytes
    const float* q_scale;  // [t]: times 2^-shift
    const int32_t* sums;   // [t, groups]: of q, made by `sums`
    const float* bias;     // [n], or null
    void* out;             // [t, n]
    Number out_type;
    int64_t t;
};

// y[t, n] = x Wᵀ: products exact for bfloat16 x, sums in float32, in an order that depends on the level and the number
// of tokens; or sums of integers, exact within a group (tiles/byte_rows.h).
struct Floats {
    Weight w;
    const void* x;  // [t, k]
    Number x_type;
    uint8_t* arranged;         // [t, arranged_stride]: x as `floats` wants it, made by `arrange`
    int64_t arranged_stride;   // bytes
    const float* token_scale;  // [t], or null: factors of the results, before the bias
    const float* bias;
    void* out;  // [t, n]
    Number out_type;
    int64_t t;
};

// Each works on units [first, last): row tiles; `sums` and `arrange` on tokens.
struct Kernels {
    void (*sums)(const Quantized&, int32_t* sums, int64_t first, int64_t last);
    void (*quantized)(const Quantized&, int64_t first, int64_t last);
    void (*arrange)(const Floats&, int64_t first, int64_t last);
    void (*floats)(const Floats&, int64_t first, int64_t last);
    gemm::Unpack unpack_floats, unpack_pairs, unpack_bytes;  // the modes of gemm/; `unpack_pairs` may be null
};

extern const Kernels portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, dotprod;

}  // namespace ptq::minifloat_tiled
