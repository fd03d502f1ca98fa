// y = x Wᵀ for many tokens, included by kernel.h: a panel of W is decoded into the second-level cache once and serves
// all of them. Order of sums and layout of x: linear.h.
#pragma once

#include "integer/linear.h"

namespace ptq::integer {
namespace {

constexpr int64_t depth = 2 * block;  // columns of a panel
constexpr int64_t chunk = 128;        // tokens that one panel serves: their sums stay in the cache, too
constexpr int tile_rows = 6;          // 6 x 4 sums in registers
static_assert(panel_rows % tile_rows == 0);

// Groups that lanes share: each weight by itself. Slow, but no format in use has such groups.
template <int bits>
void scale_each(const Linear& p, int64_t row, int64_t i, Lanes* w) {
    for (int64_t c = 0; c < std::min(block, p.k - i); c++) {
        const Affine a = affine(p, row * (p.k / p.size) + (i + c) / p.size);
        w[c % 8][c / 8] = std::fma(w[c % 8][c / 8], a.scale[0], a.offset[0]);
    }
}

// Block i of a row, as eight vectors of weights.
template <int bits>
void decode(const Linear& p, const uint8_t* place, int64_t row, int64_t i, Lanes* w) {
    const int64_t bytes = packed_size(p.k, bits), at = row * (p.k / p.size) + i / p.size;
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
    if (!lanes_share_no_group(p)) return scale_each<bits>(p, row, i, w);
    const Affine a = one_group(p) ? affine(p, at) : affine(p, at, place + i / 8);
#pragma GCC unroll unrolled
    for (int j = 0; j < 8; j++) w[j] = fma(w[j], a.scale, a.offset);
}

// Adds `vectors` products to each sum of a tile. w: rows of `depth` columns; total: [chunk, panel_rows].
template <int tokens>
void tile(const float* x, int64_t width, const Lanes* w, Lanes* total, int64_t vectors) {
    Lanes sums[tokens][tile_rows];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < tile_rows; r++) sums[t][r] = total[t * panel_rows + r];
    for (int64_t i = 0; i < vectors; i++) {
        Lanes v[tokens];
        for (int t = 0; t < tokens; t++) v[t] = load(x + t * width + i * lanes);
#pragma GCC unroll unrolled
        for (int r = 0; r < tile_rows; r++) {
            const Lanes weight = w[r * (depth / lanes) + i];
#pragma GCC unroll unrolled
            for (int t = 0; t < tokens; t++) sums[t][r] = fma(weight, v[t], sums[t][r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < tile_rows; r++) total[t * panel_rows + r] = sums[t][r];
}

template <int bits>
void many_tokens(const Linear& p, int64_t first, int64_t last) {
    constexpr int64_t stride = depth / lanes;
    const int64_t width = spread_width(p.k);
    const std::vector<uint8_t> place = places(p);
    std::vector<Lanes> w(panel_rows * stride), total(std::min(chunk, p.t) * panel_rows);
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t from = 0; from < p.t; from += chunk) {
            const int64_t row = panel * panel_rows, rows = std::min(panel_rows, p.n - row);
            const int64_t tokens = std::min(chunk, p.t - from);
            std::fill(total.begin(), total.end(), Lanes{});
            for (int64_t i = 0; i < width; i += depth) {
                const int64_t blocks = std::min(depth, width - i) / block;
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t b = 0; b < blocks; b++)
                        decode<bits>(p, place.data(), row + r, i + b * block, &w[r * stride + b * 8]);
                for (int64_t t = 0; t < tokens; t += 4)
                    for (int64_t r = 0; r < rows; r += tile_rows) {
                        constexpr decltype(&tile<1>) tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>};
                        const float* x = p.spread + (from + t) * width + i;
                        tiles[std::min<int64_t>(4, tokens - t) - 1](x, width, &w[r * stride],
                                                                    &total[t * panel_rows + r], blocks * 8);
                    }
            }
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t r = 0; r < rows; r++)
                    p.out[(from + t) * p.n + row + r] =
                        sum(total[t * panel_rows + r]) + (p.bias ? p.bias[row + r] : 0.0f);
        }
}

template <int bits>
void linear_of(const Linear& p, int64_t first, int64_t last) {
    if constexpr (in_registers<bits>) {
        if (p.t <= 4 && one_group(p)) return few_tokens<bits, true>(p, first, last);
        if (p.t <= 4 && lanes_share_no_group(p)) return few_tokens<bits, false>(p, first, last);
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
