// The kernels on E8P tiles as plain C++: no torch here. The layout is in layout.h.
#pragma once

#include <cstdint>

#include "e8p_tiled/layout.h"
#include "gemm/panels_kernels.h"
#include "tiles/layout.h"

namespace ptq::e8p_tiled {

// W[n, k] in tiles.
struct Weight {
    const uint8_t* tiles;
    float scale;
    int64_t n, k;
    int bits;
};

// Tokens as `quantized` and the panels of gemm/ want them.
struct ArrangedTokens {
    const int8_t* q;  // [t, k]
    int64_t t, k;
    int8_t* to;        // [t, columns of whole blocks]: within a block in the order of the level, then zeros
    int32_t* offsets;  // [t]: - offset * the sum of q
    int offset;        // of the weights' bytes
};

// y[t, n] as quip_sharp/tiled_ops.py defines it: the same bits at every level.
struct Quantized {
    Weight w;
    const int8_t* q;  // as `arrange_tokens` has left it
    const int32_t* offsets;
    const float* q_scale;  // [t]
    const float* bias;     // [n], or null
    void* out;             // [t, n]
    Number out_type;
    int64_t t;
};

// What a token of floating-point numbers becomes before it meets weights.
enum class Form {
    floats,  // float32
    pairs,   // of bfloat16 numbers: for `unpack_pairs`
    bytes,   // integers, see `ByteRow`
};

// The bytes of the integers that the numbers of a token are (tiles/byte_unit.h) are in a row each, the lowest
// first: x is the sum of the rows, each times its `factor`.
struct ByteRow {
    static constexpr int64_t tail = 16;  // bytes of what follows the columns of a row:
    int32_t offset;                      // as `ArrangedTokens` has it
    float factor;
    static constexpr int64_t stride(int64_t k) { return blocks_in(k) * block_columns + tail; }
    static constexpr int count(Number x) { return x == Number::bfloat16 ? 3 : 4; }
};

// y[t, n] = x Wᵀ. As floats and pairs, sums are float32, in an order that depends on the level and the number of
// tokens. As bytes they are exact, and what is lost is half a unit of each x at most.
struct Floats {
    Weight w;
    const void* x;  // [t, k]
    Number x_type;
    uint8_t* arranged;        // [t, arranged_stride]: x as `floats` wants it, made by `arrange_floats`
    int64_t arranged_stride;  // bytes
    Form form;                // what `arrange_floats` makes
    const float* bias;
    void* out;  // [t, n]
    Number out_type;
    int64_t t;
};

// W[n, k] itself, as float32.
struct Dequantize {
    Weight w;
    float* out;
};

// Each works on units [first, last): row tiles; `arrange_tokens` and `arrange_floats` on tokens.
struct Kernels {
    void (*arrange_tokens)(const ArrangedTokens&, int64_t first, int64_t last);
    void (*quantized)(const Quantized&, int64_t first, int64_t last);
    void (*arrange_floats)(const Floats&, int64_t first, int64_t last);
    void (*floats)(const Floats&, int64_t first, int64_t last);
    void (*dequantize)(const Dequantize&, int64_t first, int64_t last);
    Form few;                                                // what `floats` takes
    gemm::Unpack unpack_floats, unpack_pairs, unpack_bytes;  // the modes of gemm/; `unpack_pairs` may be null
};

extern const Kernels portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, dotprod;

// Codes as they are stored to tiles, and back.
struct Pack {
    uint8_t* codes;  // [bits, n, row_codes]
    uint8_t* tiles;
    int64_t n, row_codes;
    int bits;
};
void pack_tiles(const Pack&, int64_t first, int64_t last);    // row tiles
void unpack_tiles(const Pack&, int64_t first, int64_t last);  // row tiles

}  // namespace ptq::e8p_tiled
