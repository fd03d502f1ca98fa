// Few tokens of floating-point numbers on tiles. Codes become exact numbers, code - 2^(bits - 1), and are multiplied
// with x in float32; the scale comes once in a group. Included once per level, by decode.h.
//
// With AVX-512 BF16, a table turns two codes of a row into a pair of bfloat16 numbers (codes of seven and eight bits:
// into two pairs, of the high and the low half), and one instruction adds both products. A float32 x is cut into three
// bfloat16 numbers whose sum it is, exactly.
//
// With AVX-512 VNNI alone, x becomes integers of four bytes, in a unit of each group, and codes stay what they are: the
// kernel for quantised tokens multiplies the bytes as if they were four tokens, and their sums are exact.
#pragma once

#include "integer_tiled/pairs.h"
#include "tiles/byte_rows.h"
#include "tiles/sums.h"

namespace ptq::integer_tiled {

using namespace tiles;
namespace {

// --- x ---------------------------------------------------------------------------------------------------------------

#if defined(PTQ_BYTE_ROWS)
void arrange(const Floats& p, int64_t first, int64_t last) {
    const int64_t blocks = p.w.groups * p.w.group_blocks;
    for (int64_t t = first; t < last; t++)
        arrange_rows(p.x, p.x_type, t, p.w.k, blocks, p.w.group_blocks, p.arranged, p.arranged_stride);
}
#else
void arrange(const Floats& p, int64_t first, int64_t last) {
    const int64_t k = p.w.k, size = p.w.group_blocks * block_columns;
    const int parts = p.x_type == Number::float32 ? 3 : 1;
    for (int64_t t = first; t < last; t++)
        for (int64_t g = 0; g < p.w.groups; g++) {
            Lanes sum{};
            for (int64_t i = g * size; i < (g + 1) * size; i += tile_rows) {
                const Lanes x = read(p.x, p.x_type, t * k + i, std::clamp(k - i, int64_t{0}, tile_rows));
                sum += x;
                store_columns(p.arranged + t * p.arranged_stride, i, x, parts);
            }
            p.sums[t * p.w.groups + g] = vectors::sum(sum);
        }
}
#endif

// --- products --------------------------------------------------------------------------------------------------------

// Byte j of quad i of all rows: the code, less 2^(bits - 1). With its highest bit turned, it is that number in two's
// complement; two shifts take it out, of the plane itself where there is but one.
template <int bits>
constexpr bool one_plane = bits == 2 || bits == 4 || bits == 8;
template <int bits>
inline Lanes number_of(const uint8_t* block, const Dwords* codes, int i, int j) {
    constexpr int fields = one_plane<bits> ? 8 / bits : 1, width = one_plane<bits> ? bits : 8;
    constexpr uint32_t highest = 0xffffffffu / ((1u << width) - 1) << (bits - 1);
    const Dwords x = (one_plane<bits> ? load_dwords(block + i / fields * 64) : codes[i]) ^ highest;
    const int at = 8 * j + i % fields * bits;
    return converted<Lanes>((SignedInts)(x << (32 - bits - at)) >> (32 - bits));
}

template <int bits, int tokens>
inline void multiply_floats(const uint8_t* block, int64_t blocks, const uint8_t* x, int64_t stride,
                            Lanes total[tokens]) {
    FloatSums<tokens> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), x += block_columns * sizeof(float)) {
        fetch(block, block_bytes(bits));
        Dwords codes[quads];
        if constexpr (!one_plane<bits>) unpack_block<bits>(block, codes);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums.add(j, number_of<bits>(block, codes, i, j), x + (4 * i + j) * sizeof(float), stride);
    }
    sums.total(total);
}

#if defined(__AVX512BF16__)
// A super-block is worked through in steps: one vector of it (bits 2 and 4: a shift and a look-up, no mask), or one
// quad.
template <int bits>
constexpr int step_pairs = bits == 2   ? 8
                           : bits == 4 ? 4
                           : bits <= 6 ? 2
                                       : 4;
template <int bits>
constexpr int steps = bits == 2 || bits == 4 ? bits : quads;

// The pairs of one step, and which of x's sixteen pairs each is multiplied with: 2 i for bytes 0 and 2 of the dwords of
// quad i, 2 i + 1 for bytes 1 and 3, as `store_pairs` has them.
template <int bits>
constexpr int place_of(int step, int i) {
    constexpr int fields = 8 / bits;
    if (bits == 2 || bits == 4) return 2 * (step * fields + i % fields) + i / fields;
    return 2 * step + (bits <= 6 ? i : i / 2);
}
template <int bits>
inline void pairs_of(const uint8_t* block, const Dwords* codes, int step, const Table<bits>& table, __m512bh* pairs) {
    if constexpr (bits == 2 || bits == 4) {
        const __m512i x = _mm512_loadu_si512(block + 64 * step);
#pragma GCC unroll 8
        for (int i = 0; i < step_pairs<bits>; i++) pairs[i] = table.pairs(_mm512_srli_epi16(x, i * bits));
    } else {
        const __m512i even = (__m512i)codes[step], odd = _mm512_srli_epi16(even, 8);
        if constexpr (bits <= 6) {
            pairs[0] = table.pairs(even), pairs[1] = table.pairs(odd);
        } else {
            pairs[0] = table.low_half(even), pairs[1] = table.high_half(even);
            pairs[2] = table.low_half(odd), pairs[3] = table.high_half(odd);
        }
    }
}

template <int bits, int tokens, int parts>
inline void multiply_pairs(const uint8_t* block, int64_t blocks, const uint8_t* x, int64_t stride,
                           const Table<bits>& table, Lanes total[tokens]) {
    PairSums<tokens, parts> sums;
    for (int64_t b = 0; b < blocks; b++, block += block_bytes(bits), x += parts * part_bytes) {
        fetch(block, block_bytes(bits));
        Dwords codes[quads];
        if constexpr (bits != 2 && bits != 4) unpack_block<bits>(block, codes);
#pragma GCC unroll 8
        for (int step = 0; step < steps<bits>; step++) {
            __m512bh pairs[step_pairs<bits>];
            pairs_of<bits>(block, codes, step, table, pairs);
#pragma GCC unroll 8
            for (int i = 0; i < step_pairs<bits>; i++)
                sums.add(step * step_pairs<bits> + i, pairs[i], x + 4 * place_of<bits>(step, i), stride);
        }
    }
    sums.total(total);
}
#else
template <int bits>
struct Table {};
#endif

template <int tokens>
void finish(const Floats& p, const Lanes (&y)[tokens], int64_t tile, int64_t from) {
    const int64_t row = tile * tile_rows, count = std::min(tile_rows, p.w.n - row);
    const Lanes bias = load_bias(p.bias, row, count);
    for (int t = 0; t < tokens; t++)
        store_result(p.out, p.out_type, (from + t) * p.w.n + row, p.bias ? y[t] + bias : y[t], count);
}

#if defined(PTQ_BYTE_ROWS)
template <int bits, int tokens, int parts>
void floats_tile(const Floats& p, const Table<bits>&, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const int64_t all = w.groups * w.group_blocks, stride = p.arranged_stride / byte_rows;
    const uint8_t* block = w.tiles + tile * all * block_bytes(bits);
    const auto* q = reinterpret_cast<const int8_t*>(p.arranged + from * p.arranged_stride);
    const int8_t* segments = q + all * block_columns;
    Lanes y[tokens] = {};
    over_segments(all, w.group_blocks, [&](int64_t first, int64_t last) __attribute__((always_inline)) {
        const int64_t at = tile * w.groups + first / w.group_blocks;
        const Lanes scale = load_scales(w.scale, w.multiples, w.groups, tile, first / w.group_blocks);
        const SignedInts zero = w.zero ? load_zero(w.zero + at * tile_rows) : SignedInts{} + (1 << (bits - 1));
        SignedInts sums[byte_rows * tokens];
        integers<bits, byte_rows * tokens>(block + first * block_bytes(bits), last - first, q + first * block_columns,
                                           stride, sums);
        Lanes total[tokens];
        joined_rows<tokens>(sums, zero, segments, stride, total);
        for (int t = 0; t < tokens; t++) y[t] = fma(scale, total[t], y[t]);
        segments += sizeof(Segment);
    });
    finish<tokens>(p, y, tile, from);
}
#else
template <int bits, int tokens, int parts>
void floats_tile(const Floats& p, [[maybe_unused]] const Table<bits>& table, int64_t tile, int64_t from) {
    const Weight& w = p.w;
    const uint8_t* block = w.tiles + tile * w.groups * w.group_blocks * block_bytes(bits);
    const uint8_t* x = p.arranged + from * p.arranged_stride;
    Lanes y[tokens] = {};
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = tile * w.groups + g;
        const Lanes scale = load_scales(w.scale, w.multiples, w.groups, tile, g);
        Lanes total[tokens];
        if constexpr (in_pairs) {
#if defined(__AVX512BF16__)
            multiply_pairs<bits, tokens, parts>(block, w.group_blocks, x, p.arranged_stride, table, total);
#endif
        } else {
            multiply_floats<bits, tokens>(block, w.group_blocks, x, p.arranged_stride, total);
        }
        if (w.zero) {
            const SignedInts offset = (1 << (bits - 1)) - load_zero(w.zero + at * tile_rows);
            for (int t = 0; t < tokens; t++)
                total[t] = fma(converted<Lanes>(offset), fill(p.sums[(from + t) * w.groups + g]), total[t]);
        }
        for (int t = 0; t < tokens; t++) y[t] = fma(scale, total[t], y[t]);
        block += w.group_blocks * block_bytes(bits);
        x += w.group_blocks * (in_pairs ? parts * part_bytes : block_columns * static_cast<int64_t>(sizeof(float)));
    }
    finish<tokens>(p, y, tile, from);
}
#endif

template <int bits>
void floats_of(const Floats& p, int64_t first, int64_t last) {
    [[maybe_unused]] const Table<bits> table;
    over_tokens(p.t, first, last, [&]<int tokens>(int64_t tile, int64_t t) {
        if (in_pairs && p.x_type == Number::float32)
            floats_tile<bits, tokens, in_pairs ? 3 : 1>(p, table, tile, t);
        else
            floats_tile<bits, tokens, 1>(p, table, tile, t);
    });
}

void floats(const Floats& p, int64_t first, int64_t last) {
    constexpr decltype(&floats_of<2>) of[] = {floats_of<2>, floats_of<3>, floats_of<4>, floats_of<5>,
                                              floats_of<6>, floats_of<7>, floats_of<8>};
    of[p.w.bits - 2](p, first, last);
}

}  // namespace
}  // namespace ptq::integer_tiled
