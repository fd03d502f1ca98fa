// y = x Wᵀ for many tokens, included by kernel.h: a panel of W is decoded into the second-level cache once and serves
// all of them. Order of sums and layout of x: linear.h.
#pragma once

#include "integer/linear.h"

namespace ptq::integer {

using namespace vectors;
namespace {

constexpr int64_t depth = 4 * block;  // columns of a panel
constexpr int64_t chunk = 128;        // tokens that one panel serves: their sums stay in the cache, too
constexpr int tile_rows = 6;          // 6 x 4 sums in registers
static_assert(panel_rows % tile_rows == 0);

// Groups that lanes share: each weight by itself. Slow, but no format in use has such groups.
template <int bits>
void scale_each(const Linear& p, int64_t row, int64_t i, Lanes* w) {
    for (int64_t c = 0; c < std::min(block, p.k - i); c++) {
        const Affine a = affine(p, row * p.groups + (i + c) / p.size);
        w[c % 8][c / 8] = std::fma(w[c % 8][c / 8], a.scale[0], a.offset[0]);
    }
}

// The block at column i of a row, as eight vectors of weights; `at` is the group of its first column.
template <int bits>
void decode(const Linear& p, const uint8_t* place, int64_t row, int64_t i, int64_t at, Lanes* w) {
    const int64_t bytes = packed_size(p.k, bits);
    const uint8_t* from = p.codes + row * bytes + i / 8 * bits;
    uint8_t rest[16 * bits];
    if (i + block > p.k) {
        std::fill(rest, rest + sizeof rest, 0);
        std::memcpy(rest, from, bytes - i / 8 * bits);
        from = rest;
    }
    const Words packed = words<bits>(from);
    const Lanes table = all_codes<bits>();
#pragma GCC unroll unrolled
    for (int j = 0; j < 8; j++) w[j] = numbers<bits>(packed, j, table);
    if (!lanes_have_one_group(p)) return scale_each<bits>(p, row, i, w);
    const Affine a = one_group(p) ? affine(p, at) : affine(p, at, place + i / 8);
#pragma GCC unroll unrolled
    for (int j = 0; j < 8; j++) w[j] = fma(w[j], a.scale, a.offset);
}

// Adds `vectors` products to each sum of a tile. w: rows of `depth` columns; total: [tokens, tile_rows].
template <int tokens>
void tile(const float* x, int64_t stride, const Lanes* w, Lanes* total, int64_t vectors) {
    Lanes sums[tokens][tile_rows];
#pragma GCC unroll unrolled
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll unrolled
        for (int r = 0; r < tile_rows; r++) sums[t][r] = total[t * tile_rows + r];
    for (int64_t i = 0; i < vectors; i++) {
        Lanes v[tokens];
        for (int t = 0; t < tokens; t++) v[t] = load(x + t * stride + i * lanes);
#pragma GCC unroll unrolled
        for (int r = 0; r < tile_rows; r++) {
            const Lanes weight = w[r * (depth / lanes) + i];
#pragma GCC unroll unrolled
            for (int t = 0; t < tokens; t++) sums[t][r] = fma(weight, v[t], sums[t][r]);
        }
    }
#pragma GCC unroll unrolled
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll unrolled
        for (int r = 0; r < tile_rows; r++) total[t * tile_rows + r] = sums[t][r];
}

template <int bits>
void many_tokens(const Linear& p, int64_t first, int64_t last) {
    constexpr int64_t vectors = depth / lanes;
    const int64_t width = arranged_width(p.k), stride = arranged_stride(p.k);
    const std::vector<uint8_t> place = places(p);
    std::vector<Lanes> w(panel_rows * vectors), total(std::min(chunk, p.t) * panel_rows);
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t from = 0; from < p.t; from += chunk) {
            const int64_t row = panel * panel_rows, rows = std::min(panel_rows, p.n - row);
            const int64_t tokens = std::min(chunk, p.t - from);
            std::fill(total.begin(), total.end(), Lanes{});
            for (int64_t i = 0; i < width; i += depth) {
                const int64_t blocks = std::min(depth, width - i) / block;
                for (int64_t b = 0; b < blocks; b++) {
                    const int64_t column = i + b * block, group = column / p.size;
                    for (int64_t r = 0; r < rows; r++)
                        decode<bits>(p, place.data(), row + r, column, (row + r) * p.groups + group,
                                     &w[r * vectors + b * 8]);
                }
                for (int64_t r = 0; r < rows; r += tile_rows)  // these rows of W stay in the first-level cache
                    for (int64_t t = 0; t < tokens; t += 4) {
                        constexpr decltype(&tile<1>) tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>};
                        const float* x = p.arranged + (from + t) * stride + i;
                        tiles[std::min<int64_t>(4, tokens - t) - 1](x, stride, &w[r * vectors],
                                                                    &total[r * tokens + t * tile_rows], blocks * 8);
                    }
            }
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t r = 0; r < rows; r++)
                    p.out[(from + t) * p.n + row + r] =
                        sum(total[r / tile_rows * tile_rows * tokens + t * tile_rows + r % tile_rows]) +
                        (p.bias ? p.bias[row + r] : 0.0f);
        }
}

// Up to here, decoding anew for every four tokens is faster than through memory (measured on Zen 5).
template <int bits>
constexpr int64_t few_tokens_most = bits <= 4 ? 16 : 8;

template <int bits>
void linear_of(const Linear& p, int64_t first, int64_t last) {
    if constexpr (in_registers<bits>) {
        if (p.t <= few_tokens_most<bits> && one_group(p)) return few_tokens<bits, true>(p, first, last);
        if (p.t <= few_tokens_most<bits> && lanes_have_one_group(p)) return few_tokens<bits, false>(p, first, last);
    }
    many_tokens<bits>(p, first, last);
}

void linear(const Linear& p, int64_t first, int64_t last) {
    constexpr decltype(&linear_of<2>) of[] = {linear_of<2>, linear_of<3>, linear_of<4>, linear_of<5>,
                                              linear_of<6>, linear_of<7>, linear_of<8>};
    of[p.bits - 2](p, first, last);
}

}  // namespace
}  // namespace ptq::integer
