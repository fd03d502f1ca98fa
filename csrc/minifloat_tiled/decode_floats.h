// Few tokens of floating-point numbers. With AVX-512 BF16 one instruction adds the products of two columns; a float32 x
// is cut into three bfloat16 numbers whose sum it is, exactly. With AVX-512 VNNI alone, x meets elements that are whole
// as integers of four bytes (tiles/byte_rows.h). Included once per level, by decode.h.
#pragma once

#include "minifloat_tiled/lookup.h"
#include "tiles/byte_rows.h"

namespace ptq::minifloat_tiled {
namespace {

using tiles::in_pairs;
using tiles::part_bytes;

void arrange(const Floats& p, int64_t first, int64_t last) {
    const int64_t k = p.w.k;
#if defined(PTQ_BYTE_ROWS)
    if (p.w.element->whole) {
        for (int64_t t = first; t < last; t++)
            tiles::arrange_rows(p.x, p.x_type, t, k, p.w.blocks, p.w.group_blocks, p.arranged, p.arranged_stride);
        return;
    }
#endif
    const int parts = p.x_type == Number::float32 ? 3 : 1;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < p.w.blocks * block_columns; i += tile_rows) {
            const Lanes x = tiles::read(p.x, p.x_type, t * k + i, std::clamp(k - i, int64_t{0}, tile_rows));
            tiles::store_columns(p.arranged + t * p.arranged_stride, i, x, parts);
        }
}

template <int bits, int tokens>
inline void multiply_floats(const uint8_t* block, int64_t blocks, const uint8_t* x, int64_t stride,
                            const Values<bits>& values, Lanes total[tokens]) {
    tiles::FloatSums<tokens> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), x += block_columns * sizeof(float)) {
        tiles::fetch(block, block_bytes(bits));
        over_quads<bits>(block, [&]<int i>(Dwords codes) {
            values.columns(codes, [&]<int j>(const Lanes& column) __attribute__((always_inline)) {
                sums.add(j, column, x + (4 * i + j) * sizeof(float), stride);
            });
        });
    }
    sums.total(total);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) total[t] *= values.factor;
}

#if defined(__AVX512BF16__)
template <int bits, int tokens, int parts>
inline void multiply_pairs(const uint8_t* block, int64_t blocks, const uint8_t* x, int64_t stride,
                           const Pairs<bits>& pairs, Lanes total[tokens]) {
    tiles::PairSums<tokens, parts> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), x += parts * part_bytes) {
        tiles::fetch(block, block_bytes(bits));
        over_quads<bits>(block, [&]<int i>(Dwords codes) {
            const __m512bh even = pairs.template at<false>(codes), odd = pairs.template at<true>(codes);
            sums.add(2 * i, even, x + 8 * i, stride);
            sums.add(2 * i + 1, odd, x + 8 * i + 4, stride);
        });
    }
    sums.total(total);
}
#else
template <int bits>
using Pairs = Values<bits>;
#endif

template <int tokens>
void finish(const Floats& p, Lanes (&y)[tokens], int64_t tile, int64_t from) {
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, p.w.n - row);
    const Lanes bias = tiles::load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++) {
        if (p.token_scale) y[t] *= p.token_scale[from + t];
        if (p.bias) y[t] += bias;
        tiles::store_result(p.out, p.out_type, (from + t) * p.w.n + row, y[t], count);
    }
}

template <int bits, int tokens, int parts>
void floats_tile(const Floats& p, const Pairs<bits>& table, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const uint8_t* block = tile_of(w, tile);
    const uint8_t* x = p.arranged + from * p.arranged_stride;
    Lanes y[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const Lanes scale = scale_of(w, tile, g);
        const int64_t blocks = blocks_of(w, g);
        Lanes total[tokens];
#if defined(__AVX512BF16__)
        multiply_pairs<bits, tokens, parts>(block, blocks, x, p.arranged_stride, table, total);
#else
        multiply_floats<bits, tokens>(block, blocks, x, p.arranged_stride, table, total);
#endif
        for (int t = 0; t < tokens; t++) y[t] = fma(scale, total[t], y[t]);
        block += blocks * block_bytes(bits);
        x += blocks * (in_pairs ? parts * part_bytes : block_columns * static_cast<int64_t>(sizeof(float)));
    }
    finish<tokens>(p, y, tile, from);
}

#if defined(PTQ_BYTE_ROWS)
template <int bits, int tokens>
void bytes_tile(const Floats& p, const Bytes<bits>& bytes, int64_t tile, int64_t from) {
    using namespace tiles;
    const Weight& w = p.w;
    const uint8_t* block = tile_of(w, tile);
    const int64_t stride = p.arranged_stride / byte_rows;
    const auto* q = reinterpret_cast<const int8_t*>(p.arranged + from * p.arranged_stride);
    const int8_t* segments = q + w.blocks * block_columns;
    Lanes y[tokens] = {};
    over_segments(w.blocks, w.group_blocks, [&](int64_t first, int64_t last) __attribute__((always_inline)) {
        SignedInts sums[byte_rows * tokens];
        minifloat_tiled::integers<bits, byte_rows * tokens>(block + first * block_bytes(bits), last - first,
                                                            q + first * block_columns, stride, bytes, sums);
        Lanes total[tokens];
        joined_rows<tokens>(sums, SignedInts{} + byte_offset, segments, stride, total);
        const Lanes scale = scale_of(w, tile, first / w.group_blocks) * std::ldexp(1.0f, -w.element->shift);
        for (int t = 0; t < tokens; t++) y[t] = fma(scale, total[t], y[t]);
        segments += sizeof(Segment);
    });
    finish<tokens>(p, y, tile, from);
}

template <int bits>
void bytes_of(const Floats& p, int64_t first, int64_t last) {
    const Bytes<bits> bytes(*p.w.element);
    tiles::over_tokens(p.t, first, last,
                       [&]<int tokens>(int64_t tile, int64_t t) { bytes_tile<bits, tokens>(p, bytes, tile, t); });
}
#endif

template <int bits>
void floats_of(const Floats& p, int64_t first, int64_t last) {
#if defined(PTQ_BYTE_ROWS)
    if (p.w.element->whole) return bytes_of<bits>(p, first, last);
#endif
    const Pairs<bits> table(*p.w.element);
    tiles::over_tokens(p.t, first, last, [&]<int tokens>(int64_t tile, int64_t t) {
        if (in_pairs && p.x_type == Number::float32)
            floats_tile<bits, tokens, in_pairs ? 3 : 1>(p, table, tile, t);
        else
            floats_tile<bits, tokens, 1>(p, table, tile, t);
    });
}

void floats(const Floats& p, int64_t first, int64_t last) {
    constexpr decltype(&floats_of<4>) of[] = {floats_of<4>, floats_of<5>, floats_of<6>, floats_of<7>};
    of[p.w.element->bits - 4](p, first, last);
}

}  // namespace
}  // namespace ptq::minifloat_tiled
