// The kernels for many tokens, of one level: included after PTQ_GEMM_LEVEL, the name of its table, is defined. A panel of
// a strip is unpacked once for all tokens (csrc/gemm/int8.h).
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "e8p_tiled/books.h"
#include "e8p_tiled/gemm_kernels.h"
#include "gemm/int8.h"
#include "integer_tiled/decode_lanes.h"

namespace ptq::e8p_tiled {
namespace {

using gemm::Integers;
using gemm::load;
using gemm::store;
using gemm::strip;
using gemm::tokens_of_a_block;
using integer::Lanes;

inline int64_t width_of(const Quantized& p) {
    return blocks_in(p.w.k) * block_columns;
}

void pack(const Gemm& g, int64_t first, int64_t last) {
    const Quantized& p = g.p;
    const int64_t width = width_of(p);
    const std::vector<int8_t> nothing(width);
    for (int64_t b = first; b < last; b++) {
        const int8_t* q[tokens_of_a_block];
        for (int64_t j = 0; j < tokens_of_a_block; j++) {
            const int64_t token = b * tokens_of_a_block + j;
            q[j] = token < p.t ? p.q + token * width : nothing.data();
        }
        gemm::pack_block(q, width, gemm::token_blocks(p.t), b, g.x);
    }
}

struct Scratch {
    uint8_t* panel;  // [strip, panel_columns / 32, 8, 64]
    Integers* sums;  // [tokens, strip]: of the panels before
    Lanes* totals;   // the same: scaled sums of the first book
};

// Columns [column, end) of some row tiles; meanwhile those that follow are fetched.
template <Book book, int tiles>
void unpack_panel(const Points<book>& points, const uint8_t* blocks, int64_t tile_step, int64_t columns,
                  uint8_t* panel) {
    constexpr int64_t ahead = gemm::panel_columns / block_columns * block_bytes(book);
    for (int r = 0; r < tiles; r++) {
        const uint8_t* from = blocks + r * tile_step;
        for (int64_t c = 0; c < columns; c += block_columns, from += block_bytes(book), panel += 64 * quads) {
            for (int64_t i = 0; i < block_bytes(book); i += 64) __builtin_prefetch(from + ahead + i, 0, 2);
            Dwords weights[quads];
            points.unpack(from, weights);
            for (int i = 0; i < quads; i++) store(panel + i * 64, weights[i]);
        }
    }
}

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 4") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 4") for (int r = 0; r < tiles; r++)

// A panel and a block of tokens: sums += their products. The first panel begins with `offsets`.
template <int tiles, int tokens>
void multiply_panel(const uint8_t* panel, int64_t columns, const int32_t* x, const int32_t* offsets, Integers* sums) {
    Integers sum[tokens][tiles];
    if (offsets)
        PTQ_EACH_SUM sum[t][r] = Integers{} + offsets[t];
    else
        PTQ_EACH_SUM sum[t][r] = sums[t * tiles + r];
    const int64_t tile_step = columns * tile_rows;
    for (int64_t c = 0; c < columns; c += block_columns, panel += 64 * quads, x += quads * tokens_of_a_block)
        gemm::multiply_quads<false, tiles, tokens>(
            [&]<int i>(int r) { return load<Dwords>(panel + r * tile_step + 64 * i); }, x, sum);
    PTQ_EACH_SUM sums[t * tiles + r] = sum[t][r];
}
#undef PTQ_EACH_SUM

// The last panel of a book is done.
template <int bits, int tiles>
void end_book(const Quantized& p, int book, const Integers* sums, Lanes* totals, int64_t tile, int64_t first,
              int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++) {
            const int64_t i = t * tiles + r;
            Lanes y = p.w.scale[book] * __builtin_convertvector(sums[i], Lanes);
            if (book) y = totals[i] + y;
            if (book + 1 < books(bits)) {
                totals[i] = y;
                continue;
            }
            const int64_t row = (tile + r) * tile_rows, count = std::min(tile_rows, p.w.n - row);
            y *= p.q_scale[first + t];
            if (p.bias) y += integer_tiled::load_bias(p.bias, row, count);
            integer_tiled::store_result(p.out, p.out_type, (first + t) * p.w.n + row, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Quantized& p, int64_t tile, int64_t first) {
    const int64_t size = p.out_type == Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(p.t, first + tokens_of_a_block); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(p.out) + (t * p.w.n + tile * tile_rows) * size + at, 1, 2);
}

template <int bits, int book, int tiles>
void multiply_book(const Gemm& g, const Points<book_of(bits, book)>& points, const Scratch& scratch, int64_t tile,
                   int64_t first, int64_t last) {
    constexpr Book kind = book_of(bits, book);
    const Quantized& p = g.p;
    const int64_t width = width_of(p), tile_step = tile_bytes(p.w.k, bits);
    const uint8_t* blocks = p.w.tiles + tile * tile_step + (book ? second_book(p.w.k) : 0);
    for (int64_t column = 0; column < width; column += gemm::panel_columns) {
        const int64_t columns = std::min(gemm::panel_columns, width - column);
        unpack_panel<kind, tiles>(points, blocks + column / block_columns * block_bytes(kind), tile_step, columns,
                                  scratch.panel);
        for (int64_t t = first; t < last; t += tokens_of_a_block) {
            int32_t offsets[tokens_of_a_block] = {};
            for (int64_t i = 0; i < std::min(tokens_of_a_block, last - t); i++) offsets[i] = p.offsets[t + i];
            const int32_t* x = g.x + gemm::place(width, gemm::token_blocks(p.t), column, t / tokens_of_a_block);
            Integers* sums = scratch.sums + (t - first) * tiles;
            const bool done = column + columns == width;
            if (done) fetch_results<tiles>(p, tile, t);
            const auto multiply = last - t > 2 ? multiply_panel<tiles, 4> : multiply_panel<tiles, 2>;
            multiply(scratch.panel, columns, x, column ? nullptr : offsets, sums);
            if (done)
                end_book<bits, tiles>(p, book, sums, scratch.totals + (t - first) * tiles, tile, t,
                                      std::min(tokens_of_a_block, last - t));
        }
    }
}

template <int bits>
struct Books {
    Points<Book::e8p> first;
    Points<book_of(bits, 1)> second;
};

// All of y for some row tiles and the tokens [first, last).
template <int bits, int tiles>
void multiply_strip(const Gemm& g, const Books<bits>& all, const Scratch& scratch, int64_t tile, int64_t first,
                    int64_t last) {
    multiply_book<bits, 0, tiles>(g, all.first, scratch, tile, first, last);
    if constexpr (books(bits) == 2) multiply_book<bits, 1, tiles>(g, all.second, scratch, tile, first, last);
}

template <int bits>
void multiply_of(const Gemm& g, int64_t first, int64_t last) {
    const Books<bits> all{Points<Book::e8p>(tables()), Points<book_of(bits, 1)>(tables())};
    const int64_t tiles = row_tiles(g.p.w.n);
    const int64_t strips = (tiles + gemm::row_tiles_of_a_strip - 1) / gemm::row_tiles_of_a_strip;
    const int64_t panel = gemm::panel_columns * strip * tile_rows, outputs = g.tokens * strip;
    auto* memory = static_cast<uint8_t*>(::operator new(panel + outputs * 128, std::align_val_t{64}));
    auto* sums = reinterpret_cast<Integers*>(memory + panel);
    const Scratch scratch{memory, sums, reinterpret_cast<Lanes*>(sums + outputs)};
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t from = unit / strips * g.tokens, to = std::min(g.p.t, from + g.tokens);
        int64_t tile = unit % strips * gemm::row_tiles_of_a_strip;
        const int64_t end = std::min(tiles, tile + gemm::row_tiles_of_a_strip);
        for (; tile + strip <= end; tile += strip) multiply_strip<bits, strip>(g, all, scratch, tile, from, to);
        if constexpr (strip == 3) {
            if (end - tile == 2) multiply_strip<bits, 2>(g, all, scratch, tile, from, to);
            if (end - tile == 1) multiply_strip<bits, 1>(g, all, scratch, tile, from, to);
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Gemm& g, int64_t first, int64_t last) {
    constexpr decltype(&multiply_of<2>) of[] = {multiply_of<2>, multiply_of<3>, multiply_of<4>};
    of[g.p.w.bits - 2](g, first, last);
}

}  // namespace

const GemmKernels PTQ_GEMM_LEVEL{pack, multiply};

}  // namespace ptq::e8p_tiled
