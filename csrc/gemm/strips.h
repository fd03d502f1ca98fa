// Many tokens times weights that are unpacked once for all of them, whatever they stand for: included once per level,
// into an anonymous namespace.
//
// Sixteen rows of W (a row tile) lie in the sixteen lanes of a vector; a strip of three row tiles is multiplied with
// blocks of four or eight tokens, whose sums stay in registers: the loads of four numbers of x and three vectors of
// weights are well below the two that a cycle can do beside twelve products. Columns go in steps: a dword for each row,
// and one for each token, which hold one column as float32, two as bfloat16 or four as bytes. A panel of a strip, 128
// steps, lies in the first-level cache and serves all tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm/sizes.h"
#include "gemm/transpose.h"

namespace ptq::gemm {
namespace {

// Row tiles of a strip at this level.
#if defined(__AVX512F__)
constexpr int64_t strip = row_tiles_of_a_strip;
#else
constexpr int64_t strip = 1;
#endif

// sum += the products of some row tiles and tokens: product(sum, weights, x) is one step's. The panel is
// [row tile][step][16], x [step][token of the block].
template <int tiles, int tokens, int block_tokens, class Sum, class Weights, class Product>
inline void multiply_steps(const uint32_t* panel, int64_t steps, const int32_t* x, Sum sum[tokens][tiles],
                           const Product& product) {
    const uint32_t* next[tiles];
#pragma GCC unroll 4
    for (int r = 0; r < tiles; r++) next[r] = panel + r * steps * 16;
    const int32_t* ahead = x + steps * block_tokens;
    for (int64_t i = 0; i < steps; i += 8) {
#pragma GCC unroll 4
        for (int line = 0; line < 8 * block_tokens; line += 16) __builtin_prefetch(ahead + line, 0, 3);
        ahead += 8 * block_tokens;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++, x += block_tokens) {
            Weights w[tiles];
#pragma GCC unroll 4
            for (int r = 0; r < tiles; r++) w[r] = load_vector<Weights>(next[r] + (i + j) * 16);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
                for (int r = 0; r < tiles; r++) sum[t][r] = product(sum[t][r], w[r], x[t]);
        }
    }
}

// Where block b of so many tokens begins in the panel that begins at a step of x: [panel, block of tokens, step,
// token].
inline int64_t place(int64_t steps, int64_t token_blocks, int64_t tokens, int64_t step, int64_t b) {
    return (step * token_blocks + b * std::min(steps_of_a_panel, steps - step)) * tokens;
}

// A block of tokens, each a row of steps.
template <int64_t tokens>
inline void pack_block(const int32_t* const rows[tokens], int64_t steps, int64_t token_blocks, int64_t b, int32_t* x) {
    for (int64_t first = 0; first < steps; first += steps_of_a_panel) {
        int32_t* to = x + place(steps, token_blocks, tokens, first, b);
        for (int64_t i = first; i < std::min(steps, first + steps_of_a_panel); i += 8) {
            Eight step[8]{};
            for (int j = 0; j < tokens; j++) std::memcpy(&step[j], rows[j] + i, sizeof step[j]);
            transpose(step);
            for (int j = 0; j < 8; j++, to += tokens) std::memcpy(to, &step[j], tokens * sizeof *to);
        }
    }
}

}  // namespace
}  // namespace ptq::gemm
